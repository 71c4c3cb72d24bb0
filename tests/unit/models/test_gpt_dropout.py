"""Models with dropout: evaluation untouched, masks that differ, recomputation that replays."""

from __future__ import annotations

import functools
from itertools import combinations

import pytest
import torch
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from tiny_models import tiny_batch, tiny_config
from torch import Tensor, nn

from megatron_lengen.layers import dropout as dropout_layer
from megatron_lengen.layers import norm as norm_layer
from megatron_lengen.layers import projections as projection_layer
from megatron_lengen.layers.coordinates import set_samples
from megatron_lengen.models.build import build_chunks

pytestmark = pytest.mark.usefixtures("process_groups")

PLACEMENTS = [
    {"dropout_variant": "pre_norm"},
    {"dropout_variant": "pre_linear"},
    {"dropout_variant": "vpad"},
    {"dropout_variant": "vpad", "dropout_keep_final_norm": True},
    {"dropout_variant": "pre_linear", "dropout_apply_to": "q,k,v,o,g,u,d"},
    {"dropout_variant": "vpad", "dropout_apply_to": "k,d"},
    {"dropout_variant": "vpad", "dropout_apply_to": "o"},
]


def build(**changes) -> GPTModel:
    (model,) = build_chunks(tiny_config(**changes))
    return model


def losses(model: GPTModel, rows: int = 2, batch: int = 0) -> Tensor:
    """Per-token losses [rows, length] of one batch."""
    tokens, labels, positions = tiny_batch(rows, seed=batch)
    return model(tokens, positions, None, labels=labels)


def logits(model: GPTModel) -> Tensor:
    tokens, _, positions = tiny_batch()
    return model(tokens, positions, None)


# ---- evaluation ----------------------------------------------------------------------------------


@pytest.mark.parametrize("placement", PLACEMENTS, ids=str)
def test_evaluation_is_bitwise_the_unmodified_model(placement):
    plain, dropped = build().eval(), build(dropout_rate=0.3, **placement).eval()
    with torch.no_grad():
        assert torch.equal(logits(plain), logits(dropped))
    # The test can fail: training differs.
    set_samples([0, 1])
    assert not torch.equal(logits(plain.train()), logits(dropped.train()))


@pytest.mark.parametrize("placement", PLACEMENTS, ids=str)
def test_rate_zero_trains_bitwise_the_unmodified_model(placement):
    results = []
    for changes in ({}, placement):
        model = build(**changes).train()
        loss = losses(model).mean()
        loss.backward()
        results.append((loss, [p.grad for p in model.parameters()]))
    assert torch.equal(results[0][0], results[1][0])
    assert all(torch.equal(a, b) for a, b in zip(results[0][1], results[1][1], strict=True))


@pytest.mark.parametrize("untie", [False, True])
def test_the_unmodified_model_agrees_with_megatrons_own_layers(untie):
    """Megatron's local spec: torch's RMSNorm and its attention with an S x S mask."""
    config = tiny_config(untie_embeddings_and_output_weights=untie)
    (ours,) = build_chunks(config)
    config.persist_layer_norm = config.masked_softmax_fusion = False
    megatrons = GPTModel(
        config,
        get_gpt_layer_local_spec(normalization="RMSNorm"),
        vocab_size=config.padded_vocab_size,
        max_sequence_length=config.seq_length,
        position_embedding_type="rope",
        rotary_base=config.rotary_base,
        share_embeddings_and_output_weights=not untie,
    )
    megatrons.load_state_dict(ours.state_dict())
    tokens, labels, positions = tiny_batch()
    size = tokens.shape[1]
    hidden = torch.ones(size, size, dtype=torch.bool).triu(1)[None, None]
    expected = megatrons(tokens, positions, hidden)[..., : config.vocab_size]
    found = logits(ours)[..., : config.vocab_size]
    torch.testing.assert_close(found, expected, atol=2e-5, rtol=1e-5)
    # Gradients too, through the logits of the true vocabulary.
    for result in (found, expected):
        torch.nn.functional.cross_entropy(result.flatten(0, 1), labels.flatten()).backward()
    theirs = dict(megatrons.named_parameters())
    for name, parameter in ours.named_parameters():
        torch.testing.assert_close(parameter.grad, theirs[name].grad, atol=2e-6, rtol=1e-4)


