"""What all evaluation tools share: quick help without torch, errors in one line."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]

HELP = """
import atexit, runpy, sys
sys.argv = ["tool", "--help"]
atexit.register(lambda: print("torch:", "torch" in sys.modules))
runpy.run_path({script!r}, run_name="__main__")
"""


def run(*command: str, **variables: str) -> subprocess.CompletedProcess:
    return subprocess.run(
        [sys.executable, *command],
        cwd=ROOT,
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONWARNINGS": "ignore", **variables},
    )


@pytest.mark.parametrize("tool", ["position_loss", "needle", "report"])
def test_help_is_quick_and_bad_flags_are_one_line(tool):
    script = f"tools/evaluate/{tool}.py"
    shown = run("-c", HELP.format(script=script))
    assert shown.returncode == 0 and "--output" in shown.stdout
    assert shown.stdout.endswith("torch: False\n")
    bad = run(script, "--nonsense")
    assert bad.returncode == 2 and bad.stdout == ""
    assert bad.stderr.startswith("error: ") and bad.stderr.count("\n") == 1


@pytest.mark.parametrize("tool", ["position_loss", "needle"])
def test_missing_model_is_one_line(tool, tmp_path):
    flags = ["--model", str(tmp_path / "none" / "x"), "--output", str(tmp_path / "out")]
    flags += ["--data", __file__] if tool == "position_loss" else ["--lengths", "64"]
    bad = run(f"tools/evaluate/{tool}.py", *flags)
    assert bad.returncode == 2 and bad.stderr.count("\n") == 1 and "--model" in bad.stderr
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("tool", ["position_loss", "needle"])
def test_a_mistyped_id_without_a_network_is_one_line(tool, tmp_path):
    """No minute of retries with a warning each, and no folder left behind."""
    output = tmp_path / "results" / tool
    flags = ["--model", "no-such/model", "--output", str(output)]
    flags += ["--data", __file__] if tool == "position_loss" else ["--lengths", "64"]
    nowhere = {"HF_ENDPOINT": "http://127.0.0.1:9", "HF_HOME": str(tmp_path / "cache")}
    bad = run(f"tools/evaluate/{tool}.py", *flags, **nowhere)
    assert bad.returncode == 2, bad.stderr
    assert bad.stderr.count("\n") == 1, bad.stderr
    assert "no folder no-such/model, and http://127.0.0.1:9 cannot be reached" in bad.stderr
    assert not (tmp_path / "results").exists()
