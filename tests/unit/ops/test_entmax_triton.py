"""The Triton kernels of entmax against the definition, in Triton's interpreter on the CPU."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from attention_cases import inputs, weighting_of

NAMES = (
    "one key", "grouped heads", "slopes", "slopes and window", "documents", "window", "long",
    "part of a row", "odd heads", "wide heads", "strided", "shared marks",
)  # fmt: skip

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None, reason="Triton is not installed"
)


@pytest.fixture(scope="module")
def found() -> dict[str, float]:
    worker = Path(__file__).with_name("entmax_kernels_worker.py")
    done = subprocess.run(
        [sys.executable, "-W", "ignore", str(worker)],
        env={**os.environ, "TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize("name", NAMES)
def test_values_and_gradients_equal_the_definition(found, name):
    assert found[name] <= 2e-5


@pytest.mark.parametrize("name, tolerance", [("narrow heads", 3e-3), ("bf16", 2e-2)])
def test_16_bits(found, name, tolerance):
    assert found[name] <= tolerance


def test_blocks_without_weight_are_left_out(found):
    """A slope of 4 leaves the query's own block and the one before it."""
    assert 0.2 < found["share of blocks"] <= (8 + 7) / 36


def test_another_document_changes_no_bit(found):
    assert found["documents leak"] is False


def test_what_the_kernels_do_not_serve_is_refused():
    from megatron_lengen.ops.entmax_triton import entmax_attention

    for weighting in (weighting_of("", 4), weighting_of("dropout", 4, 1.5)):
        with pytest.raises(ValueError, match="entmax without dropout"):
            entmax_attention(*inputs(4, 4, 4), weighting)


def test_a_program_has_the_same_share_on_every_call():
    """Sizes depend on the width of heads and numbers alone, and are what Triton can take."""
    from megatron_lengen.ops.entmax_triton import blocks_for

    for channels in (8, 64, 80, 128, 192, 256):
        for dtype in (torch.float32, torch.bfloat16, torch.float16):
            blocks = blocks_for(channels, dtype)
            assert all(size >= 16 and size & (size - 1) == 0 for size in blocks[:2])
