"""Mamba2: Hugging Face's numbers, documents, carried states, dropout sites, first weights."""

from __future__ import annotations

import math

import pytest
import torch
from megatron.core.inference.contexts.static_context import StaticInferenceContext
from tiny_models import LENGTH, VOCAB, tiny_batch, tiny_mamba

from megatron_lengen.errors import BadInput
from megatron_lengen.layers.coordinates import set_documents, set_samples
from megatron_lengen.layers.dropout import Site
from megatron_lengen.layers.norm import DropoutRMSNorm
from megatron_lengen.models.build import InferenceModel, build_chunks
from megatron_lengen.models.sites import assign_sites

TAPS, CHUNK = 4, 16


@pytest.fixture(autouse=True)
def no_documents(process_groups):
    yield
    set_documents(None)


def model_of(**changes):
    (model,) = build_chunks(tiny_mamba(**changes))
    return model


def logits(model, tokens, documents=None) -> torch.Tensor:
    set_documents(documents)
    with torch.no_grad():
        positions = torch.arange(tokens.shape[1]).expand_as(tokens)
        return model(tokens, positions, None)[..., :VOCAB]


def hugging_face(model, **changes):
    """Transformers' model with the same weights, put together here."""
    from transformers import Mamba2Config, Mamba2ForCausalLM

    config = Mamba2Config(
        vocab_size=VOCAB, hidden_size=32, num_heads=8, head_dim=8, state_size=12,
        num_hidden_layers=4, chunk_size=CHUNK, tie_word_embeddings=True, **changes,
    )  # fmt: skip
    theirs = Mamba2ForCausalLM(config).eval()
    ours = dict(model.named_parameters())
    table = ours["embedding.word_embeddings.weight"][:VOCAB]
    with torch.no_grad():
        for name, parameter in theirs.named_parameters():
            name = name.replace("backbone.layers", "decoder.layers")
            if name in ours:
                parameter.copy_(ours[name].view_as(parameter))
        theirs.backbone.embeddings.weight.copy_(table)
        theirs.lm_head.weight.copy_(table)
        theirs.backbone.norm_f.weight.copy_(ours["decoder.final_norm.weight"])
    return theirs


@pytest.mark.parametrize("groups", [1, 2, 8])
@pytest.mark.parametrize("length", [1, 3, CHUNK, 50])
def test_logits_are_hugging_faces(groups, length):
    model = model_of(mamba_num_groups=groups, seq_length=64).eval()
    tokens, _, _ = tiny_batch(length=length)
    with torch.no_grad():
        expected = hugging_face(model, n_groups=groups)(tokens).logits
    torch.testing.assert_close(logits(model, tokens), expected, rtol=0, atol=1e-5)
    assert expected.abs().max() > 0.3


def test_every_gradient_is_hugging_faces():
    model = model_of(mamba_num_groups=2, mamba_init="huggingface", seq_length=64)
    theirs = hugging_face(model, n_groups=2)
    tokens, labels, positions = tiny_batch(length=40)
    set_samples([0, 1])
    loss = model(tokens, positions, None, labels=labels).mean()
    loss.backward()
    other = torch.nn.functional.cross_entropy(theirs(tokens).logits.flatten(0, 1), labels.flatten())
    other.backward()
    torch.testing.assert_close(loss, other)
    for name, parameter in theirs.named_parameters():
        name = name.replace("backbone.layers", "decoder.layers")
        name = name.replace("backbone.norm_f", "decoder.final_norm")
        if name.startswith(("lm_head", "backbone")):
            continue  # the table is two parameters there
        found = model.get_parameter(name).grad.view_as(parameter)
        scale = parameter.grad.abs().max().item()
        assert scale > 0, name
        torch.testing.assert_close(found, parameter.grad, rtol=0, atol=1e-5 * scale, msg=name)


@pytest.mark.parametrize("training", [False, True], ids=["evaluation", "training"])
@pytest.mark.parametrize("first", [1, TAPS - 1, CHUNK, CHUNK + 1])
def test_a_document_is_what_it_is_alone(first, training):
    """Report 21 of the field, where a convolution and a state must not see the document before."""
    model = model_of(mamba_chunk_size=CHUNK).train(training)
    tokens, _, _ = tiny_batch()
    set_samples([3, 4])
    documents = (torch.arange(LENGTH) >= first).long().expand(2, -1)
    whole = logits(model, tokens, documents)
    alone = logits(model, tokens[:, first:])
    torch.testing.assert_close(whole[:, first:], alone, rtol=0, atol=1e-6)
    torch.testing.assert_close(
        whole[:, :first], logits(model, tokens[:, :first]), rtol=0, atol=1e-6
    )
    crossing = logits(model, tokens)[:, first:]
    assert (crossing - alone).abs().max() > 1e-3


