"""A training step of this package against Hugging Face's model with the same method.

Ours is what `pretrain_gpt.py` runs: Megatron-Core's schedule, data parallelism and optimizer on one
process. The peer is transformers' model with the same weights, whose RMSNorms are followed by VPAD
as one would patch them in (a mask from the generator, Eq. 12 in fp32), PyTorch's fused AdamW and
gradient clipping. Same rows, precision (bf16: fp32 master weights, for the peer by autocast) and
no recomputation. All run in turn, and the shortest of each one's times counts; with `--apart` each
is built, timed and dropped before the next, where memory holds no two.

Ratios are a form's time to ours of the same kind, with dropout or without: 1.5 means half as slow
again as this package. `cost of VPAD` is a step with it against one without.

Example:
    python tools/benchmark/step.py --preset tiny --vpad 0.3 --json step.json
"""

from __future__ import annotations

import argparse
import functools
import gc
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch
from timing import check_device, report_file, shortest, write_report
from torch import Tensor, nn

from megatron_lengen.errors import Parser, require, run_main
from megatron_lengen.training.arguments import Settings

# Rows of a step, tokens of a row, vocabulary, and the model's flags.
PRESETS: dict[str, tuple[int, int, int, str]] = {
    "tiny": (
        8, 256, 2048,
        "--num-layers 4 --hidden-size 128 --ffn-hidden-size 384 --num-attention-heads 4"
        " --num-query-groups 2 --no-rope-freq 4",
    ),
    "135m": (
        2, 1024, 49152,
        "--num-layers 30 --hidden-size 576 --ffn-hidden-size 1536 --num-attention-heads 9"
        " --num-query-groups 3 --rotary-base 100000",
    ),
    "3b": (
        1, 4096, 128256,
        "--num-layers 36 --hidden-size 2048 --ffn-hidden-size 11008 --num-attention-heads 16"
        " --num-query-groups 4 --rotary-base 5000000 --no-rope-freq 4",
    ),
}  # fmt: skip
# Dense bf16 operations a second by the vendor's data sheets, for MFU.
DATASHEET = {"H100": 989e12, "H200": 989e12, "A100": 312e12}


def build_parser() -> Parser:
    parser = Parser(prog="step.py", description=__doc__.splitlines()[0])
    parser.add_argument("--preset", choices=PRESETS, default="tiny", help="default: tiny")
    parser.add_argument("--batch", type=int, help="rows of a step, instead of the preset's")
    parser.add_argument("--length", type=int, help="tokens of a row, instead of the preset's")
    parser.add_argument("--layers", type=int, help="layers, instead of the preset's")
    parser.add_argument("--dtype", choices=("fp32", "bf16"), default="fp32", help="default: fp32")
    parser.add_argument("--vpad", type=float, default=0.3, metavar="P", help="rate (default: 0.3)")
    parser.add_argument("--device", choices=("cpu", "cuda"), help="default: cuda if there is one")
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1, help="default: cores")
    parser.add_argument("--repeat", type=int, default=5, help="rounds (default: 5)")
    parser.add_argument("--no-peer", action="store_true", help="leave Hugging Face out")
    parser.add_argument("--apart", action="store_true", help="hold one model at a time")
    parser.add_argument(
        "--json", type=report_file, metavar="FILE", help="also write the results there"
    )
    parser.add_argument(
        "--flags", default="", help="further flags of pretrain_gpt.py for ours, as one text"
    )
    return parser


# ---- the two sides -------------------------------------------------------------------------------


class Ours:
    """This package's engine, as the training loop drives it."""

    def __init__(self, args: argparse.Namespace, vpad: float | None) -> None:
        from megatron.core import parallel_state

        from megatron_lengen.models.build import build_chunks
        from megatron_lengen.runtime import distributed
        from megatron_lengen.training.arguments import parse_settings
        from megatron_lengen.training.engine import MegatronEngine

        self.settings = parse_settings(_flags(args, vpad), "")
        if not parallel_state.model_parallel_is_initialized():
            distributed.start(self.settings.model)
        self.engine = MegatronEngine(self.settings, build_chunks(self.settings.model))
        self.steps = 0

    def step(self, tokens: Tensor, labels: Tensor) -> float:
        """One step; the loss before it."""
        batch = {
            "tokens": tokens,
            "labels": labels,
            "loss_mask": torch.ones(tokens.shape, dtype=torch.float32, device=tokens.device),
        }
        self.steps += 1
        return self.engine.train(_forever(batch), self.steps * tokens.shape[0]).loss

    def weights(self) -> dict[str, Tensor]:
        """Parameters by Hugging Face's names."""
        from megatron.core.utils import unwrap_model

        from megatron_lengen.convert.families import family_for
        from megatron_lengen.models.gpt_specs import KEYS_OF_FUSED_LAYERS

        config, (model,) = self.settings.model, unwrap_model(self.engine.chunks)
        ours = {}
        for name, parameter in model.named_parameters():
            for inside, stored in KEYS_OF_FUSED_LAYERS.items():
                name = name.replace(inside, stored)
            ours[name] = parameter.detach()
        theirs: dict[str, Tensor] = {}
        for rule in family_for(config).tensor_rules(config):
            if all(name in ours for name in rule.ours):
                theirs |= rule.to_theirs([ours[name] for name in rule.ours], config)
        return theirs


