"""Shards in and out, damaged files, targets that must survive."""

import json
import os

import pytest
import torch
from safetensors.torch import load_file, save_file

from megatron_lengen.convert import hf_folder
from megatron_lengen.convert.hf_folder import HFFolder, fetch_folder, parse_size
from megatron_lengen.convert.safetensors_files import ShardWriter
from megatron_lengen.convert.staging import staged_folder
from megatron_lengen.errors import BadInput

TENSORS = {
    "a": torch.randn(10, 10),
    "b": torch.randn(30).bfloat16(),
    "c": torch.randn(4, 5),
    "d": torch.tensor(2.5),
}


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "config.json").write_text('{"model_type": "smollm3"}')
    return tmp_path


def metas(tensors):
    return {name: tensor.to("meta") for name, tensor in tensors.items()}


def write(folder, size, tensors=TENSORS):
    with ShardWriter(folder, metas(tensors), size) as writer:
        for name, tensor in reversed(tensors.items()):
            writer.add(name, tensor)


def same(folder):
    read = HFFolder(folder)
    assert sorted(read.names) == sorted(TENSORS)
    for name, tensor in TENSORS.items():
        assert torch.equal(read.read(name), tensor) and read.read(name).dtype == tensor.dtype
        meta = read.meta(name)
        assert (meta.shape, meta.dtype, meta.device.type) == (tensor.shape, tensor.dtype, "meta")


def test_one_file_without_index(folder):
    write(folder, 10**9)
    assert sorted(os.listdir(folder)) == ["config.json", "model.safetensors"]
    same(folder)


def test_shards_and_index(folder):
    # 400, 60, 80 and 4 bytes: the first fills a shard of 420 alone, the rest share one.
    write(folder, 420)
    names = [f"model-0000{i}-of-00002.safetensors" for i in (1, 2)]
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    assert index["weight_map"] == {"a": names[0], **dict.fromkeys("bcd", names[1])}
    assert index["metadata"]["total_size"] == 544
    assert sorted(load_file(folder / names[1])) == ["b", "c", "d"]
    # Whoever may read the configuration may read the weights.
    assert (folder / names[0]).stat().st_mode == (folder / "config.json").stat().st_mode
    same(folder)


def test_a_view_is_written_without_the_tensor_behind_it(folder):
    write(folder, 10**9, {"x": torch.zeros(1000, 1000)[:2]})
    assert (folder / "model.safetensors").stat().st_size < 10_000


def test_old_bin_files(folder):
    halves = ({"a": TENSORS["a"], "b": TENSORS["b"]}, {"c": TENSORS["c"], "d": TENSORS["d"]})
    weight_map = {}
    for number, half in enumerate(halves, 1):
        name = f"pytorch_model-0000{number}-of-00002.bin"
        torch.save(half, folder / name)
        weight_map.update(dict.fromkeys(half, name))
    index = folder / "pytorch_model.bin.index.json"
    index.write_text(json.dumps({"weight_map": weight_map}))
    same(folder)


def test_the_index_says_which_of_two_copies_counts(folder):
    write(folder, 420)
    first, second = sorted(folder.glob("model-*.safetensors"))
    stale = {"b": TENSORS["b"] + 1, **load_file(first)}
    save_file(stale, first)
    assert torch.equal(HFFolder(folder).read("b"), TENSORS["b"])
    index = folder / "model.safetensors.index.json"
    described = json.loads(index.read_text())
    described["weight_map"]["b"] = first.name
    index.write_text(json.dumps(described))
    assert torch.equal(HFFolder(folder).read("b"), TENSORS["b"] + 1) and second.exists()


def test_files_in_folders_of_their_own(folder):
    write(folder, 420)
    index = folder / "model.safetensors.index.json"
    described = json.loads(index.read_text())
    for file in set(described["weight_map"].values()):
        (folder / "weights").mkdir(exist_ok=True)
        (folder / file).rename(folder / "weights" / file)
    described["weight_map"] = {n: f"weights/{f}" for n, f in described["weight_map"].items()}
    index.write_text(json.dumps(described))
    same(folder)


def test_bin_files_that_run_code_are_refused(folder):
    torch.save({"a": print}, folder / "pytorch_model.bin")
    with pytest.raises(BadInput, match=r"pytorch_model\.bin: holds code, which is not run"):
        HFFolder(folder)


def test_damage_is_named(folder):
    write(folder, 420)
    first = folder / "model-00001-of-00002.safetensors"
    first.write_bytes(first.read_bytes()[:-1])
    with pytest.raises(BadInput, match=r"model-00001-of-00002\.safetensors: damaged or cut"):
        HFFolder(folder)
    first.unlink()
    with pytest.raises(BadInput, match=r"model-00001-of-00002\.safetensors: missing"):
        HFFolder(folder)
    save_file({"z": torch.zeros(1)}, first)
    with pytest.raises(BadInput, match="no tensor a"):
        HFFolder(folder)


