"""The dropout family: coefficients in closed form, and the paper's Propositions 1 to 3."""

from __future__ import annotations

import math

import pytest
import torch

from megatron_lengen.ops import variants
from megatron_lengen.ops.mask import MaskCoordinates
from megatron_lengen.ops.rmsnorm import Dropout, affine_dropout, rms_norm, rms_norm_dropout

RATES = (0.05, 0.1, 0.3, 0.5)
D = 1024
ROWS = 6000  # masks per estimate


def exact(rate: float) -> float:
    """The rate that a mask really has."""
    return round(rate * 65536) / 65536


def drop(x: torch.Tensor, variant: str, rate: float, norm: bool = True) -> torch.Tensor:
    """[ROWS, 1, D]: the same or different rows, each under a mask of its own."""
    where = MaskCoordinates(5, torch.tensor([3]), torch.arange(x.shape[0]), layer=1, site=0)
    dropout = Dropout(variant, rate, where)
    if norm:
        return rms_norm_dropout(x, torch.ones(x.shape[-1]), 1e-6, dropout)
    return affine_dropout(x, dropout)


def inputs(mean: float, rows: int = ROWS) -> torch.Tensor:
    generator = torch.Generator().manual_seed(int(mean * 100) + 1)
    return torch.randn(rows, 1, D, generator=generator) + mean


def within(found: torch.Tensor, expected: float, spread: float, samples: int) -> bool:
    """Whether a mean of `samples` draws with standard deviation `spread` is 4 sigma near."""
    return abs(found.item() - expected) < 4 * spread / math.sqrt(samples)


# ---- closed forms --------------------------------------------------------------------------------


@pytest.mark.parametrize("rate", RATES)
@pytest.mark.parametrize("name", ["pre_linear", "pre_norm", "residual"])
def test_inverted_dropout_has_the_closed_form(name, rate):
    mean, variance = torch.randn(7, dtype=torch.float64), torch.rand(7, dtype=torch.float64)
    alpha, beta = variants.get_variant(name).coefficients(mean, variance, rate)
    assert torch.equal(alpha, torch.full_like(mean, 1 / (1 - rate)))
    assert torch.equal(beta, torch.zeros_like(mean))


@pytest.mark.parametrize("rate", RATES)
def test_vpad_has_the_closed_form_of_eq_12(rate):
    means = (0.0, 1e-3, -0.2, 0.7, -3.0)
    deviations = (1e-3, 0.3, 1.0, 5.0)
    for mu in means:
        for sigma in deviations:
            alpha, beta = variants.vpad(
                torch.tensor([mu], dtype=torch.float64),
                torch.tensor([sigma**2], dtype=torch.float64),
                rate,
            )
            expected = sigma * ((1 - rate) * (sigma**2 + rate * mu**2)) ** -0.5
            assert alpha.item() == pytest.approx(expected, rel=1e-12)
            assert beta.item() == pytest.approx(mu * (1 - expected * (1 - rate)), abs=1e-12)


def test_vpad_of_a_centred_row_is_alpha_dropout_with_zero():
    # Klambauer et al. 2017, a = (q + alpha'^2 q (1 - q))^(-1/2) with alpha' = 0, b = 0.
    alpha, beta = variants.vpad(torch.zeros(1), torch.ones(1), 0.25)
    assert alpha.item() == pytest.approx(0.75**-0.5)
    assert beta.item() == 0


def test_vpad_coefficients_of_a_constant_row():
    alpha, beta = variants.vpad(torch.tensor([0.0, 2.0, -1e-20]), torch.zeros(3), 0.3)
    assert alpha.tolist() == [0, 0, 0]
    assert torch.equal(beta, torch.tensor([0.0, 2.0, -1e-20]))


