"""The memory calculator: it agrees with real runs, its document is what it prints."""

from __future__ import annotations

import json
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

from megatron_lengen.errors import BadInput

ROOT = Path(__file__).parents[3]
SCRIPT = ROOT / "tools" / "benchmark" / "memory.py"


def run(monkeypatch, *arguments: str) -> None:
    """The tool in this process: importing takes longer than computing."""
    monkeypatch.setattr(sys, "argv", [str(SCRIPT), *arguments])
    runpy.run_path(str(SCRIPT))["main"]()


def test_predictions_hold_in_real_runs(tmp_path):
    """One and two processes; exact to a percent between steps, to a tenth on top."""
    file = tmp_path / "check.json"
    command = [sys.executable, "-W", "ignore", str(SCRIPT), "--check", "--quick"]
    done = subprocess.run([*command, "--json", str(file)], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    results = json.loads(file.read_text())["results"]
    assert {row["processes"] for row in results} == {1, 2}
    for row in results:
        assert row["state"] == pytest.approx(1, abs=0.01), row
        assert row["activations"] == pytest.approx(1, abs=0.1), row
        assert row["messages"] == pytest.approx(1, abs=0.001), row
        assert row["peak_bytes"] - row["state_bytes"] > 10e6  # enough to mean something


def test_one_layout_is_printed_and_written(tmp_path, monkeypatch, capsys):
    file = tmp_path / "layout.json"
    run(
        monkeypatch,
        "--preset", "smollm3-3b", "--gpus", "8", "--tensor-model-parallel-size", "2",
        "--sequence-parallel", "--pipeline-model-parallel-size", "2", "--global-batch-size", "16",
        "--use-distributed-optimizer", "--json", str(file),
    )  # fmt: skip
    first, last = json.loads(file.read_text())["results"]
    assert len(capsys.readouterr().out.splitlines()) == 3
    # 18 of 36 layers and the embedding table, both over two tensor-parallel ranks.
    layer = 2048 * (2048 + 2 * 512) + 2048 * 2048 + 3 * 2048 * 11008
    assert first["parameters"] == 18 * (layer // 2 + 2 * 2048) + 128256 // 2 * 2048
    assert last["parameters"] == first["parameters"] + 2048  # the final norm
    assert first["optimizer"] == 12 * first["parameters"] / 2


def test_the_document_shows_what_is_computed(monkeypatch, capsys):
    run(monkeypatch, "--layouts", "--markdown")
    text = (ROOT / "docs" / "scaling.md").read_text()
    for line in filter(None, capsys.readouterr().out.splitlines()):
        assert line in text, f"docs/scaling.md: run memory.py --layouts --markdown again: {line}"


@pytest.mark.parametrize(
    "arguments",
    [
        ("--preset", "gpt-5"),
        ("--gpus", "0"),
        ("--check", "--num-layers", "3"),
        ("--preset", "smollm3-3b", "--gpus", "8", "--tensor-model-parallel-size", "8"),
    ],
)
def test_bad_input_names_the_flag(arguments, monkeypatch):
    with pytest.raises(BadInput, match=r"^--"):
        run(monkeypatch, *arguments)