def test_folders_without_a_model_are_refused(tmp_path):
    with pytest.raises(BadInput, match=r"has no config\.json"):
        HFFolder(tmp_path)
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(BadInput, match=r"has no model\.safetensors"):
        HFFolder(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(BadInput, match=r"config\.json: damaged"):
        HFFolder(tmp_path)


def test_a_target_appears_whole_or_not_at_all(tmp_path):
    target = tmp_path / "out"
    with pytest.raises(RuntimeError), staged_folder(target, False, "config.json") as staging:
        (staging / "config.json").write_text("half")
        assert not target.exists()
        raise RuntimeError
    assert os.listdir(tmp_path) == []
    with staged_folder(target, False, "config.json") as staging:
        (staging / "config.json").write_text("first")
    assert (target / "config.json").read_text() == "first"
    with pytest.raises(BadInput, match="exists already; allowed: a new folder, or --force"):
        staged_folder(target, False, "config.json").__enter__()
    with pytest.raises(RuntimeError), staged_folder(target, True, "config.json"):
        raise RuntimeError
    assert (target / "config.json").read_text() == "first"
    with staged_folder(target, True, "config.json") as staging:
        (staging / "config.json").write_text("second")
    assert (target / "config.json").read_text() == "second"
    assert os.listdir(tmp_path) == ["out"]


def test_force_does_not_remove_other_peoples_folders(tmp_path):
    (tmp_path / "thesis.tex").write_text("words")
    with pytest.raises(BadInput, match=r"holds other files \(no config\.json\)"):
        staged_folder(tmp_path, True, "config.json").__enter__()


def test_hub_ids_and_local_folders(tmp_path, folder, monkeypatch):
    import huggingface_hub

    asked = []

    def snapshot(name, revision, allow_patterns):
        asked.append((name, revision, allow_patterns))
        return str(folder)

    monkeypatch.setattr(hf_folder, "check_on_hub", lambda name, flag: None)
    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot)
    monkeypatch.chdir(tmp_path)
    assert fetch_folder("Org/Model", "step-10") == folder
    # No safetensors there: the older weights are asked for in a second call.
    assert [(name, revision) for name, revision, _ in asked] == [("Org/Model", "step-10")] * 2
    assert [any(".bin" in pattern for pattern in patterns) for *_, patterns in asked] == [0, 1]
    write(folder, 10**9)
    assert fetch_folder("Org/Model") == folder and len(asked) == 3
    assert fetch_folder(folder) == folder and len(asked) == 3
    with pytest.raises(BadInput, match=r"--revision: found main; .* is a local folder"):
        fetch_folder(folder, "main")
    with pytest.raises(BadInput, match="--load: found a/b/c; allowed: a folder or a hub id"):
        fetch_folder("a/b/c")


def test_a_hub_that_fails_is_one_line(monkeypatch):
    import huggingface_hub

    def offline(*args, **kwargs):
        raise OSError("no\nnetwork")

    monkeypatch.setattr(hf_folder, "check_on_hub", lambda name, flag: None)
    monkeypatch.setattr(huggingface_hub, "snapshot_download", offline)
    with pytest.raises(BadInput) as caught:
        fetch_folder("Org/Model", "r1")
    assert str(caught.value) == (
        "--load: no folder Org/Model, and the hub gave none at r1: no network"
    )


@pytest.mark.parametrize(("text", "size"), [("5GB", 5 * 10**9), ("1.5mb", 1_500_000), ("7", 7)])
def test_sizes(text, size):
    assert parse_size(text) == size


@pytest.mark.parametrize("text", ["", "big", "0GB", "-1"])
def test_bad_sizes(text):
    with pytest.raises(BadInput, match="--max-shard-size"):
        parse_size(text)


def test_names_can_be_replaced(folder):
    """Tensors keep their content; two never become one."""
    write(folder, 10**9)
    read = HFFolder(folder, {"a": "layer.x"})
    assert sorted(read.names) == ["b", "c", "d", "layer.x"]
    assert torch.equal(read.read("layer.x"), TENSORS["a"])
    assert read.meta("layer.x").shape == (10, 10)
    for renames, message in (
        ({"a": "b"}, "--rename: b would be two tensors"),
        ({"z": "b"}, "--rename: found z; no tensor has it"),
    ):
        with pytest.raises(BadInput, match=message):
            HFFolder(folder, renames)
