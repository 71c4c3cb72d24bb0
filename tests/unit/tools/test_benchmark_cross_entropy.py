"""The benchmark of the loss: it runs, writes what it prints, and refuses bad input in one line."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

SCRIPT = Path(__file__).parents[3] / "tools" / "benchmark" / "cross_entropy.py"


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, str(SCRIPT), *arguments], capture_output=True, text=True)


def test_every_way_is_measured_and_written(tmp_path):
    file = tmp_path / "loss.json"
    done = run(
        "--tokens", "300", "--hidden", "16", "--vocabulary", "2000", "--repeat", "1",
        "--json", str(file),
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    report = json.loads(file.read_text())
    rows = {(row["pass"], row["form"]): row for row in report["results"]}
    forms = ("ours", "PyTorch", "Megatron-Core", "limit")
    assert set(rows) == {(kind, form) for kind in ("forward", "both") for form in forms}
    assert all(row["seconds"] > 0 for row in rows.values())
    assert rows["forward", "ours"]["ratio"] == rows["both", "ours"]["ratio"] == 1
    logits = 4 * 300 * 2000
    assert rows["both", "PyTorch"]["bytes"] > 2 * logits
    # One chunk of logits, gradients of weight (and a part of it, on its way) and features.
    assert rows["both", "ours"]["bytes"] < 1.1 * (logits + 4 * 16 * 4300) + 4 * 300 * 10
    assert report["settings"]["tokens"] == 300
    assert len(done.stdout.splitlines()) == 2 + len(rows)


@pytest.mark.parametrize("arguments", [("--tokens", "0"), ("--device", "cuda")])
def test_bad_input_is_one_line(arguments):
    if "cuda" in arguments and torch.cuda.is_available():
        pytest.skip("there is a GPU")
    done = run(*arguments)
    assert done.returncode == 2
    assert done.stderr.startswith("error: ") and arguments[0] in done.stderr
    assert done.stderr.count("\n") == 1
