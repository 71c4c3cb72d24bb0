"""Rows where formulas divide by zero, overflow or lose digits: nothing is ever NaN."""

from __future__ import annotations

import math

import pytest
import torch
from norm_reference import BOTH_DTYPES, DETACH, EPS, dropout_at, formula, tensors

from megatron_lengen.ops import native
from megatron_lengen.ops.rmsnorm import affine_dropout, rms_norm_dropout

BASE_ROWS = {
    "zero": lambda r: torch.zeros_like(r),
    "constant": lambda r: torch.full_like(r, 0.1),
    "negative constant": lambda r: torch.full_like(r, -317.0),
    "tiny": lambda r: r * 1e-20,
    "very tiny": lambda r: r * 1e-36,
    "huge": lambda r: r * 1e18,
    "beyond fp32 squares": lambda r: r * 1e30,
    "one spike": lambda r: torch.where(torch.arange(r.shape[-1]) == 3, 1e4, 0.0).expand_as(r),
    "alternating": lambda r: torch.where(torch.arange(r.shape[-1]) % 2 == 0, 1.0, -1.0)
    .expand_as(r),
}  # fmt: skip


@BOTH_DTYPES
@pytest.mark.parametrize("alpha_fixed, beta_fixed", DETACH)
@pytest.mark.parametrize(
    "norm, kind",
    # Squares beyond fp32 are a matter of the normalization alone.
    [(True, k) for k in BASE_ROWS] + [(False, k) for k in BASE_ROWS if "squares" not in k],
)
def test_no_row_gives_nan(path, norm, kind, alpha_fixed, beta_fixed, dtype):
    base, gain, dz = tensors(4, 2, 300, torch.float32)
    x = BASE_ROWS[kind](base.detach()).to(dtype).requires_grad_()
    gain = gain.detach().to(dtype).requires_grad_()
    dropout = dropout_at("vpad", 4, 2, alpha_fixed, beta_fixed)
    z = rms_norm_dropout(x, gain, EPS, dropout) if norm else affine_dropout(x, dropout)
    z.backward(dz.to(dtype))
    assert torch.isfinite(z).all()
    assert torch.isfinite(x.grad).all()
    assert not norm or torch.isfinite(gain.grad).all()
    if kind == "zero":
        assert torch.count_nonzero(z) == 0


@BOTH_DTYPES
@pytest.mark.parametrize("d", [3, 64, 300, 2047, 4096])
@pytest.mark.parametrize("value", [0.1, -317.0, 1e-4])
def test_a_constant_row_becomes_its_mean(path, value, d, dtype):
    x = torch.full((2, 1, d), value, dtype=dtype)
    gain = torch.ones(d, dtype=dtype)
    plain = rms_norm_dropout(x, gain, EPS)
    assert torch.equal(rms_norm_dropout(x, gain, EPS, dropout_at("vpad", 2, 1)), plain)
    assert torch.equal(affine_dropout(x, dropout_at("vpad", 2, 1)), x)


@pytest.mark.parametrize("d", [64, 300, 2047])
@pytest.mark.parametrize("alpha_fixed, beta_fixed", DETACH)
def test_alpha_of_a_constant_row_has_no_derivative(path, alpha_fixed, beta_fixed, d):
    """z = mean there: every input gets the same share of the gradient, or none if beta is fixed."""
    x = torch.full((2, 1, d), 0.1, requires_grad=True)
    dz = torch.randn(2, 1, d, generator=torch.Generator().manual_seed(1))
    affine_dropout(x, dropout_at("vpad", 2, 1, alpha_fixed, beta_fixed)).backward(dz)
    share = dz.mean(-1, keepdim=True) * (0.0 if beta_fixed else 1.0)
    torch.testing.assert_close(x.grad, share.expand_as(x), atol=1e-6, rtol=1e-5)


def test_rounding_error_of_the_statistics_is_small():
    """fp32 sums over 8192 features with an outlier stay near float64's."""
    if native.load_library() is None:
        pytest.skip("no C++ compiler")
    generator = torch.Generator().manual_seed(2)
    x = torch.randn(8, 1, 8192, generator=generator) * 0.01 + 0.3
    x[:, :, 0] = 500.0
    gain = torch.ones(8192)
    z = rms_norm_dropout(x, gain, EPS, dropout_at("vpad", 8, 1))
    hat = x.double() / (x.double().square().mean(-1, keepdim=True) + EPS).sqrt()
    mean, variance = hat.mean(-1), hat.var(-1, unbiased=False)
    alpha, beta = formula("vpad", mean, variance)
    dropped = z[:, 0] - beta
    assert math.isclose(dropped.abs().min(), 0.0, abs_tol=1e-6)
    kept = (alpha[..., None] * hat + beta[..., None])[z > 1]
    assert torch.allclose(z[z > 1].double(), kept, rtol=1e-5)
