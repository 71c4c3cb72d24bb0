"""Averages that are refused: one line, and nothing is written."""

import json
import shutil

import pytest
import torch
from averaging_cases import (
    EDGES,
    LAST_NORM,
    TABLE,
    numbers,
    quiet,
    read_all,
    write_iteration,
    write_run,
)

from megatron_lengen.checkpoint_folder import write_tracker
from megatron_lengen.convert import averaging
from megatron_lengen.convert.averaging import average
from megatron_lengen.errors import BadInput


def refused(tmp_path, loads, message, **how):
    save = tmp_path / "refused"
    with pytest.raises(BadInput, match=message) as caught:
        average([str(load) for load in loads], save, **how, report=quiet)
    assert "\n" not in str(caught.value)
    assert not list(tmp_path.glob("*refused*"))


def test_bad_choices(tmp_path):
    root = write_run(tmp_path / "run", models=(10, 20))
    there = "iter_0000010, iter_0000020"
    refused(tmp_path, [root], f"--last: found 3; .*there: {there}", last=3)
    refused(tmp_path, [root], "--last: found 0", last=0)
    refused(tmp_path, [root], f"--iteration: found 15; .*there: {there}", iterations=[10, 15])
    refused(tmp_path, [root], "--load: found .* alone; allowed: .*--last K")
    refused(tmp_path, [root, root], "--last: needs one --load; found 2", last=2)
    refused(tmp_path, ["none/there", root], "one kind")
    refused(tmp_path, [root], "--weights: found 1; allowed: one for each of 2", last=2, weights=[1])
    refused(tmp_path, [root], "whose sum is above 0", last=2, weights=[1.0, -1.0])
    refused(tmp_path, [root], "whose sum is above 0", last=2, weights=[1.0, float("nan")])
    refused(tmp_path, [root], "whose sum is above 0", last=2, weights=[1e308, float("inf")])
    refused(tmp_path, [root], "--exponential: found 1.5", last=2, decay=1.5)
    refused(tmp_path, [root], "--iterations: found 10,10; .* once", iterations=[10, 10])
    # Iterations that an older branch left behind the tracked one do not count.
    write_tracker(root, "10")
    refused(tmp_path, [root], "--last: found 2; .*there: iter_0000010$", last=2)


def test_models_that_differ(tmp_path, hf_models):
    def run(name, tensors, **settings):
        root = write_run(tmp_path / name, models=(10,))
        write_iteration(root, 20, tensors, **settings)
        return root

    both = "iter_0000010 and .*iter_0000020 differ in "
    cases = {
        "settings": (run("a", numbers(2), sliding_window=8), "sliding_window: None and 8"),
        "missing": (run("b", {TABLE: numbers(2)[TABLE]}), f"{LAST_NORM}: there and missing"),
        "more": (run("c", {**numbers(2), "decoder.x": EDGES}), "decoder.x: missing and there"),
        "shape": (
            run("d", {**numbers(2), LAST_NORM: torch.ones(8)}),
            rf"{LAST_NORM}: \[7\] float32 and \[8\] float32",
        ),
        "dtype": (
            run("e", numbers(2, torch.bfloat16)),
            r".*weight: \[16, 7\] float32 and .* bfloat16",
        ),
    }
    for root, message in cases.values():
        refused(tmp_path, [root], both + message, last=2)
    refused(tmp_path, [root, hf_models / "step-0"], "allowed: models of one kind")
    other = shutil.copytree(hf_models / "step-1", tmp_path / "other")
    config = json.loads((other / "config.json").read_text())
    (other / "config.json").write_text(json.dumps({**config, "sliding_window": 16}))
    refused(tmp_path, [hf_models / "step-0", other], "differ in sliding_window: 8 and 16")
    # Who wrote the file is no difference.
    (other / "config.json").write_text(json.dumps({**config, "transformers_version": "4.53"}))
    average([str(hf_models / "step-0"), str(other)], tmp_path / "fine", report=quiet)


