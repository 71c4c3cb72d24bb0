"""What is in a model on disk, against numpy; how two differ, with models made to differ."""

import json
import os
import re
import shutil

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from megatron_lengen.checkpoint_folder import write_tracker
from megatron_lengen.convert import differences as differences_module
from megatron_lengen.convert import inspection
from megatron_lengen.convert.differences import differences
from megatron_lengen.convert.inspection import describe, moments, part_of, tensors_of
from megatron_lengen.convert.stored import open_model

# Of the fixtures' model: 4 layers, hidden 32, feed-forward 48, heads 4 of 8 channels in 2 groups.
PARAMETERS = {
    "mlp": 4 * 3 * 48 * 32,
    "attention": 4 * (32 + 2 * 16 + 32) * 32,
    "embedding": 101 * 32,
    "norms": (4 * 2 + 1) * 32,
}


@pytest.fixture
def run(checkpoint_folder, tmp_path):
    """A run of two iterations, the second one newest, with what training writes about itself."""
    root = tmp_path / "run"
    for number in (10, 20):
        shutil.copytree(checkpoint_folder / "release", root / f"iter_{number:07d}")
        path = root / f"iter_{number:07d}" / "lengen.json"
        described = json.loads(path.read_text())
        described["iteration"], described["consumed_samples"] = number, 4 * number
        described["arguments"] = {
            "model": {"tensor_model_parallel_size": 2, "seq_length": 16, "dropout_variant": "vpad"},
            "optimizer": {"use_distributed_optimizer": True, "lr": 1e-3 * number},
            "training": {"engine": "megatron", "train_iters": 20},
        }
        path.write_text(json.dumps(described))
    write_tracker(root, "20")
    return root


@pytest.fixture
def show(tool):
    return tool("inspect")


@pytest.fixture
def changed(hf_folder, tmp_path):
    """A copy of the Hugging Face folder and its tensors, to be changed and written."""
    folder = shutil.copytree(hf_folder, tmp_path / "changed")
    tensors = load_file(folder / "model.safetensors")

    def write(**config):
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
        found = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps({**found, **config}))
        return open_model(folder)

    return tensors, write


# ---- one model -----------------------------------------------------------------------------------


def test_both_kinds_count_the_same(run, hf_folder):
    for load, tensors in ((run, 26), (hf_folder, 38)):
        found = describe(open_model(load))
        assert found["parts"] == PARAMETERS and found["dtypes"] == {"float32": 34240}
        assert found["parameters"] == sum(PARAMETERS.values()) == 34240
        assert found["tensors"] == tensors


def test_what_a_checkpoint_says(run):
    found = describe(open_model(run))
    assert found["iteration"] == 20 and found["kind"] == "checkpoint"
    assert found["iterations"] == {"iter_0000010": "complete", "iter_0000020": "the newest"}
    assert found["layout"] == {
        "tensor_model_parallel_size": 2,
        "use_distributed_optimizer": True,
        "engine": "megatron",
    }
    assert found["training"]["tokens"] == 80 * 16
    assert found["training"]["dropout_variant"] == "vpad"
    assert found["weights only"] and found["damage"] == "not looked for"
    assert found["source"] == "model" and found["tokenizer"] is None
    assert found["settings"]["sliding_window"] == 8
    files = [path for path in (run / "iter_0000020").rglob("*") if path.is_file()]
    assert found["bytes"] == sum(len(path.read_bytes()) for path in files)


def test_damage(run, show):
    (shard,) = (run / "iter_0000010").glob("*.distcp")
    shard.write_bytes(shard.read_bytes()[:-50])
    found = describe(open_model(run), check=True)
    assert found["damage"] == "none"
    assert found["iterations"]["iter_0000010"].startswith(f"{shard.name}: cut short")
    (shard,) = (run / "iter_0000020").glob("*.distcp")
    data = bytearray(shard.read_bytes())
    at = data.index(open_model(run).read("decoder.final_layernorm.weight").numpy().tobytes())
    data[at + 3] ^= 64
    shard.write_bytes(data)
    assert show(run)[0] == 0
    code, out, _ = show(run, "--check")
    assert code == 1 and f"{shard}: damaged at decoder.final_layernorm.weight" in out
    code, out, error = show(run, "--iteration", 10)
    assert code == 2 and out == "" and "cut short" in error and error.count("\n") == 1