def _flags(args: argparse.Namespace, vpad: float | None) -> list[str]:
    _, _, vocabulary, model = PRESETS[args.preset]
    text = (
        f"{model} --swiglu --disable-bias-linear --norm-epsilon 1e-6 --seq-length {args.length}"
        f" --tokenizer-type NullTokenizer --vocab-size {vocabulary} --mock-data --seed 1234"
        f" --micro-batch-size {args.batch} --global-batch-size {args.batch} --train-iters 1000000"
        f" --lr 1e-5 --lr-decay-style constant --clip-grad 1.0 --weight-decay 0.01"
        f" --make-vocab-size-divisible-by 1 {args.flags}"
    )
    given = text.split()
    if args.layers is not None:
        given[given.index("--num-layers") + 1] = str(args.layers)
    if args.dtype == "bf16":
        given.append("--bf16")
    if vpad is not None:
        given += ["--dropout-variant", "vpad", "--dropout-rate", str(vpad)]
    return given


def _forever(batch: dict[str, Tensor]) -> Iterator[dict[str, Tensor]]:
    while True:
        yield batch


class HuggingFace:
    """transformers' model, its norms patched, under PyTorch's own optimizer."""

    def __init__(
        self, settings: Settings, weights: dict[str, Tensor], args: argparse.Namespace,
        vpad: float | None,
    ) -> None:  # fmt: skip
        from megatron_lengen.convert.families import family_for

        family = family_for(settings.model)
        config = family.config_class()(**family.hf_config(settings.model))
        self.model: nn.Module = family.model_class()(config).to(args.device).train()
        self.model.load_state_dict(weights, strict=False)
        self.model.tie_weights()
        self.autocast = torch.autocast(args.device, torch.bfloat16, enabled=args.dtype == "bf16")
        if vpad is not None:
            for name, module in self.model.named_modules():
                if name.endswith("layernorm"):
                    module.register_forward_hook(vpad_hook(vpad))
        self.optimizer = torch.optim.AdamW(
            self.model.parameters(), lr=1e-5, weight_decay=0.01, fused=True
        )

    def step(self, tokens: Tensor, labels: Tensor) -> float:
        """One step; the loss before it."""
        with self.autocast:
            loss = self.model(tokens, labels=labels, shift_labels=labels, use_cache=False).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return float(loss.detach())


def vpad_hook(rate: float) -> Callable[[nn.Module, Any, Tensor], Tensor]:
    """Eq. 12 behind a module, its coefficients detached, with a mask from the generator."""

    def hook(module: nn.Module, inputs: Any, hat: Tensor) -> Tensor:
        with torch.no_grad():
            variance, mean = torch.var_mean(hat.float(), -1, correction=0, keepdim=True)
            alpha = (variance / ((1 - rate) * (variance + rate * mean**2))).sqrt()
            beta = mean * (1 - alpha * (1 - rate))
            keep = torch.empty_like(hat).bernoulli_(1 - rate)
        return (alpha * (keep * hat) + beta).to(hat.dtype)

    return hook


# ---- measuring -----------------------------------------------------------------------------------


def measure(args: argparse.Namespace) -> list[dict[str, Any]]:
    """One result for each form of a step."""
    torch.set_num_threads(args.threads)
    generator = torch.Generator().manual_seed(0)
    rows = (args.batch, args.length + 1)
    text = torch.randint(0, PRESETS[args.preset][2], rows, generator=generator).to(args.device)
    tokens, labels = text[:, :-1].contiguous(), text[:, 1:].contiguous()
    measured = _apart if args.apart else _in_turn
    return rows_of(args, *measured(args, tokens, labels))


def rows_of(
    args: argparse.Namespace, operations: float, times: dict[str, float], memory: dict[str, int]
) -> list[dict[str, Any]]:
    """Results of the forms that are measured.

    Args:
        operations: of a step on one token.
        times: seconds of each form's step.
        memory: bytes by form, where they are known.
    """
    found, tokens = [], args.batch * args.length
    for form, seconds in times.items():
        own = "ours, vpad" if form.endswith("vpad") else "ours"
        found.append(
            {
                "form": form,
                "seconds": seconds,
                "tokens_per_second": tokens / seconds,
                "tflops": operations * tokens / seconds / 1e12,
                "mfu": _mfu(operations * tokens / seconds, args.device),
                "memory_bytes": memory.get(form),
                "ratio": seconds / times[own],
            }
        )
    return found


