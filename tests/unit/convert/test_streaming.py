"""Memory of two tensors, threads, the bar, and what killed runs and full disks leave behind."""

import ctypes
import errno
import gc
import io
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from megatron_lengen.convert import staging, torch_dist
from megatron_lengen.convert.hf_folder import HFFolder
from megatron_lengen.convert.reader import open_checkpoint
from megatron_lengen.convert.safetensors_files import ShardWriter
from megatron_lengen.convert.staging import staged_folder
from megatron_lengen.convert.stream import Job, Pace, free_at_once
from megatron_lengen.convert.to_hf import checkpoint_to_hf, load_checkpoint_as_hf
from megatron_lengen.convert.to_megatron import hf_to_checkpoint
from megatron_lengen.errors import BadInput, Fault

SCRIPT = Path(__file__).resolve().parents[3] / "tools" / "checkpoint" / "convert.py"
LAYERS, HIDDEN, FFN, VOCABULARY = 16, 512, 2048, 8192
LARGEST = 2 * VOCABULARY * HIDDEN  # bytes; of the embedding, and of gate and up together
SLACK = 16 * 2**20  # of the allocator and of what is imported on the way


def silent(line):
    pass


# ---- memory --------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def large(tmp_path_factory):
    """A Llama of 150 MB in bf16, tensors up to 8 MiB: as one file, in shards, as .bin."""
    from transformers import LlamaConfig

    root = tmp_path_factory.mktemp("large")
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=HIDDEN,
        intermediate_size=FFN,
        num_hidden_layers=LAYERS,
        num_attention_heads=8,
        architectures=["LlamaForCausalLM"],
        dtype="bfloat16",
    )
    shapes = {"model.embed_tokens": [VOCABULARY, HIDDEN], "model.norm": [HIDDEN]}
    for layer in range(LAYERS):
        prefix = f"model.layers.{layer}."
        shapes |= {prefix + f"self_attn.{x}_proj": [HIDDEN, HIDDEN] for x in "qkvo"}
        shapes |= {prefix + f"mlp.{x}_proj": [FFN, HIDDEN] for x in ("gate", "up")}
        shapes[prefix + "mlp.down_proj"] = [HIDDEN, FFN]
        names = ("input_layernorm", "post_attention_layernorm")
        shapes |= {prefix + name: [HIDDEN] for name in names}
    shapes["lm_head"] = [VOCABULARY, HIDDEN]
    tensors = {  # bits of numbers from 0 to 2
        f"{name}.weight": torch.randint(0, 2**14, shape, dtype=torch.int16).view(torch.bfloat16)
        for name, shape in shapes.items()
    }
    metas = {name: tensor.to("meta") for name, tensor in tensors.items()}
    for form, size in (("one file", 10**12), ("shards", 20 * 10**6)):
        (root / form).mkdir()
        config.save_pretrained(root / form)
        with ShardWriter(root / form, metas, size) as writer:
            for name, tensor in tensors.items():
                writer.add(name, tensor)
    (root / ".bin").mkdir()
    config.save_pretrained(root / ".bin")
    torch.save(tensors, root / ".bin" / "pytorch_model.bin")
    hf_to_checkpoint(root / "one file", root / "checkpoint", verify=False, report=silent)
    return root


def memory(kind):
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) * 1024 for line in file if line.startswith(kind))


def growth(work):
    """Bytes by which this process's memory rose while it worked."""
    free_at_once()
    # What earlier tests have freed must not be what this one takes.
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        pytest.skip("the kernel does not reset the highest memory here")
    before = memory("VmRSS")
    work()
    return memory("VmHWM") - before


@pytest.mark.parametrize("workers", [1, 3])
@pytest.mark.parametrize("source", ["one file", "shards", ".bin", "checkpoint"])
def test_memory_holds_two_tensors_whatever_the_file(large, tmp_path, source, workers):
    convert = checkpoint_to_hf if source == "checkpoint" else hf_to_checkpoint
    options = {"verify": False, "report": silent, "pace": Pace(workers)}
    convert(large / source, tmp_path / "first", **options)  # what it imports is in memory then
    found = growth(lambda: convert(large / source, tmp_path / "out", **options))
    assert found < 2 * LARGEST + SLACK


def test_the_measure_of_memory_sees_a_whole_model(large):
    bound = 2 * LARGEST + SLACK
    assert growth(lambda: load_checkpoint_as_hf(large / "checkpoint")) > 2 * bound


def test_all_forms_give_the_same_bytes(large, tmp_path):
    """Three sources, several threads and shards, there and back."""
    expected = load_file(large / "one file" / "model.safetensors")
    for form in ("shards", ".bin"):
        read = HFFolder(large / form)
        assert set(read.names) == set(expected)
        for name, tensor in expected.items():
            assert torch.equal(read.read(name), tensor)
    options = {"verify": False, "report": silent, "pace": Pace(3)}
    hf_to_checkpoint(large / ".bin", tmp_path / "c", **options)
    assert len(list((tmp_path / "c" / "release").glob("*.distcp"))) == 3
    checkpoint_to_hf(tmp_path / "c", tmp_path / "o", max_shard_bytes=20 * 10**6, **options)
    found = {}
    for path in (tmp_path / "o").glob("*.safetensors"):
        assert path.stat().st_size < 21 * 10**6
        found |= load_file(path)
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)


