"""RMSNorm with dropout: values and gradients against float64 autograd, on both CPU paths."""

from __future__ import annotations

import pytest
import torch
from norm_reference import (
    BOTH_DTYPES,
    DETACH,
    EPS,
    EXACT,
    assert_near,
    dropout_at,
    mask_at,
    reference,
    tensors,
)
from torch import Tensor

from megatron_lengen.ops import variants
from megatron_lengen.ops.mask import MaskCoordinates, mask_values
from megatron_lengen.ops.rmsnorm import (
    Dropout,
    add_rms_norm_dropout,
    affine_dropout,
    norm_dropout,
    rms_norm,
    rms_norm_dropout,
)


@pytest.fixture
def uneven(monkeypatch) -> str:
    """A variant whose coefficients depend on everything, registered for one test."""
    monkeypatch.setattr(variants, "_REGISTRY", dict(variants._REGISTRY))

    @variants.register_variant("uneven")
    def uneven(mean, variance, rate):
        return 1 / (1 + variance) + rate * mean, mean * variance + 0.2

    return "uneven"


# ---- values and gradients ------------------------------------------------------------------------


@BOTH_DTYPES
@pytest.mark.parametrize("alpha_fixed, beta_fixed", DETACH)
@pytest.mark.parametrize("variant", ["pre_linear", "pre_norm", "vpad", "uneven"])
@pytest.mark.parametrize("size", [(5, 1, 33), (3, 4, 64), (2, 4, 300), (2, 1, 2048)])
def test_norm_dropout_equals_float64_autograd(
    path, uneven, size, variant, alpha_fixed, beta_fixed, dtype
):
    x, gain, dz = tensors(*size, dtype)
    dropout = dropout_at(variant, size[0], size[1], alpha_fixed, beta_fixed)
    z = rms_norm_dropout(x, gain, EPS, dropout)
    z.backward(dz)
    assert z.dtype == x.dtype and x.grad.dtype == x.dtype and gain.grad.dtype == gain.dtype
    for found, expected in zip(
        (z, x.grad, gain.grad),
        reference(x, gain, dz, variant, alpha_fixed, beta_fixed),
        strict=True,
    ):
        assert_near(found, expected, dtype)


@BOTH_DTYPES
@pytest.mark.parametrize("alpha_fixed, beta_fixed", DETACH)
@pytest.mark.parametrize("variant", ["pre_linear", "vpad", "uneven"])
def test_affine_dropout_equals_float64_autograd(
    path, uneven, variant, alpha_fixed, beta_fixed, dtype
):
    x, _, dz = tensors(3, 4, 75, dtype)
    z = affine_dropout(x, dropout_at(variant, 3, 4, alpha_fixed, beta_fixed))
    z.backward(dz)
    expected_z, expected_dx = reference(x, None, dz, variant, alpha_fixed, beta_fixed)
    assert_near(z, expected_z, dtype)
    assert_near(x.grad, expected_dx, dtype)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16], ids=str)
@pytest.mark.parametrize("alpha_fixed, beta_fixed", DETACH)
def test_other_dtypes(alpha_fixed, beta_fixed, dtype):
    x, gain, dz = tensors(3, 2, 40, dtype)
    z = rms_norm_dropout(x, gain, EPS, dropout_at("vpad", 3, 2, alpha_fixed, beta_fixed))
    z.backward(dz)
    for found, expected in zip(
        (z, x.grad, gain.grad), reference(x, gain, dz, "vpad", alpha_fixed, beta_fixed), strict=True
    ):
        assert_near(found, expected, dtype)


@BOTH_DTYPES
@pytest.mark.parametrize("alpha_fixed, beta_fixed", DETACH)
def test_the_short_definition_agrees(path, alpha_fixed, beta_fixed, dtype):
    dropout = dropout_at("vpad", 3, 2, alpha_fixed, beta_fixed)
    results = []
    for function in (norm_dropout, rms_norm_dropout):
        x, gain, dz = tensors(3, 2, 128, dtype)
        z = function(x, gain, EPS, dropout)
        z.backward(dz)
        results.append((z, x.grad, gain.grad))
    for expected, found in zip(*results, strict=True):
        assert_near(found, expected.double(), dtype)


