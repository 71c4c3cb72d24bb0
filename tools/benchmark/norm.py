"""Time of RMSNorm with dropout behind it, forward plus backward, against others' forms.

Every candidate runs once per round, in turn: other work on the machine then hits all of them alike.
On a CPU the shortest of its times counts, on a GPU the median (`timing.median`). Ratios are to ours
of the same kind, so 2.0 means twice as slow as this package.

GB/s are those of the ideal traffic: forward reads x and writes z, backward reads x and dz and
writes dx. The share is of what a copy of as many bytes reaches in the same run, the limit of any
such kernel. On a CPU outputs above 32 MB are new pages each time, whose zeroing takes longer than
any norm: the default sizes are below that.

Example:
    python tools/benchmark/norm.py --rows 2048 --hidden 2048 --json norm.json
    python tools/benchmark/norm.py --device cuda --rows 65536 --hidden 4096 --dtype bf16
"""

from __future__ import annotations

import argparse
import functools
import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch
import torch.nn.functional as F
from timing import median, report_file, shortest, write_report
from torch import Tensor

from megatron_lengen.errors import Parser, require, run_main
from megatron_lengen.ops import native
from megatron_lengen.ops.mask import STEPS, MaskCoordinates
from megatron_lengen.ops.rmsnorm import Dropout, rms_norm_dropout

EPS = 1e-5
PASSES = 5  # of x's size: x and z forward; x, dz and dx backward
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
Norm = Callable[[Tensor, Tensor], Tensor]


def build_parser() -> Parser:
    parser = Parser(prog="norm.py", description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, default=2048, help="tokens (default: 2048)")
    parser.add_argument("--hidden", type=int, default=2048, help="features (default: 2048)")
    parser.add_argument(
        "--device", choices=("cpu", "cuda"), default="cuda" if torch.cuda.is_available() else "cpu",
        help="default: cuda where there is one",
    )  # fmt: skip
    parser.add_argument("--dtype", choices=DTYPES, default="fp32", help="default: fp32")
    parser.add_argument("--rate", type=float, default=0.3, help="dropout rate (default: 0.3)")
    parser.add_argument("--repeat", type=int, default=10, help="rounds (default: 10)")
    parser.add_argument(
        "--threads", type=int, nargs="+", default=[1, 2],
        help="thread counts on a CPU (default: 1 2)",
    )  # fmt: skip
    parser.add_argument("--no-compile", action="store_true", help="leave out torch.compile")
    parser.add_argument(
        "--json", type=report_file, metavar="FILE", help="also write the results there"
    )
    return parser


# ---- candidates ----------------------------------------------------------------------------------


def ours(variant: str | None, rate: float, rows: int, device: str) -> Norm:
    """This package's norm on [rows, 1, hidden]."""
    sample, positions = torch.zeros(1, dtype=torch.int64), torch.arange(rows)
    where = MaskCoordinates(1, sample.to(device), positions.to(device), 0, 0)
    dropout = None if variant is None else Dropout(variant, rate, where)
    return lambda x, gain: rms_norm_dropout(x, gain, EPS, dropout)


def pytorch_norm(x: Tensor, gain: Tensor) -> Tensor:
    """PyTorch's RMSNorm alone."""
    return F.rms_norm(x, gain.shape, gain, EPS)


def then_dropout(norm: Norm, rate: float) -> Norm:
    """A norm, then PyTorch's dropout."""
    return lambda x, gain: F.dropout(norm(x, gain), rate, training=True)


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


def installed_norms(hidden: int, dtype: torch.dtype) -> dict[str, Norm]:
    """The norms of packages for GPUs, where they are installed."""
    found: dict[str, Norm] = {}
    if importlib.util.find_spec("liger_kernel") is not None:
        from liger_kernel.ops.rms_norm import LigerRMSNormFunction

        # The last argument keeps dz, which is used again.
        found["liger"] = lambda x, gain: LigerRMSNormFunction.apply(
            x, gain, EPS, 0.0, "llama", False
        )
    if importlib.util.find_spec("transformer_engine") is not None:
        import transformer_engine.pytorch as te

        module = te.RMSNorm(hidden, eps=EPS).to("cuda", dtype)
        found["te"] = lambda x, gain: module(x)
    return found


def candidates(args: argparse.Namespace) -> dict[tuple[str, str], Norm]:
    """Functions by (kind of norm, form); the first form of a kind is ours."""
    rate, others = args.rate, {}
    if args.device == "cuda":
        others = installed_norms(args.hidden, DTYPES[args.dtype])
    pairs = {name: then_dropout(norm, rate) for name, norm in others.items()}
    forms: dict[tuple[str, str], Norm] = {}
    for kind, theirs, more in (
        ("plain", pytorch_norm, others),
        ("pre_linear", then_dropout(pytorch_norm, rate), pairs),
        ("vpad", pytorch_vpad(rate), {}),
    ):
        variant = None if kind == "plain" else kind
        forms[kind, "ours"] = ours(variant, rate, args.rows, args.device)
        forms[kind, "pytorch"] = theirs
        if not args.no_compile:
            forms[kind, "pytorch, compiled"] = torch.compile(theirs, dynamic=False)
        forms.update({(kind, name): norm for name, norm in more.items()})
    return forms


# ---- timing --------------------------------------------------------------------------------------


