"""SwiGLU and rotary positions in one pass, against their formulas in float64."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from megatron_lengen.ops.rotary import rotate
from megatron_lengen.ops.swiglu import swiglu

# Relative to the largest number: a rounding of the result.
TOLERANCE = {torch.float64: 1e-12, torch.float32: 2e-6, torch.bfloat16: 1e-2, torch.float16: 2e-3}


def draw(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape))).to(dtype)


def assert_near(found: Tensor, wanted: Tensor, dtype: torch.dtype) -> None:
    assert found.dtype == dtype and found.shape == wanted.shape
    error = (found.double() - wanted).abs().max() / wanted.abs().max()
    assert error <= TOLERANCE[dtype]


def swiglu_in_float64(x: Tensor) -> Tensor:
    gate, up = x.chunk(2, -1)
    return gate / (1 + (-gate).exp()) * up


def rotated_in_float64(x: Tensor, angles: Tensor) -> Tensor:
    """As complex numbers: channels i and i + r / 2 are one."""
    half = angles.shape[1]
    numbers = torch.complex(x[..., :half], x[..., half : 2 * half])
    turned = numbers * torch.exp(1j * angles)[:, None, None]
    return torch.cat((turned.real, turned.imag, x[..., 2 * half :]), -1)


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("shape", [(2, 2), (1, 3, 34), (5, 2, 96)], ids=str)
def test_swiglu(path, shape, dtype):
    x = (3 * draw(*shape, dtype=dtype)).requires_grad_()
    grad = draw(*shape[:-1], shape[-1] // 2, dtype=dtype)
    z = swiglu(x)
    z.backward(grad)
    exact = x.detach().double().requires_grad_()
    wanted = swiglu_in_float64(exact)
    wanted.backward(grad.double())
    assert_near(z, wanted, dtype)
    assert_near(x.grad, exact.grad, dtype)


def test_swiglu_of_large_and_strided_inputs(path):
    x = torch.tensor([[-200.0, 200.0, -90.0, 1.0, 2.0, 3.0]])
    found = swiglu(x)[0]
    assert abs(found[0]) < 1e-30 and found[1] == 400 and abs(found[2]) < 1e-30
    rows = draw(6, 8)
    assert torch.equal(swiglu(rows[::2]), swiglu(rows)[::2])
    assert torch.equal(swiglu(rows.T.contiguous().T), swiglu(rows))
    assert swiglu(rows[:0]).shape == (0, 4)


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize(("width", "turned"), [(2, 2), (8, 8), (24, 12), (64, 64)])
def test_rotary(path, width, turned, dtype):
    x = draw(7, 2, 3, width, dtype=dtype).requires_grad_()
    grad, angles = draw(7, 2, 3, width, dtype=dtype), 100 * draw(7, turned // 2)
    z = rotate(x, angles)
    z.backward(grad)
    exact = x.detach().double().requires_grad_()
    wanted = rotated_in_float64(exact, angles.double())
    wanted.backward(grad.double())
    assert_near(z, wanted.detach(), dtype)
    assert_near(x.grad, exact.grad, dtype)


def test_rotary_of_views(path):
    """Keys lie between queries and values, and gradients come expanded."""
    mixed = draw(5, 2, 3, 24).requires_grad_()
    angles = draw(5, 4)
    for part in (mixed[..., 8:16], mixed.transpose(0, 1)[:, :2].transpose(0, 1)[..., ::3]):
        wanted = rotated_in_float64(part.detach().double(), angles[: part.shape[0]].double())
        assert_near(rotate(part, angles[: part.shape[0]]), wanted, torch.float32)
    (grad,) = torch.autograd.grad(rotate(mixed[..., 8:16], angles).sum(), mixed)
    exact = mixed.detach().double().requires_grad_()
    (wanted,) = torch.autograd.grad(
        rotated_in_float64(exact[..., 8:16], angles.double()).sum(), exact
    )
    assert_near(grad, wanted, torch.float32)
