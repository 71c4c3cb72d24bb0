"""Time and memory of attention, forward plus backward, against Hugging Face's and dense entmax.

Four parts, each with heads of one row:
  window   ours with a window, by length: the time of a token should not depend on the length
  dense    ours with a window against Hugging Face's sdpa path, which takes a mask of S x S
  entmax   ours against the package entmax on S x S scores (and adasplash where it is installed)
  memory   what a process's peak grows by, by length: twice the length, twice the memory

Every candidate of a part runs once per round, in turn, and the shortest of its times counts: other
work on the machine then hits all of them alike. Ratios: of a token's time (window) or a token's
memory (memory) to that at the shortest length, otherwise of the time to ours.

Example:
    python tools/benchmark/attention.py --threads 1 --json attention.json
"""

from __future__ import annotations

import argparse
import importlib.util
import multiprocessing
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch
from timing import write_report
from torch import Tensor

from megatron_lengen.errors import Parser, require, run_main
from megatron_lengen.ops.attention import attention, window_mask
from megatron_lengen.ops.weighting import Weighting

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
PARTS = ("window", "dense", "entmax", "memory")
Attend = Callable[[Tensor, Tensor, Tensor], Tensor]


def build_parser() -> Parser:
    parser = Parser(prog="attention.py", description=__doc__.splitlines()[0])
    parser.add_argument("--parts", choices=PARTS, nargs="+", default=list(PARTS), help="all")
    parser.add_argument(
        "--lengths",
        type=int,
        nargs="+",
        default=[4096, 8192, 16384, 32768, 65536],
        help="tokens of a row (window; the first three: memory; default: 4k to 64k)",
    )
    parser.add_argument("--window", type=int, default=1024, help="keys (default: 1024)")
    parser.add_argument("--dense-length", type=int, default=16384, help="default: 16384")
    parser.add_argument("--entmax-length", type=int, default=4096, help="default: 4096")
    parser.add_argument("--heads", type=int, default=4, help="query heads (default: 4)")
    parser.add_argument("--groups", type=int, default=4, help="key heads (default: 4)")
    parser.add_argument("--channels", type=int, default=64, help="of a head (default: 64)")
    parser.add_argument("--dtype", choices=DTYPES, default="fp32", help="default: fp32")
    parser.add_argument("--device", default="cpu", help="cpu or cuda (default: cpu)")
    parser.add_argument("--repeat", type=int, default=3, help="rounds (default: 3)")
    parser.add_argument("--threads", type=int, default=1, help="of the CPU (default: 1)")
    parser.add_argument("--json", metavar="FILE", help="also write the results there")
    return parser


# ---- candidates ----------------------------------------------------------------------------------


def ours(**features: Any) -> Attend:
    """This package's attention with a weighting."""
    weighting = Weighting(**features)
    return lambda q, k, v: attention(q, k, v, weighting)


def hugging_faces(length: int, window: int, device: str) -> Attend:
    """Hugging Face's sdpa path; its mask, which a model's layers share, is made beforehand."""
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    mask = window_mask(length, length, window, torch.device(device))[None, None]

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        module = torch.nn.Module()
        module.num_key_value_groups = q.shape[1] // k.shape[1]  # type: ignore[assignment]
        return sdpa_attention_forward(module, q, k, v, mask)[0]

    return attend


def dense_entmax(length: int, slopes: Tensor | None, device: str) -> Attend:
    """Scores, the package's entmax15, values; the mask and the bias are made beforehand."""
    from entmax import entmax15

    place = torch.arange(length, device=device)
    hidden = place[None] > place[:, None]
    bias = None if slopes is None else slopes[:, None, None] * (place[None] - place[:, None])

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in (k, v))
        scores = q.float() @ k.float().transpose(-2, -1) * q.shape[-1] ** -0.5
        scores = scores if bias is None else scores + bias
        weights = entmax15(scores.masked_fill(hidden, float("-inf")), dim=-1)
        return weights.to(v.dtype) @ v

    return attend


