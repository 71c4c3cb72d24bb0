"""The norm's benchmark: it runs, writes what it prints, and refuses bad sizes in one line."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[3] / "tools" / "benchmark" / "norm.py"


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, str(SCRIPT), *arguments], capture_output=True, text=True)


def test_every_kind_is_measured_and_written(tmp_path):
    file = tmp_path / "norm.json"
    done = run(
        "--rows", "16", "--hidden", "24", "--dtype", "bf16", "--repeat", "2", "--threads", "1",
        "--no-compile", "--device", "cpu", "--json", str(file),
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    report = json.loads(file.read_text())
    rows = {(row["norm"], row["form"]): row for row in report["results"]}
    kinds, forms = ("plain", "pre_linear", "vpad"), ("ours", "pytorch")
    assert set(rows) == {(kind, form) for kind in kinds for form in forms} | {("copy", "pytorch")}
    assert all(row["seconds"] > 0 for row in rows.values())
    assert all(rows[kind, "ours"]["ratio"] == 1 for kind in kinds)
    # x and z forward; x, dz and dx backward: [16, 24] numbers of 2 bytes.
    copied = rows["copy", "pytorch"]["seconds"]
    for row in rows.values():
        assert row["gigabytes_per_second"] == pytest.approx(5 * 16 * 24 * 2 / row["seconds"] / 1e9)
        assert row["share_of_copy"] == pytest.approx(copied / row["seconds"])
    assert report["settings"]["rows"] == 16
    assert len(done.stdout.splitlines()) == 2 + len(rows)


@pytest.mark.parametrize("arguments", [("--rows", "0"), ("--rate", "1"), ("--dtype", "fp8")])
def test_bad_input_is_one_line(arguments):
    done = run(*arguments)
    assert done.returncode == 2
    assert done.stderr.startswith("error: ") and arguments[0] in done.stderr
    assert done.stderr.count("\n") == 1
