"""Cross-entropy without logits on a GPU: values, gradients, memory, and no waiting for the host."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from megatron_lengen.ops import linear_cross_entropy as operator
from megatron_lengen.ops.linear_cross_entropy import linear_cross_entropy

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

# Largest error over largest value: of losses, of gradients.
TOLERANCES = {
    torch.float32: (1e-5, 2e-5),
    torch.bfloat16: (1e-2, 2e-2),
    torch.float16: (2e-3, 5e-3),
}


def inputs(
    dtype: torch.dtype, tokens: int = 300, hidden: int = 64, rows: int = 5003
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """hidden, weight, labels, a mask of zeros and fractions."""
    generator = torch.Generator("cuda").manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, device="cuda")

    x = normal(tokens, hidden).to(dtype).requires_grad_()
    w = (0.2 * normal(rows, hidden)).to(dtype).requires_grad_()
    labels = torch.randint(rows, (tokens,), generator=generator, device="cuda")
    labels[0] = rows - 1
    return x, w, labels, normal(tokens).clamp(min=0)


def check(dtype: torch.dtype, masked: bool, total: str, chunk: int | None) -> None:
    x, w, labels, mask = inputs(dtype)
    mask = mask if masked else None
    losses = linear_cross_entropy(x, w, labels, mask, chunk=chunk)
    x64, w64 = (tensor.detach().double().requires_grad_() for tensor in (x, w))
    expected = F.cross_entropy(x64 @ w64.t(), labels, reduction="none")
    expected = expected if mask is None else expected * mask
    found = (losses, *torch.autograd.grad(_total(losses, total), (x, w)))
    reference = (expected, *torch.autograd.grad(_total(expected, total), (x64, w64)))
    of_losses, of_gradients = TOLERANCES[dtype]
    for one, other, near in zip(
        found, reference, (of_losses, of_gradients, of_gradients), strict=True
    ):
        assert (one.double() - other).abs().max() <= near * other.abs().max()


def _total(losses: Tensor, how: str) -> Tensor:
    return 3 * losses.sum() if how == "sum" else losses.square().sum()


@pytest.mark.parametrize("chunk", [None, 37])
@pytest.mark.parametrize("total", ["sum", "squares"])
@pytest.mark.parametrize("masked", [True, False])
@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
def test_values_and_gradients_are_the_definitions(dtype, masked, total, chunk):
    check(dtype, masked, total, chunk)


def test_without_triton(monkeypatch):
    monkeypatch.setattr(operator, "optional_module", lambda name: None)
    check(torch.bfloat16, True, "sum", 37)


def test_large_logits_do_not_overflow():
    x, w, labels, mask = inputs(torch.float32)
    with torch.no_grad():
        w.mul_(1e4 / (x @ w.t()).abs().max())
        losses = linear_cross_entropy(x, w, labels, mask)
        expected = F.cross_entropy(x.double() @ w.double().t(), labels, reduction="none") * mask
    assert (losses.double() - expected).abs().max() <= 1e-4 * expected.max()


def test_many_chunks_of_bf16_add_up_in_fp32():
    """With and without a matrix product that adds to fp32."""
    x, w, labels, mask = inputs(torch.bfloat16, tokens=2048, rows=640)
    whole = torch.autograd.grad(
        F.cross_entropy(x.double() @ w.double().t(), labels, reduction="none") @ mask.double(), w
    )[0].double()
    for adds in (operator._adds_in_fp32, lambda *_: False):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(operator, "_adds_in_fp32", adds)
            total = linear_cross_entropy(x, w, labels, mask, chunk=4).sum()
            (found,) = torch.autograd.grad(total, w)
        assert (found.double() - whole).norm() <= 1e-2 * whole.norm()


def test_training_waits_for_nothing():
    """The gradient of a sum is one number, which nobody has to read."""
    x, w, labels, mask = inputs(torch.bfloat16)
    for mode in ("default", "error"):  # the first call compiles and probes
        torch.cuda.set_sync_debug_mode(mode)
        try:
            linear_cross_entropy(x, w, labels, mask, chunk=100).sum().backward()
        finally:
            torch.cuda.set_sync_debug_mode("default")


def test_memory_is_that_of_a_chunk():
    """65,536 tokens and 131,072 rows: logits would take 16 GiB."""
    x, w, labels, mask = inputs(torch.bfloat16, tokens=2**16, hidden=64, rows=2**17)
    torch.cuda.reset_peak_memory_stats()
    linear_cross_entropy(x, w, labels, mask).sum().backward()
    assert torch.cuda.max_memory_allocated() < 2**30
