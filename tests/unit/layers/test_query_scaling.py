"""Factors of the queries against the formulas in float64."""

from __future__ import annotations

import math

import pytest
import torch
from tiny_models import LENGTH, tiny_batch, tiny_config
from torch import Tensor

from megatron_lengen.layers.coordinates import query_positions, set_documents
from megatron_lengen.layers.query_scaling import QueryScaling, ScaledSelfAttention, scaled_heads
from megatron_lengen.models.build import build_chunks

LEARNED = {"query_scaling": "learned", "query_scaling_identity_init": False}
DOCUMENTS = torch.tensor([[0] * 10 + [1] * 14, [0] * 24])


@pytest.fixture(autouse=True)
def no_documents(process_groups):
    yield
    set_documents(None)


def scaling(layer: int = 4, **changes) -> QueryScaling:
    """The scaling of a layer of a tiny model, its parameters drawn."""
    (model,) = build_chunks(tiny_config(**changes))
    return model.decoder.layers[layer - 1].self_attention.query_scaling


def formula(module: QueryScaling, x: Tensor, p: Tensor) -> Tensor:
    """[s, b, heads] in float64, p [s, b]."""
    config = module.config
    x, p = x.double(), p.double()[..., None]

    def projected(name: str) -> Tensor:
        z = x @ getattr(module, f"{name}_weight").double().T * config.query_scaling_weight_scale
        bias = getattr(module, f"{name}_bias", None)
        return z if bias is None else z + bias.double()

    z = projected("coef")
    if config.query_scaling_coef_activation == "sigmoid":
        coef = config.query_scaling_coef_bound / (1 + torch.exp(-z))
    else:
        coef = config.query_scaling_coef_bound * torch.log1p(
            torch.exp(z - config.query_scaling_coef_shift)
        )
    power = config.query_scaling_pow_bound * torch.tanh(projected("pow"))
    return 1 + coef * (torch.log(p + 2) / math.log(config.query_scaling_log_base)) ** power


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"query_scaling_coef_activation": "softplus_shifted", "query_scaling_coef_shift": 1.0},
        {"query_scaling_log_base": math.e, "query_scaling_pow_bound": 3.0},
        {"query_scaling_coef_bound": 2.5, "query_scaling_weight_scale": 0.3},
        {"query_scaling_proj_bias": False},
    ],
    ids=str,
)
@pytest.mark.parametrize("documents", [None, DOCUMENTS], ids=["row", "documents"])
def test_learned_factors(changes, documents):
    torch.manual_seed(0)
    module = scaling(**LEARNED, **changes)
    x = torch.randn(LENGTH, 2, 32, requires_grad=True)
    set_documents(documents)
    p = torch.arange(LENGTH)[:, None].expand(LENGTH, 2).clone()
    if documents is not None:
        p[10:, 0] -= 10
    found, expected = module(x), formula(module, x, p)
    assert found.dtype == torch.float32
    torch.testing.assert_close(found.double(), expected, rtol=1e-6, atol=0)
    assert (found.std(dim=(0, 1)) > 1e-3).all()  # they do depend on the input
    wanted = [x, *module.parameters()]
    grad = torch.randn(found.shape)
    ours = torch.autograd.grad(found, wanted, grad)
    theirs = torch.autograd.grad(expected, wanted, grad.double())
    for one, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=2e-5)


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"query_scaling_coef_bound": 4.0},
        {"query_scaling_coef_activation": "softplus_shifted"},
        {"query_scaling_coef_activation": "softplus_shifted", "query_scaling_proj_bias": False},
    ],
    ids=str,
)
def test_identity_at_the_start(monkeypatch, changes):
    """Within 1e-3 of unscaled, whatever the input, at every position up to a million."""
    module = scaling(query_scaling="learned", **changes)
    positions = torch.tensor([[0], [1], [23], [4096], [999_999]])
    monkeypatch.setattr(
        "megatron_lengen.layers.query_scaling.query_positions", lambda length: positions
    )
    factors = module(torch.randn(5, 2, 32) * 10)
    assert (factors - 1).abs().max() <= 1e-3
    assert (factors > 1).all()  # and not switched off: gradients reach the projection
    factors.sum().backward()
    assert module.coef_weight.grad.abs().max() > 0


