"""The CUDA packages mamba-ssm and causal-conv1d, where they are installed and serve a request.

Each function gives None where they do not; the caller computes it itself then. What is lacking is
said in one line, once.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from megatron_lengen.compat import optional_module
from megatron_lengen.errors import is_first_rank

logger = logging.getLogger(__name__)

SCAN_MODULE = "mamba_ssm.ops.triton.ssd_combined"
CONV_MODULE = "causal_conv1d"
# Their addresses are 32 bits wide, beyond which results are wrong without an error.
MOST_NUMBERS = 2**31 - 1
_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def scan(
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    *,
    chunk_size: int,
    D: Tensor | None,
    documents: Tensor | None,
    initial: Tensor | None,
) -> tuple[Tensor, Tensor] | None:
    """y and the last states by mamba-ssm, or None; arguments as in `ops.ssd`."""
    module = _module(SCAN_MODULE, "mamba-ssm", x)
    if module is None:
        return None
    chunk = kernel_chunk(chunk_size)
    states = -(-x.shape[1] // chunk) * x.shape[2] * x.shape[3] * B.shape[3]
    rows = rows_at_once((x, B, C), states)
    lacking = lacks_scan(x.dtype, rows)
    if lacking is not None:
        _say(lacking, "mamba-ssm")
        return None
    wide = None if initial is None else initial.float()
    given = (x, dt.float(), B, C, None if documents is None else documents.int(), wide)

    def some(first: int) -> tuple[Tensor, Tensor]:
        cut = slice(first, first + rows)
        x, dt, B, C, documents, state = (None if t is None else t[cut] for t in given)
        return module.mamba_chunk_scan_combined(
            x, dt, A.float(), B, C, chunk, D=D, seq_idx=documents, initial_states=state,
            return_final_states=True,
        )  # fmt: skip

    parts = [some(first) for first in range(0, x.shape[0], rows)]
    y, final = (
        torch.cat(tensors) if len(parts) > 1 else tensors[0] for tensors in zip(*parts, strict=True)
    )
    return y, final.float()


def lacks_scan(dtype: torch.dtype, rows: int) -> str | None:
    """What mamba-ssm's scan would not compute, or None.

    Args:
        rows: how many its addresses can span.
    """
    if dtype not in _DTYPES:
        return str(dtype).removeprefix("torch.")
    return "addresses for rows of this length" if rows < 1 else None


def kernel_chunk(chunk_size: int) -> int:
    """The chunk its kernels are given: other sizes than powers of two have given NaN."""
    return min(256, max(16, 1 << (chunk_size.bit_length() - 1)))


def conv(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    before: Tensor | None,
    documents: Tensor | None,
    silu: bool,
) -> Tensor | None:
    """y [b, l, d] by causal-conv1d, or None.

    Args:
        before: [b, w - 1, d], the inputs before the first token, or None.
    """
    module = _module(CONV_MODULE, "causal-conv1d", x)
    if module is None:
        return None
    rows = rows_at_once((x,), 0)
    both = before is not None and documents is not None
    lacking = lacks_conv(x.dtype, x.shape[2], weight.shape[1], rows, both)
    if lacking is not None:
        _say(lacking, "causal-conv1d")
        return None
    if x.stride(2) != 1 or x.stride(0) % 8 or x.stride(1) % 8:
        x = x.contiguous()
    numbers = None if documents is None else documents.int()
    state = None if before is None else before.contiguous()

    def some(first: int) -> Tensor:
        cut = slice(first, first + rows)
        y = module.causal_conv1d_fn(
            x[cut].transpose(1, 2),
            weight,
            bias,
            seq_idx=None if numbers is None else numbers[cut],
            initial_states=None if state is None else state[cut].transpose(1, 2),
            activation="silu" if silu else None,
        )
        return y.transpose(1, 2)

    parts = [some(first) for first in range(0, x.shape[0], rows)]
    return torch.cat(parts) if len(parts) > 1 else parts[0]


def lacks_conv(
    dtype: torch.dtype, channels: int, taps: int, rows: int, both: bool = False
) -> str | None:
    """What causal-conv1d would not compute, or None.

    Args:
        rows: how many its addresses can span.
        both: whether there are documents and a state before the first of them.
    """
    if dtype not in _DTYPES:
        return str(dtype).removeprefix("torch.")
    if not 2 <= taps <= 4:
        return f"convolution of {taps} taps"
    if channels % 8:
        return f"convolution of {channels} channels"
    if both:
        return "states together with documents"
    return "addresses for rows of this length" if rows < 1 else None


def conv_update(
    x: Tensor, state: Tensor, weight: Tensor, bias: Tensor | None, silu: bool
) -> tuple[Tensor, Tensor] | None:
    """y [b, d] and the new state [b, d, w - 1] by causal-conv1d, or None; it has no backward."""
    if torch.is_grad_enabled():
        return None
    module = _module(CONV_MODULE, "causal-conv1d", x)
    if module is None or lacks_conv(x.dtype, x.shape[1], weight.shape[1], 1):
        return None
    state = state.to(x.dtype, copy=True)  # the kernel writes into it
    y = module.causal_conv1d_update(x, state, weight, bias, activation="silu" if silu else None)
    return y, state


def rows_at_once(tensors: Sequence[Tensor], more: int) -> int:
    """How many rows of the batch 32-bit addresses span; 0 where not even one.

    Args:
        tensors: [b, ...]; views of wider ones count with what lies between their numbers.
        more: numbers of one row in the kernel's own tensors.
    """

    def of_row(x: Tensor) -> int:
        return 1 + sum((n - 1) * s for n, s in zip(x.shape[1:], x.stride()[1:], strict=True))

    widest = max(more, *(max(of_row(x), x.stride(0)) for x in tensors))
    return min(tensors[0].shape[0], MOST_NUMBERS // widest)


def _module(name: str, package: str, x: Tensor) -> Any:
    """A package's module where x lies on its device and it imports, or None."""
    if x.device.type != "cuda":
        return None
    module = optional_module(name)
    if module is None:
        _say("", package)
    return module


@functools.cache
def _say(lacking: str, package: str) -> None:
    if is_first_rank():
        what = f"no {lacking} in {package}" if lacking else f"no {package} here"
        logger.warning("Mamba2: %s; PyTorch operations used, which are slower", what)
