"""Logits of our model and of transformers' SmolLM3 on the same weights, and what must fail.

The third party is `reference_logits`, a forward pass in float64 written from the definitions on the
checkpoint's keys: it tells which side is wrong when two differ.
"""

import json
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "unit" / "convert"))

from conversion_models import random_smollm3, reference_logits

from megatron_lengen.convert import mapping, verify
from megatron_lengen.convert.reader import open_checkpoint
from megatron_lengen.convert.smollm3 import SmolLM3
from megatron_lengen.convert.to_hf import checkpoint_to_hf, load_checkpoint_as_hf
from megatron_lengen.convert.to_megatron import hf_to_checkpoint
from megatron_lengen.convert.verify import VerificationError
from megatron_lengen.generation.generate import generate
from megatron_lengen.models.build import build_for_inference
from megatron_lengen.runtime import host

IRREGULAR = [1, 0, 1, 1, 0, 1, 1, 0]
CASES = {
    "windows-on-rope": {},
    "untied": {"tied": False},
    "irregular": {"rope": IRREGULAR, "tied": False},
    "windows-on-nope": {"windowed": [0, 0, 0, 1] * 2},
    "no-windows": {"window": None},
    "all-rope": {"rope": [1] * 8, "windowed": [1, 1, 0, 1] * 2},
    "window-of-one": {"window": 1},
}


def silent(line):
    pass


@pytest.fixture(params=CASES.values(), ids=CASES.keys())
def model_folder(request, tmp_path):
    """8 layers, grouped queries, vocabulary 1001 (padded to 1024 on our side)."""
    random_smollm3(tmp_path / "hf", layers=8, vocab_size=1001, **request.param)
    return tmp_path / "hf"


@pytest.fixture
def checkpoint(tmp_path):
    random_smollm3(tmp_path / "hf", layers=8, vocab_size=1001, tied=False)
    hf_to_checkpoint(tmp_path / "hf", tmp_path / "c", verify=False, report=silent)
    return tmp_path / "c"


def test_logits_agree_and_the_round_trip_is_bitwise(model_folder, tmp_path):
    there = hf_to_checkpoint(model_folder, tmp_path / "c", report=silent)
    back = checkpoint_to_hf(tmp_path / "c", tmp_path / "o", report=silent)
    for measured in (there, back):
        assert max(measured.differences) < 1e-4
        assert all(1 < scale < 100 for scale in measured.scales)
    before = load_file(model_folder / "model.safetensors")
    after = load_file(tmp_path / "o" / "model.safetensors")
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)
    pattern = ("no_rope_layers", "layer_types", "sliding_window", "use_sliding_window")
    configs = [json.loads((p / "config.json").read_text()) for p in (model_folder, tmp_path / "o")]
    assert [configs[0][key] for key in pattern] == [configs[1][key] for key in pattern]
    assert configs[1]["vocab_size"] == len(after["model.embed_tokens.weight"]) == 1001
    assert ("lm_head.weight" in after) == (not configs[1]["tie_word_embeddings"])


def test_both_agree_with_the_definition(model_folder, tmp_path):
    hf_to_checkpoint(model_folder, tmp_path / "c", report=silent)
    opened = open_checkpoint(tmp_path / "c")
    table = opened.read("embedding.word_embeddings.weight")
    assert table.shape[0] == 1024 and table[1001:].eq(0).all()
    model = load_checkpoint_as_hf(tmp_path / "c")
    tokens = torch.randint(0, 1001, (20,), generator=torch.Generator().manual_seed(1))
    with torch.inference_mode():
        theirs = model(tokens[None]).logits[0]
    expected = reference_logits(opened.config(), opened.read, tokens)
    assert theirs.shape == expected.shape == (20, 1001)
    assert (theirs - expected).abs().max() < 1e-4


@pytest.mark.usefixtures("own_process_group")
def test_greedy_continuations_agree(model_folder, tmp_path):
    """64 tokens, beyond the window, with our cache and with transformers', of what was exported."""
    from transformers import AutoModelForCausalLM

    hf_to_checkpoint(model_folder, tmp_path / "c", verify=False, report=silent)
    checkpoint_to_hf(tmp_path / "c", tmp_path / "o", verify=False, report=silent)
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "o")
    assert theirs.generation_config.eos_token_id == 1
    theirs.generation_config.eos_token_id = None  # so that all 64 are compared
    prompt = torch.tensor([[3, 14, 15, 92, 65, 358, 97]])
    # Transformers' cache of a window of one keeps every key ([-0:]).
    options = {
        "do_sample": False,
        "pad_token_id": 0,
        "use_cache": theirs.config.sliding_window != 1,
    }
    with torch.inference_mode():
        continued = theirs.generate(prompt, max_new_tokens=64, **options)
    opened = open_checkpoint(tmp_path / "c")
    ours = build_for_inference(opened.config(), opened.read)
    assert generate(ours, prompt.tolist(), 64) == [continued[0, prompt.shape[1] :].tolist()]


def test_tied_weights_share_their_storage(model_folder, tmp_path):
    hf_to_checkpoint(model_folder, tmp_path / "c", verify=False, report=silent)
    model = load_checkpoint_as_hf(tmp_path / "c")
    shared = model.lm_head.weight.data_ptr() == model.model.embed_tokens.weight.data_ptr()
    assert shared == model.config.tie_word_embeddings


