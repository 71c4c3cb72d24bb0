"""The code that travels with models of this package's own: caches, padding, packing, backends."""

import entmax as reference
import pytest
import torch
from conversion_models import FULL, SLIDING

from megatron_lengen.convert.modeling_lengen import (
    QUERY_ROWS,
    LengenForCausalLM,
    LengenModelConfig,
    entmax,
)

NAPE = {"attention_alibi_slopes": [1.0, 0.5, 0.0, 0.0], "no_rope_layers": [0, 0]}
SCALED = {"attention_scaling_enabled": True}
WINDOWS = {
    "no_rope_layers": [1, 0],
    "use_sliding_window": True,
    "sliding_window": 8,
    "layer_types": [SLIDING, FULL],
}
MODELS = {
    "scaled-windows": {**WINDOWS, **SCALED},
    "nape": NAPE,
    "nape-entmax-scaled": {**NAPE, **SCALED, "attention_function": "entmax"},
    "entmax-windows": {**WINDOWS, "attention_function": "entmax"},
}


def build(implementation="sdpa", **settings):
    torch.manual_seed(0)
    config = LengenModelConfig(
        vocab_size=101,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=0,
        initializer_range=0.3,
        attn_implementation=implementation,
        **settings,
    )
    model = LengenForCausalLM(config).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "attention_scaling" in name:
                parameter.normal_()
    return model


def random_ids(rows, length):
    return torch.randint(1, 101, (rows, length), generator=torch.Generator().manual_seed(1))


def logits(model, ids, **inputs):
    with torch.no_grad():
        return model(ids, **inputs).logits


@pytest.fixture(params=MODELS.values(), ids=MODELS)
def settings(request):
    return request.param


@pytest.mark.parametrize("alpha", [1.2, 1.5, 1.9, 2.0])
def test_entmax_and_its_derivative(alpha):
    """Against the package of entmax's authors, in float64."""
    scores = 3 * torch.randn(6, 40, dtype=torch.float64)
    scores[0, 20:] = torch.finfo(torch.float32).min
    weighted, direction = torch.randn(6, 40, dtype=torch.float64), scores.clone().requires_grad_()
    expected = reference.entmax_bisect(direction, alpha, n_iter=80)
    (wanted,) = torch.autograd.grad((expected * weighted).sum(), direction)
    found = entmax(direction, alpha)
    (grad,) = torch.autograd.grad((found * weighted).sum(), direction)
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(grad, wanted, rtol=1e-6, atol=1e-7)
    assert found[0, 20:].eq(0).all()


def test_greedy_generation_equals_full_forwards(settings):
    """64 tokens with a growing cache, and with one of a fixed size."""
    ids = random_ids(2, 11)
    for implementation in ("sdpa", "eager"):
        model = build(implementation, **settings)
        grown = ids
        for _ in range(64):
            last = logits(model, grown, use_cache=False)[:, -1:]
            grown = torch.cat((grown, last.argmax(-1)), dim=1)
        for cache in ("dynamic", "static"):
            output = model.generate(
                ids, max_new_tokens=64, do_sample=False, cache_implementation=cache
            )
            assert torch.equal(output, grown), (implementation, cache)


def test_a_padded_batch_is_its_rows_one_at_a_time(settings):
    """Left padding: logits with and without explicit positions, a cached step, generation."""
    lengths = (3, 9, 14)
    rows = [random_ids(1, n) for n in lengths]
    ids = torch.cat([torch.nn.functional.pad(row, (14 - row.shape[1], 0)) for row in rows])
    mask = torch.stack([torch.arange(14) >= 14 - n for n in lengths]).long()
    for implementation in ("sdpa", "eager"):
        model = build(implementation, **settings)
        padded = logits(model, ids, attention_mask=mask)
        assert padded.isfinite().all()
        first = model(ids[:, :-1], attention_mask=mask[:, :-1], use_cache=True)
        step = logits(model, ids[:, -1:], attention_mask=mask, **_cache_of(first))
        torch.testing.assert_close(step[:, 0], padded[:, -1], rtol=1e-4, atol=1e-4)
        output = model.generate(ids, attention_mask=mask, max_new_tokens=12, do_sample=False)
        for i, (row, length) in enumerate(zip(rows, lengths, strict=True)):
            torch.testing.assert_close(
                padded[i, -length:], logits(model, row)[0], rtol=1e-4, atol=1e-4
            )
            alone = model.generate(row, max_new_tokens=12, do_sample=False)
            assert torch.equal(output[i, 14:], alone[0, length:])


