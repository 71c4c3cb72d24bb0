"""The Triton kernels of cross-entropy against the definition, in Triton's interpreter."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None, reason="Triton is not installed"
)
WORKER = Path(__file__).with_name("cross_entropy_kernels_worker.py")


def output_of(*arguments: str, **environment: str) -> str:
    done = subprocess.run(
        [sys.executable, "-W", "ignore", str(WORKER), *arguments],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout.splitlines()[-1]


def test_statistics_and_gradients_equal_the_definition():
    found = json.loads(output_of(TRITON_INTERPRET="1"))
    assert len(found) == 16
    for name, error in found.items():
        assert error <= (1e-6 if "float32" in name else 8e-3), name


@pytest.mark.parametrize("capability", ["80", "90"])
def test_they_compile_for_gpus(tmp_path, capability):
    assert 0 <= int(output_of(capability, TRITON_CACHE_DIR=str(tmp_path))) <= 48 * 1024
