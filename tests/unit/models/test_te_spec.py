"""Transformer Engine's spec without Transformer Engine: te_cases.py in a process of its own."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[3]


def test_models_over_a_stand_in() -> None:
    cases = Path(__file__).with_name("te_cases.py")
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", str(cases)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stdout + done.stderr
    counts = re.findall(r"(\d+) (passed|skipped|failed)", done.stdout)
    assert [kind for _, kind in counts] == ["passed"] and int(counts[0][0]) >= 36, done.stdout