# ---- masks ---------------------------------------------------------------------------------------


@pytest.fixture
def masks(monkeypatch) -> dict[tuple, list[Tensor]]:
    """Kept elements of every application of dropout, by (layer, site)."""
    found: dict[tuple, list[Tensor]] = {}

    def watch(module, name: str, at: int) -> None:
        original = getattr(module, name)

        @functools.wraps(original)
        def recording(*args):
            returned = original(*args)
            z = returned[0] if isinstance(returned, tuple) else returned
            if args[at] is not None:
                where = args[at].coordinates
                found.setdefault((where.layer, where.site), []).append(z.detach() != 0)
            return returned

        monkeypatch.setattr(module, name, recording)

    watch(norm_layer, "rms_norm_dropout", 3)
    watch(norm_layer, "add_rms_norm_dropout", 4)
    watch(dropout_layer, "affine_dropout", 1)
    watch(projection_layer, "affine_dropout", 1)
    return found


def agreement(a: Tensor, b: Tensor) -> float:
    width = min(a.shape[-1], b.shape[-1])
    return (a[..., :width] == b[..., :width]).double().mean().item()


@pytest.mark.parametrize(
    "placement, sites",
    [
        ({"dropout_variant": "pre_linear"}, 8),
        ({"dropout_variant": "pre_linear", "dropout_keep_final_norm": True}, 9),
        ({"dropout_variant": "pre_norm"}, 8),
        ({"dropout_variant": "pre_linear", "dropout_apply_to": "q,k,v,o,g,u,d"}, 28),
    ],
    ids=str,
)
def test_masks_differ_between_layers_and_sites(masks, placement, sites):
    set_samples([4, 5])
    losses(build(dropout_rate=0.5, **placement).train())
    assert len(masks) == sites
    assert all(len(found) == 1 for found in masks.values())
    for (_, a), (_, b) in combinations(masks.items(), 2):
        # At least 24 x 2 x 32 elements: 0.5 +- 0.013.
        assert abs(agreement(a[0], b[0]) - 0.5) < 5 * 0.013


def test_masks_follow_the_sample_numbers(masks):
    """Other samples, other masks; the same samples in another micro-batch, the same masks."""
    model = build(dropout_variant="pre_linear", dropout_rate=0.5).train()
    set_samples([6, 7])
    losses(model)
    set_samples([8, 9])
    losses(model)
    set_samples([7, 100, 9])
    losses(model, rows=3)
    for first, second, third in masks.values():
        assert abs(agreement(first, second) - 0.5) < 5 * 0.013
        assert abs(agreement(first[:, :1], first[:, 1:]) - 0.5) < 5 * 0.02
        assert torch.equal(third[:, 0], first[:, 1])
        assert torch.equal(third[:, 2], second[:, 1])


def test_masks_follow_the_seed(masks):
    for seed in (1, 2):
        set_samples([0, 1])
        losses(build(dropout_variant="pre_linear", dropout_rate=0.5, seed=seed).train())
    for first, second in masks.values():
        assert abs(agreement(first, second) - 0.5) < 5 * 0.013


def test_masks_use_no_random_generator():
    model = build(dropout_variant="vpad", dropout_rate=0.3).train()
    results = []
    for seed in (1, 2):
        torch.manual_seed(seed)
        before = torch.get_rng_state()
        set_samples([0, 1])
        results.append(losses(model))
        assert torch.equal(torch.get_rng_state(), before)
    assert torch.equal(*results)


@pytest.mark.parametrize("placement", PLACEMENTS, ids=str)
def test_without_sample_numbers_the_error_says_what_to_call(placement):
    from megatron.core.tensor_parallel.random import get_cuda_rng_tracker

    tracker = get_cuda_rng_tracker()
    states = tracker.get_states()
    tracker.set_states({k: v for k, v in states.items() if k != "lengen-samples"})
    model = build(dropout_rate=0.1, **placement).train()
    try:
        with pytest.raises(RuntimeError, match=r"coordinates\.set_samples"):
            losses(model)
    finally:
        tracker.set_states(states)
    with torch.no_grad():
        losses(model.eval())


