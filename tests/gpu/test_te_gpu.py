"""Transformer Engine's spec with the real Transformer Engine.

What it computes is compared with Megatron-Core's own modules: both in bf16, both against those in
fp32. Rounding differs between the two, so each may be as far from fp32 as the other, and a bit.
"""

from __future__ import annotations

import pytest
import torch
from tiny_models import VOCAB, tiny_config
from torch import Tensor, nn

from megatron_lengen.compat import have_transformer_engine
from megatron_lengen.config import LengenConfig
from megatron_lengen.layers.coordinates import set_documents, set_samples
from megatron_lengen.layers.te_attention import TEAttention
from megatron_lengen.models.build import build_chunks
from megatron_lengen.ops import attention_choice
from megatron_lengen.ops.weighting import naive_attention

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.skipif(not have_transformer_engine(), reason="needs Transformer Engine"),
    pytest.mark.usefixtures("process_groups"),
]

LENGTH, ROWS = 128, 2
SIZES = {
    "hidden_size": 128,
    "ffn_hidden_size": 256,
    "num_attention_heads": 4,
    "num_query_groups": 2,
    "kv_channels": 32,
    "seq_length": LENGTH,
    "sliding_window": 40,
}
HALF = {"bf16": True, "params_dtype": torch.bfloat16, "pipeline_dtype": torch.bfloat16}
TE = {"transformer_impl": "transformer_engine"}
LOCAL = {"transformer_impl": "local"}
VPAD = {"dropout_variant": "vpad", "dropout_rate": 0.3}
NAPE = {"position_embedding_type": "nape", "no_rope_freq": None}
PACKS = "flash_attn" in attention_choice.installed()
needs_flash = pytest.mark.skipif(not PACKS, reason="packed rows need flash-attn")


@pytest.fixture(autouse=True)
def rows():
    set_samples([5, 6])
    yield
    set_documents(None)


def config_of(*settings: dict, **changes) -> LengenConfig:
    merged = dict(SIZES)
    for part in (*settings, changes):
        merged.update(part)
    return tiny_config(**merged)


def model_of(*settings: dict) -> nn.Module:
    (model,) = build_chunks(config_of(*settings))
    return model.cuda()


def batch() -> tuple[Tensor, Tensor, Tensor]:
    text = torch.randint(0, VOCAB, (ROWS, LENGTH + 1), generator=torch.Generator().manual_seed(1))
    text = text.cuda()
    positions = torch.arange(LENGTH, device="cuda").expand(ROWS, LENGTH)
    return text[:, :-1].contiguous(), text[:, 1:].contiguous(), positions


def documents() -> Tensor:
    """Documents of 50, 61 and 17 tokens, and of 128."""
    lengths = torch.tensor([50, 61, 17])
    first = torch.arange(3).repeat_interleave(lengths)
    return torch.stack((first, torch.zeros(LENGTH, dtype=torch.int64))).cuda()


def logits_of(model: nn.Module) -> Tensor:
    tokens, _, positions = batch()
    with torch.no_grad():
        return model.eval()(tokens, positions, None)[..., :VOCAB].float()


def trained(model: nn.Module) -> tuple[Tensor, dict[str, Tensor]]:
    """Loss and gradients in training, by name with the norm's gain where fused layers have it."""
    tokens, labels, positions = batch()
    loss = model.train()(tokens, positions, None, labels=labels).float().mean()
    loss.backward()
    names = {
        "input_layernorm.": "self_attention.linear_qkv.layer_norm_",
        "pre_mlp_layernorm.": "mlp.linear_fc1.layer_norm_",
    }
    found = {}
    for name, parameter in model.named_parameters():
        for ours, fused in names.items():
            name = name.replace(ours, fused)
        found[name] = parameter.grad.float()
    return loss.detach(), found


def assert_as_near(exact: Tensor, found: Tensor, other: Tensor, what: str) -> None:
    """`found` is about as near to fp32 as `other` is; both are bf16 results."""
    scale = exact.square().mean().sqrt().clamp(min=1e-12)
    error, allowed = (((x - exact).square().mean().sqrt() / scale).item() for x in (found, other))
    assert error <= 2 * allowed + 2e-3, f"{what}: {error:.2e}, Megatron's modules {allowed:.2e}"


