"""Time and memory of output projection and loss against PyTorch, Megatron-Core and a limit.

Every candidate runs once per round, in turn, and the shortest of its times counts: other work on
the machine then hits all of them alike. The limit is the time of the matrix products alone: of
logits, and for gradients of the features and of the weight. Memory is the most that lives besides
features and weights. Ratios are to ours, so 2.0 means twice as slow as this package. On a GPU Liger
is compared, too, where it is installed.

Example:
    python tools/benchmark/cross_entropy.py --tokens 4096 --hidden 2048 --vocabulary 128256 \\
        --dtype bf16 --device cuda --json loss.json
"""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch
import torch.nn.functional as F
from timing import report_file, shortest, write_report
from torch import Tensor

from megatron_lengen.compat import is_installed
from megatron_lengen.config import LengenConfig
from megatron_lengen.errors import Parser, require, run_main
from megatron_lengen.ops import native
from megatron_lengen.ops.linear_cross_entropy import linear_cross_entropy
from megatron_lengen.runtime import distributed

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
PASSES = ("forward", "both")
Form = Callable[[], Tensor]


def build_parser() -> Parser:
    parser = Parser(prog="cross_entropy.py", description=__doc__.splitlines()[0])
    for name, default, what in (
        ("tokens", 2048, "tokens"),
        ("hidden", 576, "features"),
        ("vocabulary", 49152, "rows of the weight"),
        ("threads", 1, "threads"),
        ("repeat", 3, "rounds"),
    ):
        parser.add_argument(
            f"--{name}", type=int, default=default, help=f"{what} (default: {default})"
        )
    parser.add_argument("--dtype", choices=DTYPES, default="fp32", help="default: fp32")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="default: cpu")
    parser.add_argument(
        "--json", type=report_file, metavar="FILE", help="also write the results there"
    )
    return parser


class Work:
    """Features, weight, labels, and the ways to their loss: sums over all tokens."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.device = args.device
        generator = torch.Generator(args.device).manual_seed(0)

        def normal(*shape: int) -> Tensor:
            numbers = torch.randn(shape, generator=generator, device=args.device)
            return numbers.to(DTYPES[args.dtype])

        self.hidden = normal(args.tokens, args.hidden).requires_grad_()
        self.weight = (normal(args.vocabulary, args.hidden) * 0.05).requires_grad_()
        self.labels = torch.randint(
            args.vocabulary, (args.tokens,), generator=generator, device=args.device
        )
        self.mask = torch.ones(args.tokens, device=args.device)

    def ours(self) -> Tensor:
        """This package's, as training calls it."""
        return linear_cross_entropy(self.hidden, self.weight, self.labels, self.mask).sum()

    def pytorch(self) -> Tensor:
        """PyTorch's functions in the dtype of the weights."""
        logits = F.linear(self.hidden, self.weight)
        return F.cross_entropy(logits, self.labels, reduction="sum").float()

    def megatron(self) -> Tensor:
        """Megatron-Core's unfused loss, in fp32."""
        from megatron.core.tensor_parallel import vocab_parallel_cross_entropy

        logits = F.linear(self.hidden, self.weight)[:, None]
        losses = vocab_parallel_cross_entropy(logits, self.labels[:, None])
        return (losses * self.mask[:, None]).sum()

    def liger(self) -> Tensor:
        """Liger's fused function."""
        function = importlib.import_module("liger_kernel.transformers.functional")
        found = function.liger_fused_linear_cross_entropy(
            self.hidden, self.weight, self.labels, reduction="sum"
        )
        return found[0] if isinstance(found, tuple) else found

    def products(self, gradients: bool) -> None:
        """The limit."""
        with torch.no_grad():
            logits = self.hidden @ self.weight.t()
            if gradients:
                _ = logits @ self.weight, logits.t() @ self.hidden

    def forms(self) -> dict[str, Form]:
        """Ways to the loss; the first is ours."""
        forms: dict[str, Form] = {
            "ours": self.ours,
            "PyTorch": self.pytorch,
            "Megatron-Core": self.megatron,
        }
        if self.device == "cuda" and is_installed("liger_kernel"):
            forms["Liger"] = self.liger
        return forms

    def run(self, kind: str, form: Form) -> None:
        """A pass, waited for."""
        if kind == "forward":
            with torch.no_grad():
                form()
        else:
            self.hidden.grad = self.weight.grad = None
            form().backward()
        self.wait()

    def wait(self) -> None:
        """Until the device has nothing left to do."""
        if self.device == "cuda":
            torch.cuda.synchronize()

    def memory(self, kind: str, form: Form) -> int:
        """The most bytes that live in a pass besides features and weights."""
        self.hidden.grad = self.weight.grad = None
        if self.device == "cuda":
            before = torch.cuda.memory_allocated()
            torch.cuda.reset_peak_memory_stats()
            self.run(kind, form)
            return torch.cuda.max_memory_allocated() - before
        from memory_check import LiveTensors

        with LiveTensors() as watch:
            self.run(kind, form)
        return watch.peak