@pytest.mark.parametrize("documents", [None, [7], [7, 8], [12]])
def test_pieces_of_a_row_carry_the_state(documents):
    """Pieces of 7, 1, 4 and the rest; also where a document begins between pieces or inside one."""
    config = tiny_mamba(mamba_num_groups=2)
    (chunk,) = build_chunks(config)
    chunk.eval()
    tokens, _, _ = tiny_batch()
    numbers = None
    if documents is not None:
        starts = torch.zeros(LENGTH, dtype=torch.int64)
        starts[documents] = 1
        numbers = starts.cumsum(0).expand(2, -1)
    whole = logits(chunk, tokens, numbers).clone()
    model, cache = InferenceModel(chunk, config), StaticInferenceContext(2, LENGTH)
    for piece in tokens.split([7, 1, 4, 12], dim=1):
        end = cache.sequence_len_offset + piece.shape[1]
        set_documents(None if numbers is None else numbers[:, :end])
        found = model.last_logits(piece, cache)
        cache.increment_sequence_len_offset(piece.shape[1])
        torch.testing.assert_close(found, whole[:, end - 1], rtol=0, atol=1e-5)


BLOCKS = range(4)
SITES = [
    ({"dropout_variant": "vpad"}, {"norm": Site.MIXER_NORM}),
    ({"dropout_variant": "pre_norm"}, {"mamba_bda": Site.MIXER_OUTPUT}),
    (
        {"dropout_variant": "vpad", "include_mixer_norms": True},
        {"norm": Site.MIXER_NORM, "mixer.norm": Site.GATED_NORM},
    ),
    (
        {"dropout_variant": "pre_linear", "dropout_apply_to": "i,o"},
        {"mixer.in_proj.i": Site.I, "mixer.out_proj.o": Site.O},
    ),
]


@pytest.mark.parametrize("changes, expected", SITES)
def test_sites(changes, expected):
    config = tiny_mamba(dropout_rate=0.2, dropout_layers="1-3", **changes)
    found = assign_sites(build_chunks(config)[0], config)
    assert {name: (site.layer, site.site) for name, site in found.items()} == {
        f"decoder.layers.{i}.{name}": (i, site)
        for i in (1, 2, 3)
        for name, site in expected.items()
    }


@pytest.mark.parametrize("changes, expected", SITES)
def test_every_site_acts_in_training_alone(changes, expected):
    tokens, _, _ = tiny_batch()
    set_samples([3, 4])
    plain = logits(model_of().eval(), tokens)
    for name in expected:
        others = (
            ",".join(f"decoder.layers.?.{other}" for other in expected if other != name) or None
        )
        model = model_of(dropout_rate=0.2, dropout_skip_modules=others, **changes)
        assert torch.equal(logits(model.eval(), tokens), plain)
        trained = logits(model.train(), tokens)
        assert torch.equal(logits(model, tokens), trained)
        assert not torch.allclose(trained, plain, atol=1e-3)
        set_samples([3, 5])
        assert torch.equal(logits(model, tokens)[0], trained[0])
        assert not torch.equal(logits(model, tokens)[1], trained[1])
        set_samples([3, 4])


def wide(**changes) -> dict[str, torch.Tensor]:
    model = model_of(
        num_layers=2, hidden_size=256, mamba_head_dim=2, untie_embeddings_and_output_weights=True,
        init_method_std=0.02, **changes,
    )  # fmt: skip
    return {name: p.detach() for name, p in model.named_parameters()}


def is_uniform(values: torch.Tensor, low: float, high: float) -> None:
    """Bounds, and mean and deviation within five standard errors (256 values or more)."""
    assert low <= values.min() and values.max() <= high
    spread, error = (high - low) / math.sqrt(12), 5 / math.sqrt(values.numel())
    assert abs(values.mean() - (low + high) / 2) < error * spread
    assert abs(values.std() - spread) < error * spread


