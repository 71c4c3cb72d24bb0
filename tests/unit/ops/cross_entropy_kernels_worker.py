"""Runs the Triton kernels of cross-entropy in Triton's interpreter; prints what was found as JSON.

A process of its own, since Triton reads TRITON_INTERPRET while it is imported. With a compute
capability as argument it compiles them for such a GPU instead, which need not be here.
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[3]))
sys.path.insert(0, str(Path(__file__).parent))

import torch

from megatron_lengen.ops import linear_cross_entropy_triton as kernels

CASES = {
    f"{columns} {dtype} {step}": (columns, getattr(torch, dtype), step)
    for columns in (1, 37, 4096, 5000)
    for dtype in ("float32", "bfloat16")
    for step in ("both", "in turn")
}


def error_of(columns: int, dtype: torch.dtype, step: str) -> float:
    """Largest difference from float64, of statistics (relative) and gradients."""
    generator = torch.Generator().manual_seed(0)
    memory = (4 * torch.randn(5, columns + 3, generator=generator)).to(dtype)
    logits = memory[:, :columns]
    labels = torch.randint(0, columns, (5,), generator=generator)
    labels[0], labels[1], labels[2] = columns - 1, -1, columns
    factors = torch.tensor([1.0, 0.5, 2.0, 0.0, 1.0])
    x, beyond = logits.double(), memory[:, columns:].clone()
    statistics = torch.full((3, 9), torch.nan)[:, 2:7]
    for part in ("measure", "differentiate") if step == "in turn" else ("both",):
        kernels.run(part, logits, labels, statistics, factors)
    here = (labels >= 0) & (labels < columns)
    gradient = x.softmax(1)
    gradient[here, labels[here]] -= 1
    label = x.gather(1, torch.where(here, labels, 0)[:, None])[:, 0] * here
    largest = x.amax(1)
    sums = (x - largest[:, None]).exp().sum(1)
    errors = [
        (statistics[0] - largest).abs().max(),
        (statistics[1] / sums - 1).abs().max(),
        (statistics[2] - label).abs().max(),
        (logits - gradient * factors[:, None]).abs().max(),
    ]
    assert torch.equal(memory[:, columns:], beyond)
    return float(max(errors))


def compile_for(capability: int) -> int:
    """The most shared memory in bytes; an odd vocabulary is read 16 bytes at a time."""
    from entmax_compile_worker import AbsentGPU
    from triton.runtime import driver

    driver.set_active(AbsentGPU(capability))
    found = []
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        logits, floats = torch.empty(4, 9000, dtype=dtype), torch.empty(4)
        labels = torch.zeros(4, dtype=torch.int64)
        sizes, how = (9024, 9001, kernels._BLOCK), {"num_warps": kernels._WARPS}
        found += [
            kernels.measure.warmup(
                logits, labels, floats, floats, floats, *sizes, grid=(1,), **how
            ),
            kernels.differentiate.warmup(
                logits, labels, floats, floats, floats, *sizes, grid=(1, 1), **how
            ),
        ]
    assert all(re.search(r"ld\.global\S*\.v4\.b32", kernel.asm["ptx"]) for kernel in found)
    return max(kernel.metadata.shared for kernel in found)


if __name__ == "__main__":
    torch.set_num_threads(1)
    if len(sys.argv) > 1:
        print(compile_for(int(sys.argv[1])))
    else:
        print(json.dumps({name: error_of(*case) for name, case in CASES.items()}))
