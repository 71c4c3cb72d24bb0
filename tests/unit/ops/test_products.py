"""Products through oneDNN and through torch.matmul, against float64."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from megatron_lengen.ops import products


@pytest.fixture(params=[True, False], ids=["oneDNN", "matmul"])
def library(request, monkeypatch) -> bool:
    """Every product by one of the two, whatever the processor and the size."""
    if request.param and not hasattr(torch.ops.mkldnn, "_linear_pointwise"):
        pytest.skip("this PyTorch has no oneDNN")
    monkeypatch.setattr(products, "onednn_is_faster", lambda: request.param)
    monkeypatch.setattr(products, "SMALLEST", 1)
    return request.param


def draw(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)))


@pytest.mark.parametrize(("n", "k"), [(1, 1), (5, 3), (33, 64), (160, 70)])
@pytest.mark.parametrize("rows", [(1,), (7,), (3, 5), (40, 2)], ids=str)
def test_linear_and_its_gradients(library, rows, n, k):
    x, weight, grad = draw(*rows, k).requires_grad_(), draw(n, k).requires_grad_(), draw(*rows, n)
    y = products.linear(x, weight)
    y.backward(grad)
    wide = [t.detach().double().requires_grad_() for t in (x, weight)]
    wanted = wide[0] @ wide[1].T
    wanted.backward(grad.double())
    for found, exact in ((y, wanted), (x.grad, wide[0].grad), (weight.grad, wide[1].grad)):
        torch.testing.assert_close(found.double(), exact, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    "change", [lambda t: t.T.contiguous().T, lambda t: t[::2], lambda t: t[:, ::2]]
)
def test_strides(library, change):
    a, b = change(draw(24, 32)), change(draw(24, 32)).T
    for found, wanted in (
        (products.product(a, b), a.double() @ b.double()),
        (products.transposed_product(a, a), a.double().T @ a.double()),
    ):
        torch.testing.assert_close(found.double(), wanted, rtol=1e-5, atol=1e-5)


def test_what_is_returned_may_be_changed_in_place(library):
    """Megatron-Core's loss does so with logits."""
    weight = draw(6, 4).requires_grad_()
    y = products.linear(draw(3, 2, 4), weight)
    y -= y.detach().max()
    y.square().sum().backward()
    assert weight.grad is not None


def test_frozen_weights(library):
    x, weight = draw(3, 4).requires_grad_(), draw(6, 4)
    products.linear(x, weight).sum().backward()
    torch.testing.assert_close(x.grad, weight.sum(0).expand(3, -1))


def test_small_products_other_dtypes_and_processors_stay(monkeypatch):
    x, weight = draw(256, 256), draw(256, 256)
    monkeypatch.setattr(products, "onednn_is_faster", lambda: True)
    assert products.serves(x, weight)
    assert not products.serves(x[:2], weight)
    assert not products.serves(x.bfloat16(), weight.bfloat16())
    assert not products.serves(x.to("meta"), weight.to("meta"))
    monkeypatch.setattr(products, "onednn_is_faster", lambda: False)
    assert not products.serves(x, weight)