def test_one_token_outside_of_the_window_changes_nothing(tmp_path):
    """Window 4, one layer: position 9 sees 6, 7, 8, 9 and no more."""
    random_smollm3(tmp_path / "hf", layers=1, window=4, rope=[1])
    hf_to_checkpoint(tmp_path / "hf", tmp_path / "c", report=silent)
    model = load_checkpoint_as_hf(tmp_path / "c")
    opened = open_checkpoint(tmp_path / "c")
    tokens = torch.arange(10)

    def last(token, position):
        changed = tokens.clone()
        changed[position] = token
        with torch.inference_mode():
            theirs = model(changed[None]).logits[0, 9]
        return theirs, reference_logits(opened.config(), opened.read, changed)[9]

    for logits, inside, outside in zip(last(9, 9), last(50, 6), last(50, 5), strict=True):
        assert torch.equal(logits, outside)
        assert (logits - inside).abs().max() > 1e-2


def test_positions_move_rope_layers_only(tmp_path):
    """Swapping two earlier tokens leaves a layer without RoPE unmoved."""
    for rope, moved in ((1, True), (0, False)):
        folder = tmp_path / str(rope)
        random_smollm3(folder / "hf", layers=1, window=None, rope=[rope])
        hf_to_checkpoint(folder / "hf", folder / "c", report=silent)
        model = load_checkpoint_as_hf(folder / "c")
        with torch.inference_mode():
            first, second = (
                model(torch.tensor([row])).logits[0, -1] for row in ([5, 9, 7, 3], [9, 5, 7, 3])
            )
        assert ((first - second).abs().max() > 1e-2) == moved


# ---- what verification must catch ----------------------------------------------------------------


@pytest.fixture(params=["whole", "by layer"])
def loaded(request, monkeypatch):
    """Both ways of verification: with memory for a model, and without."""
    free = {"whole": 1 << 50, "by layer": 0}[request.param]
    monkeypatch.setattr(host, "free_memory", lambda: free)
    return request.param


def interleaved(rows):
    """Rows of every head reordered for the other rotary layout (pairs side by side)."""
    head = rows.unflatten(0, (-1, 2, 4))
    return head.transpose(1, 2).flatten(0, 2)


def spoil_split(monkeypatch, name, spoil):
    """Let a rule give spoilt tensors on export."""
    honest = getattr(mapping, name)
    monkeypatch.setattr(mapping, name, lambda *args: spoil(list(honest(*args))))


def spoil_config(monkeypatch, **changes):
    """Let the configuration map write something else than the checkpoint has."""
    honest, spoilt = SmolLM3.hf_config, {}

    def hf_config(self, config):
        spoilt.update(honest(self, config), **changes)
        return dict(spoilt)

    monkeypatch.setattr(SmolLM3, "hf_config", hf_config)
    # Reading back what was written finds it at once; here it is for the verification to find.
    monkeypatch.setattr(SmolLM3, "objection", lambda self, config: None)


def qk_for_the_other_layout(monkeypatch):
    spoil_split(monkeypatch, "_split_qkv", lambda t: [interleaved(t[0]), interleaved(t[1]), t[2]])


def gate_and_up_swapped(monkeypatch):
    spoil_split(monkeypatch, "_split_gate_up", lambda t: t[::-1])


def another_rope_base(monkeypatch):
    rotary = {"rope_type": "default", "rope_theta": 2e6}
    spoil_config(monkeypatch, rope_theta=2e6, rope_parameters=rotary)


def one_key_too_many(monkeypatch):
    spoil_config(monkeypatch, sliding_window=9)


def another_epsilon(monkeypatch):
    spoil_config(monkeypatch, rms_norm_eps=1e-2)


FAULTS = [
    qk_for_the_other_layout,
    gate_and_up_swapped,
    another_rope_base,
    one_key_too_many,
    another_epsilon,
]


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.__name__)
def test_faults_are_caught_and_nothing_is_published(
    fault, checkpoint, tmp_path, monkeypatch, loaded
):
    fault(monkeypatch)
    with pytest.raises(VerificationError, match="verification failed"):
        checkpoint_to_hf(checkpoint, tmp_path / "out", report=silent)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["c", "hf"]


@pytest.mark.parametrize("fault", ["_join_qkv", "_join_gate_up"])
def test_faults_on_import_are_caught_too(fault, tmp_path, monkeypatch, loaded):
    random_smollm3(tmp_path / "hf", layers=8)
    honest = getattr(mapping, fault)
    monkeypatch.setattr(mapping, fault, lambda tensors, c: [honest(tensors, c)[0].flip(0)])
    with pytest.raises(VerificationError):
        hf_to_checkpoint(tmp_path / "hf", tmp_path / "c", report=silent)
    assert [p.name for p in tmp_path.iterdir()] == ["hf"]


@pytest.mark.parametrize("fault", [one_key_too_many, another_rope_base, another_epsilon])
def test_settings_are_caught_in_logits_alone(fault, checkpoint, tmp_path, monkeypatch, loaded):
    """One key too many must show in the numbers, not only in the comparison of settings."""
    fault(monkeypatch)
    monkeypatch.setattr(verify, "_check_pattern", lambda *args: None)
    with pytest.raises(VerificationError, match="largest difference of logits"):
        checkpoint_to_hf(checkpoint, tmp_path / "out", report=silent)


def test_a_wrong_flag_for_tying_is_caught(checkpoint, tmp_path, monkeypatch, loaded):
    """The logits agree here: transformers uses the stored head whatever the flag says."""
    spoil_config(monkeypatch, tie_word_embeddings=True)
    with pytest.raises(VerificationError, match="tie_word_embeddings is True"):
        checkpoint_to_hf(checkpoint, tmp_path / "out", report=silent)
