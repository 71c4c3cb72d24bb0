"""Time and memory of attention, forward plus backward, against its peers and the device's limit.

Five parts, each with heads of one row:
  kinds    causal, window, documents, slopes, entmax by length: ours, PyTorch's operator and
           compiled forms, flash-attn, Transformer Engine, entmax, adasplash where installed, and
           the limit: the products over visible pairs at the measured speed of a large product
  window   ours with a window, by length: the time of a token should not depend on the length
  dense    ours with a window against Hugging Face's sdpa path, which takes a mask of S x S
  entmax   ours against the package entmax on S x S scores (and adasplash where it is installed)
  memory   what a process's peak grows by, by length: twice the length, twice the memory

Every candidate of a part runs once per round, in turn: other work on the machine then hits all of
them alike. The shortest of its times counts on a CPU, the median on CUDA. Ratios: of a token's time
(window) or a token's memory (memory) to that at the shortest length, otherwise of the time to ours.

Examples:
    python tools/benchmark/attention.py --threads 1 --json attention.json
    python tools/benchmark/attention.py --device cuda --parts kinds --heads 16 --channels 128
"""

from __future__ import annotations

import argparse
import multiprocessing
import sys
import time
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch
from attention_forms import (
    KINDS,
    Attend,
    Sizes,
    adasplashes,
    dense_entmax,
    forms_of,
    hugging_faces,
    normal,
    operations,
    ours,
    run_of,
    weighting_of,
)
from timing import check_device, matmul_rate, report_file, times, write_report
from torch import Tensor

from megatron_lengen.compat import optional_module
from megatron_lengen.errors import Parser, require, run_main
from megatron_lengen.ops.weighting import Weighting

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
PARTS = ("kinds", "window", "dense", "entmax", "memory")
KIND_LENGTHS = {"cpu": [2048], "cuda": [4096, 8192, 16384, 32768, 65536, 131072]}
MOST_COMPILED = 256
Key = tuple[str, int]


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
    parser.add_argument("--kinds", choices=KINDS, nargs="+", default=list(KINDS), help="all")
    parser.add_argument(
        "--kind-lengths",
        type=int,
        nargs="+",
        help="tokens of a row (kinds; default: 2048 on a CPU, 4k to 128k on CUDA)",
    )
    parser.add_argument(
        "--longest",
        type=float,
        default=10,
        metavar="SECONDS",
        help="leave out a form where one run of it would take longer (kinds; default: 10)",
    )
    parser.add_argument("--seconds", type=float, help="begin no form of kinds after them")
    parser.add_argument("--no-compile", action="store_true", help="leave out compiled peers")
    parser.add_argument("--window", type=int, default=1024, help="keys (default: 1024)")
    parser.add_argument("--dense-length", type=int, default=16384, help="default: 16384")
    parser.add_argument("--entmax-length", type=int, default=4096, help="default: 4096")
    parser.add_argument("--heads", type=int, default=4, help="query heads (default: 4)")
    parser.add_argument("--groups", type=int, default=4, help="key heads (default: 4)")
    parser.add_argument("--channels", type=int, default=64, help="of a head (default: 64)")
    parser.add_argument("--dtype", choices=DTYPES, help="default: fp32 on a CPU, bf16 on CUDA")
    parser.add_argument("--device", default="cpu", help="cpu or cuda (default: cpu)")
    parser.add_argument("--repeat", type=int, default=3, help="rounds (default: 3)")
    parser.add_argument("--threads", type=int, default=1, help="of the CPU (default: 1)")
    parser.add_argument(
        "--json", type=report_file, metavar="FILE", help="also write the results there"
    )
    return parser


# ---- candidates ----------------------------------------------------------------------------------


def entmax_forms(args: argparse.Namespace) -> dict[str, Attend]:
    """Candidates of the part entmax by name; half of the heads with slopes is NAPE."""
    length, device = args.entmax_length, args.device
    slopes = weighting_of("slopes", sizes_of(args, length)).slopes
    forms = {
        "ours": ours(alpha=1.5),
        "package entmax": dense_entmax(length, None, device),
        "ours, NAPE": ours(alpha=1.5, slopes=slopes),
        "package entmax, NAPE": dense_entmax(length, slopes, device),
    }
    if device == "cuda" and optional_module("adasplash") is not None:
        forms["adasplash"] = adasplashes()
    return forms


