"""Runs the norm's Triton kernels in Triton's interpreter, and prints what was found as JSON.

A process of its own, since Triton reads TRITON_INTERPRET while it is imported. Errors are the
largest of values and gradients, relative to the largest number of each, against float64.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))
sys.path.insert(0, str(Path(__file__).parents[3]))

import norm_reference
import pure_philox
import torch
import triton
import triton.language as tl
from norm_reference import DETACH, EPS, dropout_at, reference, tensors
from torch import Tensor

from megatron_lengen.ops import rmsnorm, rmsnorm_triton, variants
from megatron_lengen.ops.mask import MaskCoordinates
from megatron_lengen.ops.rmsnorm import (
    Dropout,
    add_rms_norm_dropout,
    affine_dropout,
    rms_norm_dropout,
)
from megatron_lengen.ops.rmsnorm_paths import TorchKernels
from megatron_lengen.ops.rmsnorm_triton import Tile, TritonKernels

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
LAYOUTS = {
    "every second feature": lambda t: t.repeat_interleave(2, dim=-1)[..., ::2],
    "transposed": lambda t: t.transpose(0, 1).contiguous().transpose(0, 1),
    "features not last": lambda t: t.permute(2, 0, 1).contiguous().permute(1, 2, 0),
    "expanded": lambda t: t[:1, :, :].expand_as(t),
}
Found = dict[str, object]


@triton.jit
def uneven_twin(mean, variance, rate):
    return 1 / (1 + variance) + rate * mean, tl.fma(mean, variance, 0.2)


def register() -> None:
    """A user's variant without a twin, and the same one with it."""

    @variants.register_variant("uneven")
    @variants.register_variant("uneven with twin", triton=lambda: uneven_twin)
    def uneven(mean, variance, rate):
        return 1 / (1 + variance) + rate * mean, mean * variance + 0.2

    of = norm_reference.formula
    norm_reference.formula = lambda name, mean, variance: of(
        "uneven" if name == "uneven with twin" else name, mean, variance
    )


def error(found: tuple[Tensor | None, ...], expected: tuple[Tensor, ...]) -> float:
    """The largest error of any tensor, relative to its largest number."""
    errors = [
        float((f.double() - e).abs().max() / max(e.abs().max().item(), 1e-6))
        for f, e in zip(found, expected, strict=True)
    ]
    return max(errors) if all(e == e for e in errors) else float("inf")


def error_of(
    size: tuple[int, int, int],
    variant: str | None,
    dtype: torch.dtype = torch.float32,
    detach: tuple[bool, bool] = (True, True),
    norm: bool = True,
    layouts: tuple[str, str] | None = None,
) -> float:
    """Of the norm with dropout, or of dropout alone."""
    x, gain, dz = tensors(*size, dtype)
    if layouts is not None:
        x = LAYOUTS[layouts[0]](x.detach()).requires_grad_()
        dz = LAYOUTS[layouts[1]](dz)
    dropout = None if variant is None else dropout_at(variant, *size[:2], *detach)
    z = rms_norm_dropout(x, gain, EPS, dropout) if norm else affine_dropout(x, dropout)
    z.backward(dz)
    found = (z, x.grad, gain.grad) if norm else (z, x.grad)
    if z.dtype != dtype or x.grad.dtype != dtype:
        return float("inf")
    return error(found, reference(x, gain if norm else None, dz, variant, *detach))


def error_of_residual(variant: str | None, dtype: torch.dtype, d: int = 33) -> float:
    """z, the sum and all gradients against the two steps, and the sum bit by bit.

    (bf16: to one rounding, since the interpreter cuts bits off instead of rounding.)
    """
    x, gain, dz = tensors(3, 2, d, dtype)
    _, _, residual = tensors(2, 3, d, dtype)
    residual = residual.transpose(0, 1).requires_grad_()
    sum_grad = dz.flip(-1)
    dropout = None if variant is None else dropout_at(variant, 3, 2, False, False)
    z, total = add_rms_norm_dropout(x, residual, gain, EPS, dropout)
    torch.autograd.backward((z, total), (dz, sum_grad))
    step = 2**-7 if dtype == torch.bfloat16 else 0.0
    wanted = (residual + x).detach()
    if ((total - wanted).abs() > step * wanted.abs()).any() or not x.grad.equal(residual.grad):
        return float("inf")
    expected_z, dx, dgain = reference(total, gain, dz, variant, False, False)
    return error((z, x.grad, gain.grad), (expected_z, dx + sum_grad.double(), dgain))


