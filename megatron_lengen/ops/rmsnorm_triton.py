"""RMSNorm with dropout in Triton kernels: what `ops.rmsnorm` runs on GPUs.

Where the variant has a twin (`ops.variants`) and no rank has only a part of the features, forward
reads its input once and writes z and a few numbers a row. Otherwise one kernel writes statistics,
`row_coefficients` makes alpha and beta of them, and another kernel applies those. Backward reads
the input and dz once and writes dx; each program keeps its sum of the gain's gradient in registers
and writes it at its end, so that nothing is added atomically and results repeat bit by bit. Rows
wider than a program's registers are read in parts, more than once.

Masks are computed where they are applied, in the bits of `ops.mask`.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor

from megatron_lengen.ops import rmsnorm_backward_kernels as backward_kernels
from megatron_lengen.ops import rmsnorm_kernels as kernels
from megatron_lengen.ops.rmsnorm_paths import Found, TorchKernels
from megatron_lengen.ops.variants import get_variant

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
# Threads of a multiprocessor in backward: as many as have the registers, for kernels as compiled;
# fp32 takes more of them. A program for which there is no room would begin when others end.
_THREADS, _THREADS_OF_FP32 = 512, 384
_PROCESSORS = 8  # where there is no GPU to ask: Triton's interpreter


class Tile(NamedTuple):
    """Rows and features of a program's tile, its warps, and how many tiles it holds at once."""

    rows: int
    features: int
    warps: int
    parts: int = 1

    def holds(self, d: int) -> bool:
        """Whether a program has whole rows of d features in registers."""
        return d <= self.features * self.parts