@BOTH_DTYPES
@pytest.mark.parametrize("variant", [None, "pre_linear", "vpad"])
def test_one_feature(path, variant, dtype):
    x = torch.tensor([[[3.0]], [[-0.01]], [[0.0]]], dtype=dtype, requires_grad=True)
    gain = torch.tensor([2.0], dtype=dtype, requires_grad=True)
    dropout = dropout_at(variant, 3, 1, False, False) if variant else None
    z = rms_norm_dropout(x, gain, EPS, dropout)
    z.sum().backward()
    hat = 2 * x.detach().double() / (x.detach().double() ** 2 + EPS).sqrt()
    # vpad: one element is a constant row, so its value stands whatever the mask says.
    factor = mask_at(3, 1, 1) / (1 - EXACT) if variant == "pre_linear" else 1.0
    assert_near(z, hat * factor, dtype)
    assert torch.isfinite(x.grad).all() and torch.isfinite(gain.grad).all()


# ---- memory layouts (strides) --------------------------------------------------------------------

LAYOUTS = {
    "contiguous": lambda t: t.clone(),
    "every second feature": lambda t: t.repeat_interleave(2, dim=-1)[..., ::2],
    "transposed": lambda t: t.transpose(0, 1).contiguous().transpose(0, 1),
    "features not last in memory": lambda t: t.permute(2, 0, 1).contiguous().permute(1, 2, 0),
    "expanded": lambda t: t[:1, :, :1].expand_as(t),
}


@BOTH_DTYPES
@pytest.mark.parametrize("dz_layout", LAYOUTS)
@pytest.mark.parametrize("x_layout", LAYOUTS)
def test_strides_do_not_matter(path, x_layout, dz_layout, dtype):
    # A row of equal features is where the paper's formula has no derivative: pre_linear.
    variant = "pre_linear" if x_layout == "expanded" else "vpad"
    base, gain, dz = tensors(5, 3, 24, dtype)
    x = LAYOUTS[x_layout](base.detach()).requires_grad_()
    dz = LAYOUTS[dz_layout](dz)
    z = rms_norm_dropout(x, gain, EPS, dropout_at(variant, 5, 3, False, False))
    z.backward(dz)
    for found, expected in zip(
        (z, x.grad, gain.grad), reference(x, gain, dz, variant, False, False), strict=True
    ):
        assert_near(found, expected, dtype)


def test_gradient_of_a_sum(path):
    """`.sum().backward()` hands an expanded gradient to the function."""
    x, gain, _ = tensors(4, 2, 50, torch.float32)
    rms_norm_dropout(x, gain, EPS, dropout_at("vpad", 4, 2)).sum().backward()
    _, dx, dgain = reference(x, gain, torch.ones(4, 2, 50), "vpad", True, True)
    assert_near(x.grad, dx, torch.float32)
    assert_near(gain.grad, dgain, torch.float32)


# ---- the plain norm ------------------------------------------------------------------------------


@BOTH_DTYPES
@pytest.mark.parametrize("variant", ["pre_linear", "vpad"])
def test_rate_zero_is_bitwise_the_plain_norm(path, variant, dtype):
    where = MaskCoordinates(1, torch.arange(4), torch.arange(3), 0, 0)
    results = []
    for dropout in (None, Dropout(variant, 0.0, where, False, False)):
        x, gain, dz = tensors(3, 4, 300, dtype)
        z = rms_norm_dropout(x, gain, EPS, dropout)
        z.backward(dz)
        results.append((z, x.grad, gain.grad))
    for plain, dropped in zip(*results, strict=True):
        assert torch.equal(plain, dropped)
    x = tensors(3, 4, 300, dtype)[0]
    assert affine_dropout(x, None) is x
    assert affine_dropout(x, Dropout(variant, 0.0, where)) is x


@BOTH_DTYPES
@pytest.mark.parametrize("shape", [(7, 64), (2, 3, 5, 33), (1, 1, 300)])
def test_plain_norm_of_any_shape_equals_pytorchs(path, shape, dtype):
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(shape, generator=generator, dtype=torch.float64)
    gain = torch.rand(shape[-1], generator=generator, dtype=torch.float64) + 0.5
    dz = torch.randn(shape, generator=generator, dtype=torch.float64)
    leaves = [t.to(dtype).requires_grad_() for t in (x, gain)]
    z = rms_norm_dropout(*leaves, EPS)
    z.backward(dz.to(dtype))
    wide = [t.detach().double().requires_grad_() for t in leaves]
    expected = torch.nn.functional.rms_norm(wide[0], shape[-1:], wide[1], EPS)
    expected.backward(dz.to(dtype).double())
    assert_near(z, expected.detach(), dtype)
    for found, wanted in zip(leaves, wide, strict=True):
        assert_near(found.grad, wanted.grad, dtype)


