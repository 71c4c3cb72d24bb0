"""Models of Transformer Engine's spec, built by Megatron-Core's own wrappers over a stand-in.

Run by test_te_spec.py in a process of its own: the stand-in must be there before Megatron-Core.
"""
# ruff: noqa: E402

from __future__ import annotations

import te_stand_in

te_stand_in.install()

import pytest
import torch
from te_stand_in import Calls
from tiny_models import LENGTH, tiny_batch, tiny_config, tiny_mamba
from torch import Tensor, nn

from megatron_lengen.compat import package_version
from megatron_lengen.config import LengenConfig
from megatron_lengen.errors import BadInput
from megatron_lengen.layers import te_attention
from megatron_lengen.layers.coordinates import set_documents, set_samples
from megatron_lengen.layers.dropout import Site
from megatron_lengen.layers.te_norm import te_dropout_norm
from megatron_lengen.models.backends import why_no_fp8
from megatron_lengen.models.build import build_chunks
from megatron_lengen.models.sites import _site
from megatron_lengen.ops.attention_choice import choose
from megatron_lengen.training import arguments

pytestmark = pytest.mark.usefixtures("process_groups")

VPAD = {"dropout_variant": "vpad", "dropout_rate": 0.3}
# Rows of 24 tokens: documents of 5, 16 and 3, and of 24.
DOCUMENTS = torch.stack((torch.tensor([0] * 5 + [1] * 16 + [2] * 3), torch.full((LENGTH,), 7)))
KINDS = {"gpt": tiny_config, "mamba": tiny_mamba}
TE = {"transformer_impl": "transformer_engine"}


@pytest.fixture(autouse=True)
def nothing_announced():
    set_samples([3, 4])
    Calls.clear()
    yield
    set_documents(None)


@pytest.fixture
def as_on_a_gpu(monkeypatch):
    """Attention is chosen as on CUDA in bf16 with everything installed."""

    def choice(request):
        asked = request._replace(device="cuda", dtype=torch.bfloat16)
        return choose(asked, frozenset({"triton", "flash_attn"})).backend

    monkeypatch.setattr(te_attention, "choose_aloud", choice)


def model_of(config: LengenConfig) -> nn.Module:
    (model,) = build_chunks(config)
    return model


def both(kind: str = "gpt", **changes) -> tuple[nn.Module, nn.Module]:
    """Transformer Engine's and Megatron's modules with the same weights."""
    return model_of(KINDS[kind](**TE, **changes)), model_of(KINDS[kind](**changes))


def loss_of(model: nn.Module) -> Tensor:
    tokens, labels, positions = tiny_batch()
    return model(tokens, positions, None, labels=labels).mean()


def gradients(model: nn.Module) -> dict[str, Tensor]:
    """By name in checkpoints, whichever module the norm's gain sits in."""
    model.zero_grad()
    loss_of(model).backward()
    return {stored(name): parameter.grad for name, parameter in model.named_parameters()}


def stored(name: str) -> str:
    for ours, theirs in (
        ("input_layernorm.", "self_attention.linear_qkv.layer_norm_"),
        ("pre_mlp_layernorm.", "mlp.linear_fc1.layer_norm_"),
        (".norm.weight", ".mixer.in_proj.layer_norm_weight"),
    ):
        if ".mixer." not in name:
            name = name.replace(ours, theirs)
    return name


def keys(model: nn.Module) -> set[str]:
    state = model.sharded_state_dict(metadata={"non_homogeneous_layers": True})
    found: set[str] = set()
    for entry in state.values():
        found.add(entry.key)
    return found