def error_of_one_output(which: int) -> float:
    """The gradient where only z, or only the sum, is used further."""
    x, gain, dz = tensors(2, 1, 16, torch.float32)
    residual = torch.ones_like(x, requires_grad=True)
    outputs = add_rms_norm_dropout(x, residual, gain, EPS, dropout_at("vpad", 2, 1))
    outputs[which].backward(dz)
    dx = dz.double()
    if which == 0:
        dx = reference((residual + x).detach(), gain, dz, "vpad", True, True)[1]
    return error((x.grad, residual.grad), (dx, dx))


def mask_is_equal(first: int, seed: int, position: int, sample: int, d: int = 21) -> bool:
    """Whether the zeros of masked ones are those of a Philox in plain Python."""
    positions, samples = [position, position + 1], [sample, sample + 7, 3]
    where = MaskCoordinates(
        seed, torch.tensor(samples), torch.tensor(positions), 4095, 255, first_channel=first
    )
    x = torch.ones(2, 3, d, requires_grad=True)
    z = affine_dropout(x, Dropout("pre_linear", 0.3, where))
    z.backward(torch.ones_like(z))
    keep = pure_philox.keep(seed, samples, positions, 4095, 255, range(first, first + d), 0.3)
    return torch.equal(z != 0, keep != 0) and torch.equal(x.grad != 0, keep != 0)


def constant_rows_are_their_mean(dtype: torch.dtype, d: int) -> bool:
    """Rows of one number, 0 among them, under vpad: bitwise the plain norm and themselves."""
    values = torch.tensor([0.1, 0.0, -317.0, 1e-4], dtype=dtype)
    x, gain = values[:, None, None].expand(4, 1, d), torch.full((d,), 0.7, dtype=dtype)
    dropout = dropout_at("vpad", 4, 1)
    plain = rms_norm_dropout(x, gain, EPS)
    return torch.equal(rms_norm_dropout(x, gain, EPS, dropout), plain) and torch.equal(
        affine_dropout(x, dropout), x
    )


def error_of_scaled_rows(scale: float) -> float:
    """vpad of rows of any size, against the PyTorch operations."""
    x, _, _ = tensors(2, 2, 40, torch.float32)
    x = x.detach() * scale
    dropout = dropout_at("vpad", 2, 2)
    found = affine_dropout(x, dropout)
    rmsnorm._kernels_for = lambda x: TorchKernels()
    expected = affine_dropout(x, dropout)
    rmsnorm._kernels_for = lambda x: TritonKernels()
    return float((found - expected).abs().max() / expected.abs().max())


def kernels_of_forward(variant: str | None, detach: tuple[bool, bool] = (True, True)) -> list[str]:
    """The names of the kernels that run."""
    names: list[str] = []
    launch = rmsnorm_triton._launch

    def record(kernel, *arguments, **others):
        names.append(kernel.fn.__name__)
        launch(kernel, *arguments, **others)

    rmsnorm_triton._launch = record
    x, gain, _ = tensors(1, 1, 8, torch.float32)
    dropout = None if variant is None else dropout_at(variant, 1, 1, *detach)
    rms_norm_dropout(x, gain, EPS, dropout)
    rmsnorm_triton._launch = launch
    return names


def edges() -> Found:
    """Rows 0 and 1, odd widths, layouts, exactness."""
    found: Found = {f"width {d}": error_of((2, 1, d), "vpad") for d in (2, 7, 8, 257)}
    found["one row"] = error_of((1, 1, 40), "vpad")
    x = torch.ones(0, 2, 8, requires_grad=True)
    gain = torch.ones(8, requires_grad=True)
    rms_norm_dropout(x, gain, EPS, dropout_at("vpad", 0, 2)).sum().backward()
    found["no rows"] = x.grad.shape == x.shape and not gain.grad.any()
    found["plain norm of two dimensions"] = error_of_two_dimensions()
    for name in LAYOUTS:
        found[f"strides: x {name}"] = error_of((3, 2, 24), "vpad", layouts=(name, "transposed"))
        found[f"strides: dz {name}"] = error_of((3, 2, 24), "vpad", layouts=("transposed", name))
    for dtype in DTYPES:
        for d in (3, 300):
            found[f"constant {dtype} {d}"] = constant_rows_are_their_mean(dtype, d)
    for scale in (1e-20, 1e-18, 1e-10, 1e10, 1e18):
        found[f"scale {scale}"] = error_of_scaled_rows(scale)
    for first, seed, position, sample in (
        (0, 77, 4, 9), (8, 2**64 - 5, 2**32 - 1, 2**31), (3, 2**63 + 2**31, 2**33 + 6, 2**40),
        (4096, 2**31, 0, 0),
    ):  # fmt: skip
        found[f"mask {first}"] = mask_is_equal(first, seed, position, sample)
    return found


