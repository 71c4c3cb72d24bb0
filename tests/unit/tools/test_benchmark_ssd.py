"""The benchmark of Mamba2: it runs, writes what it prints, and refuses bad sizes in one line."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[3] / "tools" / "benchmark" / "ssd.py"


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, str(SCRIPT), *arguments], capture_output=True, text=True)


def test_every_part_is_measured_and_written(tmp_path):
    file = tmp_path / "ssd.json"
    done = run(
        "--batch", "2", "--length", "70", "--hidden", "32", "--heads", "4", "--head-dim", "16",
        "--state", "8", "--dtype", "bf16", "--repeat", "1", "--no-compile",
        "--json", str(file),
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    report = json.loads(file.read_text())
    rows = {(row["pass"], row["part"], row["form"]): row for row in report["results"]}
    others = {"mixer": "Hugging Face", "scan": "ours, uncompiled", "convolution": "PyTorch"}
    passes = ("forward", "both")
    assert set(rows) == {
        (kind, part, form)
        for kind in passes
        for part, other in others.items()
        for form in ("ours", other, "limit")
    }
    assert all(row["seconds"] > 0 for row in rows.values())
    assert all(rows[kind, part, "ours"]["ratio"] == 1 for kind in passes for part in others)
    assert report["settings"]["length"] == 70
    assert len(done.stdout.splitlines()) == 2 + len(rows)


@pytest.mark.parametrize("arguments", [("--length", "0"), ("--groups", "5")])
def test_bad_input_is_one_line(arguments):
    done = run(*arguments)
    assert done.returncode == 2
    assert done.stderr.startswith("error: ") and arguments[0] in done.stderr
    assert done.stderr.count("\n") == 1