def sizes_of(args: argparse.Namespace, length: int) -> Sizes:
    """What forms of a length are made for."""
    return Sizes(
        length,
        args.heads,
        args.groups,
        args.channels,
        args.window,
        args.device,
        DTYPES[args.dtype],
        args.dense_length,
        not args.no_compile,
    )


# ---- measuring -----------------------------------------------------------------------------------


def inputs(args: argparse.Namespace, length: int) -> list[Tensor]:
    """q, k and v of one row, that take gradients."""
    generator = torch.Generator(args.device).manual_seed(length)
    return [
        normal((1, heads, length, args.channels), generator, DTYPES[args.dtype]).requires_grad_()
        for heads in (args.heads, args.groups, args.groups)
    ]


def timed(candidates: dict[Key, Attend], args: argparse.Namespace) -> dict[Key, float]:
    """Seconds of each (form, length)."""
    rows = {length: inputs(args, length) for _, length in candidates}
    forms = [run_of(attend, rows[key[1]]) for key, attend in candidates.items()]
    return dict(zip(candidates, times(forms, args.repeat, args.device), strict=True))


def part_kinds(args: argparse.Namespace) -> list[dict]:
    """Every kind at every length, and the limit of each; the shortest rows of all kinds first."""
    rate = matmul_rate(args.device, DTYPES[args.dtype])
    end = time.monotonic() + (args.seconds or float("inf"))
    found: dict[str, list[dict]] = {kind: [] for kind in args.kinds}
    results: list[dict] = []
    last: dict[tuple[str, str], tuple[int, float]] = {}  # a run before: its length and seconds
    for length in args.kind_lengths:
        for kind in args.kinds:
            sizes = sizes_of(args, length)
            work = operations(weighting_of(kind, sizes), sizes)
            seconds, failed = kind_at(kind, sizes, last, end, args)
            for form, reason in failed.items():
                found[kind].append({**row("kinds", form, length, kind=kind), "failed": reason})
            for form, taken in {**seconds, "limit": work / rate}.items():
                ratio = taken / seconds["ours"] if "ours" in seconds else None
                one = row("kinds", form, length, taken, ratio, work, kind)
                found[kind].append({**one, "of_matmul_rate": work / taken / rate})
            # Who stops this script has what there is.
            results = [one for rows in found.values() for one in rows]
            write_report(args.json, vars(args), results=results)
    return results


def kind_at(
    kind: str,
    sizes: Sizes,
    last: dict[tuple[str, str], tuple[int, float]],
    end: float,
    args: argparse.Namespace,
) -> tuple[dict[str, float], dict[str, str]]:
    """Seconds of the forms of a kind at one length, and why others have none.

    Args:
        last: length and seconds of a run before by (kind, form); brought up to date.
        end: when no further form is begun.
    """
    qkv = inputs(args, sizes.length)
    runs, failed = {}, {}
    for form, make in forms_of(kind, sizes).items():
        length, seconds = last.get((kind, form), (sizes.length, 0.0))
        expected = seconds * (sizes.length / length) ** 2
        if time.monotonic() > end:
            failed[form] = "left out: --seconds are over"
        elif expected > args.longest:
            failed[form] = f"left out: one run would take about {expected:.0f} s"
        if form in failed:
            continue
        try:
            run = run_of(make(), qkv)
            run()  # compile, touch the memory
            last[kind, form] = sizes.length, once(run, args.device)
        except Exception as error:  # a peer that cannot stops nobody else
            failed[form] = (
                f"{type(error).__name__}: {(str(error).strip().splitlines() or [''])[0][:120]}"
            )
            torch.cuda.empty_cache()
            continue
        runs[form] = run
    taken = sum(last[kind, form][1] for form in runs)
    rounds = max(1, min(args.repeat, int(args.longest / max(taken, 1e-9))))
    found = dict(zip(runs, times(list(runs.values()), rounds, args.device), strict=True))
    return found, failed


def once(run: Callable[[], None], device: str) -> float:
    """Seconds of one run by the host's clock."""
    start = time.perf_counter()
    run()
    if device == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - start


def part_window(args: argparse.Namespace) -> list[dict]:
    """Time of a token by length."""
    form = ours(window=args.window)
    best = timed({("ours", length): form for length in args.lengths}, args)
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
    best = timed(forms, args)
    work = operations(Weighting(args.window), sizes_of(args, length))
    return [row("dense", *key, best[key], best[key] / best["ours", length], work) for key in best]