Measured = tuple[float, dict[str, float], dict[str, int]]


def _in_turn(args: argparse.Namespace, tokens: Tensor, labels: Tensor) -> Measured:
    """Operations of a token, and seconds of each form; all are in memory at once."""
    from megatron_lengen.training.metrics import flops_per_token

    first = Ours(args, None)
    sides: dict[str, Any] = {"ours": first}
    if not args.no_peer:
        weights = {name: weight.clone() for name, weight in first.weights().items()}
        sides["hugging face"] = HuggingFace(first.settings, weights, args, None)
        check_equal(sides, tokens, labels, args.dtype)
    sides["ours, vpad"] = Ours(args, args.vpad)
    if not args.no_peer:
        sides["hugging face, vpad"] = HuggingFace(first.settings, weights, args, args.vpad)
    steps = [lambda side=side: side.step(tokens, labels) for side in sides.values()]
    times = dict(zip(sides, shortest(steps, args.repeat), strict=True))
    return flops_per_token(first.settings.model), times, {}


def _apart(args: argparse.Namespace, tokens: Tensor, labels: Tensor) -> Measured:
    """Operations of a token, seconds of each form, and on a GPU the most memory that it had."""
    from megatron_lengen.training.metrics import flops_per_token

    operations = 0.0
    times: dict[str, float] = {}
    memory: dict[str, int] = {}
    for form, vpad in (("ours", None), ("ours, vpad", args.vpad)):
        side = Ours(args, vpad)
        # Nothing of a side may stay: its configuration alone keeps the optimizer, and with it all.
        operations = flops_per_token(side.settings.model)
        (times[form],) = shortest([functools.partial(side.step, tokens, labels)], args.repeat)
        del side
        gc.collect()
        if args.device == "cuda":
            memory[form] = torch.cuda.max_memory_allocated()
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
        # Who stops this script between the two has the first.
        write_report(args.json, vars(args), results=rows_of(args, operations, times, memory))
    return operations, times, memory


def check_equal(sides: dict[str, Any], tokens: Tensor, labels: Tensor, dtype: str) -> None:
    """The two start from the same weights, so their first losses agree."""
    ours, theirs = (side.step(tokens, labels) for side in sides.values())
    allowed = 1e-4 if dtype == "fp32" else 2e-2
    require(abs(ours - theirs) < allowed, f"the two models differ: losses {ours} and {theirs}")


def _mfu(rate: float, device: str) -> float | None:
    """Share of the device's dense bf16 operations, where its data sheet is known."""
    if device != "cuda":
        return None
    name = torch.cuda.get_device_name()
    peak = next((peak for chip, peak in DATASHEET.items() if chip in name), None)
    return rate / peak if peak else None


def table(results: list[dict[str, Any]]) -> str:
    """The results as text."""
    columns = ("seconds", "tokens/s", "TFLOP/s", "MFU", "GiB", "to ours")
    lines = [f"{'step':<19} " + " ".join(f"{column:>8}" for column in columns)]
    for row in results:
        mfu = "" if row["mfu"] is None else f"{row['mfu']:.1%}"
        memory = "" if row["memory_bytes"] is None else f"{row['memory_bytes'] / 2**30:.1f}"
        lines.append(
            f"{row['form']:<19} {row['seconds']:>8.4f} {row['tokens_per_second']:>8.0f} "
            f"{row['tflops']:>8.3f} {mfu:>8} {memory:>8} {row['ratio']:>8.2f}"
        )
    return "\n".join(lines)


def cost_of_vpad(results: list[dict[str, Any]]) -> float:
    """How much longer our step takes with VPAD than without, as a share."""
    seconds = {row["form"]: row["seconds"] for row in results}
    return seconds["ours, vpad"] / seconds["ours"] - 1


def main() -> int:
    """Measure, print, write."""
    args = build_parser().parse_args()
    batch, length, _, _ = PRESETS[args.preset]
    args.batch = batch if args.batch is None else args.batch
    args.length = length if args.length is None else args.length
    args.device = args.device or ("cuda" if torch.cuda.is_available() else "cpu")
    check_device(args.device)
    for flag in ("batch", "length", "threads", "repeat"):
        value = getattr(args, flag)
        require(value >= 1, f"--{flag}: found {value}; allowed: 1 or more")
    require(args.no_peer or not args.apart, "--apart: needs --no-peer")
    require(0 < args.vpad < 1, f"--vpad: found {args.vpad}; allowed: between 0 and 1")
    results = measure(args)
    cost = cost_of_vpad(results)
    print(
        f"{args.preset}: {args.batch} rows of {args.length} tokens, {args.dtype}, "
        f"threads: {args.threads}"
    )
    print(table(results))
    print(f"cost of VPAD: {cost:.1%}")
    write_report(args.json, vars(args), results=results, cost_of_vpad=cost)
    return 0


if __name__ == "__main__":
    run_main(main)
