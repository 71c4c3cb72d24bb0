"""The mean of checkpoints and of folders, against float64."""

import json
import os
import shutil
import weakref
from pathlib import Path

import pytest
import torch
from averaging_cases import (
    EDGES,
    LAST_NORM,
    TABLE,
    assert_mean,
    numbers,
    quiet,
    read_all,
    weights_in,
    write_iteration,
    write_run,
)
from safetensors.torch import save_file

from megatron_lengen.checkpoint_folder import find, write_tracker
from megatron_lengen.convert.averaging import average, shares_of
from megatron_lengen.convert.stored import open_model
from megatron_lengen.convert.to_hf import checkpoint_to_hf
from megatron_lengen.errors import BadInput


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_checkpoints_against_float64(tmp_path, dtype):
    root = write_run(tmp_path / "run", dtype)
    folder = average([str(root)], tmp_path / "mean", last=3, report=quiet)
    found = read_all(tmp_path / "mean")
    assert {tensor.dtype for tensor in found.values()} == {dtype}
    assert_mean(found, [numbers(seed, dtype) for seed in (20, 30, 40)])
    # A release: weights only, with what the last model brings.
    assert folder == tmp_path / "mean" / "release" and find(tmp_path / "mean").release
    described = json.loads((folder / "lengen.json").read_text())
    assert [entry["name"] for entry in described["averaged"]] == [
        f"run/iter_00000{n}" for n in (20, 30, 40)
    ]
    assert described["arguments"]["training"]["lr"] == 40 and described["iteration"] == 0
    assert described["source"] == {"family": "llama"}
    assert (folder / "tokenizer" / "own.txt").read_text() == "tokens of 40"
    assert find(root).iteration == 40


def test_which_and_how_much(tmp_path):
    root = write_run(tmp_path / "run")
    models = {n: numbers(n) for n in (10, 20, 30, 40)}
    ways = {
        "iterations": ({"iterations": [40, 10]}, [10, 40], None),
        "weights": ({"last": 2, "weights": [3.0, -1.0]}, [30, 40], [3.0, -1.0]),
        "decay": ({"last": 3, "decay": 0.5}, [20, 30, 40], [0.25, 0.5, 1.0]),
    }
    for name, (how, chosen, weights) in ways.items():
        average([str(root)], tmp_path / name, **how, report=quiet)
        assert_mean(read_all(tmp_path / name), [models[n] for n in chosen], weights)
    loads = [str(root / "iter_0000020"), str(root)]
    average(loads, tmp_path / "loads", dtype="bf16", report=quiet)
    found = read_all(tmp_path / "loads")
    assert found[TABLE].dtype == torch.bfloat16
    assert_mean(found, [models[20], models[40]])