@pytest.mark.parametrize(
    "name, part",
    [
        ("model.layers.3.self_attn.q_proj.weight", "attention"),
        ("decoder.layers.3.self_attention.linear_qkv.layer_norm_weight", "norms"),
        ("decoder.layers.0.self_attention.query_scaling.coef_weight", "query scaling"),
        ("model.layers.0.self_attn.attention_scaling.pow_bias", "query scaling"),
        ("lm_head.weight", "output layer"),
        ("output_layer.weight", "output layer"),
        ("backbone.embeddings.weight", "embedding"),
        ("backbone.layers.0.mixer.A_log", "mixer"),
        ("anything", "other"),
    ],
)
def test_parts(name, part):
    assert part_of(name) == part


@pytest.mark.parametrize("piece", [7, 1000])
def test_statistics_against_numpy(monkeypatch, piece):
    """A mean far from 0, where differences of squares would lose the deviation."""
    monkeypatch.setattr(inspection, "PIECE", piece)
    values = torch.randn(20, 13, generator=torch.Generator().manual_seed(1)) * 1e-3 + 100
    values[3, 4:6] = torch.tensor([torch.nan, -torch.inf])
    found = moments(values)
    finite = values.numpy().astype(np.float64)
    finite = finite[np.isfinite(finite)]
    expected = {"mean": finite.mean(), "std": finite.std(), "max": np.abs(finite).max()}
    for name, value in expected.items():
        assert found[name] == pytest.approx(value, rel=1e-9), name
    assert found["not_finite"] == 2
    nothing = moments(torch.full((2,), torch.nan))
    assert nothing == {"mean": 0.0, "std": 0.0, "max": 0.0, "not_finite": 2}


def test_tensors(run):
    rows = {row["name"]: row for row in tensors_of(open_model(run), statistics=True)}
    row = rows["decoder.layers.0.mlp.linear_fc1.weight"]
    assert row["shape"] == [96, 32] and row["dtype"] == "float32" and 0.1 < row["std"] < 0.3
    assert list(next(tensors_of(open_model(run)))) == ["name", "shape", "dtype"]


# ---- two models ----------------------------------------------------------------------------------


def test_a_checkpoint_is_the_folder_that_it_comes_from(run, hf_folder):
    for one, other in ((run, hf_folder), (hf_folder, run)):
        found = differences(open_model(one), open_model(other))
        assert found["same"] and found["equal"] == found["compared"] == 38
        assert found["one"] == str(open_model(one).folder)


@pytest.mark.parametrize("piece", [11, 2**20])
def test_numbers_that_differ(run, changed, monkeypatch, piece):
    monkeypatch.setattr(differences_module, "PIECE", piece)
    tensors, write = changed
    key, gate = "model.layers.2.self_attn.k_proj.weight", "model.layers.1.mlp.gate_proj.weight"
    original = {name: tensor.double().numpy() for name, tensor in tensors.items()}
    tensors[key] = tensors[key] * 1.5
    tensors[gate][5, 7] += 0.25
    tensors["model.norm.weight"][0] = torch.nan
    found = differences(open_model(run), write())
    assert [row["name"] for row in found["tensors"]] == ["model.norm.weight", key, gate]
    assert not found["same"] and found["equal"] == 35 and found["settings"] == {}
    rows = {row["name"]: row for row in found["tensors"]}
    assert rows[key]["relative"] == pytest.approx(0.5, rel=1e-6)
    assert rows[key]["max_abs"] == pytest.approx(0.5 * np.abs(original[key]).max(), rel=1e-6)
    assert rows[gate]["max_abs"] == pytest.approx(0.25, rel=1e-6)
    norm = np.linalg.norm(original[gate])
    assert rows[gate]["relative"] == pytest.approx(0.25 / norm, rel=1e-5)
    assert np.isnan(rows["model.norm.weight"]["max_abs"])


def test_zeros_of_two_signs_and_two_dtypes_are_not_bitwise_equal(changed, tmp_path):
    tensors, write = changed
    for name, value in (("zero", torch.tensor([0.0])), ("half", torch.tensor([1.0]))):
        tensors[name] = value
    folder = shutil.copytree(write().folder, tmp_path / "before")
    tensors["zero"] = -tensors["zero"]
    tensors["half"] = tensors["half"].bfloat16()
    found = differences(open_model(folder), write())
    rows = {row["name"]: row for row in found["tensors"]}
    assert set(rows) == {"zero", "half"}
    assert {row["max_abs"] for row in rows.values()} == {0.0}
    assert rows["half"]["dtype"] == ["float32", "bfloat16"]


def test_names_shapes_and_settings(run, changed):
    tensors, write = changed
    del tensors["model.norm.weight"]
    tensors["more"] = torch.ones(2)
    gate = "model.layers.1.mlp.gate_proj.weight"
    tensors[gate] = tensors[gate][:40].contiguous()
    found = differences(open_model(run), write(sliding_window=16))
    assert found["only_in_one"] == ["model.norm.weight"] and found["only_in_other"] == ["more"]
    assert found["settings"] == {"sliding_window": [8, 16]}
    assert [row["name"] for row in found["tensors"]] == [gate]
    assert found["tensors"][0]["shape"] == [[48, 32], [40, 32]]


