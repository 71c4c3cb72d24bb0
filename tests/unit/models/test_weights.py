"""Initial weights as a function of seed and name; padded vocabularies; checkpoint keys."""

from __future__ import annotations

import math

import pytest
import torch
from tiny_models import VOCAB, tiny_batch, tiny_config

from megatron_lengen.layers.coordinates import set_samples
from megatron_lengen.models.build import build_chunks, build_for_inference
from megatron_lengen.models.weights import fill_weights, global_name

pytestmark = pytest.mark.usefixtures("process_groups")

LAYER_KEYS = [
    "self_attention.linear_qkv.layer_norm_weight",
    "self_attention.linear_qkv.weight",
    "self_attention.linear_proj.weight",
    "mlp.linear_fc1.layer_norm_weight",
    "mlp.linear_fc1.weight",
    "mlp.linear_fc2.weight",
]


def weights(**changes) -> dict[str, torch.Tensor]:
    (model,) = build_chunks(tiny_config(**changes))
    return {name: p.detach() for name, p in model.named_parameters()}


def test_weights_depend_on_seed_and_name_alone():
    first = weights()
    torch.manual_seed(1)
    torch.rand(1000)
    again = weights(dropout_variant="vpad", dropout_rate=0.3, dropout_apply_to="q,d")
    assert first.keys() == again.keys()
    assert all(torch.equal(first[name], again[name]) for name in first)
    # The first layers of a deeper model are the same, but for the residual projections' scale.
    deeper = weights(num_layers=8)
    for name in first:
        scale = math.sqrt(0.5) if "linear_proj" in name or "linear_fc2" in name else 1.0
        torch.testing.assert_close(deeper[name], first[name] * scale)


def test_weights_differ_between_seeds_names_and_layers():
    first, other = weights(), weights(seed=4321)
    matrices = {n: w for n, w in first.items() if w.dim() > 1}
    assert not any(torch.equal(w, other[n]) for n, w in matrices.items())
    flat = [w.flatten()[:1024] for w in matrices.values()]
    correlation = torch.corrcoef(torch.stack(flat)) - torch.eye(len(flat))
    assert correlation.abs().max() < 5 / math.sqrt(1024)


def test_standard_deviations_are_megatrons():
    wide = {"hidden_size": 128, "ffn_hidden_size": 256, "init_method_std": 0.02}
    found = weights(**wide, untie_embeddings_and_output_weights=True, vocab_size=2000)
    for name, weight in found.items():
        if weight.dim() == 1:
            assert torch.equal(weight, torch.ones_like(weight)), name
            continue
        true_rows = weight[:2000] if "embedding" in name or "output" in name else weight
        residual = "linear_proj" in name or "linear_fc2" in name
        expected = 0.02 / math.sqrt(2 * 4) if residual else 0.02
        n = true_rows.numel()
        assert abs(true_rows.std().item() / expected - 1) < 5 / math.sqrt(2 * n), name
        assert abs(true_rows.mean().item()) < 5 * expected / math.sqrt(n), name


def test_tied_and_untied_outputs():
    assert "output_layer.weight" not in weights()
    untied = weights(untie_embeddings_and_output_weights=True)
    table, output = untied["embedding.word_embeddings.weight"], untied["output_layer.weight"]
    assert table.shape == output.shape == (112, 32)
    assert not torch.equal(table, output)


def test_biases_start_at_zero():
    found = weights(add_bias_linear=True)
    biases = [n for n in found if n.endswith("bias")]
    assert len(biases) == 4 * 4
    assert all(torch.count_nonzero(found[n]) == 0 for n in biases)


