"""Scripts that use Triton, each in a process of its own: Triton reads its settings at import."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

# Before it, the interpreter fails on scalars of NumPy 2.4.
INTERPRETER_SINCE = (3, 7)
INTERPRETED = {"TRITON_INTERPRET": "1"}


def output_of(script: Path, *arguments: object, **environment: str) -> str:
    """What a script prints; the test is skipped where Triton, or its interpreter, cannot run it."""
    found = pytest.importorskip("triton", reason="Triton is not installed").__version__
    if "TRITON_INTERPRET" in environment and _numbers(found) < INTERPRETER_SINCE:
        pytest.skip(f"Triton {found} cannot interpret kernels with this NumPy; 3.7 can")
    done = subprocess.run(
        [sys.executable, "-W", "ignore", str(script), *map(str, arguments)],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout


def last_line(text: str) -> str:
    """Of what a script printed."""
    return text.splitlines()[-1]


def _numbers(release: str) -> tuple[int, ...]:
    return tuple(map(int, release.split(".")[:2]))