def test_sample_numbers_of_another_batch_are_refused():
    set_samples([0, 1, 2])
    model = build(dropout_variant="vpad", dropout_rate=0.1).train()
    with pytest.raises(RuntimeError, match="3 sample numbers for a batch of 2 rows"):
        losses(model)


# ---- recomputation -------------------------------------------------------------------------------

FULL = {"recompute_granularity": "full", "recompute_method": "uniform"}
RECOMPUTATIONS = [
    {**FULL, "recompute_num_layers": 1},
    {**FULL, "recompute_num_layers": 4},
    {"recompute_granularity": "full", "recompute_method": "block", "recompute_num_layers": 2},
    {"recompute_granularity": "selective"},
    {"recompute_granularity": "selective", "recompute_modules": ["core_attn", "mlp"]},
]


def step(**changes) -> tuple[Tensor, list[Tensor]]:
    """Losses of two micro-batches, both forward before either backward, and gradients."""
    model = build(dropout_rate=0.3, **changes).train()
    micro_batches = []
    for number in range(2):
        set_samples([2 * number, 2 * number + 1])
        micro_batches.append(losses(model, batch=number).mean())
    for loss in micro_batches:
        loss.backward()
    return torch.stack(micro_batches).detach(), [p.grad for p in model.parameters()]


@pytest.mark.parametrize("recomputation", RECOMPUTATIONS, ids=str)
@pytest.mark.parametrize("placement", PLACEMENTS, ids=str)
def test_recomputation_replays_the_masks(placement, recomputation):
    expected = step(**placement)
    found = step(**placement, **recomputation)
    assert torch.equal(expected[0], found[0])
    assert all(torch.equal(a, b) for a, b in zip(expected[1], found[1], strict=True))


def test_a_step_without_dropout_differs():
    """The comparison above would see it."""
    assert not torch.equal(step(dropout_variant="vpad")[0], step(dropout_variant="pre_linear")[0])


def test_bf16_model_trains():
    model = build(
        dropout_variant="vpad", dropout_rate=0.3, bf16=True, params_dtype=torch.bfloat16,
        dropout_apply_to="q,k,v,o,g,u,d",
    ).train()  # fmt: skip
    set_samples([0, 1])
    losses(model).float().mean().backward()
    for name, parameter in model.named_parameters():
        assert parameter.dtype == parameter.grad.dtype == torch.bfloat16, name
        assert torch.isfinite(parameter.grad).all(), name


def test_no_module_but_the_sites_holds_state():
    """Nothing of dropout is a parameter or a buffer."""
    names = {n for n, _ in build().named_parameters()} | {n for n, _ in build().named_buffers()}
    for placement in PLACEMENTS:
        model: nn.Module = build(dropout_rate=0.3, **placement)
        found = {n for n, _ in model.named_parameters()} | {n for n, _ in model.named_buffers()}
        assert found == names


RECOMPUTED = {
    "recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1
}  # fmt: skip


@pytest.mark.parametrize("recomputation", [{}, RECOMPUTED], ids=["kept", "recomputed"])
@pytest.mark.parametrize("variant", ["none", "vpad", "pre_norm"])
def test_norms_made_with_the_sums_that_they_read(monkeypatch, variant, recomputation):
    taken: list[bool] = []
    take = norm_layer.NormWithSite.take_ready

    def take_and_note(norm: nn.Module, x: Tensor) -> Tensor | None:
        ready = take(norm, x)
        taken.append(ready is not None)
        return ready

    monkeypatch.setattr(norm_layer.NormWithSite, "take_ready", take_and_note)
    found = []
    for fused in (True, False):
        rate = 0.0 if variant == "none" else 0.3
        model = build(dropout_variant=variant, dropout_rate=rate, **recomputation).train()
        for layer in model.decoder.layers:
            assert layer.self_attn_bda.sums is not None
            if not fused:
                layer.self_attn_bda.sums = None
        set_samples([0, 1])
        taken.clear()
        loss = losses(model)
        loss.sum().backward()
        # Of a layer's two norms the second is made with its sum.
        assert any(taken) is fused and not all(taken)
        found.append((loss, [p.grad for p in model.parameters()]))
    assert torch.equal(found[0][0], found[1][0])
    torch.testing.assert_close(found[0][1], found[1][1])
