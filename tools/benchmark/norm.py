"""Time of RMSNorm with dropout behind it, forward plus backward, against PyTorch's own forms.

Every candidate runs once per round, in turn, and the shortest of its times counts: other work on
the machine then hits all of them alike. Ratios are to ours of the same kind, so 2.0 means twice as
slow as this package.

Example:
    python tools/benchmark/norm.py --rows 4096 --hidden 2048 --json norm.json
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch
import torch.nn.functional as F
from timing import write_report
from torch import Tensor

from megatron_lengen.errors import Parser, require, run_main
from megatron_lengen.ops import native
from megatron_lengen.ops.mask import STEPS, MaskCoordinates
from megatron_lengen.ops.rmsnorm import Dropout, rms_norm_dropout

EPS = 1e-5
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
Norm = Callable[[Tensor, Tensor], Tensor]


def build_parser() -> Parser:
    parser = Parser(prog="norm.py", description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, default=4096, help="tokens (default: 4096)")
    parser.add_argument("--hidden", type=int, default=2048, help="features (default: 2048)")
    parser.add_argument("--dtype", choices=DTYPES, default="fp32", help="default: fp32")
    parser.add_argument("--rate", type=float, default=0.3, help="dropout rate (default: 0.3)")
    parser.add_argument("--repeat", type=int, default=10, help="rounds (default: 10)")
    parser.add_argument(
        "--threads", type=int, nargs="+", default=[1, 2], help="thread counts (default: 1 2)"
    )
    parser.add_argument("--no-compile", action="store_true", help="leave out torch.compile")
    parser.add_argument("--json", metavar="FILE", help="also write the results there")
    return parser


# ---- candidates ----------------------------------------------------------------------------------


def ours(variant: str | None, rate: float, rows: int) -> Norm:
    """This package's norm on [rows, 1, hidden]."""
    where = MaskCoordinates(1, torch.zeros(1, dtype=torch.int64), torch.arange(rows), 0, 0)
    dropout = None if variant is None else Dropout(variant, rate, where)
    return lambda x, gain: rms_norm_dropout(x, gain, EPS, dropout)


def pytorch_norm(x: Tensor, gain: Tensor) -> Tensor:
    """PyTorch's RMSNorm alone."""
    return F.rms_norm(x, gain.shape, gain, EPS)


def pytorch_pair(rate: float) -> Norm:
    """PyTorch's RMSNorm, then its dropout."""
    return lambda x, gain: F.dropout(pytorch_norm(x, gain), rate, training=True)


def pytorch_vpad(rate: float) -> Norm:
    """Eq. 12 as one would write it, with a mask from the generator."""

    def norm(x: Tensor, gain: Tensor) -> Tensor:
        hat = pytorch_norm(x, gain)
        with torch.no_grad():
            variance, mean = torch.var_mean(hat.float(), -1, correction=0, keepdim=True)
            alpha = (variance / ((1 - rate) * (variance + rate * mean**2))).sqrt()
            beta = mean * (1 - alpha * (1 - rate))
        keep = torch.rand_like(hat) >= rate
        return (alpha * keep * hat + beta).to(x.dtype)

    return norm


def candidates(rate: float, rows: int, compiled: bool) -> dict[tuple[str, str], Norm]:
    """Functions by (kind of norm, form); the first form of a kind is ours."""
    forms: dict[tuple[str, str], Norm] = {}
    for kind, own, theirs in (
        ("plain", ours(None, rate, rows), pytorch_norm),
        ("pre_linear", ours("pre_linear", rate, rows), pytorch_pair(rate)),
        ("vpad", ours("vpad", rate, rows), pytorch_vpad(rate)),
    ):
        forms[kind, "ours"] = own
        forms[kind, "pytorch"] = theirs
        if compiled:
            forms[kind, "pytorch, compiled"] = torch.compile(theirs, dynamic=False)
    return forms


# ---- timing --------------------------------------------------------------------------------------


def shortest_times(
    forms: dict[tuple[str, str], Norm], rows: int, hidden: int, dtype: torch.dtype, repeat: int
) -> dict[tuple[str, str], float]:
    """Seconds of one forward and backward of each candidate on [rows, 1, hidden]."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(rows, 1, hidden, generator=generator).to(dtype).requires_grad_()
    gain = torch.ones(hidden, dtype=dtype, requires_grad=True)
    dz = torch.randn(rows, 1, hidden, generator=generator).to(dtype)

    def seconds(norm: Norm) -> float:
        x.grad = gain.grad = None
        start = time.perf_counter()
        norm(x, gain).backward(dz)
        return time.perf_counter() - start

    for norm in forms.values():  # compile, build, touch the memory
        seconds(norm)
        seconds(norm)
    best = dict.fromkeys(forms, float("inf"))
    for _ in range(repeat):
        for name, norm in forms.items():
            best[name] = min(best[name], seconds(norm))
    return best


def measure(args: argparse.Namespace) -> list[dict]:
    """One result for each thread count, kind and form."""
    found = []
    for threads in args.threads:
        torch.set_num_threads(threads)
        torch.compiler.reset()
        if not args.no_compile:
            # Compiled code carries its number of threads.
            from torch._inductor import config

            config.cpp.threads = threads
        forms = candidates(args.rate, args.rows, not args.no_compile)
        best = shortest_times(forms, args.rows, args.hidden, DTYPES[args.dtype], args.repeat)
        for (kind, form), seconds in best.items():
            ratio = seconds / best[kind, "ours"]
            found.append(
                {"threads": threads, "norm": kind, "form": form, "seconds": seconds, "ratio": ratio}
            )
    return found


def table(results: list[dict]) -> str:
    """The results as text."""
    lines = [f"{'threads':>7}  {'norm':<10}  {'form':<17}  {'seconds':>8}  {'to ours':>7}"]
    for row in results:
        lines.append(
            f"{row['threads']:>7}  {row['norm']:<10}  {row['form']:<17}  "
            f"{row['seconds']:>8.4f}  {row['ratio']:>7.2f}"
        )
    return "\n".join(lines)


def main() -> int:
    """Measure, print, write."""
    args = build_parser().parse_args()
    for flag in ("rows", "hidden", "repeat"):
        value = getattr(args, flag)
        require(value >= 1, f"--{flag}: found {value}; allowed: 1 or more")
    require(min(args.threads) >= 1, f"--threads: found {min(args.threads)}; allowed: 1 or more")
    require(
        0 < args.rate < 1 and 1 <= round(STEPS * args.rate) < STEPS,
        f"--rate: found {args.rate}; allowed: between 0 and 1",
    )
    results = measure(args)
    kernels = "compiled" if native.load_library() is not None else "PyTorch operations"
    print(f"[{args.rows}, {args.hidden}] {args.dtype}, forward + backward; our kernels: {kernels}")
    print(table(results))
    write_report(args.json, vars(args), kernels=kernels, results=results)
    return 0


if __name__ == "__main__":
    run_main(main)
