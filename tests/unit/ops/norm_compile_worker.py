"""Compiles the norm's Triton kernels for a GPU that need not be here; prints what they take.

Arguments: compute capability, features, dtype. Prints as JSON, for each kernel of a forward and a
backward with vpad and a residual: 16-byte reads and writes, and 32 x 32 bit products.
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[3]))

import torch
from entmax_compile_worker import AbsentGPU
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from megatron_lengen.ops import rmsnorm
from megatron_lengen.ops.mask import MaskCoordinates
from megatron_lengen.ops.rmsnorm import Dropout, add_rms_norm_dropout
from megatron_lengen.ops.rmsnorm_triton import TritonKernels


def found_in(ptx: str) -> dict[str, int]:
    """What a kernel's code has."""
    return {
        "wide reads": len(re.findall(r"ld\.global\S*\.v4\.b32", ptx)),
        "wide writes": len(re.findall(r"st\.global\S*\.v4\.b32", ptx)),
        "wide products": ptx.count("mul.wide.u32"),
    }


def main() -> None:
    capability, features, dtype = sys.argv[1:]
    driver.set_active(AbsentGPU(int(capability)))
    found: dict[str, dict[str, int]] = {}
    run = JITFunction.run

    def compile_only(self, *arguments, grid, warmup, **others):
        kernel = run(self, *arguments, grid=grid, warmup=True, **others)
        found[self.fn.__name__] = found_in(kernel.asm["ptx"])

    JITFunction.run = compile_only
    rmsnorm._kernels_for = lambda x: TritonKernels()
    x = torch.empty(4, 2, int(features), dtype=getattr(torch, dtype), requires_grad=True)
    gain = torch.empty(int(features), dtype=x.dtype, requires_grad=True)
    where = MaskCoordinates(1, torch.arange(2), torch.arange(4), 0, 0)
    outputs = add_rms_norm_dropout(x, x.detach(), gain, 1e-5, Dropout("vpad", 0.3, where))
    torch.autograd.backward(outputs, (x.detach(), x.detach()))
    print(json.dumps(found))


if __name__ == "__main__":
    main()