@pytest.mark.parametrize("untie", [False, True])
def test_padded_vocabulary_has_no_probability_and_no_influence(untie):
    """112 rows for 100 ids: the loss is that of a table with exactly 100."""
    results = []
    for multiple in (16, 4):  # padded to 112, and not padded
        (model,) = build_chunks(
            tiny_config(
                make_vocab_size_divisible_by=multiple, untie_embeddings_and_output_weights=untie
            )
        )
        tokens, labels, positions = tiny_batch()
        logits = model(tokens, positions, None)
        loss = model(tokens, positions, None, labels=labels)
        loss.mean().backward()
        results.append((logits, loss, {n: p.grad for n, p in model.named_parameters()}))
    (padded, loss, gradients), (exact, exact_loss, exact_gradients) = results
    assert padded.shape[-1] == 112 and exact.shape[-1] == VOCAB
    assert torch.equal(padded[..., :VOCAB], exact)
    assert torch.count_nonzero(padded.softmax(-1)[..., VOCAB:]) == 0
    torch.testing.assert_close(loss, exact_loss, rtol=1e-6, atol=1e-6)
    for name, gradient in gradients.items():
        extra = gradient[VOCAB:] if name.startswith(("embedding", "output")) else None
        assert extra is None or torch.count_nonzero(extra) == 0
        gradient = gradient[: exact_gradients[name].shape[0]]
        torch.testing.assert_close(gradient, exact_gradients[name], rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"dropout_variant": "vpad", "dropout_rate": 0.3},
        {"dropout_variant": "pre_norm", "dropout_rate": 0.3},
        {"dropout_variant": "vpad", "dropout_rate": 0.3, "dropout_apply_to": "q,k,v,o,g,u,d"},
    ],
    ids=str,
)
@pytest.mark.parametrize("untie", [False, True])
def test_checkpoint_keys_are_megatrons_fused_layers(changes, untie):
    (model,) = build_chunks(tiny_config(untie_embeddings_and_output_weights=untie, **changes))
    state = model.sharded_state_dict(metadata={"non_homogeneous_layers": True})
    keys = {
        value.key
        for value in state.values()
        if hasattr(value, "key") and "extra_state" not in value.key
    }
    expected = {f"decoder.layers.{i}.{key}" for i in range(4) for key in LAYER_KEYS}
    expected |= {"embedding.word_embeddings.weight", "decoder.final_layernorm.weight"}
    if untie:
        expected.add("output_layer.weight")
    assert keys == expected


def test_fill_weights_takes_global_names():
    (model,) = build_chunks(tiny_config())
    asked = {}

    def give(name: str) -> torch.Tensor:
        shape = list(dict(model.named_parameters())[name].shape)
        if name == "embedding.word_embeddings.weight":
            shape[0] = VOCAB + 900  # a table with other padding
        asked[name] = torch.randn(shape)
        return asked[name]

    fill_weights(model, tiny_config(), give)
    for name, parameter in model.named_parameters():
        assert global_name(name, model) == name
        if name == "embedding.word_embeddings.weight":
            assert torch.equal(parameter[:VOCAB], asked[name][:VOCAB])
            assert torch.count_nonzero(parameter[VOCAB:]) == 0
        else:
            assert torch.equal(parameter, asked[name])


def test_inference_model_gives_the_training_models_logits():
    config = tiny_config(dropout_variant="vpad", dropout_rate=0.3)
    (model,) = build_chunks(config)
    stored = {
        n.replace("input_layernorm.", "self_attention.linear_qkv.layer_norm_").replace(
            "pre_mlp_layernorm.", "mlp.linear_fc1.layer_norm_"
        ): p.detach()
        for n, p in model.named_parameters()
    }
    inference = build_for_inference(config, stored.__getitem__)
    tokens, _, positions = tiny_batch()
    set_samples([0, 1])
    found = inference(tokens)
    assert found.dtype == torch.float32 and found.shape == (2, 24, VOCAB)
    assert torch.equal(found, model.eval()(tokens, positions, None)[..., :VOCAB])
    # Causal: a later token changes nothing before it.
    tokens = tokens.clone()
    tokens[:, 20] = (tokens[:, 20] + 1) % VOCAB
    changed = inference(tokens)
    assert torch.equal(found[:, :20], changed[:, :20])
    assert not torch.equal(found[:, 20], changed[:, 20])
