"""The copy-task recipe, end to end at a few iterations: trained, evaluated, reported, resumed."""

from __future__ import annotations

import json
import os
import signal
import statistics
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "examples" / "copy_mamba2.sh"
NAMES = ["wd", "no_wd", "pl_d", "vpad"]


def start(out: Path, **variables: str) -> subprocess.Popen[str]:
    """Start the script with this test's interpreter and so few steps that it takes a minute."""
    small = {"STEPS": "3", "SAMPLES": "4", "SEEDS": "5", "RUNS": "no_wd vpad"}
    clean = {k: v for k, v in os.environ.items() if not k.startswith(("RANK", "WORLD", "SLURM"))}
    environment = clean | small | {"PYTHON": sys.executable, "OUT": str(out)} | variables
    pipe = subprocess.PIPE
    return subprocess.Popen(
        ["bash", str(SCRIPT)], env=environment, stdout=pipe, stderr=pipe, text=True
    )


def run(out: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    """Start it and wait."""
    running = start(out, **variables)
    said = running.communicate(timeout=600)
    return subprocess.CompletedProcess(running.args, running.returncode, *said)


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """Two settings side by side, then a second seed of one of them."""
    out = tmp_path_factory.mktemp("copy") / "run"
    done = run(out)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    again = run(out, SEEDS="5 6", RUNS="vpad", JOBS="1")
    assert again.returncode == 0, again.stdout[-3000:] + again.stderr[-3000:]
    # The first is done; lines of a single job have no name before them.
    assert "vpad, seed 6" in again.stdout and "vpad, seed 5" not in again.stdout
    return out, done.stdout


def test_two_settings_at_once_and_a_report(finished: tuple[Path, str]) -> None:
    _, printed = finished
    assert "[no_wd-5] saved" in printed and "[vpad-5] saved" in printed
    table = printed[printed.index("seeds ") :].splitlines()
    assert table[0].split() == ["seeds", "1", "1"]
    assert table[2].startswith("exact match at 20 (%)")


def test_the_report_is_mean_and_deviation_over_seeds(finished: tuple[Path, str]) -> None:
    out, _ = finished
    report = json.loads((out / "report.json").read_text())
    assert list(report["variants"]) == ["vpad"] and report["train_lengths"] == [10, 20]
    measured = [
        json.loads((out / f"vpad-{seed}" / "copy_task" / "results.json").read_text())["lengths"]
        for seed in (5, 6)
    ]
    for index, entry in enumerate(report["variants"]["vpad"]["lengths"]):
        for score in ("exact_match", "token_accuracy", "forced_character_accuracy"):
            values = [lengths[index][score] for lengths in measured]
            assert entry[score]["values"] == values
            assert entry[score]["mean"] == pytest.approx(sum(values) / 2)
            assert entry[score]["std"] == pytest.approx(statistics.stdev(values))
    assert "| VPAD |" in (out / "report.md").read_text()
    assert (out / "report.png").stat().st_size > 10_000


def test_the_settings_differ_in_dropout_alone(finished: tuple[Path, str]) -> None:
    out, _ = finished
    found, losses = {}, {}
    for name in ("no_wd-5", "vpad-5", "vpad-6"):
        description = json.loads((out / name / "iter_0000003" / "lengen.json").read_text())
        arguments = description["arguments"]
        model = arguments["model"]
        found[name] = (
            arguments["optimizer"]["weight_decay"],
            model["dropout_variant"],
            model["dropout_rate"],
            model["seed"],
        )
        losses[name] = json.loads((out / name / "metrics.jsonl").open().readline())["lm_loss"]
    assert found == {
        "no_wd-5": (0, "none", 0, 5),
        "vpad-5": (0, "vpad", 0.1, 5),
        "vpad-6": (0, "vpad", 0.1, 6),
    }
    assert len(set(losses.values())) == 3


def test_a_signal_lets_both_models_save(tmp_path: Path) -> None:
    running = start(tmp_path, STEPS="100000")
    assert running.stdout is not None
    waiting = {"[no_wd-5] 1 processes", "[vpad-5] 1 processes"}
    for line in running.stdout:
        waiting = {words for words in waiting if not line.startswith(words)}
        if not waiting:
            break
    running.send_signal(signal.SIGTERM)
    said, errors = running.communicate(timeout=120)
    assert running.returncode == 0, said + errors
    assert "started again, this recipe goes on here" in errors and "report" not in said
    for name in ("no_wd-5", "vpad-5"):
        saved = (tmp_path / name / "latest_checkpointed_iteration.txt").read_text()
        assert 0 < int(saved) < 100000


def test_the_paper_run_is_printed_whole() -> None:
    every = {"SEEDS": "1 2", "RUNS": " ".join(NAMES), "STEPS": ""}
    done = run(Path("runs/x"), PRESET="45m", DRY_RUN="1", **every)
    assert done.returncode == 0, done.stderr
    lines = [line for line in done.stdout.splitlines() if "pretrain_mamba.py" in line]
    assert len(lines) == 8
    for words in (
        "--train-iters 19531", "--num-layers 12", "--hidden-size 768", "--mamba-head-dim 64",
        "--mamba-state-dim 128", "--untie-embeddings-and-output-weights",
        "--copy-task 50-100", "--global-batch-size 256", "--lr 1e-3", "--lr-decay-style cosine",
        "--lr-warmup-fraction 0.05", "--adam-beta2 0.95", "--clip-grad 1.0",
    ):  # fmt: skip
        assert all(words in line for line in lines), words
    assert ["--weight-decay 0.1" in line for line in lines[:4]] == [True, False, False, False]
    assert "--dropout-variant pre_linear --dropout-rate 0.1" in lines[2]
    assert "--dropout-variant vpad --dropout-rate 0.1" in lines[3]
    assert "--seed 1" in lines[0] and "--seed 2" in lines[4]
    assert "copy_task.py --model runs/x/vpad-2" in done.stdout


@pytest.mark.parametrize(
    ("variables", "message"),
    [
        ({"PRESET": "7b"}, "PRESET: found 7b"),
        ({"RUNS": "wd dropout"}, "RUNS: found dropout"),
        ({"SEEDS": "one"}, "SEEDS: found one"),
        ({"JOBS": "0"}, "JOBS: found 0"),
    ],
)
def test_bad_input_is_one_line(variables: dict[str, str], message: str) -> None:
    done = run(Path("runs/x"), DRY_RUN="1", **variables)
    assert done.returncode == 2
    assert message in done.stderr and done.stderr.count("\n") == 1