def _hugging_face_norm(name: str, gain: Tensor) -> torch.nn.Module:
    if name == "llama":
        from transformers.models.llama.modeling_llama import LlamaRMSNorm as Norm
    else:
        from transformers.models.smollm3.modeling_smollm3 import SmolLM3RMSNorm as Norm
    norm = Norm(gain.shape[0], eps=EPS)
    norm.weight.data = gain
    return norm


@pytest.mark.parametrize("name", ["llama", "smollm3"])
@pytest.mark.parametrize("d", [64, 300, 2048])
def test_plain_norm_equals_hugging_faces(path, name, d):
    x, gain, _ = (t.detach() for t in tensors(64, 2, d, torch.float32))
    expected = _hugging_face_norm(name, gain)(x)
    assert (rms_norm_dropout(x, gain, EPS) - expected).abs().max() <= 1e-6 * expected.abs().max()
    x, gain = x.bfloat16(), gain.bfloat16()
    expected = _hugging_face_norm(name, gain)(x)
    found = rms_norm_dropout(x, gain, EPS)
    assert torch.equal(rms_norm(x, gain, EPS), expected)
    if path == "torch":
        assert torch.equal(found, expected)
    # The kernel adds the squares in another order: where that moves x / rms over a rounding
    # boundary the result is the neighbouring number. Rarely, and no further.
    bits = [t.view(torch.int16).int() for t in (found, expected)]
    assert (bits[0] - bits[1]).abs().max() <= 1
    assert (bits[0] != bits[1]).double().mean() < 1e-3


# ---- what is saved, what is dropped, what is deterministic ---------------------------------------


@BOTH_DTYPES
@pytest.mark.parametrize("alpha_fixed", [True, False])
@pytest.mark.parametrize("variant", [None, "pre_linear", "vpad"])
def test_backward_saves_the_input_and_four_numbers_a_row(path, variant, alpha_fixed, dtype):
    s, b, d = 16, 2, 512
    x, gain, dz = tensors(s, b, d, dtype)
    dropout = dropout_at(variant, s, b, alpha_fixed) if variant else None
    saved: list[Tensor] = []

    def pack(tensor: Tensor) -> Tensor:
        saved.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        z = rms_norm_dropout(x, gain, EPS, dropout)
    sizes = {t.data_ptr(): t.untyped_storage().nbytes() for t in saved}
    sizes.pop(gain.data_ptr())
    assert sum(sizes.values()) <= x.numel() * x.element_size() + 4 * 4 * s * b
    z.backward(dz)


@BOTH_DTYPES
def test_dropped_elements_pass_no_gradient(path, dtype):
    x, _, _ = tensors(6, 2, 100, dtype)
    z = affine_dropout(x, dropout_at("pre_linear", 6, 2))
    z.backward(torch.ones_like(z))
    kept = mask_at(6, 2, 100) != 0
    assert torch.equal(z != 0, kept)
    assert torch.equal(x.grad != 0, kept)


@pytest.mark.parametrize("steps, kept", [(0, True), (1, False)])
def test_an_element_is_dropped_below_the_threshold_and_kept_at_it(path, steps, kept):
    where = MaskCoordinates(5, torch.tensor([1]), torch.tensor([2]), 0, 0)
    values = mask_values(where, 64)
    for channel in (0, 7, 40):
        rate = (int(values[0, 0, channel]) + steps) / 65536
        x = torch.ones(1, 1, 64, requires_grad=True)
        z = affine_dropout(x, Dropout("pre_linear", rate, where))
        z.sum().backward()
        assert bool(z[0, 0, channel] != 0) is kept
        assert bool(x.grad[0, 0, channel] != 0) is kept


@pytest.mark.parametrize("channel", [0, 40, 63])
def test_derivatives_of_alpha_use_the_same_threshold(path, channel):
    where = MaskCoordinates(5, torch.tensor([1]), torch.tensor([2]), 0, 0)
    rate = int(mask_values(where, 64)[0, 0, channel]) / 65536
    dropout = Dropout("vpad", rate, where, detach_alpha=False, detach_beta=False)
    results = []
    for function in (norm_dropout, rms_norm_dropout):
        x, gain, dz = tensors(1, 1, 64, torch.float32)
        function(x, gain, EPS, dropout).backward(dz)
        results.append(x.grad)
    assert_near(results[1], results[0].double(), torch.float32)


