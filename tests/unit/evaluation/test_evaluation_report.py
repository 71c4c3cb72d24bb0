"""The report: numbers arrive unchanged in JSON, Markdown and the table; pictures are drawn."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from megatron_lengen.errors import BadInput
from megatron_lengen.evaluation.report import final_metrics, load_run, settings_notes, write_report

ROOT = Path(__file__).resolve().parents[3]


def write_run(folder: Path, loss: float, recall: float, digits: int = 7) -> None:
    """A finished model's folder: two spans of positions, two needle lengths, a metrics file."""

    def part(start: int, end: int, mean: float) -> dict:
        return {"start": start, "end": end, "mean": mean, "stderr": 0.01, "documents": 4}

    position_loss = {
        "settings": {"task": "position_loss", "model": str(folder), "max_length": 512},
        "train_length": 256,
        "windows": [part(i, i + 128, loss + i / 1000) for i in range(0, 512, 128)],
        "spans": [part(0, 256, loss), part(256, 511, loss + 0.25)],
        "documents": {"used": 4, "read": 5, "too_short": 1},
    }
    needle = {
        "settings": {"task": "needle", "model": str(folder), "samples": 20, "digits": digits},
        "train_length": 256,
        "lengths": [
            {"length": n, "recall": recall / k, "stderr": 1.0, "token_accuracy": 90.0}
            for k, n in enumerate((256, 512), 1)
        ],
    }
    for task, content in (("position_loss", position_loss), ("needle", needle)):
        (folder / task).mkdir(parents=True)
        (folder / task / "results.json").write_text(json.dumps(content))
    rows = [{"iteration": i, "consumed_tokens": 10 * i, "lm_loss": 5 - i} for i in (1, 2, 3)]
    rows.insert(2, {"iteration": 2, "lm_loss": loss + 0.5, "validation": True})
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def test_numbers_arrive(tmp_path):
    for name, loss, recall in (("vpad", 1.5, 80.0), ("no_wd", 1.25, 50.0), ("wd", 1.125, 20.0)):
        write_run(tmp_path / name, loss, recall)
    runs = {name: load_run(tmp_path / name) for name in ("vpad", "no_wd", "wd")}
    text = write_report(tmp_path / "out", runs, title="Three models")
    lines = {line[:31].strip(): line[31:].split() for line in text.splitlines()}
    assert lines[""] == ["WD", "no-WD", "VPAD"]
    assert lines["validation loss"] == ["1.6250", "1.7500", "2.0000"]
    assert lines["loss at positions 256-510"] == ["1.3750", "1.5000", "1.7500"]
    assert lines["needle recall at 512 (%)"] == ["10.0", "25.0", "40.0"]

    report = json.loads((tmp_path / "out" / "report.json").read_text())
    assert list(report["models"]) == ["wd", "no_wd", "vpad"]
    assert report["train_length"] == 256
    assert report["models"]["vpad"]["needle"]["lengths"][0]["recall"] == 80.0
    assert report["models"]["wd"]["position_loss"]["spans"][1]["mean"] == 1.375
    assert report["models"]["no_wd"]["training"]["lm_loss"] == 2
    written = (tmp_path / "out" / "report.md").read_text()
    assert "| loss at positions 0-255 | 1.1250 | 1.2500 | 1.5000 |" in written
    assert "differ" not in written and "position_loss: 4 documents" in written
    assert (tmp_path / "out" / "report.png").read_bytes()[:4] == b"\x89PNG"


def test_picture_has_a_line_per_model(tmp_path, monkeypatch):
    import matplotlib.pyplot as plt

    for name in ("wd", "vpad"):
        write_run(tmp_path / name, 1.0, 50.0)
    drawn = []
    monkeypatch.setattr(plt, "close", drawn.append)
    write_report(tmp_path / "out", {name: load_run(tmp_path / name) for name in ("wd", "vpad")})
    left, right = drawn[0].axes
    assert [line.get_label() for line in left.lines] == ["WD", "VPAD", "training length (256)"]
    assert list(left.lines[0].get_xdata()) == [64, 192, 320, 448]
    assert len({line.get_color() for line in left.lines}) == 3
    assert [list(line.get_xdata()) for line in right.lines if len(line.get_xdata()) == 2][:1] == [
        [256, 512]
    ]
    monkeypatch.undo()
    plt.close("all")


