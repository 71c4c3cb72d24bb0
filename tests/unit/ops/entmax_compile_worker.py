"""Compiles the Triton kernels of entmax for a GPU that need not be here; prints what they take.

Arguments: compute capability, channels, dtype, alpha. Prints the largest shared memory in bytes.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[3]))

import torch
from triton.backends.compiler import GPUTarget
from triton.runtime import driver

from megatron_lengen.ops import entmax_kernels as kernels
from megatron_lengen.ops.entmax_triton import _Call, blocks_for
from megatron_lengen.ops.weighting import Weighting

KEYS = 256


class AbsentGPU:
    """What Triton asks a driver for while it compiles."""

    def __init__(self, capability: int) -> None:
        self.capability = capability

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", self.capability, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int | None = None) -> int:
        return 0


def main() -> None:
    capability, channels, dtype, alpha = sys.argv[1:]
    driver.set_active(AbsentGPU(int(capability)))
    q = torch.empty(2, 4, KEYS, int(channels), dtype=getattr(torch, dtype))
    k = q[:, ::2]
    weighting = Weighting(
        window=100,
        slopes=torch.ones(4),
        documents=torch.zeros(2, KEYS, dtype=torch.int64),
        alpha=float(alpha),
    )
    blocks = blocks_for(int(channels), q.dtype)
    call = _Call.of(q, k, k, weighting, blocks)
    floats = torch.empty(2, 4, KEYS)
    bytes_, integers = floats.to(torch.int8), floats.to(torch.int32)
    of_q, of_k = q.stride()[:3], k.stride()[:3]
    common = {"grid": (1, 1), "num_warps": blocks.warps}
    compiled = [
        kernels.forward.warmup(
            q, k, k, q, floats, floats, floats, bytes_, integers, of_q, of_k, of_k,
            *call.arguments, **common,
        ),
        kernels.backward_queries.warmup(
            q, k, k, q, q, floats, floats, floats, floats, bytes_, integers, of_q, of_k, of_k, of_q,
            *call.arguments, **common,
        ),
        kernels.backward_keys.warmup(
            q, k, k, q, k, k, floats, floats, floats, floats, bytes_, integers, of_q, of_k, of_k,
            of_q, *call.arguments, **common,
        ),
    ]  # fmt: skip
    print(max(kernel.metadata.shared for kernel in compiled))


if __name__ == "__main__":
    main()