def test_files_are_those_of_the_library(tmp_path):
    """Odd sizes before wide elements, no elements, no dimensions; each aligned to its own size."""
    tensors = {
        "odd": torch.randint(0, 2, (3,)).bool(),
        "half": torch.randn(5).bfloat16(),
        "wide": torch.randn(3, 5, dtype=torch.float64),
        "none": torch.empty(0, 4),
        "one": torch.tensor(2.5),
        "bytes": torch.randn(7).to(torch.float8_e4m3fn),
        "view": torch.randn(4, 6).t(),
    }
    metas = {name: tensor.to("meta") for name, tensor in tensors.items()}
    with ShardWriter(tmp_path, metas, 10**9) as writer:
        for name, tensor in tensors.items():
            writer.add(name, tensor)
    file = tmp_path / "model.safetensors"
    with safe_open(file, "pt") as opened:
        assert opened.metadata() == {"format": "pt"}
    found = load_file(file)
    whole = {name: tensor.contiguous() for name, tensor in tensors.items()}
    save_file(whole, tmp_path / "theirs.safetensors", metadata={"format": "pt"})
    theirs = load_file(tmp_path / "theirs.safetensors")
    (tmp_path / "config.json").write_text("{}")
    ours = HFFolder(tmp_path)
    for name, tensor in theirs.items():
        for other in (found[name], ours.read(name)):
            assert other.dtype == tensor.dtype and other.shape == tensor.shape
            assert bytes(other.reshape(-1).view(torch.uint8)) == bytes(
                tensor.reshape(-1).view(torch.uint8)
            )
    assert file.stat().st_size == (tmp_path / "theirs.safetensors").stat().st_size


def test_a_tensor_that_was_forgotten_is_an_error(tmp_path):
    metas = {name: torch.empty(2, device="meta") for name in "ab"}
    with (
        pytest.raises(ValueError, match="not written: b"),
        ShardWriter(tmp_path, metas, 10**9) as writer,
    ):
        with pytest.raises(ValueError, match=r"a: .* planned"):
            writer.add("a", torch.ones(3))
        writer.add("a", torch.ones(2))


# ---- threads and the bar -------------------------------------------------------------------------


def test_jobs_run_at_once_while_there_is_room():
    held, most, lock, together = 0, 0, threading.Lock(), threading.Barrier(3, timeout=60)

    def work(size, meet):
        nonlocal held, most
        with lock:
            held += size
            most = max(most, held)
        if meet:
            together.wait()  # fails if the three do not run at the same time
        time.sleep(0.002)
        with lock:
            held -= size

    first = [Job(lambda: work(3, True), 3, 3) for _ in range(3)]
    mixed = [Job(lambda size=size: work(size, False), size, size) for size in (10, 3, 4, 9) * 5]
    Pace(3).run(first + mixed, "x")
    assert most <= 10


def test_the_first_error_comes_out_and_stops_the_rest():
    done = []

    def work(number):
        if number == 2:
            raise BadInput("two")
        time.sleep(0.01)
        done.append(number)

    for workers in (1, 3):
        done.clear()
        jobs = [Job(lambda number=number: work(number), 1, 0) for number in range(50)]
        with pytest.raises(BadInput, match="two"):
            Pace(workers).run(jobs, "x")
        assert len(done) <= 2 * workers


def test_the_bar_is_quiet_unless_asked(capfd):
    jobs = [Job(lambda: None, 1000, 0) for _ in range(3)]
    Pace().run(jobs, "tensors")
    assert capfd.readouterr() == ("", "")
    Pace(progress=True).run(jobs, "tensors")
    out, error = capfd.readouterr()
    assert out == "" and "tensors" in error and "3.00k/3.00k" in error


# ---- what goes wrong -----------------------------------------------------------------------------


def test_a_killed_run_leaves_nothing_at_the_target_and_the_next_one_tidies_up(large, tmp_path):
    target = tmp_path / "out"
    arguments = ["--load", large / "checkpoint", "--save", target, "--max-shard-size", "9MB"]
    command = [sys.executable, SCRIPT, "to-hf", *arguments]
    process = subprocess.Popen(list(map(str, command)), stdout=subprocess.DEVNULL)
    try:
        end = time.monotonic() + 120
        while not list(tmp_path.glob(".out.*.partial/model-*")) and time.monotonic() < end:
            time.sleep(0.002)
        os.kill(process.pid, signal.SIGKILL)
    finally:
        process.kill()
        process.wait()
    assert process.returncode == -signal.SIGKILL
    (left,) = tmp_path.iterdir()
    assert left.name.startswith(".out.") and left.name.endswith(".partial")
    checkpoint_to_hf(large / "checkpoint", target, verify=False, report=silent)
    assert os.listdir(tmp_path) == ["out"]


