"""Projections with an input of their own per part, against Megatron's and float64."""

from __future__ import annotations

import pytest
import torch
from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear
from tiny_models import tiny_config
from torch import Tensor

from megatron_lengen.layers.coordinates import set_samples
from megatron_lengen.layers.dropout import DropoutSite, Site
from megatron_lengen.layers.projections import MaskedGateUp, MaskedQKV, MaskedRows, MaskedUp
from megatron_lengen.ops.mask import MaskCoordinates, keep_mask

pytestmark = pytest.mark.usefixtures("process_groups")

LENGTH, SAMPLES, RATE, SEED, LAYER = 7, [5, 11], 0.3, 8, 1
EXACT = round(RATE * 65536) / 65536
# 4 query heads in 2 groups of 8 channels: a group's rows are 16 of q, 8 of k, 8 of v.
CASES = {"qkv": (MaskedQKV, 64), "gate and up": (MaskedGateUp, 96), "up": (MaskedUp, 48)}


def make(kind: type, outputs: int, inputs: int = 32, bias: bool = False, **options):
    config = tiny_config()
    layer = kind(
        inputs, outputs, config=config, init_method=torch.nn.init.zeros_, bias=bias,
        skip_bias_add=False, **options,
    )  # fmt: skip
    generator = torch.Generator().manual_seed(outputs)
    layer.weight.data = torch.randn(layer.weight.shape, generator=generator) * 0.2
    if bias:
        layer.bias.data = torch.randn(layer.bias.shape, generator=generator)
    return layer


def columns(kind: type, outputs: int, **options):
    return make(kind, outputs, gather_output=False, **options)


def drop_site(
    letter: str, variant: str = "vpad", detach: bool = True, rate: float = RATE
) -> DropoutSite:
    return DropoutSite(variant, rate, detach, detach, SEED, LAYER, Site[letter.upper()], False)


def dropped(x: Tensor, letter: str, variant: str = "vpad", detach: bool = True) -> Tensor:
    """x under its own mask, in float64 with plain formulas."""
    where = MaskCoordinates(
        SEED, torch.tensor(SAMPLES), torch.arange(LENGTH), LAYER, int(Site[letter.upper()])
    )
    keep = keep_mask(where, x.shape[-1], RATE)
    if variant == "pre_linear":
        return x * keep / (1 - EXACT)
    mean = x.mean(-1, keepdim=True)
    variance = ((x - mean) ** 2).mean(-1, keepdim=True)
    alpha = (variance / ((1 - EXACT) * (variance + EXACT * mean**2))).sqrt()
    beta = mean * (1 - alpha * (1 - EXACT))
    if detach:
        alpha, beta = alpha.detach(), beta.detach()
    return alpha * keep * x + beta