def error_of_two_dimensions() -> float:
    x, gain, dz = tensors(5, 1, 24, torch.float32)
    flat = x.detach()[:, 0].requires_grad_()
    z = rms_norm_dropout(flat, gain, EPS)
    z.backward(dz[:, 0])
    expected, dx, dgain = reference(x, gain, dz, None, True, True)
    return error((z, flat.grad, gain.grad), (expected[:, 0], dx[:, 0], dgain))


def small_tiles() -> Found:
    """Rows wider than a tile, and programs that have several tiles."""
    rmsnorm_triton.forward_tile = rmsnorm_triton.backward_tile = lambda d: Tile(1, 32, 1)
    rmsnorm_triton._PROCESSORS = 1
    rmsnorm_triton._THREADS = rmsnorm_triton._THREADS_OF_FP32 = 64
    found: Found = {"several tiles": error_of((7, 1, 24), "vpad", detach=(False, False))}
    found["wide residual"] = error_of_residual("vpad", torch.float32, 39)
    for dtype in DTYPES:
        found[f"wide {dtype}"] = error_of((3, 1, 39), "vpad", dtype)
        found[f"constant wide {dtype}"] = constant_rows_are_their_mean(dtype, 39)
    found["wide, derivatives"] = error_of((1, 2, 75), "uneven", detach=(False, False))
    found["wide, no norm"] = error_of((1, 2, 64), "vpad", norm=False, detach=(False, False))
    found["wide, plain"] = error_of((1, 2, 39), None)
    found["mask wide"] = mask_is_equal(3, 5, 6, 7, d=39)
    return found


def launched_by_compiled_code() -> bool:
    """Whether the compiler leaves the launch alone, and what is around it computes the same."""
    x, gain, dz = tensors(3, 2, 33, torch.float32)
    dropout = dropout_at("vpad", 3, 2)

    def layer(x: Tensor) -> Tensor:
        return rms_norm_dropout(x * 2, gain, EPS, dropout) + 1

    found = []
    for function in (layer, torch.compile(layer, backend="eager")):
        z = function(x)
        found.append((z, *torch.autograd.grad(z, (x, gain), dz)))
    breaks = torch._dynamo.utils.counters["graph_break"]
    same = all(torch.equal(a, b) for a, b in zip(*found, strict=True))
    return same and any("_launch" in reason for reason in breaks)


def main() -> None:
    torch.set_num_threads(1)
    register()
    rmsnorm._kernels_for = lambda x: TritonKernels()
    found: Found = {}
    names = ("pre_linear", "pre_norm", "vpad", "uneven", "uneven with twin")
    for variant in names:
        for detach in DETACH if variant in ("vpad", "uneven") else DETACH[::3]:
            found[f"norm {variant} {detach}"] = error_of((3, 2, 33), variant, detach=detach)
            found[f"affine {variant} {detach}"] = error_of(
                (2, 2, 40), variant, detach=detach, norm=False
            )
    for dtype in DTYPES:
        for variant in (None, "pre_linear", "vpad", "uneven"):
            found[f"norm {dtype} {variant}"] = error_of((3, 2, 64), variant, dtype)
            found[f"residual {dtype} {variant}"] = error_of_residual(variant, dtype)
    for which in (0, 1):
        found[f"residual, output {which}"] = error_of_one_output(which)
    for variant in (None, *names):
        found[f"kernels {variant}"] = kernels_of_forward(variant)
    found["kernels vpad, derivatives"] = kernels_of_forward("vpad", (False, False))
    found["compiled"] = launched_by_compiled_code()
    print(json.dumps({**found, **edges(), **small_tiles()}))


if __name__ == "__main__":
    main()