@pytest.mark.parametrize(
    "changes, boundaries",
    [
        ({}, False),
        (VPAD, False),
        ({**VPAD, "dropout_layers": "1,2", "dropout_keep_final_norm": True}, False),
        ({"dropout_variant": "pre_norm", "dropout_rate": 0.3}, False),
        ({**VPAD, "dropout_apply_to": "q,u,d"}, False),
        ({**VPAD, "query_scaling": "learned"}, False),
        ({**VPAD, **NAPE}, False),
        (VPAD, True),
        ({**VPAD, **NAPE}, True),
    ],
    ids=str,
)
def test_both_backends_are_the_same_model(changes, boundaries):
    """Logits in evaluation; loss and gradients in training, where masks are the same."""
    if boundaries:
        changes = {**changes, "document_boundaries": "mask"}
        set_documents(documents())
    models = [
        model_of(LOCAL, changes), model_of(TE, HALF, changes), model_of(LOCAL, HALF, changes)
    ]  # fmt: skip
    assert_as_near(*(logits_of(model) for model in models), "logits")
    (exact, exact_grads), (loss, grads), (other, other_grads) = map(trained, models)
    assert_as_near(exact, loss, other, "loss")
    assert set(grads) == set(exact_grads) == set(other_grads)
    for name, gradient in exact_grads.items():
        assert_as_near(gradient, grads[name], other_grads[name], name)


@pytest.mark.parametrize("changes", [{}, VPAD, {**VPAD, "dropout_layers": "0"}], ids=str)
def test_keys_of_checkpoints_are_those_of_megatrons_modules(changes):
    def keys(model: nn.Module) -> set[str]:
        state = model.sharded_state_dict(metadata={"non_homogeneous_layers": True})
        return {entry.key for name, entry in state.items() if not name.endswith("_extra_state")}

    assert keys(model_of(TE, HALF, changes)) == keys(model_of(LOCAL, HALF, changes))


@pytest.mark.parametrize(
    "changes, evaluation, training",
    [
        ({}, 1, 1),
        (VPAD, 9, 1),
        ({**VPAD, "dropout_keep_final_norm": True}, 9, 0),
        ({**VPAD, "dropout_layers": "1,2"}, 5, 1),
    ],
    ids=str,
)
def test_its_norm_computes_wherever_no_dropout_acts(monkeypatch, changes, evaluation, training):
    import transformer_engine.pytorch as te

    model = model_of(TE, HALF, changes)
    calls = []
    forward = te.RMSNorm.forward

    def counted(self, *args, **kwargs):
        calls.append(self)
        return forward(self, *args, **kwargs)

    monkeypatch.setattr(te.RMSNorm, "forward", counted)
    tokens, _, positions = batch()
    for mode, expected in ((False, evaluation), (True, training)):
        calls.clear()
        model.train(mode)(tokens, positions, None)
        assert len(calls) == expected


def test_evaluation_is_transformer_engines_bit_for_bit():
    """The norm of a model that trains with dropout, against TE's class on the same gain."""
    import transformer_engine.pytorch as te

    model = model_of(TE, HALF, VPAD).eval()
    norm = model.decoder.layers[1].input_layernorm
    with torch.no_grad():
        norm.weight.uniform_(0.5, 2.0)
    alone = te.RMSNorm(128, eps=norm.eps, params_dtype=torch.bfloat16, device="cuda")
    alone.load_state_dict({"weight": norm.weight}, strict=False)
    x = torch.randn(LENGTH, ROWS, 128, device="cuda", dtype=torch.bfloat16)
    assert torch.equal(norm(x), alone(x))