def test_the_work_of_others_stays(tmp_path):
    """Of a process that is still at it, and for other targets."""
    (tmp_path / ".other.12345678.partial").mkdir()
    target = tmp_path / "out"
    with staged_folder(target, False, "config.json") as first:
        (first / "config.json").write_text("first")
        with staged_folder(target, False, "config.json") as second:
            assert first.exists()
            (second / "config.json").write_text("second")
    assert (target / "config.json").read_text() == "first"
    assert sorted(os.listdir(tmp_path)) == [".other.12345678.partial", "out"]


def test_killed_between_two_renames_the_old_folder_comes_back(tmp_path):
    previous = tmp_path / ".out.12345678.previous"
    previous.mkdir()
    (previous / "config.json").write_text("old")
    with pytest.raises(BadInput, match="exists already"):
        staged_folder(tmp_path / "out", False, "config.json").__enter__()
    assert (tmp_path / "out" / "config.json").read_text() == "old"


class Full(io.RawIOBase):
    """A file on a disk with little room."""

    def __init__(self, path):
        self.name, self._left = str(path), 10_000
        self._at = 0

    def writable(self):
        return True

    def tell(self):
        return self._at

    def write(self, data):
        size = memoryview(data).nbytes
        self._left -= size
        self._at += size
        if self._left < 0:
            raise OSError(errno.ENOSPC, "No space left on device")
        return size


def full_files(monkeypatch):
    def opened(path, mode, **options):
        return Full(path) if "w" in mode else open(path, mode, **options)

    monkeypatch.setattr(torch_dist, "open", opened, raising=False)

    def pwrite(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "pwrite", pwrite)


def no_room(monkeypatch):
    usage = staging.shutil.disk_usage("/")._replace(free=1000)
    monkeypatch.setattr(staging.shutil, "disk_usage", lambda path: usage)


@pytest.mark.parametrize("fault", [no_room, full_files])
@pytest.mark.parametrize("source", ["checkpoint", "hf"])
def test_a_full_disk_is_one_line_and_leaves_nothing(
    fault, source, checkpoint_folder, hf_folder, tmp_path, monkeypatch
):
    convert, load = checkpoint_to_hf, checkpoint_folder
    if source == "hf":
        convert, load = hf_to_checkpoint, hf_folder
    fault(monkeypatch)
    with pytest.raises(Fault, match=r"No space left on device .*nothing was written") as caught:
        convert(load, tmp_path / "new" / "out", verify=False, report=silent)
    assert caught.value.code == 1 and "\n" not in str(caught.value)
    assert os.listdir(tmp_path) == []


def test_a_changed_bit_is_found(checkpoint_folder, tmp_path):
    """In the middle of a tensor, where nothing but its checksum can tell."""
    import shutil

    copy = shutil.copytree(checkpoint_folder, tmp_path / "c")
    shard = copy / "release" / "__0_0.distcp"
    data = bytearray(shard.read_bytes())
    data[5000] ^= 1
    shard.write_bytes(data)
    opened = open_checkpoint(copy)
    with pytest.raises(BadInput, match=r"__0_0\.distcp: .* cannot be read, damaged .*checksum"):
        for key in opened.model_keys:
            opened.read(key)


def test_a_tensor_with_a_part_missing_is_refused(checkpoint_folder):
    opened = open_checkpoint(checkpoint_folder)
    key = "decoder.final_layernorm.weight"
    opened.metadata.state_dict_metadata[key].chunks.clear()
    with pytest.raises(BadInput, match=f"parts of {key} are missing"):
        opened.read(key)


# ---- old files -----------------------------------------------------------------------------------


class Harmful:
    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.mkdir, (str(self.path),)


def test_code_in_old_files_is_not_run(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    torch.save({"a": torch.ones(1), "b": Harmful(tmp_path / "harm")}, tmp_path / "bad.bin")
    torch.save({"a": torch.ones(1)}, tmp_path / "good.bin")
    for name, message in (("bad", "holds code, which is not run"), ("good", None)):
        os.replace(tmp_path / f"{name}.bin", tmp_path / "pytorch_model.bin")
        if message:
            with pytest.raises(BadInput, match=message):
                HFFolder(tmp_path)
        else:
            assert HFFolder(tmp_path).read("a") == 1
    assert not (tmp_path / "harm").exists()


def test_old_files_with_views_and_of_older_versions(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    base = torch.arange(24.0).view(4, 6)
    tensors = {"whole": base, "part": base[1:3], "turned": base.t(), "shared": base[:, 2]}
    tensors |= {"none": torch.empty(0, 3), "one": torch.tensor(7)}
    file = tmp_path / "pytorch_model.bin"
    torch.save(tensors, file)
    read = HFFolder(tmp_path)
    for name, tensor in tensors.items():
        assert torch.equal(read.read(name), tensor) and read.meta(name).shape == tensor.shape
    torch.save(tensors, file, _use_new_zipfile_serialization=False)
    with pytest.raises(BadInput, match="not a file of weights"):
        HFFolder(tmp_path)