def forward_tile(d: int) -> Tile:
    """The tile for rows of d features: of 8 elements a thread, of which it has several.

    Long shares of a thread spend less on sums over a row, so that it has up to 48 elements; parts
    leave little of a row's last tile empty where d is no power of two.
    """
    if d > 16384:
        return Tile(1, 16384, 16)
    of_row = 1  # warps
    while d > of_row * 32 * 48:
        of_row *= 2
    features = min(max(triton.next_power_of_2(d), 8), of_row * 256)
    parts = triton.cdiv(d, features)
    if of_row > 1:
        return Tile(1, features, of_row, parts)
    return Tile(4 * max(4 // parts, 1) * 256 // features, features, 4, parts)


def backward_tile(d: int) -> Tile:
    """The same, of up to 16 elements a thread: x, dz and the gain's gradient are kept of each."""
    features = min(max(triton.next_power_of_2(d), 8), 8192)
    warps = min(max(features // 512, 4), 16)
    return Tile(max(warps * 512 // features, 1), features, warps)


class TritonKernels(TorchKernels):
    """Forward and backward on CUDA tensors of fp32, bf16 and fp16; they are contiguous."""

    def fused(self, x, residual, gain, eps, dropout, keep_moments) -> Found | None:
        coefficients = None
        if dropout is not None:
            twin = get_variant(dropout.variant).triton
            if twin is None or dropout.ranks > 1:
                return None
            coefficients = twin()
        return self._forward(x, residual, gain, eps, dropout, coefficients, keep_moments)

    def statistics(self, x, residual, gain, eps, moments):
        found = self._forward(x, residual, gain, eps, None, None, moments, with_z=False)
        return found.total, found.rstd, found.mean, found.variance

    def _forward(
        self, x, residual, gain, eps, dropout, coefficients, keep_moments, with_z=True
    ) -> Found:
        z = torch.empty_like(x) if with_z else None
        total = x if residual is None else torch.empty_like(x)
        found = Found(
            z,
            total,
            rstd=_numbers(x, eps is not None),
            alpha=_numbers(x, dropout is not None),
            mean=_numbers(x, keep_moments),
            variance=_numbers(x, keep_moments),
        )
        tile = forward_tile(x.shape[-1])
        _launch(
            kernels.forward if tile.holds(x.shape[-1]) else kernels.forward_wide,
            tile, x, dropout,
            tensors=(
                x, residual, gain, total, z, found.rstd, found.mean, found.variance, found.alpha,
            ),
            numbers=(0.0 if eps is None else eps, 0.0 if dropout is None else dropout.exact_rate),
            COEFFICIENTS=coefficients, NORM=eps is not None,
            PARTS=tile.parts,
            MOMENTS=keep_moments or dropout is not None, DROPOUT=dropout is not None,
        )  # fmt: skip
        return found

    def forward(self, x, gain, rstd, alpha, beta, dropout):
        z = torch.empty_like(x)
        _launch(
            kernels.apply, forward_tile(x.shape[-1]), x, dropout,
            tensors=(x, gain, z, rstd, alpha, beta), NORM=rstd is not None,
        )  # fmt: skip
        return z

    def coefficient_grads(self, x, gain, rstd, dz, dropout):
        alpha_grad, beta_grad = _numbers(x), _numbers(x)
        _launch(
            backward_kernels.coefficient_grads, backward_tile(x.shape[-1]), x, dropout,
            tensors=(x, gain, dz, rstd, alpha_grad, beta_grad), NORM=rstd is not None,
        )  # fmt: skip
        return alpha_grad, beta_grad

    def backward(self, x, gain, rstd, alpha, mean, statistics_grads, dz, total_grad, dropout):
        d, tile = x.shape[-1], backward_tile(x.shape[-1])
        dx, partial, gain_grad = torch.empty_like(x), None, None
        threads = _THREADS_OF_FP32 if x.dtype == torch.float32 else _THREADS
        programs = programs_for(_rows(x), tile, _processors(x.device), threads)
        wide = not tile.holds(d)
        if gain is not None:
            make = torch.zeros if wide else torch.empty
            partial = make(programs, d, dtype=torch.float32, device=x.device)
            gain_grad = torch.empty_like(gain)
        mean_grad, variance_grad = statistics_grads or (None, None)
        if statistics_grads is None:
            mean = None
        _launch(
            backward_kernels.backward_wide if wide else backward_kernels.backward, tile, x, dropout,
            tensors=(
                x, gain, dz, total_grad, dx, partial, rstd, alpha, mean, mean_grad, variance_grad,
            ),
            programs=programs, NORM=rstd is not None, DROPOUT=dropout is not None,
        )  # fmt: skip
        if gain is not None:
            with torch.cuda.device_of(x):
                backward_kernels.sum_partials[(triton.cdiv(d, 16),)](
                    partial,
                    gain_grad,
                    programs,
                    D=d,
                    BLOCK=16,
                    R=128,
                    num_warps=4,
                    enable_fp_fusion=True,
                )
        return dx, gain_grad


def programs_for(rows: int, tile: Tile, processors: int, threads: int) -> int:
    """How many programs share the rows in backward, and with them the gain's partial sums.

    Args:
        threads: of each processor.
    """
    return min(triton.cdiv(rows, tile.rows), processors * max(threads // (32 * tile.warps), 1))


def _numbers(x: Tensor, wanted: bool = True) -> Tensor | None:
    """Memory for one fp32 number a row."""
    return x.new_empty(x.shape[:-1], dtype=torch.float32) if wanted else None


def _rows(x: Tensor) -> int:
    return x.numel() // x.shape[-1] if x.numel() else 0


def _processors(device: torch.device) -> int:
    if device.type != "cuda":
        return _PROCESSORS
    return torch.cuda.get_device_properties(device).multi_processor_count


@torch.compiler.disable  # it would trace the launch, and lose `enable_fp_fusion` on the way
def _launch(
    kernel: Any,
    tile: Tile,
    x: Tensor,
    dropout: Any,
    tensors: tuple[Tensor | None, ...],
    numbers: tuple[float, ...] = (),
    programs: int | None = None,
    **constants: Any,
) -> None:
    """Run one kernel over the rows of x, if there are any."""
    rows = _rows(x)
    if not rows:
        return
    d, batch = x.shape[-1], 1
    mask: tuple[Any, ...] = (None, None, 0, 0, 0, 0, 0)
    if dropout is not None:
        where, batch = dropout.coordinates, x.shape[1]
        mask = (
            _on(where.positions, x.device), _on(where.samples, x.device),
            _signed(where.seed), _signed(where.seed >> 32), _signed(where.stream),
            where.first_channel, dropout.threshold,
        )  # fmt: skip
    with torch.cuda.device_of(x):
        kernel[(programs or triton.cdiv(rows, tile.rows),)](
            *tensors, rows, *numbers, *mask,
            ALIGNED=mask[5] % 8 == 0, BATCH=batch, D=d, BLOCK=tile.features, R=tile.rows,
            num_warps=tile.warps,
            # In fp32 a product fused with the difference after it, and so not rounded, would
            # give rows of a constant a variance; 16-bit products are rounded in between.
            enable_fp_fusion=x.dtype.itemsize == 2,
            **constants,
        )  # fmt: skip


def _on(coordinates: Tensor, device: torch.device) -> Tensor:
    """[n] int64 on the device; the package's layers keep them there (`layers.coordinates`)."""
    return coordinates.to(device, torch.int64, non_blocking=True).contiguous()


def _signed(word: int) -> int:
    """The low 32 bits as a signed number: kernels are compiled for one type of argument."""
    word &= 0xFFFFFFFF
    return word - (1 << 32) if word >= 1 << 31 else word