def part_of_rows(case: str, outputs: int) -> list[str]:
    """Which part each output row belongs to."""
    if case == "qkv":
        return (["q"] * 16 + ["k"] * 8 + ["v"] * 8) * 2
    if case == "gate and up":
        return ["g"] * (outputs // 2) + ["u"] * (outputs // 2)
    return ["u"] * outputs


def values_and_gradients(layer, x: Tensor) -> list[Tensor]:
    x = x.clone().requires_grad_()
    out = layer(x)[0]
    weights = torch.randn(out.shape, generator=torch.Generator().manual_seed(3))
    return [out, *torch.autograd.grad((out * weights).sum(), [x, *layer.parameters()])]


@pytest.fixture
def x() -> Tensor:
    set_samples(SAMPLES)
    return torch.randn(LENGTH, 2, 32, generator=torch.Generator().manual_seed(0)) + 0.3


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("case", CASES)
def test_without_sites_these_are_megatrons_layers(case, bias, x):
    kind, outputs = CASES[case]
    ours = values_and_gradients(columns(kind, outputs, bias=bias).train(), x)
    theirs = values_and_gradients(columns(ColumnParallelLinear, outputs, bias=bias), x)
    assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


@pytest.mark.parametrize("case", CASES)
def test_evaluation_ignores_the_sites(case, x):
    kind, outputs = CASES[case]
    layer = columns(kind, outputs).eval()
    layer.sites = {name: drop_site(name) for name in layer.sites}
    assert torch.equal(layer(x)[0], columns(ColumnParallelLinear, outputs)(x)[0])


@pytest.mark.parametrize("case", CASES)
def test_the_masked_path_with_a_rate_near_nothing_is_megatrons_layer(case, x):
    """One step in 65536 drops none of these few inputs for this seed: the split must be exact."""
    kind, outputs = CASES[case]
    layer = columns(kind, outputs).train()
    layer.sites = {name: drop_site(name, "pre_linear", rate=1 / 65536) for name in layer.sites}
    for found, expected in zip(
        values_and_gradients(layer, x),
        values_and_gradients(columns(ColumnParallelLinear, outputs), x),
        strict=True,
    ):
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("detach", [False, True])
@pytest.mark.parametrize("variant", ["pre_linear", "vpad"])
@pytest.mark.parametrize(
    "case, letters",
    [("qkv", "q"), ("qkv", "kv"), ("qkv", "qkv"), ("gate and up", "g"), ("gate and up", "u"),
     ("gate and up", "gu"), ("up", "u")],
)  # fmt: skip
def test_every_part_sees_its_own_masked_input(case, letters, variant, detach, bias, x):
    kind, outputs = CASES[case]
    layer = columns(kind, outputs, bias=bias).train()
    layer.sites.update({letter: drop_site(letter, variant, detach) for letter in letters})
    found = values_and_gradients(layer, x)

    wide = x.double().requires_grad_()
    weight = layer.weight.detach().double().requires_grad_()
    leaves = [wide, weight]
    inputs = {
        name: dropped(wide, name, variant, detach) if name in letters else wide
        for name in set(part_of_rows(case, outputs))
    }
    rows = [inputs[name] @ w for name, w in zip(part_of_rows(case, outputs), weight, strict=True)]
    out = torch.stack(rows, dim=-1)
    if bias:
        leaves.append(layer.bias.detach().double().requires_grad_())
        out = out + leaves[-1]
    weights = torch.randn(out.shape, generator=torch.Generator().manual_seed(3))
    expected = [out, *torch.autograd.grad((out * weights).sum(), leaves)]
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours.double(), theirs, rtol=1e-4, atol=2e-5)


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("letter", ["o", "d"])
def test_rows_with_a_masked_input(letter, bias, x):
    options = {"input_is_parallel": True, "bias": bias}
    layer, plain = (make(kind, 24, **options) for kind in (MaskedRows, RowParallelLinear))
    assert torch.equal(layer.train()(x)[0], plain(x)[0])
    layer.site = drop_site(letter)
    assert torch.equal(layer.eval()(x)[0], plain(x)[0])
    found = values_and_gradients(layer.train(), x)
    wide = x.double().requires_grad_()
    weight = layer.weight.detach().double().requires_grad_()
    out = dropped(wide, letter) @ weight.T
    leaves = [wide, weight]
    if bias:
        leaves.append(layer.bias.detach().double().requires_grad_())
        out = out + leaves[-1]
    weights = torch.randn(out.shape, generator=torch.Generator().manual_seed(3))
    expected = [out, *torch.autograd.grad((out * weights).sum(), leaves)]
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours.double(), theirs, rtol=1e-4, atol=2e-5)


def test_a_bias_to_add_later_is_handed_on(x):
    config = tiny_config()
    layer = MaskedUp(
        32, 48, config=config, init_method=torch.nn.init.ones_, bias=True, skip_bias_add=True,
        gather_output=False,
    ).train()  # fmt: skip
    layer.bias.data.fill_(2.0)
    layer.sites["u"] = drop_site("u")
    with_bias = layer(x)
    assert with_bias[1] is layer.bias
    layer.bias.data.zero_()
    assert torch.equal(with_bias[0], layer(x)[0])
