"""The main recipe, end to end at a few iterations: trained, converted, evaluated, reported."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "examples" / "smollm3_cpt_vpad.sh"
NAMES = ["wd", "no_wd", "vpad"]


def run(out: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run the script with the interpreter of this test and so few steps that it takes a minute."""
    small = {"RECALL_ITERS": "4", "BASE_ITERS": "4", "CPT_ITERS": "3"}
    small |= {"DOCUMENTS": "2", "SAMPLES": "2"}
    clean = {k: v for k, v in os.environ.items() if not k.startswith(("RANK", "WORLD", "SLURM"))}
    environment = clean | small | {"PYTHON": sys.executable, "OUT": str(out)} | variables
    return subprocess.run(
        ["bash", str(SCRIPT)], env=environment, capture_output=True, text=True, timeout=600
    )


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    out = tmp_path_factory.mktemp("recipe") / "run"
    done = run(out)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return out, done.stdout


def test_a_report_of_three_models_with_a_picture(finished: tuple[Path, str]) -> None:
    out, printed = finished
    report = json.loads((out / "report.json").read_text())
    assert list(report["models"]) == NAMES
    text = (out / "report.md").read_text()
    for name, label in zip(NAMES, ("WD", "no-WD", "VPAD"), strict=True):
        folder = out / name
        losses = json.loads((folder / "position_loss" / "results.json").read_text())
        assert losses["settings"]["max_length"] == 16 * 256
        recall = json.loads((folder / "needle" / "results.json").read_text())
        assert recall["settings"]["lengths"] == [256, 512, 1024, 2048, 4096]
        assert f"| {label} |" in text and f" {label}" in printed
    assert (out / "report.png").stat().st_size > 10_000


def test_the_models_differ_in_weight_decay_and_dropout_alone(finished: tuple[Path, str]) -> None:
    out, _ = finished
    found = {}
    for name in NAMES:
        description = json.loads((out / name / "iter_0000003" / "lengen.json").read_text())
        arguments = description["arguments"]
        model = arguments["model"]
        found[name] = (
            arguments["optimizer"]["weight_decay"],
            model["dropout_variant"],
            model["dropout_rate"],
        )
        assert model["sliding_window"] == 256
    assert found == {"wd": (0.1, "none", 0), "no_wd": (0, "none", 0), "vpad": (0, "vpad", 0.1)}
    losses = {
        name: [json.loads(row)["lm_loss"] for row in (out / name / "metrics.jsonl").open()]
        for name in NAMES
    }
    # The first step sees the same weights and the same rows; only dropout can change its loss.
    assert losses["wd"][0] == losses["no_wd"][0] != losses["vpad"][0]


def test_the_exported_models_load_as_unmodified_ones(finished: tuple[Path, str]) -> None:
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(finished[0] / "vpad" / "huggingface")
    assert config.model_type == "smollm3"
    assert config.no_rope_layers == [1, 1, 1, 0]
    assert config.layer_types == ["sliding_attention"] * 3 + ["full_attention"]
    assert config.sliding_window == 256


def test_started_again_it_trains_nothing(finished: tuple[Path, str]) -> None:
    out, _ = finished
    before = {path: path.stat().st_mtime_ns for path in out.rglob("*.distcp")}
    done = run(out)
    assert done.returncode == 0 and "tokens/s" not in done.stdout
    assert before == {path: path.stat().st_mtime_ns for path in out.rglob("*.distcp")}


def test_the_paper_run_is_printed_whole() -> None:
    done = run(
        Path("runs/x"),
        PRESET="3b",
        BASE="some/model",
        DATA="data/dclm",
        DRY_RUN="1",
        CPT_ITERS="954",
    )
    assert done.returncode == 0
    training = next(line for line in done.stdout.splitlines() if "pretrain_gpt.py" in line)
    for words in (
        "--train-iters 954", "--global-batch-size 256", "--seq-length 4096", "--lr 2e-5",
        "--lr-decay-style constant", "--sliding-window 4096", "--window-attn-skip-freq 4",
        "--no-rope-freq 4", "--dropout-variant vpad --dropout-rate 0.3", "--weight-decay 0.0",
        "--adam-beta2 0.95", "--clip-grad 1.0", "--bf16",
    ):  # fmt: skip
        assert words in training
    assert "to-megatron --load some/model --revision stage3-step-4720000" in done.stdout


@pytest.mark.parametrize(
    ("variables", "message"),
    [
        ({"PRESET": "7b"}, "PRESET: found 7b"),
        ({"PRESET": "3b"}, "BASE: not given; PRESET=3b needs it"),
    ],
)
def test_bad_input_is_one_line(variables: dict[str, str], message: str) -> None:
    done = run(Path("runs/x"), DRY_RUN="1", **variables)
    assert done.returncode == 2
    assert message in done.stderr and done.stderr.count("\n") == 1