@pytest.mark.parametrize("rows, d", [(1, 2048), (7, 8192), (65536, 64)])
def test_gain_gradient_in_bf16_is_summed_in_fp32(path, rows, d):
    generator = torch.Generator().manual_seed(rows)
    x = torch.randn(rows, 1, d, generator=generator).bfloat16()
    dz = (torch.randn(rows, 1, d, generator=generator) + 0.05).bfloat16()
    gain = torch.ones(d, dtype=torch.bfloat16, requires_grad=True)
    rms_norm_dropout(x, gain, EPS).backward(dz)
    wide = x.double()
    unit = wide / (wide.square().mean(-1, keepdim=True) + EPS).sqrt()
    expected = (dz.double() * unit).sum((0, 1))
    assert (gain.grad.double() - expected).norm() < 1e-2 * expected.norm()


def test_second_derivatives_are_refused_rather_than_wrong(path):
    x, gain, _ = tensors(2, 1, 8, torch.float32)
    z = rms_norm_dropout(x, gain, EPS, dropout_at("vpad", 2, 1))
    (dx,) = torch.autograd.grad(z.square().sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        dx.sum().backward()


@pytest.mark.parametrize("shape", [(4, 3, 8), (5, 2, 8), (8, 8)])
def test_coordinates_of_another_batch_are_refused(path, shape):
    dropout = dropout_at("pre_linear", 4, 2)
    for apply in (affine_dropout, lambda x, d: rms_norm_dropout(x, torch.ones(8), EPS, d)):
        with pytest.raises(ValueError, match=r"masks for \[4, 2\] rows"):
            apply(torch.ones(shape), dropout)


def test_an_empty_batch_is_empty(path):
    x = torch.ones(0, 2, 8, requires_grad=True)
    z = rms_norm_dropout(x, torch.ones(8), EPS, dropout_at("vpad", 0, 2))
    z.sum().backward()
    assert z.shape == x.grad.shape == (0, 2, 8)


# ---- the residual addition -----------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("alpha_fixed, beta_fixed", DETACH)
@pytest.mark.parametrize("variant", [None, "pre_linear", "vpad"])
def test_the_residual_added_first_equals_two_steps(path, variant, alpha_fixed, beta_fixed, dtype):
    x, gain, dz = tensors(3, 4, 75, dtype)
    residual = tensors(4, 3, 75, dtype)[0].detach().transpose(0, 1).requires_grad_()
    dropout = dropout_at(variant, 3, 4, alpha_fixed, beta_fixed) if variant else None
    z, total = add_rms_norm_dropout(x, residual, gain, EPS, dropout)
    torch.autograd.backward((z, total), (dz, dz.flip(0)))
    assert torch.equal(total, residual + x)
    expected_z, dx, dgain = reference(total.detach(), gain, dz, variant, alpha_fixed, beta_fixed)
    assert_near(z, expected_z, dtype)
    assert_near(x.grad, dx + dz.flip(0).double(), dtype)
    assert torch.equal(x.grad, residual.grad)
    assert_near(gain.grad, dgain, dtype)
    assert torch.equal(z, rms_norm_dropout(total, gain, EPS, dropout))


@pytest.mark.parametrize("which", [0, 1])
def test_the_residual_addition_with_one_output_used(path, which):
    x, gain, dz = tensors(2, 2, 40, torch.float32)
    residual = torch.randn(2, 2, 40, generator=torch.Generator().manual_seed(0)).requires_grad_()
    outputs = add_rms_norm_dropout(x, residual, gain, EPS, dropout_at("vpad", 2, 2))
    outputs[which].backward(dz)
    expected = dz.double()
    if which == 0:
        expected = reference((residual + x).detach(), gain, dz, "vpad", True, True)[1]
    assert_near(x.grad, expected, torch.float32)
    assert torch.equal(x.grad, residual.grad)
    assert (gain.grad is None) is (which == 1)


def test_a_residual_of_another_dtype_or_shape_is_refused():
    x, gain = torch.ones(2, 1, 8), torch.ones(8)
    with pytest.raises(ValueError, match=r"x and residual must be alike, found \[2, 1, 8\]"):
        add_rms_norm_dropout(x, torch.ones(2, 2, 8), gain, EPS)
    with pytest.raises(ValueError, match="bfloat16"):
        add_rms_norm_dropout(x.bfloat16(), x, gain, EPS)
