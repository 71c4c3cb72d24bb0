"""The norm with dropout on CUDA against float64, and where kernels of this kind have failed."""

from __future__ import annotations

import importlib.util

import pytest
import torch
from norm_reference import DETACH, EPS, RATE, assert_near, dropout_at, formula, reference, tensors
from torch import Tensor

from megatron_lengen.ops import rmsnorm, variants
from megatron_lengen.ops.mask import MaskCoordinates, keep_mask
from megatron_lengen.ops.rmsnorm import (
    Dropout,
    add_rms_norm_dropout,
    affine_dropout,
    norm_dropout,
    rms_norm,
    rms_norm_dropout,
)

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs Triton"),
]

DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
SIZES = [
    (1, 1, 1), (5, 1, 33), (3, 4, 64), (2, 4, 300), (700, 3, 72), (40, 3, 576), (33, 1, 2048),
    (9, 2, 2047), (9, 2, 5120), (5, 1, 8192), (3, 2, 12288), (2, 2, 16385), (2, 1, 65536),
]  # fmt: skip


@pytest.fixture(autouse=True)
def uneven(monkeypatch) -> None:
    """A variant without a twin, registered for one test."""
    monkeypatch.setattr(variants, "_REGISTRY", dict(variants._REGISTRY))

    @variants.register_variant("uneven")
    def uneven(mean, variance, rate):
        return 1 / (1 + variance) + rate * mean, mean * variance + 0.2


