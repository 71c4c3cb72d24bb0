"""The report on the copy task: mean and deviation over seeds, and nothing mixed that differs."""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
from pathlib import Path

import pytest

from megatron_lengen.errors import BadInput
from megatron_lengen.evaluation.copy_report import load_run, summarize, write_report
from megatron_lengen.evaluation.copy_task import SCORES

ROOT = Path(__file__).resolve().parents[3]


def write_run(folder: Path, base: float, samples: int = 10, metrics: bool = True) -> Path:
    """Results at two lengths: scores base, base + 1, ... and half of them."""
    (folder / "copy_task").mkdir(parents=True)
    lengths = [
        {
            "length": length,
            "samples": samples,
            **{s: (base + i) * factor for i, s in enumerate(SCORES)},
        }
        for length, factor in ((30, 1.0), (60, 0.5))
    ]
    results = {
        "settings": {"lengths": [30, 60], "samples": samples, "seed": 42},
        "train_lengths": [10, 20],
        "lengths": lengths,
    }
    (folder / "copy_task" / "results.json").write_text(json.dumps(results))
    if metrics:
        (folder / "metrics.jsonl").write_text('{"iteration": 1, "lm_loss": 2.5}\n')
    return folder


def test_mean_and_deviation_over_seeds(tmp_path):
    values = [10.0, 40.0, 70.5]
    runs = [load_run(write_run(tmp_path / str(i), base)) for i, base in enumerate(values)]
    found = summarize(runs)
    assert found["seeds"] == 3 and found["training_loss"]["mean"] == 2.5
    long = found["lengths"][1]
    assert long["length"] == 60
    assert long["exact_match"]["values"] == [5.0, 20.0, 35.25]
    assert long["exact_match"]["mean"] == pytest.approx((5.0 + 20.0 + 35.25) / 3)
    assert long["exact_match"]["std"] == pytest.approx(statistics.stdev([5.0, 20.0, 35.25]))
    single = summarize(runs[:1])["lengths"][0]["token_accuracy"]
    assert single == {"mean": 11.0, "std": None, "values": [11.0]}
    bare = load_run(write_run(tmp_path / "bare", 1.0, metrics=False))
    assert summarize([*runs, bare])["training_loss"] is None


def test_report(tmp_path):
    runs = {
        "vpad": [load_run(write_run(tmp_path / f"v{i}", 50.0 + 10 * i)) for i in range(2)],
        "mine": [load_run(write_run(tmp_path / "m", 20.0))],
        "wd": [load_run(write_run(tmp_path / "w", 30.0))],
    }
    (tmp_path / "out").mkdir()
    text = write_report(tmp_path / "out", runs, "A title")
    lines = text.splitlines()
    assert lines[0].split() == ["WD", "VPAD", "mine"]
    assert lines[1].split() == ["seeds", "1", "2", "1"]
    (exact,) = [line for line in lines if line.startswith("exact match at 30 (%)")]
    assert exact.split()[-5:] == ["30.0", "55.0", "±", "7.1", "20.0"]
    markdown = (tmp_path / "out" / "report.md").read_text()
    assert "# A title" in markdown and "sources of 10 to 20 letters" in markdown
    assert "| exact match at 60 (%) | 15.0 | 27.5 ± 3.5 | 10.0 |" in markdown
    content = json.loads((tmp_path / "out" / "report.json").read_text())
    assert content["samples"] == 10 and list(content["variants"]) == ["wd", "vpad", "mine"]
    assert (tmp_path / "out" / "report.png").stat().st_size > 10_000


def test_other_examples_are_not_set_beside(tmp_path):
    runs = {"wd": [load_run(write_run(tmp_path / "a", 1.0))]}
    runs["vpad"] = [load_run(write_run(tmp_path / "b", 1.0, samples=20))]
    with pytest.raises(BadInput, match=r"\[30, 60\], 10, 42.* and .*\[30, 60\], 20, 42"):
        write_report(tmp_path, runs, "x")
    with pytest.raises(BadInput, match=r"has no copy_task/results\.json"):
        load_run(tmp_path)


def test_tool(tmp_path):
    folder = write_run(tmp_path / "wd-1", 12.0)

    def run(*arguments: str) -> subprocess.CompletedProcess:
        command = [sys.executable, "tools/evaluate/copy_report.py", *arguments]
        return subprocess.run(command, cwd=ROOT, capture_output=True, text=True)

    done = run("--runs", f"wd={folder}", f"wd={folder}", "--output", str(tmp_path / "out"))
    assert done.returncode == 0, done.stderr
    assert "12.0 ± 0.0" in done.stdout
    failed = run("--runs", "wd", "--output", str(tmp_path / "out"))
    assert failed.returncode == 2 and failed.stderr.count("\n") == 1