def test_reference_weights():
    """mamba-ssm's: PyTorch's defaults, A in [1, 16], steps in [1e-3, 0.1], out_proj / sqrt(2)."""
    found = wide()
    for layer in range(2):
        mixer = f"decoder.layers.{layer}.mixer."
        is_uniform(found[mixer + "A_log"].exp(), 1.0 - 1e-5, 16.0 + 1e-5)
        steps = torch.nn.functional.softplus(found[mixer + "dt_bias"])
        is_uniform(steps.log(), math.log(1e-3) - 1e-3, math.log(0.1) + 1e-3)
        assert torch.equal(found[mixer + "D"], torch.ones(256))
        for name, bound in (
            ("in_proj.weight", 1 / 16),
            ("out_proj.weight", 1 / math.sqrt(512) / math.sqrt(2)),
            ("conv1d.weight", 0.5),
            ("conv1d.bias", 0.5),
        ):
            is_uniform(found[mixer + name].flatten(), -bound, bound)
    is_uniform(found["output_layer.weight"][:VOCAB].flatten(), -1 / 16, 1 / 16)
    assert abs(found["embedding.word_embeddings.weight"][:VOCAB].std() - 0.02) < 0.001


def test_hugging_faces_weights():
    found = wide(mamba_init="huggingface")
    for layer in range(2):
        mixer = f"decoder.layers.{layer}.mixer."
        expected = torch.arange(1, 257).log()
        torch.testing.assert_close(found[mixer + "A_log"], expected)
        bound = 1 / math.sqrt(512)
        is_uniform(found[mixer + "out_proj.weight"].flatten(), -bound, bound)
        is_uniform(found[mixer + "conv1d.weight"].flatten(), -0.5, 0.5)
        assert not found[mixer + "conv1d.bias"].any()
        weight = found[mixer + "in_proj.weight"]
        assert abs(weight.std() - 0.02) < 0.001 and weight.max() > 0.06
    assert abs(found["output_layer.weight"][:VOCAB].std() - 0.02) < 0.001


def test_keys_of_checkpoints_are_megatrons():
    state = model_of().sharded_state_dict(metadata={"non_homogeneous_layers": True})
    keys = set()
    for name, entry in state.items():
        if not name.endswith("_extra_state"):
            built = entry.build() if hasattr(entry, "build") else [entry]
            keys |= {tensor.key for tensor in built}
    mixer = {f"in_proj.weight.{part}" for part in ("z", "x", "B", "C", "dt")}
    mixer |= {f"conv1d.{kind}.{part}" for kind in ("weight", "bias") for part in "xBC"}
    mixer |= {
        "A_log",
        "D",
        "dt_bias",
        "norm.weight",
        "out_proj.weight",
        "in_proj.layer_norm_weight",
    }
    expected = {f"decoder.layers.{i}.mixer.{name}" for i in range(4) for name in mixer}
    assert keys == expected | {"embedding.word_embeddings.weight", "decoder.final_norm.weight"}


@pytest.mark.parametrize(
    "changes, words",
    [
        ({"mamba_head_dim": 24}, "--mamba-head-dim: found 24; allowed: divisors"),
        ({"mamba_num_groups": 3}, "--mamba-num-groups: found 3; allowed: divisors of the 8 heads"),
        ({"mamba_num_groups": 0}, "--mamba-num-groups: found 0; allowed: 1 or more"),
        ({"mamba_conv_kernel": 1}, "--mamba-conv-kernel: found 1; allowed: 2 or more"),
        ({"tensor_model_parallel_size": 16}, "allowed: divisors of the 8 heads"),
        (
            {"tensor_model_parallel_size": 4, "mamba_num_groups": 2},
            "--tensor-model-parallel-size: found 4; allowed: divisors of --mamba-num-groups (2)",
        ),
        ({"context_parallel_size": 2}, "--context-parallel-size: found 2; allowed: 1"),
        ({"recompute_granularity": "selective"}, "--recompute-granularity: found selective"),
        ({"mamba_init": "other"}, "--mamba-init: found other"),
        ({"include_mixer_norms": True}, "--include-mixer-norms: found with --dropout-variant none"),
        (
            {"dropout_variant": "vpad", "dropout_rate": 0.1, "dropout_apply_to": "q"},
            "--dropout-apply-to: found 'q'; allowed: letters of i,o",
        ),
        (
            {"dropout_skip_modules": "*.input_layernorm"},
            "--dropout-skip-modules: '*.input_layernorm' matches no module",
        ),
    ],
)
def test_what_cannot_be_is_said(changes, words):
    with pytest.raises(BadInput) as error:
        tiny_mamba(**changes)
    assert words in str(error.value) and "\n" not in str(error.value)


def test_every_norm_has_the_configurations_epsilon():
    """Megatron-Core's layer names one or not, by its version."""
    model = model_of(layernorm_epsilon=3e-4)
    norms = [module for module in model.modules() if isinstance(module, DropoutRMSNorm)]
    assert len(norms) == len(model.decoder.layers) + 1
    assert all(norm.eps == 3e-4 for norm in norms)