def test_order_is_rounding_at_most(tmp_path):
    root = write_run(tmp_path / "run")
    loads = [str(root / f"iter_00000{n}") for n in (10, 20, 30, 40)]
    average(loads, tmp_path / "a", weights=[1.0, 2.0, 3.0, 5.0], report=quiet)
    average(loads[::-1], tmp_path / "b", weights=[5.0, 3.0, 2.0, 1.0], report=quiet)
    a, b = read_all(tmp_path / "a"), read_all(tmp_path / "b")
    for name in a:
        torch.testing.assert_close(a[name], b[name], rtol=2**-23, atol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("weights", [None, [0.1, 0.2, 0.7], [1e-3, 3.0, 7.0], [2.0, -1.5, 0.3]])
def test_of_equal_models_it_is_bitwise_the_model(tmp_path, dtype, weights):
    tensors = numbers(1, dtype)
    tensors[LAST_NORM] = EDGES.to(dtype)
    write_iteration(tmp_path / "run", 10, tensors)
    average([str(tmp_path / "run")] * 3, tmp_path / "mean", weights=weights, report=quiet)
    for name, found in read_all(tmp_path / "mean").items():
        # A negative share turns -0.0 into 0.0, which is equal but not bitwise.
        if weights and min(weights) < 0:
            assert torch.equal(found, tensors[name])
        else:
            bits = torch.int32 if dtype == torch.float32 else torch.int16
            assert torch.equal(found.view(bits), tensors[name].view(bits))


def test_padding_of_other_layouts_is_no_difference(tmp_path):
    """A run that went on with more tensor-parallel ranks has more rows behind the vocabulary."""
    root = write_run(tmp_path / "run", models=(10,))
    wide = numbers(20)
    wide[TABLE] = torch.cat([wide[TABLE], torch.zeros(16, 7)])
    write_iteration(root, 20, wide)
    average([str(root)], tmp_path / "mean", last=2, report=quiet)
    assert_mean(read_all(tmp_path / "mean"), [numbers(10), numbers(20)])


# ---- Hugging Face folders ------------------------------------------------------------------------


def test_folders(hf_models, tmp_path):
    loads = [str(hf_models / f"step-{seed}") for seed in range(3)]
    save = tmp_path / "mean"
    assert average(loads, save, report=quiet) == save
    sources = [weights_in(Path(load)) for load in loads]
    found = weights_in(save)
    assert set(found) == set(sources[0]) and "lm_head.weight" not in found
    assert_mean(found, sources)
    last = hf_models / "step-2"
    travelled = (
        *("config.json", "generation_config.json", "tokenizer.json", "modeling_mine.py"),
        "additional_chat_templates/tools.jinja",
    )
    for name in travelled:
        assert (save / name).read_bytes() == (last / name).read_bytes(), name
    assert not (save / "trainer_state.json").exists()
    card = (save / "README.md").read_text()
    assert "The mean of 3 models' weights" in card and "| `step-1` | 0.333333 |" in card
    assert str(tmp_path) not in card and str(hf_models) not in card
    # It loads, with the embedding as its head.
    from transformers import AutoModelForCausalLM

    model, report = AutoModelForCausalLM.from_pretrained(save, output_loading_info=True)
    assert not report["missing_keys"] and not report["unexpected_keys"]
    assert model.get_output_embeddings().weight is model.get_input_embeddings().weight


def test_a_folder_in_another_dtype_says_so(hf_models, tmp_path):
    loads = [str(hf_models / f"step-{seed}") for seed in range(2)]
    average(loads, tmp_path / "mean", dtype="fp32", report=quiet)
    found = weights_in(tmp_path / "mean")
    assert {tensor.dtype for tensor in found.values()} == {torch.float32}
    assert_mean(found, [weights_in(Path(load)) for load in loads])
    config = json.loads((tmp_path / "mean" / "config.json").read_text())
    assert config["dtype"] == "float32" and config["model_type"] == "smollm3"


def test_whole_numbers_and_what_stays_fp32(hf_models, tmp_path):
    """Report 12 of the field: A_log, D and dt_bias of Mamba2 keep fp32, also in the average."""
    extra = "backbone.layers.0.mixer.A_log"
    for seed in range(2):
        folder = shutil.copytree(hf_models / f"step-{seed}", tmp_path / str(seed))
        tensors = weights_in(folder)
        tensors[extra] = torch.full((3,), 1 + 2**-20 * seed)
        tensors["counter"] = torch.tensor([7 + seed, 2**60 + seed])
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    average([str(tmp_path / "0"), str(tmp_path / "1")], tmp_path / "m", dtype="bf16", report=quiet)
    found = weights_in(tmp_path / "m")
    assert torch.equal(found["counter"], torch.tensor([8, 2**60 + 1]))
    assert found[extra].dtype == torch.float32
    assert torch.equal(found[extra], torch.full((3,), 1 + 2**-21))
    assert found["model.norm.weight"].dtype == torch.bfloat16
    # Loaders give every tensor the dtype that is written there.
    assert json.loads((tmp_path / "m" / "config.json").read_text())["dtype"] == "float32"


def test_revisions_of_a_hub_repository(hf_models, tmp_path, monkeypatch):
    import huggingface_hub

    from megatron_lengen.convert import hf_folder

    asked = []

    def snapshot(name, revision=None, allow_patterns=None):
        asked.append((name, revision))
        return str(hf_models / revision)

    monkeypatch.setattr(hf_folder, "check_on_hub", lambda name, flag: None)
    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot)
    monkeypatch.chdir(tmp_path)
    for number, loads in enumerate(
        (
            ["Org/Model@step-0,step-2"],
            ["Org/Model@step-0 step-2"],
            ["Org/Model@step-0", "Org/Model@step-2"],
        )
    ):
        asked.clear()
        average(loads, tmp_path / str(number), report=quiet)
        assert asked == [("Org/Model", "step-0"), ("Org/Model", "step-2")]
        sources = [weights_in(hf_models / f"step-{seed}") for seed in (0, 2)]
        assert_mean(weights_in(tmp_path / str(number)), sources)
    assert "| `Org/Model@step-2` | 0.5 |" in (tmp_path / "0" / "README.md").read_text()
    with pytest.raises(BadInput, match=r"--save: .* exists already"):
        average(["Org/Model@step-0,step-1"], tmp_path / "0", report=quiet)
    assert len(asked) == 2  # nothing is downloaded for a target that is taken


def test_memory_holds_one_tensor(tmp_path, monkeypatch):
    """Besides the sum, one tensor that was read is alive at a time."""
    root = write_run(tmp_path / "run")
    alive, most = set(), 0
    stored = type(open_model(root))
    read = stored.read

    def watched(self, name):
        nonlocal most
        tensor = read(self, name)
        key = object()
        alive.add(key)
        weakref.finalize(tensor, alive.discard, key)
        most = max(most, len(alive))
        return tensor

    monkeypatch.setattr(stored, "read", watched)
    average([str(root)], tmp_path / "mean", last=4, report=quiet)
    assert most == 1


@pytest.mark.parametrize("size", [5e-324, 1e308])
def test_weights_of_any_size(size):
    assert shares_of(3, [size, size, size]) == [1.0, 1.0, 1.0]


def test_decay_is_by_age():
    assert shares_of(4, decay=0.5) == [0.125, 0.25, 0.5, 1.0]
    assert shares_of(2, decay=1.0) == shares_of(2) == [1.0, 1.0]


# ---- the tool ------------------------------------------------------------------------------------


def test_the_tool(tool, tmp_path, checkpoint_folder):
    """From two checkpoints to a verified Hugging Face folder."""
    root = shutil.copytree(checkpoint_folder, tmp_path / "run")
    os.rename(root / "release", root / "iter_0000005")
    shutil.copytree(root / "iter_0000005", root / "iter_0000006")
    write_tracker(root, "6")
    code, out, error = tool("average")("--load", root, "--last", 2, "--save", tmp_path / "mean")
    assert code == 0, error
    assert out.splitlines() == [
        "0.5000 run/iter_0000005",
        "0.5000 run/iter_0000006",
        f"mean of 2 models -> {tmp_path / 'mean' / 'release'}",
    ]
    verified = checkpoint_to_hf(tmp_path / "mean", tmp_path / "hf", report=quiet)
    assert verified.worst < 1e-4
    card = (tmp_path / "hf" / "README.md").read_text()
    assert "The weights are a mean: of `run/iter_0000005`, `run/iter_0000006`." in card