def on_gpu(size: tuple[int, int, int], dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    x, gain, dz = (t.detach().cuda() for t in tensors(*size, dtype))
    return x.requires_grad_(), gain.requires_grad_(), dz


def mask_of(dropout: Dropout | None, d: int) -> Tensor | None:
    return None if dropout is None else keep_mask(dropout.coordinates, d, RATE).double()


def assert_all_near(found: tuple[Tensor, ...], expected: tuple[Tensor, ...]) -> None:
    for f, e in zip(found, expected, strict=True):
        assert_near(f, e, found[0].dtype)


def test_triton_serves_cuda_tensors():
    from megatron_lengen.ops.rmsnorm_triton import TritonKernels

    x = torch.ones(1, 1, 8, device="cuda")
    assert type(rmsnorm._kernels_for(x)) is TritonKernels
    assert type(rmsnorm._kernels_for(x.double())) is not TritonKernels


# ---- values and gradients ------------------------------------------------------------------------


@DTYPES
@pytest.mark.parametrize("detach", DETACH[::3], ids=str)
@pytest.mark.parametrize("variant", [None, "pre_linear", "vpad", "uneven"])
@pytest.mark.parametrize("size", SIZES, ids=str)
def test_norm_dropout_equals_float64_autograd(size, variant, detach, dtype):
    if variant == "vpad" and size[2] == 1:
        pytest.skip("the formula divides by the variance, which is 0")
    x, gain, dz = on_gpu(size, dtype)
    dropout = None if variant is None else dropout_at(variant, *size[:2], *detach)
    z = rms_norm_dropout(x, gain, EPS, dropout)
    z.backward(dz)
    mask = mask_of(dropout, size[2])
    assert_all_near((z, x.grad, gain.grad), reference(x, gain, dz, variant, *detach, mask))


@DTYPES
@pytest.mark.parametrize("detach", DETACH, ids=str)
@pytest.mark.parametrize("variant", ["pre_norm", "vpad", "uneven"])
@pytest.mark.parametrize("size", [(3, 4, 75), (9, 2, 2048), (2, 1, 20000)], ids=str)
def test_affine_dropout_equals_float64_autograd(size, variant, detach, dtype):
    x, _, dz = on_gpu(size, dtype)
    dropout = dropout_at(variant, *size[:2], *detach)
    z = affine_dropout(x, dropout)
    z.backward(dz)
    mask = mask_of(dropout, size[2])
    assert_all_near((z, x.grad), reference(x, None, dz, variant, *detach, mask))


@DTYPES
@pytest.mark.parametrize("variant", [None, "vpad", "uneven"])
@pytest.mark.parametrize("size", [(3, 4, 75), (65, 2, 2048), (2, 1, 20000)], ids=str)
def test_the_residual_added_first(size, variant, dtype):
    x, gain, dz = on_gpu(size, dtype)
    residual = on_gpu(size, dtype)[0].detach().flip(0).requires_grad_()
    dropout = None if variant is None else dropout_at(variant, *size[:2], False, False)
    z, total = add_rms_norm_dropout(x, residual, gain, EPS, dropout)
    torch.autograd.backward((z, total), (dz, dz.flip(0)))
    assert torch.equal(total, residual + x) and torch.equal(x.grad, residual.grad)
    mask = mask_of(dropout, size[2])
    expected, dx, dgain = reference(total, gain, dz, variant, False, False, mask)
    found = (z, x.grad, gain.grad)
    assert_all_near(found, (expected, dx + dz.flip(0).double(), dgain))


def test_float64_takes_pytorch_operations():
    x, gain, dz = on_gpu((3, 2, 40), torch.float64)
    z = rms_norm_dropout(x, gain, EPS, dropout_at("vpad", 3, 2))
    z.backward(dz)
    assert_all_near((z, x.grad, gain.grad), reference(x, gain, dz, "vpad", True, True))


# ---- masks ---------------------------------------------------------------------------------------


@DTYPES
@pytest.mark.parametrize("first", [0, 3, 8, 4096])
@pytest.mark.parametrize("d", [21, 2048, 20000])
@pytest.mark.parametrize("seed", [77, 2**64 - 5])
def test_masks_have_the_bits_of_the_cpus(seed, d, first, dtype):
    positions, samples = torch.tensor([0, 7, 2**33 + 6]), torch.tensor([3, 2**31, 2**40 + 1])
    where = MaskCoordinates(seed, samples, positions, 4095, 255, first_channel=first)
    x = torch.ones(3, 3, d, device="cuda", dtype=dtype, requires_grad=True)
    z = affine_dropout(x, Dropout("pre_linear", 0.3, where))
    z.backward(torch.ones_like(z))
    keep = keep_mask(where, d, 0.3).cuda()
    assert torch.equal(z != 0, keep) and torch.equal(x.grad != 0, keep)


def test_coordinates_on_the_device_cost_no_synchronization():
    x, gain, dz = on_gpu((4, 2, 64), torch.bfloat16)
    where = MaskCoordinates(1, torch.arange(2).cuda(), torch.arange(4).cuda(), 0, 0)
    for mode in ("default", "error"):
        torch.cuda.set_sync_debug_mode(mode)
        try:
            rms_norm_dropout(x, gain, EPS, Dropout("vpad", 0.3, where)).backward(dz)
        finally:
            torch.cuda.set_sync_debug_mode("default")


# ---- memory layouts ------------------------------------------------------------------------------

LAYOUTS = {
    "contiguous": lambda t: t.clone(),
    "every second feature": lambda t: t.repeat_interleave(2, dim=-1)[..., ::2],
    "transposed": lambda t: t.transpose(0, 1).contiguous().transpose(0, 1),
    "expanded": lambda t: t[:1].expand_as(t),
}


@DTYPES
@pytest.mark.parametrize("dz_layout", LAYOUTS)
@pytest.mark.parametrize("x_layout", LAYOUTS)
def test_strides_do_not_matter(x_layout, dz_layout, dtype):
    base, gain, dz = on_gpu((5, 3, 256), dtype)
    x = LAYOUTS[x_layout](base.detach()).requires_grad_()
    dz = LAYOUTS[dz_layout](dz)
    dropout = dropout_at("vpad", 5, 3, False, False)
    z = rms_norm_dropout(x, gain, EPS, dropout)
    z.backward(dz)
    mask = mask_of(dropout, 256)
    assert_all_near((z, x.grad, gain.grad), reference(x, gain, dz, "vpad", False, False, mask))


def test_gradient_of_a_sum():
    """`.sum().backward()` hands an expanded gradient to the function."""
    x, gain, dz = on_gpu((4, 2, 50), torch.float32)
    rms_norm_dropout(x, gain, EPS, dropout_at("vpad", 4, 2)).sum().backward()
    _, dx, dgain = reference(x, gain, torch.ones_like(dz), "vpad", True, True)
    assert_all_near((x.grad, gain.grad), (dx, dgain))


def test_an_empty_batch_is_empty():
    x = torch.ones(0, 2, 8, device="cuda", requires_grad=True)
    gain = torch.ones(8, device="cuda", requires_grad=True)
    z = rms_norm_dropout(x, gain, EPS, dropout_at("vpad", 0, 2))
    z.sum().backward()
    assert z.shape == x.grad.shape == (0, 2, 8) and not gain.grad.any()


# ---- size ----------------------------------------------------------------------------------------


def test_more_than_2_to_the_31_elements():
    """The last rows are what they are alone, and their masks do not repeat earlier ones."""
    rows, d, few = 2**20 + 16, 2048, 24
    if torch.cuda.mem_get_info()[0] < 24 * 2**30:
        pytest.skip("needs 24 GiB of GPU memory")
    generator = torch.Generator("cuda").manual_seed(0)
    x = torch.empty(rows, 1, d, device="cuda", dtype=torch.bfloat16)
    x.normal_(generator=generator).requires_grad_()
    gain = torch.ones(d, device="cuda", dtype=torch.bfloat16)
    positions, samples = torch.arange(rows, device="cuda"), torch.zeros(1, device="cuda").long()
    z = rms_norm_dropout(
        x, gain, EPS, Dropout("vpad", RATE, MaskCoordinates(5, samples, positions, 0, 0))
    )
    z.backward(x.detach())
    where = MaskCoordinates(5, samples.cpu(), positions[-few:].cpu(), 0, 0)
    last = x[-few:].detach().requires_grad_()
    alone = rms_norm_dropout(last, gain, EPS, Dropout("vpad", RATE, where))
    alone.backward(last.detach())
    assert torch.equal(z[-few:], alone) and torch.equal(x.grad[-few:], last.grad)
    assert_near(
        alone.cpu(),
        norm_dropout(last.detach().cpu(), gain.cpu(), EPS, Dropout("vpad", RATE, where)).double(),
        torch.bfloat16,
    )


# ---- rounding ------------------------------------------------------------------------------------


@pytest.mark.parametrize("rows", [1, 7, 65536])
@pytest.mark.parametrize("d", [64, 512, 2048, 8192])
def test_gain_gradient_in_bf16_is_summed_in_fp32(rows, d):
    generator = torch.Generator("cuda").manual_seed(rows)
    x = torch.randn(rows, 1, d, generator=generator, device="cuda").bfloat16()
    dz = (torch.randn(rows, 1, d, generator=generator, device="cuda") + 0.05).bfloat16()
    gain = torch.ones(d, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    rms_norm_dropout(x, gain, EPS).backward(dz)
    wide = x.double()
    unit = wide / (wide.square().mean(-1, keepdim=True) + EPS).sqrt()
    expected = (dz.double() * unit).sum((0, 1))
    assert (gain.grad.double() - expected).norm() < 1e-2 * expected.norm()


@DTYPES
@pytest.mark.parametrize("variant", ["pre_linear", "vpad"])
def test_rate_zero_is_bitwise_the_plain_norm(variant, dtype):
    where = MaskCoordinates(1, torch.arange(4), torch.arange(33), 0, 0)
    results = []
    for dropout in (None, Dropout(variant, 0.0, where, False, False)):
        x, gain, dz = on_gpu((33, 4, 300), dtype)
        z = rms_norm_dropout(x, gain, EPS, dropout)
        z.backward(dz)
        results.append((z, x.grad, gain.grad))
    for plain, dropped in zip(*results, strict=True):
        assert torch.equal(plain, dropped)


def test_plain_norm_rounds_where_hugging_faces_does():
    """Sums in another order move x / rms over a rounding boundary: rarely, and by one step of x /
    rms, which the gain can make two of the product."""
    x, gain, _ = on_gpu((512, 2, 2048), torch.bfloat16)
    found, expected = rms_norm_dropout(x, gain, EPS), rms_norm(x, gain, EPS)
    bits = [t.detach().view(torch.int16).int() for t in (found, expected)]
    assert (bits[0] - bits[1]).abs().max() <= 2
    assert (bits[0] != bits[1]).double().mean() < 1e-3


@pytest.mark.parametrize("d", [64, 2048, 20000])
def test_results_repeat_bit_by_bit(d):
    results = []
    for _ in range(2):
        x, gain, dz = on_gpu((500, 2, d), torch.bfloat16)
        z = rms_norm_dropout(x, gain, EPS, dropout_at("vpad", 500, 2))
        z.backward(dz)
        results.append((z, x.grad, gain.grad))
    assert all(torch.equal(first, second) for first, second in zip(*results, strict=True))


@DTYPES
@pytest.mark.parametrize("d", [3, 64, 300, 2047, 4096, 20000])
@pytest.mark.parametrize("value", [0.1, 0.0, -317.0, 1e-4])
def test_a_constant_row_becomes_its_mean(value, d, dtype):
    """Also where the compiler could fuse a product with the difference that must be 0."""
    x = torch.full((2, 1, d), value, dtype=dtype, device="cuda")
    gain = torch.full((d,), 0.7, dtype=dtype, device="cuda")
    plain = rms_norm_dropout(x, gain, EPS)
    assert torch.equal(rms_norm_dropout(x, gain, EPS, dropout_at("vpad", 2, 1)), plain)
    assert torch.equal(affine_dropout(x, dropout_at("vpad", 2, 1)), x)


@pytest.mark.parametrize("detach", DETACH, ids=str)
@pytest.mark.parametrize("scale", [0.0, 1e-36, 1e-20, 1e-18, 1e10, 1e17])
def test_rows_of_any_size(scale, detach):
    x, _, dz = on_gpu((4, 2, 300), torch.float32)
    x = (x.detach() * scale).requires_grad_()
    z = affine_dropout(x, dropout_at("vpad", 4, 2, *detach))
    z.backward(dz)
    assert torch.isfinite(z).all() and torch.isfinite(x.grad).all()
    if scale >= 1e-18:
        alpha, beta = formula("vpad", *moments(x))
        mask = mask_of(dropout_at("vpad", 4, 2), 300).cuda()
        expected = alpha * mask * x.detach().double() + beta
        assert_near(z.double() / scale, expected / scale, torch.float32)


def moments(x: Tensor) -> tuple[Tensor, Tensor]:
    wide = x.detach().double()
    return wide.mean(-1, keepdim=True), wide.var(-1, unbiased=False, keepdim=True)
