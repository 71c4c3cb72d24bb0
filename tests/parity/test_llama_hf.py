"""Models that begin in transformers: rotary scaling of every kind, shapes, biases, one window.

In with the verification on, the same logits and continuations as transformers gives, and out again:
the same tensors bit for bit, and the same configuration as transformers understands it.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "unit" / "convert"))

from conversion_models import random_hf, reference_logits

from megatron_lengen.convert.reader import open_checkpoint
from megatron_lengen.convert.to_hf import checkpoint_to_hf
from megatron_lengen.convert.to_megatron import hf_to_checkpoint
from megatron_lengen.errors import BadInput
from megatron_lengen.generation.generate import generate
from megatron_lengen.models.build import build_for_inference

# Original positions so few that every kind acts within 64 tokens.
LINEAR = {"rope_type": "linear", "factor": 3.0}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
YARN = {
    "rope_type": "yarn",
    "factor": 4.0,
    "original_max_position_embeddings": 32,
    "beta_fast": 4.0,
    "beta_slow": 1.0,
    "truncate": True,
}
BIASES = {"attention_bias": True, "mlp_bias": True}
NOPE = {"no_rope_layers": [1, 1, 0, 1], "use_sliding_window": True, "sliding_window": 8,
        "layer_types": ["sliding_attention", "full_attention"] * 2}  # fmt: skip
# class, rope_parameters, other settings
CASES: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "default, tied": ("Llama", {"rope_type": "default"}, {"tie_word_embeddings": True}),
    "linear, one head of keys": ("Llama", LINEAR, {"num_key_value_heads": 1}),
    "llama3, no groups": ("Llama", LLAMA3, {"num_key_value_heads": 4}),
    "llama3, biases, tied": ("Llama", LLAMA3, {**BIASES, "tie_word_embeddings": True}),
    "yarn, wider heads": ("Llama", YARN, {"head_dim": 16}),
    "smollm3, llama3": ("SmolLM3", LLAMA3, {**NOPE, "tie_word_embeddings": True}),
    "smollm3, linear, biases": ("SmolLM3", LINEAR, {**NOPE, **BIASES}),
    "smollm3, heads that do not divide": (
        "SmolLM3",
        LLAMA3,
        {**NOPE, "num_attention_heads": 3, "num_key_value_heads": 3, "head_dim": 16},
    ),
    "mistral, window": ("Mistral", {"rope_type": "default"}, {"sliding_window": 8}),
    "mistral, llama3": (
        "Mistral",
        LLAMA3,
        {"sliding_window": None, "head_dim": 16, "tie_word_embeddings": True},
    ),
}


def silent(line: str) -> None:
    pass


def make_folder(folder: Path, name: str, rotary: dict[str, Any], settings: dict[str, Any]) -> Any:
    """A random model of 4 layers, saved."""
    config = getattr(transformers, f"{name}Config")(
        **{
            "vocab_size": 101,
            "hidden_size": 32,
            "intermediate_size": 48,
            "num_hidden_layers": 4,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "max_position_embeddings": 128,
            "rope_parameters": {"rope_theta": 5000.0, **rotary},
            "bos_token_id": None,
            "eos_token_id": None,
            "pad_token_id": None,
            **settings,
        }
    )
    return random_hf(getattr(transformers, f"{name}ForCausalLM"), config, folder)


def logits_of(model: Any, tokens: torch.Tensor) -> torch.Tensor:
    with torch.inference_mode():
        return model(tokens).logits


@pytest.mark.parametrize(("name", "rotary", "settings"), CASES.values(), ids=CASES)
@pytest.mark.usefixtures("own_process_group")
def test_in_and_out(name, rotary, settings, tmp_path):
    theirs = make_folder(tmp_path / "hf", name, rotary, settings)
    there = hf_to_checkpoint(tmp_path / "hf", tmp_path / "c", report=silent)
    back = checkpoint_to_hf(tmp_path / "c", tmp_path / "o", report=silent)
    assert max(*there.differences, *back.differences) < 1e-4
    assert min(*there.scales, *back.scales) > 1

    opened = open_checkpoint(tmp_path / "c")
    ours = build_for_inference(opened.config(), opened.read)
    for length in (1, 9, 100):
        tokens = torch.randint(0, 101, (1, length), generator=torch.Generator().manual_seed(length))
        expected = logits_of(theirs, tokens)
        assert (ours(tokens) - expected).abs().max() < 1e-4
        if not settings.get("attention_bias"):
            definition = reference_logits(opened.config(), opened.read, tokens[0])
            assert (definition - expected[0]).abs().max() < 1e-4
    prompt = torch.tensor([[3, 14, 15, 92, 65]])
    with torch.inference_mode():
        continued = theirs.generate(prompt, max_new_tokens=64, do_sample=False, pad_token_id=0)
    assert generate(ours, prompt.tolist(), 64) == [continued[0, 5:].tolist()]

    before, after = (load_file(tmp_path / f / "model.safetensors") for f in ("hf", "o"))
    assert before.keys() == after.keys()
    assert all(torch.equal(before[key], after[key]) for key in before)
    first, second = (transformers.AutoConfig.from_pretrained(tmp_path / f) for f in ("hf", "o"))
    assert first.rope_parameters == second.rope_parameters
    first, second = first.to_dict(), second.to_dict()
    changed = {key for key in first if first[key] != second[key]}
    # The interval says nothing beside the list of layers, and cannot say an irregular one.
    assert changed <= {"_name_or_path", "no_rope_layer_interval"}


def test_scaling_acts(tmp_path):
    """The cases above could not tell a kind from another if they all gave the same."""
    found = []
    for number, rotary in enumerate(({"rope_type": "default"}, LINEAR, LLAMA3, YARN)):
        model = make_folder(tmp_path / str(number), "Llama", rotary, {})
        found.append(logits_of(model, torch.arange(60)[None]))
    pairs = [(a, b) for a in range(4) for b in range(a)]
    assert all((found[a] - found[b]).abs().max() > 0.1 for a, b in pairs)


@pytest.mark.parametrize("old", [LLAMA3, YARN, LINEAR, {"type": "linear", "factor": 3.0}])
def test_files_of_older_versions(old, tmp_path):
    """`rope_scaling` beside `rope_theta`, and keys that no class knows."""
    make_folder(tmp_path / "hf", "Llama", {"rope_type": "default"}, {})
    path = tmp_path / "hf" / "config.json"
    raw = json.loads(path.read_text())
    del raw["rope_parameters"]
    raw |= {
        "rope_scaling": old,
        "rope_theta": 5000.0,
        "rope_interleaved": False,
        "is_llama_config": True,
        "transformers.js_config": {"dtype": "q4"},
        "a_key_of_ones_own": 1,
    }
    path.write_text(json.dumps(raw))
    measured = hf_to_checkpoint(tmp_path / "hf", tmp_path / "c", report=silent)
    assert max(measured.differences) < 1e-4
    checkpoint_to_hf(tmp_path / "c", tmp_path / "o", report=silent)
    written = json.loads((tmp_path / "o" / "config.json").read_text())["rope_parameters"]
    old = {"rope_type": old["type"], "factor": old["factor"]} if "type" in old else old
    assert written == {"rope_theta": 5000.0, **old}


@pytest.mark.parametrize(
    ("rotary", "message"),
    [
        ({"rope_type": "dynamic", "factor": 2.0}, "found rope_type dynamic; allowed: default"),
        (
            {"rope_type": "longrope", "factor": 2.0, "short_factor": [1.0] * 4}
            | {"long_factor": [2.0] * 4},
            "found rope_type longrope; allowed: default",
        ),
        ({"rope_type": "linear", "factor": 0.5}, "found factor 0.5; allowed: 1 or more"),
        ({**LLAMA3, "high_freq_factor": 0.5}, "allowed: low below high"),
    ],
)
def test_other_kinds_and_bad_numbers_are_refused(rotary, message, tmp_path):
    make_folder(tmp_path / "hf", "Llama", {"rope_type": "default"}, {})
    path = tmp_path / "hf" / "config.json"
    raw = json.loads(path.read_text())
    raw["rope_parameters"] = {"rope_theta": 5000.0, **rotary}
    path.write_text(json.dumps(raw))
    with pytest.raises(BadInput, match=message) as caught:
        hf_to_checkpoint(tmp_path / "hf", tmp_path / "c", report=silent)
    assert "\n" not in str(caught.value) and not (tmp_path / "c").exists()


def test_windows_of_some_layers_are_not_mistrals(tmp_path):
    make_folder(tmp_path / "hf", "SmolLM3", {"rope_type": "default"}, NOPE)
    hf_to_checkpoint(tmp_path / "hf", tmp_path / "c", verify=False, report=silent)
    with pytest.raises(BadInput, match="mistral cannot represent --"):
        checkpoint_to_hf(tmp_path / "c", tmp_path / "o", family="mistral", report=silent)


def test_the_family_of_the_documentation(tmp_path, monkeypatch):
    """Its code as it stands there, listed beside the others."""
    from megatron_lengen.convert import families

    text = (Path(__file__).parents[2] / "docs" / "huggingface.md").read_text()
    code = text.split("## Add a family")[1].split("```python\n")[1].split("```")[0]
    module: dict[str, Any] = {}
    exec(code, module)
    known = (*families.families(), module["Phi3"]())
    monkeypatch.setattr(families, "families", lambda: known)
    for window in (8, None):
        settings = {"sliding_window": window, "num_key_value_heads": 2}
        folder = tmp_path / str(window)
        make_folder(folder / "hf", "Phi3", {"rope_type": "default"}, settings)
        there = hf_to_checkpoint(folder / "hf", folder / "c", report=silent)
        back = checkpoint_to_hf(folder / "c", folder / "o", report=silent)
        assert max(*there.differences, *back.differences) < 1e-4
        before, after = (load_file(folder / f / "model.safetensors") for f in ("hf", "o"))
        assert before.keys() == after.keys()
        assert all(torch.equal(before[key], after[key]) for key in before)
    make_folder(tmp_path / "hf", "Llama", LLAMA3, {})
    hf_to_checkpoint(tmp_path / "hf", tmp_path / "c", verify=False, report=silent)
    with pytest.raises(BadInput, match="phi3 cannot represent llama3 scaling"):
        checkpoint_to_hf(tmp_path / "c", tmp_path / "o", family="phi3", report=silent)