@pytest.mark.parametrize(
    "kind, changes",
    [
        ("gpt", {}),
        ("gpt", VPAD),
        ("gpt", {**VPAD, "dropout_layers": "1,2", "dropout_keep_final_norm": True}),
        ("gpt", {"dropout_variant": "pre_norm", "dropout_rate": 0.3}),
        ("gpt", {**VPAD, "dropout_apply_to": "q,g,d", "dropout_layers": "0,3"}),
        ("gpt", {**VPAD, "query_scaling": "learned"}),
        ("mamba", {}),
        ("mamba", VPAD),
        ("mamba", {**VPAD, "dropout_apply_to": "i,o"}),
        ("mamba", {"dropout_variant": "pre_norm", "dropout_rate": 0.3}),
    ],
    ids=str,
)
def test_it_computes_and_stores_what_megatrons_modules_do(kind, changes):
    te, local = both(kind, **changes)
    tokens, _, positions = tiny_batch()
    for model in (te, local):
        model.eval()
    torch.testing.assert_close(
        te(tokens, positions, None), local(tokens, positions, None), rtol=1e-5, atol=1e-5
    )
    for model in (te, local):
        model.train()
    torch.testing.assert_close(loss_of(te), loss_of(local), rtol=1e-6, atol=0)
    found, expected = gradients(te), gradients(local)
    assert set(found) == set(expected)
    for name, gradient in expected.items():
        torch.testing.assert_close(found[name], gradient, rtol=1e-4, atol=1e-6, msg=name)
    weights = {key for key in keys(te) if not key.endswith("_extra_state")}
    assert weights == {key for key in keys(local) if not key.endswith("_extra_state")}


@pytest.mark.parametrize(
    "kind, changes, evaluation, training",
    [
        # (Transformer Engine's norms alone, those inside its linears) of a forward of 4 layers.
        ("gpt", {}, (1, 8), (1, 8)),
        ("gpt", VPAD, (9, 0), (1, 0)),
        ("gpt", {**VPAD, "dropout_keep_final_norm": True}, (9, 0), (0, 0)),
        ("gpt", {**VPAD, "dropout_layers": "1,2"}, (5, 4), (1, 4)),
        ("gpt", {**VPAD, "dropout_skip_modules": "*.input_layernorm"}, (9, 0), (5, 0)),
        ("gpt", {**VPAD, "dropout_apply_to": "q,k"}, (9, 0), (9, 0)),
        ("gpt", {"dropout_variant": "pre_norm", "dropout_rate": 0.3}, (1, 8), (1, 8)),
        ("mamba", {}, (1, 4), (1, 4)),
        ("mamba", VPAD, (5, 0), (1, 0)),
        ("mamba", {"dropout_variant": "pre_norm", "dropout_rate": 0.3}, (1, 4), (1, 4)),
    ],
    ids=str,
)
def test_its_norms_compute_wherever_no_dropout_acts(kind, changes, evaluation, training):
    model = model_of(KINDS[kind](**TE, **changes))
    for mode, expected in ((False, evaluation), (True, training)):
        Calls.clear()
        loss_of(model.train(mode))
        assert (Calls.norms, Calls.fused_norms) == expected


def test_a_norm_has_no_state_beside_its_weight():
    model = model_of(tiny_config(**TE, **VPAD))
    norms = [m for m in model.modules() if isinstance(m, te_dropout_norm())]
    assert len(norms) == 9
    for norm in norms:
        assert list(norm.state_dict()) == ["weight"]
        norm.load_state_dict({"weight": torch.ones(32)}, strict=True)
    assert not [key for key in keys(model) if "norm" in key and "extra_state" in key]


def test_a_norm_has_megatrons_settings():
    config = tiny_config(
        tensor_model_parallel_size=2, sequence_parallel=True, params_dtype=torch.bfloat16
    )
    norm = te_dropout_norm()(config=config, hidden_size=32, eps=1e-6)
    assert norm.weight.dtype == torch.bfloat16 and norm.weight.sequence_parallel is True
    assert norm.eps == 1e-6 and not norm.zero_centered_gamma
    assert _site(config, 0, Site.ATTENTION_NORM, norm).sequence_sharded  # masks of its tokens
    alone = te_dropout_norm()(tiny_config(), 32)
    assert alone.weight.dtype == torch.float32 and alone.weight.sequence_parallel is False


# ---- attention -----------------------------------------------------------------------------------


@pytest.mark.parametrize("documents", [None, DOCUMENTS], ids=["rows", "documents"])
@pytest.mark.parametrize("changes", [{}, VPAD], ids=str)
def test_what_attention_is_asked_for(as_on_a_gpu, documents, changes):
    te, local = both(document_boundaries="mask", **changes)
    set_documents(documents)
    torch.testing.assert_close(loss_of(te), loss_of(local), rtol=1e-6, atol=0)
    windows = [(7, 0), (7, 0), (7, 0), (-1, 0)]  # the query itself is not counted
    common = {"format": "sbhd", "mask": "causal"}
    if documents is not None:
        common = {
            "format": "thd",
            "mask": "padding_causal",
            "ends": [0, 5, 21, 24, 48],
            "longest": (24, 24),
        }
    # Megatron-Core names a window only where there is one.
    expected = [{**common, "window": None if w[0] < 0 else w} for w in windows]
    assert Calls.attention == expected


