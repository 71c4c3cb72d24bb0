"""Mamba2 from and to transformers, and from mamba-ssm's own files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM, Mamba2Config, Mamba2ForCausalLM

from megatron_lengen.convert import mapping
from megatron_lengen.convert.reader import open_checkpoint
from megatron_lengen.convert.to_hf import checkpoint_to_hf
from megatron_lengen.convert.to_megatron import hf_to_checkpoint
from megatron_lengen.convert.verify import VerificationError
from megatron_lengen.errors import BadInput
from megatron_lengen.generation.generate import generate
from megatron_lengen.models.build import build_for_inference

pytestmark = pytest.mark.usefixtures("own_process_group")

OF_HEADS = ("A_log", "D", "dt_bias")
EMBEDDING = "backbone.embeddings.weight"
VOCAB = 101


def random_mamba2(folder: Path | None, dtype: torch.dtype = torch.float32, **settings: Any) -> Any:
    """Logits of the order of 1; numbers of the heads as in real models, and fp32."""
    values = {"hidden_size": 32, "num_heads": 8, "head_dim": 8, "state_size": 12, "n_groups": 1,
              "num_hidden_layers": 3, "vocab_size": VOCAB, "chunk_size": 16, "bos_token_id": None,
              "eos_token_id": 1, "pad_token_id": None, "tie_word_embeddings": True}  # fmt: skip
    torch.manual_seed(0)
    model = Mamba2ForCausalLM(Mamba2Config(**{**values, **settings})).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("D") or "norm" in name:
                parameter.normal_(1, 0.3)
            elif not name.endswith(("A_log", "dt_bias")):
                parameter.normal_(0, 0.2)
            if not name.endswith(OF_HEADS):
                parameter.data = parameter.data.to(dtype)
        model.lm_head.weight = model.lm_head.weight if not model.config.tie_word_embeddings else (
            model.backbone.embeddings.weight
        )  # fmt: skip
    if folder is not None:
        model.save_pretrained(folder)
    return model


def tensors_of(folder: Path) -> dict[str, Tensor]:
    return load_file(folder / "model.safetensors")


CASES = {
    "one group, tied": {},
    "two groups, untied": {"n_groups": 2, "tie_word_embeddings": False},
    "a group for each head": {"n_groups": 8, "conv_kernel": 3, "layer_norm_epsilon": 1e-3},
    "16 bits": {"dtype": torch.bfloat16, "n_groups": 2},
    "residual rescaled": {"rescale_prenorm_residual": True},
}


@pytest.mark.parametrize("name", CASES)
def test_there_and_back_is_bitwise(tmp_path, name):
    """Verified both ways: logits below and beyond chunks. Then the same bits and dtypes."""
    random_mamba2(tmp_path / "hf", **CASES[name])
    there = hf_to_checkpoint(tmp_path / "hf", tmp_path / "ck", report=lambda _: None)
    back = checkpoint_to_hf(tmp_path / "ck", tmp_path / "back", report=lambda _: None)
    assert there.worst < 1e-5 and back.worst < 1e-5 and there.lengths == (64, 271)
    first, second = tensors_of(tmp_path / "hf"), tensors_of(tmp_path / "back")
    assert first.keys() - {"lm_head.weight"} == second.keys() - {"lm_head.weight"}
    for key, tensor in second.items():
        assert tensor.dtype == first[key].dtype and torch.equal(tensor, first[key]), key
    config = json.loads((tmp_path / "back" / "config.json").read_text())
    for key, value in json.loads((tmp_path / "hf" / "config.json").read_text()).items():
        # transformers itself divides loaded weights where the flag is on.
        unlike = {"transformers_version", "time_step_limit", "rescale_prenorm_residual", "dtype"}
        if key not in unlike | {"time_step_rank"}:
            assert config[key] == value, key


@pytest.mark.parametrize("tied", [True, False])
def test_what_auto_loads(tmp_path, tied):
    """Reports 11 and 12 of the field: fp32 numbers of heads whatever is asked; tables tied."""
    random_mamba2(tmp_path / "hf", torch.bfloat16, tie_word_embeddings=tied)
    hf_to_checkpoint(tmp_path / "hf", tmp_path / "ck", report=lambda _: None)
    checkpoint_to_hf(tmp_path / "ck", tmp_path / "out", dtype="bf16", report=lambda _: None)
    stored = tensors_of(tmp_path / "out")
    for key, tensor in stored.items():
        assert tensor.dtype == (torch.float32 if key.endswith(OF_HEADS) else torch.bfloat16), key
    model, info = AutoModelForCausalLM.from_pretrained(
        tmp_path / "out", dtype="auto", output_loading_info=True
    )
    assert not info["missing_keys"] and not info["unexpected_keys"]
    assert (model.lm_head.weight.data_ptr() == model.backbone.embeddings.weight.data_ptr()) == tied
    for key, parameter in model.named_parameters():
        assert not key.endswith(OF_HEADS) or torch.equal(parameter, stored[key]), key


def test_continuations_are_hugging_faces(tmp_path):
    random_mamba2(tmp_path / "hf", n_groups=2)
    hf_to_checkpoint(tmp_path / "hf", tmp_path / "ck", report=lambda _: None)
    checkpoint_to_hf(tmp_path / "ck", tmp_path / "out", report=lambda _: None)
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    prompts = [[5, 9, 3], list(range(2, 42)), [7]]
    expected = []
    for prompt in prompts:
        found = theirs.generate(
            torch.tensor([prompt]), max_new_tokens=64, do_sample=False, eos_token_id=None
        )
        expected.append(found[0, len(prompt) :].tolist())
    checkpoint = open_checkpoint(tmp_path / "ck")
    ours = build_for_inference(checkpoint.config(), checkpoint.read)
    assert generate(ours, prompts, 64) == expected
    assert len({tuple(row) for row in expected}) == 3 and len(set(expected[0])) > 8


def as_mamba_ssm(model: Any, folder: Path, **changes: Any) -> None:
    """A folder as mamba-ssm writes it, put together from its public description."""
    folder.mkdir()
    config = model.config
    described = {
        "d_model": config.hidden_size, "d_intermediate": 0, "n_layer": config.num_hidden_layers,
        "vocab_size": config.vocab_size - 3, "attn_layer_idx": [], "attn_cfg": {},
        "ssm_cfg": {"layer": "Mamba2", "headdim": config.head_dim, "d_state": config.state_size,
                    "ngroups": config.n_groups},
        "rms_norm": True, "residual_in_fp32": True, "fused_add_norm": True,
        "pad_vocab_size_multiple": 4, "tie_embeddings": config.tie_word_embeddings, **changes,
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(described))
    state = {
        name.replace("backbone.embeddings.", "backbone.embedding."): tensor
        for name, tensor in model.state_dict().items()
    }
    torch.save(state, folder / "pytorch_model.bin")


@pytest.mark.parametrize("tied", [True, False])
def test_from_mamba_ssm(tmp_path, tied):
    model = random_mamba2(
        None, vocab_size=104, n_groups=2, tie_word_embeddings=tied, chunk_size=256
    )
    as_mamba_ssm(model, tmp_path / "ssm")
    result = hf_to_checkpoint(tmp_path / "ssm", tmp_path / "ck", report=lambda _: None)
    assert result.worst < 1e-5
    checkpoint_to_hf(tmp_path / "ck", tmp_path / "out", report=lambda _: None)
    back = AutoModelForCausalLM.from_pretrained(tmp_path / "out").eval()
    tokens = torch.arange(300)[None] % 101
    with torch.no_grad():
        torch.testing.assert_close(back(tokens).logits, model(tokens).logits, rtol=0, atol=1e-4)


@pytest.mark.parametrize(
    "changes, words",
    [
        ({"ssm_cfg": {"layer": "Mamba1"}}, "ssm_cfg: found layer Mamba1; allowed: Mamba2"),
        ({"ssm_cfg": {"d_state": 16}}, "ssm_cfg: found layer Mamba1; allowed: Mamba2"),
        ({"attn_layer_idx": [1]}, "attn_layer_idx: found [1]; allowed: none"),
        ({"d_intermediate": 64}, "d_intermediate: found 64; allowed: 0"),
        ({"rms_norm": False}, "rms_norm: found False; allowed: True"),
        ({"ssm_cfg": {"layer": "Mamba2", "bias": True}}, "ssm_cfg: found bias; allowed"),
    ],
)
def test_what_is_not_ours_in_mamba_ssm(tmp_path, changes, words):
    as_mamba_ssm(random_mamba2(None), tmp_path / "ssm", **changes)
    with pytest.raises(BadInput) as error:
        hf_to_checkpoint(tmp_path / "ssm", tmp_path / "ck", report=lambda _: None)
    assert words in str(error.value)


@pytest.mark.parametrize(
    "changes, words",
    [
        ({"use_bias": True}, "use_bias: found True; allowed: False"),
        ({"hidden_act": "gelu"}, "hidden_act: found gelu; allowed: silu"),
        ({"time_step_limit": (0.0, 0.5)}, "time_step_limit: found (0.0, 0.5); allowed"),
    ],
)
def test_what_is_not_ours_in_hugging_face(tmp_path, changes, words):
    random_mamba2(tmp_path / "hf", **changes)
    with pytest.raises(BadInput) as error:
        hf_to_checkpoint(tmp_path / "hf", tmp_path / "ck", report=lambda _: None)
    assert words in str(error.value)


@pytest.mark.parametrize(
    "changes, words",
    [
        ({"conv_kernel": 3}, "conv1d.weight: found 4 in the last dimension; .* asks for 3"),
        ({"vocab_size": 96}, "backbone.embeddings.weight: found 101 rows; .* asks for 96"),
        ({"num_heads": 4, "head_dim": 16}, "in_proj.weight: found 160 rows; .* asks for 156"),
    ],
)
def test_a_configuration_of_other_sizes(tmp_path, changes, words):
    random_mamba2(tmp_path / "hf")
    described = json.loads((tmp_path / "hf" / "config.json").read_text())
    (tmp_path / "hf" / "config.json").write_text(json.dumps({**described, **changes}))
    for verify in (True, False):
        with pytest.raises(BadInput, match=words):
            hf_to_checkpoint(tmp_path / "hf", tmp_path / "ck", verify=verify, report=lambda _: None)


@pytest.mark.parametrize("fault", ["B and C", "x and z", "groups"])
def test_verification_finds_it(tmp_path, monkeypatch, fault):
    """Rows in another order, or the norm over one group in place of two (report 15)."""
    random_mamba2(tmp_path / "hf", n_groups=2)
    if fault == "groups":
        from megatron_lengen.layers import gated_norm

        right = gated_norm.gated_rms_norm
        monkeypatch.setattr(
            gated_norm,
            "gated_rms_norm",
            lambda y, z, weight, groups, eps, across: right(y, z, weight, 1, eps, across),
        )
    else:
        right_rows, order = mapping.Rule.rows_of, {"B and C": "BC", "x and z": "xz"}[fault]
        other = {f".{a}": f".{b}" for a, b in (order, order[::-1])}

        def wrong(rule: mapping.Rule, ours: str, config: Any) -> Any:
            for name, instead in other.items():
                if "in_proj.weight" in ours and ours.endswith(name):
                    return right_rows(rule, ours.removesuffix(name) + instead, config)
            return right_rows(rule, ours, config)

        monkeypatch.setattr(mapping.Rule, "rows_of", wrong)
    with pytest.raises(VerificationError, match="largest difference of logits"):
        hf_to_checkpoint(tmp_path / "hf", tmp_path / "ck", report=lambda _: None)
    assert not (tmp_path / "ck" / "release").exists()


def test_sizes_of_the_released_model(tmp_path):
    """Mamba2-1.3B's widths and its vocabulary of 50277, padded to 50288; one block of its 48."""
    sizes = {"hidden_size": 2048, "num_heads": 64, "head_dim": 64, "state_size": 128,
             "num_hidden_layers": 1, "vocab_size": 50288, "chunk_size": 256}  # fmt: skip
    model = random_mamba2(None, torch.bfloat16, **sizes)
    with torch.no_grad():
        model.backbone.embeddings.weight.mul_(0.1)
    changes = {"vocab_size": 50277, "pad_vocab_size_multiple": 16}
    as_mamba_ssm(model, tmp_path / "ssm", **changes)
    result = hf_to_checkpoint(tmp_path / "ssm", tmp_path / "ck", report=lambda _: None)
    assert result.worst < 1e-4
    checkpoint = open_checkpoint(tmp_path / "ck")
    assert checkpoint.config().vocab_size == 50288 == checkpoint.config().padded_vocab_size - 16
    checkpoint_to_hf(tmp_path / "ck", tmp_path / "out", verify=False, report=lambda _: None)
    stored = tensors_of(tmp_path / "out")
    assert stored[EMBEDDING].shape == (50288, 2048)
    expected = model.state_dict()
    for key, tensor in stored.items():
        assert torch.equal(tensor, expected[key]), key
