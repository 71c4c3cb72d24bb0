"""The Triton kernels of cross-entropy against the definition, in Triton's interpreter."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from triton_process import INTERPRETED, last_line, output_of

WORKER = Path(__file__).with_name("cross_entropy_kernels_worker.py")


def test_statistics_and_gradients_equal_the_definition():
    found = json.loads(last_line(output_of(WORKER, **INTERPRETED)))
    assert len(found) == 16
    for name, error in found.items():
        assert error <= (1e-6 if "float32" in name else 8e-3), name


@pytest.mark.parametrize("capability", ["80", "90"])
def test_they_compile_for_gpus(tmp_path, capability):
    memory = last_line(output_of(WORKER, capability, TRITON_CACHE_DIR=str(tmp_path)))
    assert 0 <= int(memory) <= 48 * 1024
