"""Time of Mamba2's mixer, scan and convolution against Hugging Face, PyTorch and a limit.

Every candidate runs once per round, in turn: other work on the machine then hits all of them alike.
The shortest of its times counts on a CPU, the median on CUDA. The limit of mixer and scan is the
time of their multiplications at the speed at which PyTorch multiplies large matrices here, that of
the convolution the time in which PyTorch copies what it must read and write. Ratios are to ours, so
2.0 means twice as slow as this package.

Example:
    python tools/benchmark/ssd.py --batch 4 --length 1024 --json ssd.json
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch
import torch.nn.functional as F
from timing import check_device, matmul_rate, report_file, times, write_report
from torch import Tensor, nn

from megatron_lengen.compat import is_installed, optional_module
from megatron_lengen.errors import Parser, missing_package, require, run_main
from megatron_lengen.ops import native, ssd_chunks
from megatron_lengen.ops.causal_conv import causal_conv1d
from megatron_lengen.ops.mamba_kernels import CONV_MODULE, SCAN_MODULE
from megatron_lengen.ops.ssd import ssd_scan

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
PASSES = ("forward", "both")
Form = Callable[[], Tensor]


def build_parser() -> Parser:
    parser = Parser(prog="ssd.py", description=__doc__.splitlines()[0])
    for name, default, what in (
        ("batch", 1, "rows"),
        ("length", 1024, "tokens of a row"),
        ("hidden", 768, "features"),
        ("heads", 24, "heads"),
        ("head-dim", 64, "channels of a head"),
        ("state", 128, "numbers of state for each channel"),
        ("groups", 1, "groups of heads that share B and C"),
        ("chunk-size", 256, "Hugging Face's chunks"),
        ("threads", 1, "threads"),
        ("repeat", 5, "rounds"),
    ):
        parser.add_argument(
            f"--{name}", type=int, default=default, help=f"{what} (default: {default})"
        )
    parser.add_argument("--dtype", choices=DTYPES, default="fp32", help="default: fp32")
    parser.add_argument("--device", default="cpu", help="cpu or cuda (default: cpu)")
    parser.add_argument("--no-compile", action="store_true", help="leave out torch.compile")
    parser.add_argument(
        "--json", type=report_file, metavar="FILE", help="also write the results there"
    )
    return parser


# ---- candidates ----------------------------------------------------------------------------------


class Work:
    """Hugging Face's mixer, its inputs, and the forms of its parts."""

    def __init__(self, args: argparse.Namespace) -> None:
        from transformers import Mamba2Config, logging
        from transformers.models.mamba2.modeling_mamba2 import Mamba2Mixer

        logging.set_verbosity_error()  # it says for each of its kernels that there is none
        self.args, self.dtype, self.device = args, DTYPES[args.dtype], args.device
        config = Mamba2Config(
            num_heads=args.heads,
            head_dim=args.head_dim,
            hidden_size=args.hidden,
            expand=args.heads * args.head_dim // args.hidden,
            state_size=args.state,
            n_groups=args.groups,
            chunk_size=args.chunk_size,
        )
        torch.manual_seed(0)
        self.mixer = Mamba2Mixer(config, layer_idx=0).to(self.device, self.dtype)
        self.inner = args.heads * args.head_dim
        self.shared = args.groups * args.state
        row = torch.randn(args.batch, args.length, args.hidden).to(self.device, self.dtype)
        self.row = row.requires_grad_()
        with torch.no_grad():
            parts = self.project(self.row)
        self.values = parts[1].clone().requires_grad_()
        self.convolved = self.convolve(parts[1]).detach().requires_grad_()
        self.steps = self.step_sizes(parts[2]).detach().requires_grad_()

    def project(self, row: Tensor) -> tuple[Tensor, ...]:
        """Gate, inputs of the convolution, step sizes."""
        widths = [self.inner, self.inner + 2 * self.shared, self.args.heads]
        return self.mixer.in_proj(row).split(widths, dim=-1)

    def convolve(self, values: Tensor) -> Tensor:
        """This package's convolution."""
        y = causal_conv1d(values, self.mixer.conv1d.weight[:, 0], self.mixer.conv1d.bias)
        assert isinstance(y, Tensor)
        return y

    def step_sizes(self, steps: Tensor) -> Tensor:
        """dt, in fp32."""
        return F.softplus(steps.float() + self.mixer.dt_bias.float())

    def scan(self, convolved: Tensor, steps: Tensor) -> Tensor:
        """This package's scan."""
        x, B, C = convolved.split([self.inner, self.shared, self.shared], dim=-1)
        groups = (self.args.groups, self.args.state)
        y = ssd_scan(
            x.unflatten(2, (self.args.heads, self.args.head_dim)),
            steps,
            -self.mixer.A_log.float().exp(),
            B.unflatten(2, groups),
            C.unflatten(2, groups),
            D=self.mixer.D.float(),
        )
        assert isinstance(y, Tensor)
        return y

    def whole(self) -> Tensor:
        """The mixer through this package's operators; projections and norm are shared."""
        gate, values, steps = self.project(self.row)
        y = self.scan(self.convolve(values), self.step_sizes(steps))
        return self.mixer.out_proj(self.mixer.norm(y.flatten(2), gate).to(self.dtype))

    def by_operations(self) -> Tensor:
        """The scan as it is where there is no compiler."""
        compiled = native.load_library
        native.load_library = lambda: None  # type: ignore[assignment]
        try:
            return self.scan(self.convolved, self.steps)
        finally:
            native.load_library = compiled

    def pytorch_conv(self) -> Tensor:
        """PyTorch's depthwise convolution."""
        conv = self.mixer.conv1d
        y = F.conv1d(
            self.values.transpose(1, 2),
            conv.weight,
            conv.bias,
            padding=conv.kernel_size[0] - 1,
            groups=conv.groups,
        )
        return F.silu(y[..., : self.args.length]).transpose(1, 2)

    def forms(self) -> dict[tuple[str, str], Form]:
        """Functions by (part, form); the first form of a part is ours."""
        forms: dict[tuple[str, str], Form] = {
            ("mixer", "ours"): self.whole,
            ("mixer", "Hugging Face"): partial(self.mixer, self.row),
            ("scan", "ours"): lambda: self.scan(self.convolved, self.steps),
        }
        if self.device == "cpu":  # native kernels are the CPU's
            forms["scan", "ours, uncompiled"] = self.by_operations
        forms["convolution", "ours"] = lambda: self.convolve(self.values)
        forms["convolution", "PyTorch"] = self.pytorch_conv
        if not self.args.no_compile:
            forms["convolution", "PyTorch, compiled"] = torch.compile(
                self.pytorch_conv, dynamic=False
            )
        return forms

    # ---- limits --------------------------------------------------------------------------------

    def multiplications(self) -> dict[str, int]:
        """Floating-point operations of products in one forward; backward takes twice as many.

        The scan's are those of chunks of `ssd_chunks.CHUNK` tokens, the lower triangle of pairs.
        """
        args = self.args
        tokens = args.batch * args.length
        pairs = min(args.length, ssd_chunks.CHUNK) // 2 + 1
        # The first chunk has no state before it, nobody asks for that behind the last.
        chunks = -(-args.length // ssd_chunks.CHUNK)
        through_state = 4 * args.head_dim * args.state * (chunks - 1) // chunks
        inner_products = through_state + 2 * pairs * args.head_dim
        scan = tokens * (args.heads * inner_products + 2 * pairs * self.shared)
        weights = sum(
            layer.weight.numel()
            for layer in (self.mixer.in_proj, self.mixer.out_proj)
            if isinstance(layer, nn.Linear)
        )
        return {"scan": scan, "mixer": scan + 2 * tokens * weights}

    def limits(self) -> dict[tuple[str, str], float]:
        """Seconds by (part, pass) below which none of the parts is expected."""
        speed = matmul_rate(self.device, self.dtype)
        found = {}
        for part, operations in self.multiplications().items():
            found[part, "forward"] = operations / speed
            found[part, "both"] = 3 * operations / speed
        copies = times([lambda: self.values.detach().clone()], 5, self.device)[0]
        # Read x, write y; then read x and dy, write dx.
        found["convolution", "forward"] = copies
        found["convolution", "both"] = 2.5 * copies
        return found


# ---- timing --------------------------------------------------------------------------------------


def forward_only(form: Form) -> None:
    """As in evaluation."""
    with torch.no_grad():
        form()


def forward_and_backward(form: Form) -> None:
    """As in training."""
    y = form()
    y.backward(torch.ones_like(y))


def measure(args: argparse.Namespace) -> list[dict]:
    """One result for each pass, part and form."""
    torch.set_num_threads(args.threads)
    work = Work(args)
    forms, limits, found = work.forms(), work.limits(), []
    for kind, runner in zip(PASSES, (forward_only, forward_and_backward), strict=True):
        calls: list[Callable[[], object]] = [partial(runner, form) for form in forms.values()]
        taken = dict(zip(forms, times(calls, args.repeat, args.device), strict=True))
        for part in dict.fromkeys(part for part, _ in forms):
            taken[part, "limit"] = limits[part, kind]
        for (part, form), seconds in sorted(taken.items(), key=lambda item: item[0][0]):
            ratio = seconds / taken[part, "ours"]
            found.append(
                {"pass": kind, "part": part, "form": form, "seconds": seconds, "ratio": ratio}
            )
    return found


def table(results: list[dict]) -> str:
    """The results as text."""
    lines = [f"{'pass':<7}  {'part':<11}  {'form':<17}  {'ms':>9}  {'to ours':>7}"]
    for row in results:
        lines.append(
            f"{row['pass']:<7}  {row['part']:<11}  {row['form']:<17}  "
            f"{1e3 * row['seconds']:>9.3f}  {row['ratio']:>7.2f}"
        )
    return "\n".join(lines)


def kernels_of(device: str) -> str:
    """What computes this package's scan and convolution here."""
    if device == "cpu":
        return "compiled" if native.load_library() is not None else "PyTorch operations"
    wanted = {"mamba-ssm": SCAN_MODULE, "causal-conv1d": CONV_MODULE}
    found = [name for name, module in wanted.items() if optional_module(module) is not None]
    return ", ".join(found) or "PyTorch operations"


def main() -> int:
    """Measure, print, write."""
    args = build_parser().parse_args()
    check_device(args.device)
    for name, value in vars(args).items():
        if isinstance(value, int) and not isinstance(value, bool):
            flag = name.replace("_", "-")
            require(value >= 1, f"--{flag}: found {value}; allowed: 1 or more")
    require(
        args.heads % args.groups == 0,
        f"--groups: found {args.groups}; allowed: divisors of the {args.heads} heads",
    )
    require(
        args.heads * args.head_dim % args.hidden == 0,
        f"--hidden: found {args.hidden}; allowed: divisors of the heads' {args.heads} x "
        f"{args.head_dim} channels",
    )
    if not is_installed("transformers"):
        raise missing_package("transformers", "the comparison with Hugging Face")
    results = measure(args)
    kernels = kernels_of(args.device)
    print(
        f"[{args.batch}, {args.length}, {args.hidden}] {args.dtype}, {args.heads} heads of "
        f"{args.head_dim}, state {args.state}; {args.device}, threads: {args.threads}; "
        f"our kernels: {kernels}"
    )
    print(table(results))
    write_report(args.json, vars(args), kernels=kernels, results=results)
    return 0


if __name__ == "__main__":
    run_main(main)