def traffic(rows: int, hidden: int, dtype: torch.dtype) -> int:
    """Bytes that forward and backward must at least read and write."""
    return PASSES * rows * hidden * dtype.itemsize


def number_of_sets(args: argparse.Namespace) -> int:
    """How many inputs take turns, so that no call finds its own in a GPU's cache."""
    if args.device == "cpu":
        return 1
    cache = torch.cuda.get_device_properties(0).L2_cache_size
    return 1 + -(-cache // (args.rows * args.hidden * DTYPES[args.dtype].itemsize))


def draw_inputs(args: argparse.Namespace, sets: int) -> list[tuple[Tensor, Tensor, Tensor]]:
    """x, gain and dz, `sets` times."""
    dtype, device = DTYPES[args.dtype], args.device
    generator = torch.Generator(device).manual_seed(0)
    gain = torch.ones(args.hidden, dtype=dtype, device=device, requires_grad=True)

    def draw() -> Tensor:
        size = (args.rows, 1, args.hidden)
        return torch.randn(size, generator=generator, device=device, dtype=dtype)

    return [(draw().requires_grad_(), gain, draw()) for _ in range(sets)]


def call_on(norm: Norm, x: Tensor, gain: Tensor, dz: Tensor) -> Callable[[], None]:
    """One forward and backward."""

    def call() -> None:
        norm(x, gain).backward(dz)
        x.grad = gain.grad = None

    return call


def copies_of(args: argparse.Namespace, sets: int) -> list[Callable[[], object]]:
    """Copies that read and write as much as a forward and a backward."""
    half = traffic(args.rows, args.hidden, DTYPES[args.dtype]) // 2
    pairs = [torch.zeros(2, half, dtype=torch.uint8, device=args.device) for _ in range(sets)]
    return [functools.partial(pair[0].copy_, pair[1]) for pair in pairs]


def seconds_of_each(
    forms: dict[tuple[str, str], Norm], args: argparse.Namespace
) -> dict[tuple[str, str], float]:
    """Seconds of a call of each candidate, and of the copy."""
    sets = number_of_sets(args)
    inputs = draw_inputs(args, sets)
    all_calls: dict[tuple[str, str], list[Callable[[], object]]] = {
        name: [call_on(norm, *drawn) for drawn in inputs] for name, norm in forms.items()
    }
    all_calls["copy", "pytorch"] = copies_of(args, sets)
    if args.device == "cuda":
        found = median(list(all_calls.values()), args.repeat)
    else:
        found = shortest([calls[0] for calls in all_calls.values()], args.repeat)
    return dict(zip(all_calls, found, strict=True))


def rows_of(seconds: dict[tuple[str, str], float], size: int, threads: int | None) -> list[dict]:
    """Results of one run: what each candidate took and what that means for `size` bytes."""
    found = []
    for (kind, form), taken in seconds.items():
        found.append(
            {
                "threads": threads, "norm": kind, "form": form, "seconds": taken,
                "gigabytes_per_second": size / taken / 1e9,
                "share_of_copy": seconds["copy", "pytorch"] / taken,
                "ratio": taken / seconds[kind, "ours"] if kind != "copy" else None,
            }
        )  # fmt: skip
    return found


def measure(args: argparse.Namespace) -> list[dict]:
    """One result for each thread count (one only on a GPU), kind and form."""
    size = traffic(args.rows, args.hidden, DTYPES[args.dtype])
    if args.device == "cuda":
        return rows_of(seconds_of_each(candidates(args), args), size, None)
    found = []
    for threads in args.threads:
        torch.set_num_threads(threads)
        torch.compiler.reset()
        if not args.no_compile:
            # Compiled code carries its number of threads.
            from torch._inductor import config

            config.cpp.threads = threads
        found += rows_of(seconds_of_each(candidates(args), args), size, threads)
    return found


def table(results: list[dict]) -> str:
    """The results as text."""
    lines = [
        f"{'threads':>7}  {'norm':<10}  {'form':<17}  {'seconds':>9}  {'GB/s':>7}  {'of copy':>7}  "
        f"{'to ours':>7}"
    ]
    for row in results:
        ratio = "" if row["ratio"] is None else f"{row['ratio']:.2f}"
        lines.append(
            f"{row['threads'] or '-':>7}  {row['norm']:<10}  {row['form']:<17}  "
            f"{row['seconds']:>9.6f}  {row['gigabytes_per_second']:>7.1f}  "
            f"{row['share_of_copy']:>7.1%}  {ratio:>7}"
        )
    return "\n".join(lines)


def our_kernels(args: argparse.Namespace) -> str:
    """What this package's form runs on."""
    if args.device == "cuda":
        return f"{torch.cuda.get_device_name()}, " + (
            "Triton" if importlib.util.find_spec("triton") is not None else "PyTorch operations"
        )
    return "compiled" if native.load_library() is not None else "PyTorch operations"


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
    require(
        args.device == "cpu" or torch.cuda.is_available(),
        "--device: found cuda; allowed: cpu, since there is no CUDA device",
    )
    results = measure(args)
    kernels = our_kernels(args)
    print(f"[{args.rows}, {args.hidden}] {args.dtype}, forward + backward; our kernels: {kernels}")
    print(table(results))
    write_report(args.json, vars(args), kernels=kernels, results=results)
    return 0


if __name__ == "__main__":
    run_main(main)