def _cache_of(output):
    """The cache under the name that this version of transformers gives it."""
    name = "cache" if "cache" in output else "past_key_values"
    return {name: output[name]}


def test_positions_may_be_given_row_by_row(settings):
    """Two documents packed in a row are the two alone; another start of positions is none."""
    model, ids = build(**settings), random_ids(2, 12)
    positions = torch.stack([torch.arange(12), torch.cat((torch.arange(5), torch.arange(7)))])
    packed = logits(model, ids, position_ids=positions, use_cache=False)
    for found, alone in (
        (packed[0], ids[:1]),
        (packed[1, :5], ids[1:, :5]),
        (packed[1, 5:], ids[1:, 5:]),
    ):
        torch.testing.assert_close(found, logits(model, alone)[0], rtol=1e-4, atol=1e-4)


def test_backends_agree_beyond_one_block_of_queries(settings):
    ids = random_ids(1, QUERY_ROWS + 40)
    model = build(**settings)
    blocks = logits(model, ids)
    model.set_attn_implementation("eager")
    output = model(ids, output_attentions=True)
    torch.testing.assert_close(output.logits, blocks, rtol=1e-4, atol=1e-4)
    for weights in output.attentions:
        assert weights.shape == (1, 4, QUERY_ROWS + 40, QUERY_ROWS + 40)
        torch.testing.assert_close(weights.sum(-1), torch.ones_like(weights[..., 0]))


def test_other_backends_serve_what_they_can():
    """Flash attention has windows, so it serves scaled models; ALiBi and entmax it lacks."""
    from transformers import AttentionInterface

    asked = []

    def like_another(module, query, key, value, mask, sliding_window=None, scaling=None, **kwargs):
        asked.append(sliding_window)
        return query.transpose(1, 2), None

    AttentionInterface.register("like_another", like_another)
    build("like_another", **MODELS["scaled-windows"])(random_ids(1, 5))
    assert asked == [8, None]
    for name, what in (("nape", "ALiBi"), ("entmax-windows", "entmax")):
        model = build("like_another", **MODELS[name])
        message = f"found like_another; allowed for a model with {what}: sdpa, eager"
        with pytest.raises(ValueError, match=message):
            model(random_ids(1, 5))


def test_scaling_is_computed_in_fp32():
    """Rounding to bf16 first would move a factor by up to 1 in 256."""
    attention = build(**MODELS["scaled-windows"]).model.layers[0].self_attn.bfloat16()
    x = torch.randn(1, 9, 32).bfloat16()
    found = attention.attention_scaling(x, torch.arange(9)[None])
    wide = attention.attention_scaling.double()(x.double(), torch.arange(9)[None])
    assert found.dtype == torch.float32
    torch.testing.assert_close(found.double(), wide.double(), rtol=1e-5, atol=1e-5)


def test_training_and_dropout_of_weights():
    """Gradients reach every parameter; dropout acts in training only."""
    model = build(**MODELS["nape-entmax-scaled"], attention_dropout=0.5).train()
    ids = random_ids(2, 10)
    first, second = (model(ids, labels=ids).loss for _ in range(2))
    assert first != second
    first.backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())
    model.eval()
    assert model(ids, labels=ids).loss == model(ids, labels=ids).loss