@pytest.mark.parametrize(
    "layer, changes, boundaries, backend",
    [
        (1, {}, False, "te"),
        (4, {}, False, "te"),
        pytest.param(1, {}, True, "te", marks=needs_flash),
        pytest.param(4, {}, True, "te", marks=needs_flash),
        (1, NAPE, False, "flex"),
        (1, NAPE, True, "flex"),
    ],
    ids=["window", "row", "window documents", "documents", "slopes", "slopes documents"],
)
def test_attention(monkeypatch, layer, changes, boundaries, backend):
    """Output and gradients of a layer's core attention in bf16 against the definition in fp32."""
    from megatron_lengen.layers import te_attention

    chosen = []

    def noted(request):
        chosen.append(attention_choice.choose_aloud(request))
        return chosen[-1] if chosen[-1] == "te" else "other"

    monkeypatch.setattr(te_attention, "choose_aloud", noted)
    if boundaries:
        set_documents(documents())
    module = TEAttention(config_of(TE, HALF, changes), layer_number=layer)
    generator = torch.Generator().manual_seed(layer)
    half = [
        torch.randn(LENGTH, ROWS, heads, 32, generator=generator).cuda().bfloat16()
        for heads in (4, 2, 2)
    ]
    half = [x.requires_grad_() for x in half]
    wide = [x.detach().float().requires_grad_() for x in half]
    found = module(*half)
    weighting = module._weighting(half[0])
    expected = naive_attention(*(x.permute(1, 2, 0, 3) for x in wide), weighting)
    expected = expected.permute(2, 0, 1, 3).flatten(2)
    gradient = torch.randn(expected.shape, generator=generator).cuda()
    found.backward(gradient.bfloat16())
    expected.backward(gradient)
    torch.testing.assert_close(found.float(), expected, rtol=2e-2, atol=2e-2)
    for x, y in zip(half, wide, strict=True):
        torch.testing.assert_close(x.grad.float(), y.grad, rtol=5e-2, atol=5e-2)
    assert chosen == [backend]


@needs_flash
def test_documents_wait_for_the_device_once(monkeypatch):
    """The ends of documents are counted in the first layer only."""
    model = model_of(TE, HALF, {"document_boundaries": "mask"}).eval()
    set_documents(documents())
    tokens, _, positions = batch()
    counted = []
    nonzero = Tensor.nonzero
    monkeypatch.setattr(Tensor, "nonzero", lambda x, **how: counted.append(1) or nonzero(x, **how))
    with torch.no_grad():
        model(tokens, positions, None)
    assert len(counted) == 1


@pytest.mark.parametrize("changes", [{}, VPAD], ids=str)
@pytest.mark.parametrize("recipe", ["delayed", "tensorwise", "blockwise", "mxfp8"])
def test_a_step_in_fp8(recipe, changes):
    """Finite, near bf16, and not bf16: three bits of mantissa leave a trace."""
    from megatron_lengen.models.backends import why_no_fp8

    reason = why_no_fp8(recipe)
    if reason is not None:
        pytest.skip(reason)
    plain = model_of(TE, HALF, changes)
    model = model_of(TE, HALF, changes, {"fp8": "hybrid", "fp8_recipe": recipe})
    for _ in range(2):  # delayed scaling has no maxima in its first step
        model.zero_grad()
        model.set_is_first_microbatch()
        loss, grads = trained(model)
    expected, expected_grads = trained(plain)
    torch.testing.assert_close(loss, expected, rtol=2e-2, atol=0)
    for name, gradient in expected_grads.items():
        assert torch.isfinite(grads[name]).all(), name
        cosine = torch.cosine_similarity(grads[name].flatten(), gradient.flatten(), dim=0)
        assert cosine > 0.9, f"{name}: {cosine:.3f}"
    name = "decoder.layers.0.mlp.linear_fc1.weight"
    assert not torch.equal(grads[name], expected_grads[name])
    model.set_is_first_microbatch()
    plain_logits, logits = logits_of(plain), logits_of(model)
    assert (logits - plain_logits).norm() < 0.2 * plain_logits.norm()


def test_first_and_last_layers_stay_in_bf16():
    from megatron_lengen.models.backends import why_no_fp8

    reason = why_no_fp8("tensorwise")
    if reason is not None:
        pytest.skip(reason)
    ends = {"num_layers_at_start_in_bf16": 2, "num_layers_at_end_in_bf16": 2}
    settings = {"fp8": "hybrid", "fp8_recipe": "tensorwise", "first_last_layers_bf16": True}
    everywhere = model_of(TE, HALF, {**settings, **ends})  # four layers: none is left
    assert torch.equal(logits_of(everywhere), logits_of(model_of(TE, HALF)))