@pytest.mark.parametrize("position", [0, 1, LENGTH - 1, LENGTH, LENGTH + 1, 100_000, 1_000_000])
@pytest.mark.parametrize("kind", ["log", "ssmax", "learned"])
def test_far_positions_in_fp32_under_bf16(monkeypatch, kind, position):
    """Report 23 of the field: exact at any position, also in a bf16 model."""
    changes = {"query_scaling": kind, "query_scaling_identity_init": False}
    module = scaling(**changes, bf16=True, params_dtype=torch.bfloat16)
    monkeypatch.setattr(
        "megatron_lengen.layers.query_scaling.query_positions",
        lambda length: torch.tensor([[position]]),
    )
    x = torch.randn(1, 1, 32, dtype=torch.bfloat16)
    found = module(x).double()
    if kind == "learned":
        expected = formula(module, x, torch.tensor([[position]]))
    else:
        expected = torch.full((1, 1, 4), math.log(position + 1), dtype=torch.float64)
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-7)


def test_ssmax_scales_by_head():
    module = scaling(query_scaling="ssmax")
    assert module.ssmax_scale.tolist() == [1.0] * 4
    with torch.no_grad():
        module.ssmax_scale.copy_(torch.tensor([0.5, 1.0, 2.0, -1.0]))
    expected = torch.log(torch.arange(LENGTH) + 1.0)[:, None] * module.ssmax_scale
    torch.testing.assert_close(module(torch.zeros(LENGTH, 2, 32))[:, 0], expected)


def test_scope():
    assert scaled_heads(tiny_config(query_scaling="log"), 0) == [True] * 4
    nope = tiny_config(query_scaling="log", query_scaling_scope="nope")
    assert scaled_heads(nope, 0) == [False] * 4 and scaled_heads(nope, 3) == [True] * 4
    nape = tiny_config(
        query_scaling="log", query_scaling_scope="nope", position_embedding_type="nape"
    )
    assert scaled_heads(nape, 0) == [False, False, True, True]
    (model,) = build_chunks(nope)
    kinds = [
        isinstance(layer.self_attention, ScaledSelfAttention) for layer in model.decoder.layers
    ]
    assert kinds == [False, False, False, True]
    (model,) = build_chunks(nape)
    factors = model.decoder.layers[0].self_attention.query_scaling(torch.zeros(LENGTH, 1, 32))
    assert (factors[..., :2] == 1).all() and factors[5, 0, 2] == pytest.approx(math.log(6))


def test_queries_of_a_model_are_multiplied():
    """ssmax with s = 1 / ln n would be no scaling: the model's logits show the factor."""
    (plain,) = build_chunks(tiny_config())
    (scaled,) = build_chunks(tiny_config(query_scaling="ssmax"))
    tokens, _, positions = tiny_batch()
    plain.eval(), scaled.eval()
    with torch.no_grad():
        for layer in scaled.decoder.layers:
            layer.self_attention.query_scaling.ssmax_scale.fill_(0.0)
        flat = scaled(tokens, positions, None)
        for layer in plain.decoder.layers:
            rows = layer.self_attention.linear_qkv.weight.view(2, 4, 8, 32)
            rows[:, :2] = 0  # the queries of each group
        expected = plain(tokens, positions, None)
    torch.testing.assert_close(flat, expected)


def test_positions_of_the_last_queries():
    """Cached decoding: documents of all keys so far, positions of the newest tokens."""
    set_documents(DOCUMENTS)
    assert query_positions(2).tolist() == [[12, 22], [13, 23]]
