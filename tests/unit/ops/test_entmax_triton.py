"""The Triton kernels of entmax against the definition, in Triton's interpreter on the CPU."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from attention_cases import inputs, weighting_of
from triton_process import INTERPRETED, last_line, output_of

NAMES = (
    "one key", "grouped heads", "slopes", "slopes and window", "documents", "window", "long",
    "part of a row", "odd heads", "wide heads", "strided", "shared marks",
)  # fmt: skip

HERE = Path(__file__).parent


@pytest.fixture(scope="module")
def found() -> dict[str, float]:
    return json.loads(last_line(output_of(HERE / "entmax_kernels_worker.py", **INTERPRETED)))


@pytest.mark.parametrize("name", NAMES)
def test_values_and_gradients_equal_the_definition(found, name):
    assert found[name] <= 2e-5


@pytest.mark.parametrize(
    "name, tolerance", [("narrow heads", 3e-3), ("beyond 32 bits", 3e-3), ("bf16", 2e-2)]
)
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


@pytest.mark.parametrize(
    "capability, channels, dtype, alpha",
    [(90, 64, "bfloat16", 1.5), (80, 128, "bfloat16", 1.3), (80, 64, "float32", 2.0)],
)
def test_they_compile_for_gpus(tmp_path, capability, channels, dtype, alpha):
    """In the shared memory that a program has from Ampere's small GPUs on."""
    worker, cache = HERE / "entmax_compile_worker.py", {"TRITON_CACHE_DIR": str(tmp_path)}
    memory = last_line(output_of(worker, capability, channels, dtype, alpha, **cache))
    assert 0 < int(memory) <= 99 * 1024
