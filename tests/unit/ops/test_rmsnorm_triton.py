"""The Triton kernels of the norm against float64, in Triton's interpreter on the CPU."""

from __future__ import annotations

import ast
import json
import re
from pathlib import Path

import pytest
from triton_process import INTERPRETED, last_line, output_of

pytest.importorskip("triton", reason="Triton is not installed")

from megatron_lengen.ops import rmsnorm_triton
from megatron_lengen.ops.rmsnorm_triton import Tile, backward_tile, forward_tile, programs_for

HERE = Path(__file__).parent


@pytest.fixture(scope="module")
def found() -> dict:
    return json.loads(last_line(output_of(HERE / "norm_kernels_worker.py", **INTERPRETED)))


def check(found: dict, *prefixes: str, count: int) -> None:
    """Errors of `count` cases are those of roundings; what was asked is true."""
    names = [name for name in found if name.startswith(prefixes)]
    assert len(names) == count
    for name in names:
        value = found[name]
        if isinstance(value, bool):
            assert value, name
        else:
            # The interpreter cuts bf16 off instead of rounding it.
            tolerance = 2e-2 if "bfloat16" in name else 2e-3 if "float16" in name else 2e-6
            assert value <= tolerance, name


def test_every_variant_and_derivative(found):
    check(found, "norm pre", "norm vpad", "norm uneven", "affine", count=2 * (2 * 4 + 3 * 2))


def test_every_dtype(found):
    check(found, "norm torch", count=3 * 4)


def test_the_residual_addition(found):
    check(found, "residual torch", count=3 * 4)
    check(found, "residual, output", count=2)


def test_widths_and_rows(found):
    check(found, "width", "one row", "no rows", "plain norm", count=4 + 3)


def test_strides(found):
    check(found, "strides", count=8)


def test_rows_of_a_constant_are_their_mean(found):
    check(found, "constant", count=6 + 3)


def test_vpad_of_rows_of_any_size(found):
    check(found, "scale", count=5)


def test_rows_wider_than_a_tile_and_programs_with_several(found):
    check(found, "several tiles", "wide", count=1 + 1 + 3 + 3)


def test_masks_are_bit_by_bit_those_of_plain_python(found):
    check(found, "mask", count=4 + 1)


def test_a_variant_with_a_twin_takes_one_kernel(found):
    for name in ("None", "pre_linear", "pre_norm", "vpad", "uneven with twin"):
        assert found[f"kernels {name}"] == ["forward"]
    assert found["kernels vpad, derivatives"] == ["forward"]
    assert found["kernels uneven"] == ["forward", "apply"]


def test_compiled_layers_launch_them_as_others_do(found):
    assert found["compiled"]


@pytest.mark.parametrize("tile_for, most", [(forward_tile, 48), (backward_tile, 16)])
@pytest.mark.parametrize(
    "d", [1, 8, 9, 64, 257, 576, 1536, 1537, 2048, 2560, 4096, 5120, 12288, 16384, 65536]
)
def test_tiles_hold_rows_in_few_registers_and_fill_warps(tile_for, most, d):
    tile = tile_for(d)
    of_thread = tile.rows * tile.features * tile.parts / (32 * tile.warps)
    assert 8 <= of_thread <= most
    assert tile.holds(d) or tile.rows == 1
    # No part is empty, and no tile of a row is twice what it needs to be.
    assert (tile.parts - 1) * tile.features < d and tile.features < 2 * max(d, 5)


def test_programs_are_as_many_as_the_processors_hold_or_there_are_tiles():
    assert programs_for(5, Tile(2, 2048, 8), 132, 512) == 3
    assert programs_for(10**6, Tile(1, 2048, 4), 132, 512) == 132 * 4
    assert programs_for(10**6, Tile(1, 2048, 4), 132, 384) == 132 * 3
    assert programs_for(10**6, Tile(1, 8192, 16), 132, 384) == 132


def test_no_kernel_returns_none():
    """Triton 3.6 refuses to compile what later versions and the interpreter take."""
    files = sorted(Path(rmsnorm_triton.__file__).parent.glob("*_kernels.py"))
    found = {}
    for file in files:
        functions = [node for node in ast.parse(file.read_text()).body if _is_compiled(node)]
        found[file.name] = len(functions)
        for node in (node for function in functions for node in ast.walk(function)):
            if isinstance(node, ast.Return):
                assert not isinstance(node.value, ast.Constant), f"{file.name}:{node.lineno}"
    assert found["rmsnorm_tile_kernels.py"] > 5 and found["entmax_kernels.py"] > 5


def _is_compiled(node: ast.stmt) -> bool:
    of = node.decorator_list if isinstance(node, ast.FunctionDef) else []
    return any("triton.jit" in ast.unparse(decorator) for decorator in of)


@pytest.mark.parametrize("capability, features, dtype", [(90, 2048, "bfloat16")])
def test_they_compile_for_gpus(tmp_path, capability, features, dtype):
    """No register is spilled, memory is read and written 16 bytes at a time."""
    printed = output_of(
        HERE / "norm_compile_worker.py", capability, features, dtype,
        TRITON_CACHE_DIR=str(tmp_path), TRITON_DUMP_PTXAS_LOG="1",
    )  # fmt: skip
    kernels = json.loads(last_line(printed))
    assert set(kernels) == {"forward", "backward", "sum_partials"}
    spilled = re.findall(r"(\d+) bytes spill", printed)
    assert len(spilled) >= len(kernels) and set(spilled) == {"0"}
    # 16 bytes are 8 elements: x, the residual and the gain are read; the sum and z written.
    calls = {"forward": 32 // 8, "backward": 16 // 8}
    assert kernels["forward"]["wide reads"] == 3 * calls["forward"]
    assert kernels["forward"]["wide writes"] == 2 * calls["forward"]
    # Two rounds of Philox need one product, eight need two: each is one instruction.
    for name, number in calls.items():
        assert kernels[name]["wide products"] >= 18 * number