def test_gradients_with_documents(as_on_a_gpu):
    te, local = both(document_boundaries="mask", **VPAD)
    set_documents(DOCUMENTS)
    found, expected = gradients(te), gradients(local)
    for name, gradient in expected.items():
        torch.testing.assert_close(found[name], gradient, rtol=1e-4, atol=1e-7)


def test_slopes_go_elsewhere(as_on_a_gpu):
    te, local = both(position_embedding_type="nape", no_rope_freq=None)
    torch.testing.assert_close(loss_of(te), loss_of(local), rtol=1e-6, atol=0)
    assert Calls.attention == []


# ---- fp8 -----------------------------------------------------------------------------------------

COLUMNS, ROWS = "TEColumnParallelLinear", "TERowParallelLinear"
FUSED = "TELayerNormColumnParallelLinear"


def fp8_config(**changes) -> LengenConfig:
    return tiny_config(
        **TE,
        bf16=True,
        params_dtype=torch.bfloat16,
        pipeline_dtype=torch.bfloat16,
        **{"fp8": "hybrid", **changes},
    )


@pytest.mark.parametrize(
    "changes, columns, layers",
    [
        ({"fp8_recipe": "tensorwise"}, FUSED, 4),
        ({"fp8_recipe": "tensorwise", **VPAD}, COLUMNS, 4),
        ({"fp8_recipe": "blockwise", "first_last_layers_bf16": True}, FUSED, 2),
        (
            {
                "fp8_recipe": "tensorwise",
                "first_last_layers_bf16": True,
                "num_layers_at_start_in_bf16": 0,
                "num_layers_at_end_in_bf16": 3,
            },
            FUSED,
            1,
        ),
        ({"fp8_recipe": "delayed", "fp8": "e4m3"}, FUSED, 4),
    ],
    ids=str,
)
def test_which_products_are_in_fp8(changes, columns, layers):
    model = model_of(fp8_config(**changes))
    loss = loss_of(model)
    loss.backward()
    assert torch.isfinite(loss)
    assert Calls.products_in_fp8 == [columns, ROWS, columns, ROWS] * layers
    name = {
        "delayed": "TEDelayedScaling",
        "tensorwise": "Float8CurrentScaling",
        "blockwise": "Float8BlockScaling",
    }[changes["fp8_recipe"]]
    # By layer, but around all of them where maxima are shared at the end.
    contexts = 1 if changes["fp8_recipe"] == "delayed" else layers
    assert [type(recipe).__name__ for recipe in Calls.recipes] == [name] * contexts
    assert {recipe.fp8_format.name for recipe in Calls.recipes} == {
        changes.get("fp8", "hybrid").upper()
    }


def test_delayed_scaling_gets_its_settings():
    config = fp8_config(fp8_margin=2, fp8_amax_history_len=16, fp8_amax_compute_algo="max")
    loss_of(model_of(config))
    (recipe,) = Calls.recipes
    found = {name: recipe.others[name] for name in ("margin", "amax_history_len")}
    assert found == {"margin": 2, "amax_history_len": 16}
    assert recipe.others["amax_compute_algo"] == "max" and not recipe.others["fp8_dpa"]


def test_what_the_gpu_cannot_do_is_said_in_one_line():
    assert why_no_fp8("delayed") is why_no_fp8("tensorwise") is why_no_fp8("blockwise") is None
    command = (
        "--num-layers 2 --hidden-size 64 --num-attention-heads 4 --seq-length 64 --bf16 "
        "--transformer-impl transformer_engine --fp8-format hybrid --fp8-recipe mxfp8 "
        "--mock-data --tokenizer-type NullTokenizer --vocab-size 100 --train-iters 1 --lr 1e-3"
    )
    with pytest.raises(BadInput, match="--fp8-recipe: found mxfp8; Device compute cap"):
        arguments.parse_settings(command.split(), "test")
    settings = arguments.parse_settings(command.replace("mxfp8", "tensorwise").split(), "test")
    assert settings.model.fp8_recipe == settings.optimizer.fp8_recipe == "tensorwise"


def test_the_stand_in_stands_in():
    assert package_version("transformer-engine") is None