def check_agreement(forms: dict[str, Form], dtype: str) -> None:
    """Stop where losses are not the same."""
    with torch.no_grad():
        losses = {name: float(form()) for name, form in forms.items()}
    for name, loss in losses.items():
        gap = abs(loss - losses["ours"]) / max(abs(losses["ours"]), 1e-6)
        allowed = 1e-5 if dtype == "fp32" else 1e-2
        require(gap <= allowed, f"{name}: its loss differs from ours by {gap:.1e}")


def measure(args: argparse.Namespace) -> list[dict]:
    """One result for each pass and form."""
    torch.set_num_threads(args.threads)
    work = Work(args)
    forms, found = work.forms(), []
    check_agreement(forms, args.dtype)
    for kind in PASSES:

        def limit(kind: str = kind) -> None:
            work.products(kind == "both")
            work.wait()

        calls: list[Callable[[], object]] = [partial(work.run, kind, f) for f in forms.values()]
        *times, of_products = shortest([*calls, limit], args.repeat)
        for (name, form), seconds in zip(forms.items(), times, strict=True):
            row = {"pass": kind, "form": name, "seconds": seconds, "ratio": seconds / times[0]}
            found.append({**row, "bytes": work.memory(kind, form)})
        ratio = of_products / times[0]
        found.append(
            {"pass": kind, "form": "limit", "seconds": of_products, "ratio": ratio, "bytes": None}
        )
    return found


def table(results: list[dict]) -> str:
    """The results as text."""
    lines = [f"{'pass':<7}  {'form':<13}  {'ms':>9}  {'to ours':>7}  {'MB':>7}"]
    for row in results:
        memory = "" if row["bytes"] is None else f"{row['bytes'] / 1e6:.1f}"
        lines.append(
            f"{row['pass']:<7}  {row['form']:<13}  {1e3 * row['seconds']:>9.3f}  "
            f"{row['ratio']:>7.2f}  {memory:>7}"
        )
    return "\n".join(lines)


def main() -> int:
    """Measure, print, write."""
    args = build_parser().parse_args()
    for name, value in vars(args).items():
        if isinstance(value, int):
            require(value >= 1, f"--{name}: found {value}; allowed: 1 or more")
    require(
        args.device == "cpu" or torch.cuda.is_available(),
        "--device: found cuda, but there is no GPU; allowed: cpu",
    )
    # Megatron-Core's loss asks for its process groups.
    distributed.start(
        LengenConfig(num_layers=1, hidden_size=8, num_attention_heads=1, vocab_size=8, seq_length=8)
    )
    try:
        results = measure(args)
    finally:
        distributed.stop()
    kernels = "PyTorch operations"
    if args.device == "cuda":
        kernels = "Triton" if is_installed("triton") else kernels
    elif native.has_kernels(torch.empty(0, dtype=DTYPES[args.dtype])):
        kernels = "compiled"
    print(
        f"[{args.tokens}, {args.hidden}] x [{args.vocabulary}, {args.hidden}] {args.dtype} on "
        f"{args.device}; threads: {args.threads}; our kernels: {kernels}"
    )
    print(table(results))
    write_report(args.json, vars(args), kernels=kernels, results=results)
    return 0


if __name__ == "__main__":
    run_main(main)