@pytest.mark.parametrize("scale", [1e-18, 1e-10, 1.0, 1e10, 1e18])
def test_vpad_alpha_does_not_depend_on_the_rows_scale(scale):
    mean, variance = torch.tensor([0.3 * scale]), torch.tensor([scale**2])
    mean.requires_grad_()
    variance.requires_grad_()
    alpha, beta = variants.vpad(mean, variance, 0.25)
    expected = (0.75 * (1 + 0.25 * 0.09)) ** -0.5
    assert alpha.item() == pytest.approx(expected, rel=1e-5)
    assert beta.item() == pytest.approx(0.3 * scale * (1 - 0.75 * expected), rel=1e-5)
    # d alpha / d mean, d variance in closed form, multiplied by numbers that keep them near 1.
    slopes = torch.autograd.grad(alpha * scale, (mean, variance))
    ratio = 1 + 0.25 * 0.09
    at_mean = -(0.75**-0.5) * ratio**-1.5 * 0.25 * 0.3
    at_variance = 0.5 * 0.75**-0.5 * ratio**-1.5 * 0.25 * 0.09 / scale
    assert slopes[0].item() == pytest.approx(at_mean, rel=1e-4)
    assert slopes[1].item() == pytest.approx(at_variance, rel=1e-4)


# ---- moments over masks and inputs ---------------------------------------------------------------


@pytest.mark.parametrize("rate", RATES)
@pytest.mark.parametrize("mean", [0.0, 0.8])
def test_pre_linear_moments_are_proposition_2s(rate, mean):
    x = inputs(mean)
    hat = rms_norm(x, torch.ones(D), 1e-6)
    z = drop(x, "pre_linear", rate)
    p = exact(rate)
    # Var z = Var x_hat + p / (1 - p) E[x_hat^2], and E[x_hat^2] = 1.
    spread = math.sqrt(hat.var().item() + p / (1 - p))
    assert within(z.mean() - hat.mean(), 0.0, spread, z.numel())
    assert z.var().item() == pytest.approx(hat.var().item() + p / (1 - p), rel=0.01)


@pytest.mark.parametrize("rate", RATES)
@pytest.mark.parametrize("mean", [0.0, 0.8])
def test_vpad_moments_are_proposition_3s(rate, mean):
    x = inputs(mean)
    hat = rms_norm(x, torch.ones(D), 1e-6)
    z = drop(x, "vpad", rate)
    assert within(z.mean() - hat.mean(), 0.0, hat.std().item(), z.numel())
    assert z.var().item() == pytest.approx(hat.var().item(), rel=0.01)


@pytest.mark.parametrize("rate", RATES)
@pytest.mark.parametrize("mean", [0.0, 0.8])
def test_vpad_keeps_the_moments_of_a_single_row(rate, mean):
    """Over many masks of one row: each element's mean over masks averages to the row's."""
    x = inputs(mean, rows=1).expand(ROWS, 1, D)
    hat = rms_norm(x[:1], torch.ones(D), 1e-6)
    z = drop(x, "vpad", rate)
    per_row_mean, row_variance = hat.mean(), hat.var(unbiased=False)
    assert z.mean().item() == pytest.approx(per_row_mean.item(), abs=4 / math.sqrt(z.numel()))
    second_moment = (z - per_row_mean).square().mean()
    assert second_moment.item() == pytest.approx(row_variance.item(), rel=0.01)


@pytest.mark.parametrize("rate", RATES)
@pytest.mark.parametrize("variant", ["pre_linear", "vpad"])
def test_pre_activation_moments_with_the_covariance_term(variant, rate):
    """Eq. 11 and 13 for y = w.z over inputs with a common component, so that C(x_hat, w) > 0."""
    generator = torch.Generator().manual_seed(4)
    d = 256
    shared = torch.randn(60000, 1, 1, generator=generator) * 0.5
    # Without the normalization, so that the covariance of the inputs is known: 0.25.
    x = torch.randn(60000, 1, d, generator=generator) + shared + 0.5
    w = torch.randn(d, generator=generator) / math.sqrt(d) + 0.05
    p, mu, variance, second = exact(rate), 0.5, 1.25, 1.5
    covariance = 0.25 * (w.sum() ** 2 - w.square().sum()).item()
    y_test = variance * w.square().sum().item() + covariance
    if variant == "pre_linear":
        z = drop(x, variant, rate, norm=False)
        expected = y_test + p / (1 - p) * second * w.square().sum().item()
    else:
        # Population moments, as in the proposition; the layer uses each row's own.
        alpha, beta = variants.vpad(torch.tensor(mu), torch.tensor(variance), p)
        ones = drop(torch.ones_like(x), "pre_linear", rate, norm=False)
        z = alpha * (ones != 0) * x + beta
        expected = y_test + ((alpha * (1 - p)).item() ** 2 - 1) * covariance
    y = (z @ w).flatten().double()
    assert within(y.mean(), mu * w.sum().item(), math.sqrt(expected), y.numel())
    # The variance of a variance estimate is 2 sigma^4 / n.
    assert abs(y.var().item() / expected - 1) < 5 * math.sqrt(2 / y.numel())