def entmax_forms(args: argparse.Namespace) -> dict[str, Attend]:
    """Candidates of the part entmax by name; half of the heads with slopes is NAPE."""
    length, device = args.entmax_length, args.device
    slopes = torch.zeros(args.heads, device=device)
    slopes[: args.heads // 2] = 1 / torch.arange(1, args.heads // 2 + 1, device=device)
    forms = {
        "ours": ours(alpha=1.5),
        "package entmax": dense_entmax(length, None, device),
        "ours, NAPE": ours(alpha=1.5, slopes=slopes),
        "package entmax, NAPE": dense_entmax(length, slopes, device),
    }
    if args.device == "cuda" and importlib.util.find_spec("adasplash") is not None:
        from adasplash import adasplash

        forms["adasplash"] = lambda q, k, v: adasplash(q, k, v, alpha=1.5, is_causal=True)
    return forms


# ---- measuring -----------------------------------------------------------------------------------


def inputs(args: argparse.Namespace, length: int) -> list[Tensor]:
    """q, k and v of one row, that take gradients."""
    generator = torch.Generator().manual_seed(length)
    return [
        torch.randn(1, heads, length, args.channels, generator=generator)
        .to(args.device, DTYPES[args.dtype])
        .requires_grad_()
        for heads in (args.heads, args.groups, args.groups)
    ]


def seconds_of(attend: Attend, qkv: list[Tensor]) -> float:
    """Of one forward and backward."""

    def now() -> float:
        if qkv[0].is_cuda:
            torch.cuda.synchronize()
        return time.perf_counter()

    for x in qkv:
        x.grad = None
    start = now()
    attend(*qkv).sum().backward()
    return now() - start


def shortest(
    candidates: dict[tuple[str, int], Attend], args: argparse.Namespace
) -> dict[tuple[str, int], float]:
    """The shortest time of each (form, length)."""
    rows = {length: inputs(args, length) for _, length in candidates}
    best = dict.fromkeys(candidates, float("inf"))
    for attend, qkv in ((form, rows[key[1]]) for key, form in candidates.items()):
        if args.device == "cuda":  # compile, touch the memory
            seconds_of(attend, qkv)
    for _ in range(args.repeat):
        for key, attend in candidates.items():
            best[key] = min(best[key], seconds_of(attend, rows[key[1]]))
    return best


def part_window(args: argparse.Namespace) -> list[dict]:
    """Time of a token by length."""
    form = ours(window=args.window)
    best = shortest({("ours", length): form for length in args.lengths}, args)
    per_token = {length: seconds / length for (_, length), seconds in best.items()}
    first = per_token[min(per_token)]
    return [
        row("window", form, length, seconds, per_token[length] / first)
        for (form, length), seconds in best.items()
    ]


def part_dense(args: argparse.Namespace) -> list[dict]:
    """A window against Hugging Face's mask."""
    length = args.dense_length
    forms = {
        ("ours", length): ours(window=args.window),
        ("Hugging Face sdpa", length): hugging_faces(length, args.window, args.device),
    }
    best = shortest(forms, args)
    return [row("dense", *key, best[key], best[key] / best["ours", length]) for key in best]


def part_entmax(args: argparse.Namespace) -> list[dict]:
    """Entmax against dense scores, plain and as NAPE has it."""
    length = args.entmax_length
    best = shortest({(name, length): form for name, form in entmax_forms(args).items()}, args)
    return [
        row("entmax", name, length, seconds, seconds / best[base, length])
        for (name, _), seconds in best.items()
        for base in ["ours, NAPE" if name.endswith("NAPE") else "ours"]
    ]


def part_memory(args: argparse.Namespace) -> list[dict]:
    """Peak memory of entmax by length, each in a process of its own."""
    found, first = [], None
    for length in args.lengths[:3]:
        context = multiprocessing.get_context("spawn")
        with context.Pool(1) as pool:
            mebibytes = pool.apply(peak_growth, (args, length))
        first = first or mebibytes / length
        found.append(
            {
                "part": "memory",
                "form": "ours, entmax",
                "length": length,
                "mebibytes": mebibytes,
                "ratio": mebibytes / length / first,
            }
        )
    return found


def peak_growth(args: argparse.Namespace, length: int) -> float:
    """MiB that entmax's forward and backward add to this process's peak."""
    torch.set_num_threads(args.threads)
    form = ours(alpha=1.5)
    qkv = inputs(args, length)
    seconds_of(form, [x[:, :, :64].detach().requires_grad_() for x in qkv])
    if args.device == "cuda":
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.max_memory_allocated()
        seconds_of(form, qkv)
        return (torch.cuda.max_memory_allocated() - before) / 2**20
    before = _peak_kibibytes()
    seconds_of(form, qkv)
    return max(4, _peak_kibibytes() - before) / 2**10


def _peak_kibibytes() -> int:
    """The most memory this process has had; getrusage would answer for its parent too."""
    status = Path("/proc/self/status").read_text()
    return next(int(line.split()[1]) for line in status.splitlines() if line.startswith("VmHWM"))


# ---- results -------------------------------------------------------------------------------------


def row(part: str, form: str, length: int, seconds: float, ratio: float) -> dict:
    """One result of time."""
    return {"part": part, "form": form, "length": length, "seconds": seconds, "ratio": ratio}


def table(results: list[dict]) -> str:
    """The results as text."""
    lines = [f"{'part':<7}  {'form':<22}  {'tokens':>7}  {'seconds':>9}  {'us/token':>9}  ratio"]
    for found in results:
        if "seconds" in found:
            amount = f"{found['seconds']:>9.3f}  {found['seconds'] / found['length'] * 1e6:>9.2f}"
        else:
            amount = f"{found['mebibytes']:>9.1f}  {'(MiB)':>9}"
        lines.append(
            f"{found['part']:<7}  {found['form']:<22}  {found['length']:>7}  {amount}  "
            f"{found['ratio']:>5.2f}"
        )
    return "\n".join(lines)


def check(args: argparse.Namespace) -> None:
    """Raise BadInput for sizes that cannot be measured."""
    for flag in (
        "window", "dense_length", "entmax_length", "heads", "groups", "channels", "repeat",
        "threads",
    ):  # fmt: skip
        value, name = getattr(args, flag), flag.replace("_", "-")
        require(value >= 1, f"--{name}: found {value}; allowed: 1 or more")
    require(min(args.lengths) >= 1, f"--lengths: found {min(args.lengths)}; allowed: 1 or more")
    require(
        args.heads % args.groups == 0,
        f"--groups: found {args.groups}; allowed: divisors of --heads ({args.heads})",
    )
    require(args.device in ("cpu", "cuda"), f"--device: found {args.device}; allowed: cpu, cuda")
    require(
        args.device == "cpu" or torch.cuda.is_available(),
        "--device: found cuda, but there is no CUDA device; allowed: cpu",
    )


def main() -> int:
    """Measure, print, write."""
    args = build_parser().parse_args()
    check(args)
    torch.set_num_threads(args.threads)
    measure = dict(zip(PARTS, (part_window, part_dense, part_entmax, part_memory), strict=True))
    results = [found for part in args.parts for found in measure[part](args)]
    print(
        f"{args.heads} heads of {args.channels}, {args.groups} of keys, {args.dtype}, "
        f"{args.device}, window {args.window}; forward + backward"
    )
    print(table(results))
    write_report(args.json, vars(args), results=results)
    return 0


if __name__ == "__main__":
    run_main(main)