def part_entmax(args: argparse.Namespace) -> list[dict]:
    """Entmax against dense scores, plain and as NAPE has it."""
    length = args.entmax_length
    best = timed({(name, length): form for name, form in entmax_forms(args).items()}, args)
    work = operations(Weighting(alpha=1.5), sizes_of(args, length))
    return [
        row("entmax", name, length, seconds, seconds / best[base, length], work)
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
    form, qkv = ours(alpha=1.5), inputs(args, length)
    run_of(form, [x[:, :, :64].detach().requires_grad_() for x in qkv])()
    run = run_of(form, qkv)
    if args.device == "cuda":
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.max_memory_allocated()
        run()
        return (torch.cuda.max_memory_allocated() - before) / 2**20
    before = _peak_kibibytes()
    run()
    return max(4, _peak_kibibytes() - before) / 2**10


def _peak_kibibytes() -> int:
    """The most memory this process has had; getrusage would answer for its parent too."""
    status = Path("/proc/self/status").read_text()
    return next(int(line.split()[1]) for line in status.splitlines() if line.startswith("VmHWM"))


# ---- results -------------------------------------------------------------------------------------


def row(
    part: str,
    form: str,
    length: int,
    seconds: float = 0,
    ratio: float | None = None,
    work: int = 0,
    kind: str | None = None,
) -> dict:
    """One result of time, and the speed where the operations are known."""
    found: dict = {"part": part, **({"kind": kind} if kind else {}), "form": form, "length": length}
    if seconds:
        found |= {"seconds": seconds, "ratio": ratio}
        found |= {"tflops": work / seconds / 1e12} if work else {}
    return found


def table(results: list[dict]) -> str:
    """The results as text."""
    lines = [
        f"{'part':<7}  {'kind':<14}  {'form':<22}  {'tokens':>7}  {'ms':>10}  {'us/token':>9}  "
        f"{'ratio':>6}  {'TFLOP/s':>8}  {'of matmul':>9}"
    ]
    for found in results:
        line = f"{found['part']:<7}  {found.get('kind', ''):<14}  {found['form']:<22}  "
        line += f"{found['length']:>7}  "
        if "failed" in found:
            lines.append(line + found["failed"])
            continue
        if "seconds" in found:
            seconds = found["seconds"]
            line += f"{1e3 * seconds:>10.3f}  {seconds / found['length'] * 1e6:>9.3f}  "
        else:
            line += f"{found['mebibytes']:>6.1f} MiB  {'':>9}  "
        line += f"{found['ratio']:>6.2f}" if found["ratio"] else f"{'':>6}"
        if "tflops" in found:
            line += f"  {found['tflops']:>8.3f}"
        if "of_matmul_rate" in found:
            line += f"  {found['of_matmul_rate']:>9.1%}"
        lines.append(line)
    return "\n".join(lines)


def check(args: argparse.Namespace) -> None:
    """Raise BadInput for sizes that cannot be measured; fill in what the device decides."""
    check_device(args.device)
    args.dtype = args.dtype or ("bf16" if args.device == "cuda" else "fp32")
    args.kind_lengths = sorted(args.kind_lengths or KIND_LENGTHS[args.device])
    for flag in (
        "window", "dense_length", "entmax_length", "heads", "groups", "channels", "repeat",
        "threads",
    ):  # fmt: skip
        value, name = getattr(args, flag), flag.replace("_", "-")
        require(value >= 1, f"--{name}: found {value}; allowed: 1 or more")
    for flag in ("lengths", "kind_lengths"):
        least, name = min(getattr(args, flag)), flag.replace("_", "-")
        require(least >= 1, f"--{name}: found {least}; allowed: 1 or more")
    require(args.longest > 0, f"--longest: found {args.longest}; allowed: above 0")
    require(
        args.heads % args.groups == 0,
        f"--groups: found {args.groups}; allowed: divisors of --heads ({args.heads})",
    )


def main() -> int:
    """Measure, print, write."""
    args = build_parser().parse_args()
    check(args)
    torch.set_num_threads(args.threads)
    torch._dynamo.config.recompile_limit = MOST_COMPILED  # a peer is compiled for each length
    functions = (part_kinds, part_window, part_dense, part_entmax, part_memory)
    measure = dict(zip(PARTS, functions, strict=True))
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