@pytest.mark.parametrize("rate", RATES)
def test_pre_norm_attenuates_the_mean_as_in_proposition_1(rate):
    generator = torch.Generator().manual_seed(8)
    r = torch.randn(2000, 1, D, generator=generator) * 0.7 + 0.4
    u = torch.randn(2000, 1, D, generator=generator) + 0.6 + 0.3 * r
    w = torch.rand(D, generator=generator)
    gain = torch.ones(D)
    y_test = (rms_norm(r + u, gain, 1e-12) @ w).mean()
    y_dropped = (rms_norm(r + drop(u, "pre_norm", rate, norm=False), gain, 1e-12) @ w).mean()
    p = exact(rate)
    kappa = (u.square().mean() / (r + u).square().mean()).item()
    c = (1 + p / (1 - p) * kappa) ** -0.5
    assert (y_dropped / y_test).item() == pytest.approx(c, rel=2e-3)
    assert c < 0.99  # the effect is larger than the tolerance


# ---- the registry --------------------------------------------------------------------------------


@pytest.fixture
def registry(monkeypatch):
    """The registry of this process, restored after the test."""
    copy = dict(variants._REGISTRY)
    monkeypatch.setattr(variants, "_REGISTRY", copy)
    return copy


def test_built_in_variants_and_their_places():
    placements = {n: variants.get_variant(n).placement for n in variants.variant_names()}
    assert placements == {
        "pre_linear": "after_norm",
        "vpad": "after_norm",
        "pre_norm": "before_residual",
        "residual": "before_residual",
    }


def test_a_registered_variant_is_used(registry):
    @variants.register_variant("fill_with_mean", "filler")
    def fill(mean, variance, rate):
        return torch.ones_like(mean), mean * rate

    x = inputs(0.5, rows=3)
    z = drop(x, "filler", 0.5)
    hat = rms_norm(x, torch.ones(D), 1e-6)
    shift = 0.5 * hat.mean(-1, keepdim=True)
    dropped = drop(x, "pre_linear", 0.5) == 0
    torch.testing.assert_close(z, torch.where(dropped, shift, hat + shift))
    assert variants.get_variant("filler").name == "fill_with_mean"


@pytest.mark.parametrize("name", ["vpad", "residual", "none"])
def test_names_cannot_be_registered_twice(registry, name):
    before = dict(registry)
    with pytest.raises(ValueError, match=f"'{name}' is registered already"):
        variants.register_variant(name)(lambda mean, variance, rate: (mean, variance))
    assert registry == before


def test_a_taken_alias_registers_nothing(registry):
    before = dict(registry)
    with pytest.raises(ValueError, match="registered already"):
        variants.register_variant("brand_new", "vpad")(lambda mean, variance, rate: (mean, mean))
    assert registry == before


@pytest.mark.parametrize(
    "coefficients",
    [
        lambda mean, variance, rate: (torch.tensor(2.0), torch.zeros(1)),
        lambda mean, variance, rate: (2.0, 0.0),
        lambda mean, variance, rate: (mean.double() * 0 + 2, 0 * mean.double()),
    ],
)
def test_coefficients_of_another_shape_or_type_are_brought_into_form(registry, coefficients):
    variants.register_variant("loose")(coefficients)
    variants.register_variant("tight")(
        lambda mean, variance, rate: (torch.full_like(mean, 2.0), torch.zeros_like(mean))
    )
    x = inputs(0.5, rows=3)
    assert torch.equal(drop(x, "loose", 0.5), drop(x, "tight", 0.5))


def test_coefficients_of_an_impossible_shape_are_refused(registry):
    variants.register_variant("wrong")(lambda mean, variance, rate: (torch.ones(5), mean))
    with pytest.raises(ValueError, match="'wrong'"):
        drop(inputs(0.5, rows=3), "wrong", 0.5)