def test_models_with_parts_only(tmp_path):
    write_run(tmp_path / "wd", 1.0, 50.0)
    write_run(tmp_path / "other", 1.0, 50.0)
    (tmp_path / "other" / "needle" / "results.json").unlink()
    (tmp_path / "bare").mkdir()
    (tmp_path / "bare" / "metrics.jsonl").write_text('{"iteration": 1, "lm_loss": 2.0}\n')
    names = ("bare", "other", "wd")
    text = write_report(tmp_path / "out", {name: load_run(tmp_path / name) for name in names})
    assert text.splitlines()[0].split() == ["WD", "bare", "other"]
    assert "needle recall at 256 (%)" in text
    assert text.splitlines()[-1].split()[-3:] == ["90.0", "-", "-"]
    only = write_report(tmp_path / "out", {"bare": load_run(tmp_path / "bare")})
    assert "loss at" not in only and "2.0000" in only
    with pytest.raises(BadInput, match="has none of"):
        load_run(tmp_path / "out")


def test_differing_settings_are_named(tmp_path):
    write_run(tmp_path / "wd", 1.0, 50.0)
    write_run(tmp_path / "vpad", 1.0, 50.0, digits=5)
    notes = settings_notes({name: load_run(tmp_path / name) for name in ("wd", "vpad")})
    assert [note for note in notes if "differ" in note] == [
        "needle: these settings differ between models: digits"
    ]


def test_training_lengths_must_agree(tmp_path):
    write_run(tmp_path / "wd", 1.0, 50.0)
    with pytest.raises(BadInput, match=r"--train-length: found 256, 512"):
        write_report(tmp_path / "out", {"wd": load_run(tmp_path / "wd")}, train_length=512)


def test_metrics_after_a_resume_and_a_kill(tmp_path):
    path = tmp_path / "metrics.jsonl"
    rows = [{"iteration": i, "lm_loss": float(i)} for i in range(1, 31)]
    rows += [{"iteration": i, "lm_loss": 100.0 + i} for i in range(29, 32)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows) + '{"iteration": 32, "lm_l')
    found = final_metrics(path)
    assert (found["iteration"], found["lm_loss"], found["recent_iterations"]) == (31, 131.0, 20)
    expected = (sum(range(12, 29)) + 129 + 130 + 131) / 20
    assert found["lm_loss_recent"] == pytest.approx(expected)
    assert found["validation_loss"] is None
    path.write_text('{"iteration": 1, "lm_l\n{"iteration": 2, "lm_loss": 1.0}\n')
    with pytest.raises(BadInput, match=r"metrics\.jsonl:1"):
        final_metrics(path)


def test_tool(tmp_path):
    write_run(tmp_path / "wd", 1.0, 50.0)
    write_run(tmp_path / "vpad", 1.5, 75.0)

    def run(*arguments: str) -> subprocess.CompletedProcess:
        command = [sys.executable, "tools/evaluate/report.py", *arguments]
        return subprocess.run(command, cwd=ROOT, capture_output=True, text=True)

    runs = [f"wd={tmp_path / 'wd'}", f"vpad={tmp_path / 'vpad'}"]
    done = run("--runs", *runs, "--output", str(tmp_path / "out"))
    assert done.returncode == 0, done.stderr
    assert "VPAD" in done.stdout and "1.7500" in done.stdout
    assert sorted(p.name for p in (tmp_path / "out").iterdir()) == [
        "report.json",
        "report.md",
        "report.png",
    ]
    for bad in (["wd"], [f"wd={tmp_path}"], runs[:1] * 2):
        failed = run("--runs", *bad, "--output", str(tmp_path / "out"))
        assert failed.returncode == 2 and failed.stderr.count("\n") == 1, failed.stderr
