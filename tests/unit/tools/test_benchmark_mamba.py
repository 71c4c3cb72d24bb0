"""The benchmark of whole Mamba2 models: the two are the same, it writes what it prints."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[3] / "tools" / "benchmark" / "mamba.py"


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, str(SCRIPT), *arguments], capture_output=True, text=True)


def test_both_kinds_of_work_are_measured_and_written(tmp_path):
    """It stops where the two models give other logits."""
    file = tmp_path / "mamba.json"
    done = run("--layers", "2", "--batch", "2", "--length", "20", "--repeat", "1", "--vpad", "0.1",
               "--json", str(file))  # fmt: skip
    assert done.returncode == 0, done.stderr
    report = json.loads(file.read_text())
    rows = {(row["work"], row["model"]): row for row in report["results"]}
    models = ("ours", "Hugging Face", "ours, VPAD", "limit")
    assert set(rows) == {(work, model) for work in ("prompt", "training") for model in models}
    assert all(row["tokens_per_second"] > 0 for row in rows.values())
    assert rows["training", "ours"]["ratio"] == 1
    assert report["settings"]["length"] == 20
    assert len(done.stdout.splitlines()) == 2 + len(rows)


@pytest.mark.parametrize(
    "arguments, words",
    [
        (["--layers", "0"], "--layers: found 0; allowed: 1 or more"),
        (["--hidden", "100"], "--hidden: found 100; allowed: divisors of the heads' 256 channels"),
    ],
)
def test_bad_sizes(arguments, words):
    done = run(*arguments)
    assert done.returncode == 2 and words in done.stderr and done.stderr.count("\n") == 1