def test_damage_and_numbers_that_are_none(tmp_path, hf_models):
    root = write_run(tmp_path / "run")
    (file,) = (root / "iter_0000020").glob("*.distcp")
    whole = file.read_bytes()
    spoilt = bytearray(whole)
    at = whole.index(numbers(20)[LAST_NORM].numpy().tobytes())
    spoilt[at] ^= 1
    file.write_bytes(spoilt)
    refused(tmp_path, [root], rf"iter_0000020/{file.name}: {LAST_NORM} .*damaged", last=4)
    file.write_bytes(whole[:-100])
    refused(tmp_path, [root], f"iter_0000020/{file.name}: cut short", last=4)
    broken = numbers(20)
    broken[LAST_NORM][3] = torch.inf
    shutil.rmtree(root / "iter_0000020")
    write_iteration(root, 20, broken)
    write_tracker(root, "40")
    message = f"iter_0000020: {LAST_NORM} has numbers that are not finite"
    refused(tmp_path, [root], message, last=4)
    short = shutil.copytree(hf_models / "step-1", tmp_path / "short")
    data = (short / "model.safetensors").read_bytes()
    (short / "model.safetensors").write_bytes(data[:-10])
    refused(tmp_path, [hf_models / "step-0", short], "model.safetensors: damaged or cut short")
    large = numbers(1)
    large[LAST_NORM][0] = 3e38
    write_iteration(tmp_path / "large", 10, large)
    write_iteration(tmp_path / "large", 20, numbers(2))
    how = {"last": 2, "weights": [9.0, -8.0]}
    refused(tmp_path, [tmp_path / "large"], "does not fit into torch.float32", **how)


def test_targets(tmp_path, hf_models):
    root = write_run(tmp_path / "run", models=(10, 20))
    average([str(root)], tmp_path / "mean", last=2, report=quiet)
    before = read_all(tmp_path / "mean")
    for how in ({}, {"force": True}):
        with pytest.raises(BadInput, match=r"--save: .* (exists already|holds the iterations)"):
            average([str(root)], root, last=2, **how, report=quiet)
    with pytest.raises(BadInput, match=r"--save: .* exists already"):
        average([str(root)], tmp_path / "mean", last=1, report=quiet)
    assert torch.equal(read_all(tmp_path / "mean")[TABLE], before[TABLE])
    average([str(root)], tmp_path / "mean", last=1, force=True, report=quiet)
    assert torch.equal(read_all(tmp_path / "mean")[TABLE], numbers(20)[TABLE])
    loads = [str(hf_models / "step-0"), str(hf_models / "step-1")]
    with pytest.raises(BadInput, match="is one of --load"):
        average(loads, hf_models / "step-1", force=True, report=quiet)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["mean", "run"]


def test_room_is_looked_for_first(tmp_path, monkeypatch):
    root = write_run(tmp_path / "run", models=(10, 20))
    usage = shutil.disk_usage(tmp_path)._replace(free=100)
    monkeypatch.setattr(averaging.shutil, "disk_usage", lambda path: usage)
    refused(tmp_path, [root], "--save: .* GB needed, 1e-07 GB free", last=2)


def test_bad_input_is_one_line_and_code_2(tool, tmp_path):
    root = write_run(tmp_path / "run", models=(10,))
    for arguments, message in (
        (["--save", "x"], "the following arguments are required: --load"),
        (["--load", root, "--save", "x", "--last", 2], "--last: found 2"),
        (["--load", root, "--save", "x", "--last", 2, "--iterations", "1"], "--iterations: not"),
        (["--load", root, "--save", "x", "--iterations", "1,a"], "--iterations: invalid"),
        (["--load", root, "--save", "x", "--dtype", "fp8"], "--dtype: found fp8"),
    ):
        code, out, error = tool("average")(*arguments)
        assert code == 2 and out == ""
        assert error.startswith(f"error: {message}") and error.count("\n") == 1, error