def test_flags_of_runs_do_not_count(run):
    found = differences(open_model(run, 10), open_model(run, 20))
    assert found["same"] and found["arguments"] == {"optimizer.lr": [0.01, 0.02]}


def test_how_weights_were_drawn_and_how_a_pattern_is_spelled_are_no_difference(run, hf_folder):
    path = run / "iter_0000020" / "lengen.json"
    described = json.loads(path.read_text())
    described["model"] |= {"init_method_std": 0.5, "query_scaling_identity_init": False}
    # The fixture's says [1, 1, 1, 0].
    described["model"] |= {"window_attn_skip_freq": 4, "no_rope_freq": 4}
    path.write_text(json.dumps(described))
    for other in (open_model(hf_folder), open_model(run, 10)):
        assert differences(open_model(run), other)["same"]
    described["model"]["window_attn_skip_freq"] = 2
    path.write_text(json.dumps(described))
    found = differences(open_model(run), open_model(run, 10))
    assert list(found["settings"]) == ["window_attn_skip_freq"] and not found["same"]


def test_entries_that_say_what_is_so_anyway_are_no_difference(hf_folder, tmp_path):
    """One writer leaves out what another spells out; transformers understands the same."""
    other = shutil.copytree(hf_folder, tmp_path / "other")
    config = json.loads((other / "config.json").read_text())
    heads = config["num_attention_heads"]
    config |= {"head_dim": config["hidden_size"] // heads, "pretraining_tp": 2, "extra": "x"}
    (other / "config.json").write_text(json.dumps(config))
    assert differences(open_model(hf_folder), open_model(other))["same"]
    (other / "config.json").write_text(json.dumps({**config, "eos_token_id": 3}))
    found = differences(open_model(hf_folder), open_model(other))
    assert list(found["settings"]) == ["eos_token_id"]


# ---- the tool ------------------------------------------------------------------------------------


def test_the_tool(show, run, hf_folder):
    code, out, _ = show(run)
    assert code == 0
    assert "parameters:        34,240\n" in out
    assert "mlp 18,432, attention 12,288, embedding 3,232, norms 288" in out
    assert "decoder" not in out and "kv_channels" not in out
    code, out, _ = show(hf_folder, "--settings", "--statistics")
    assert code == 0 and "sliding_window" in out
    assert re.search(r"^model.norm.weight +32 +float32  1.\d+ +0.3", out, re.MULTILINE)
    found = json.loads(show(run, "--iteration", 10, "--tensors", "--json")[1])
    assert found["iteration"] == 10 and len(found["tensor"]) == 26
    code, out, _ = show(run, "--diff", hf_folder)
    assert code == 0 and out == "38 of 38 tensors are equal bit for bit; the same model\n"


def test_the_tool_on_what_differs(show, run, changed):
    tensors, write = changed
    for name in tensors:
        tensors[name] = tensors[name] + 1
    tensors["model.norm.weight"][0] = torch.nan
    other = write(sliding_window=16).folder
    code, out, _ = show(run, "--diff", other)
    assert code == 1 and "sliding_window  8    16" in out
    assert out.count("\nmodel.") == 20 and "\n...\n" in out
    assert out.endswith("0 of 38 tensors are equal bit for bit\n")
    code, out, _ = show(run, "--diff", other, "--tensors")
    assert code == 1 and out.count("\nmodel.") == 38
    code, out, _ = show(run, "--diff", other, "--json")
    assert code == 1 and json.loads(out)["tensors"][0]["relative"] == "nan"


def test_bad_input_is_one_line_and_code_2(show, run, tmp_path, hf_folder):
    os.mkdir(tmp_path / "empty")
    for arguments, message in (
        ([], "the following arguments are required: model"),
        ([tmp_path / "none"], f"found {tmp_path / 'none'}; allowed: a checkpoint, a Hugging"),
        ([tmp_path / "empty"], f"{tmp_path / 'empty'} has no config.json"),
        ([run, "--iteration", 15], f"--iteration: found 15; {run}: there: iter_0000010, iter"),
        ([hf_folder, "--iteration", 1], "--iteration: found 1; "),
        ([run, "--diff", tmp_path / "none"], "found "),
        ([run, "--diff", run, "--check"], "--diff: found with"),
    ):
        code, out, error = show(*arguments)
        assert code == 2 and out == ""
        assert error.startswith(f"error: {message}") and error.count("\n") == 1, error
