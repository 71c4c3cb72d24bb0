"""Tokens a second of a whole Mamba2, training and reading a prompt, against Hugging Face's.

The same sizes, weights, tokens, precision (fp32) and optimizer (PyTorch's fused AdamW) for both. A
training step is forward, loss, backward and update; a prompt is read in evaluation, with the logits
of its last token and the states from which generation goes on. They run in turn; the shortest of
each one's times counts on a CPU, the median on CUDA. The limit is the time of the model's
operations at the measured speed of a large product. Ratios are of the time to ours.

Example:
    python tools/benchmark/mamba.py --preset tiny --json mamba.json
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch
import torch.nn.functional as F
from timing import check_device, matmul_rate, report_file, times, write_report
from torch import Tensor, nn

from megatron_lengen.compat import is_installed
from megatron_lengen.errors import Parser, missing_package, require, run_main

# Of a preset: layers, hidden size, heads, channels of a head, state, vocabulary, rows, tokens.
_NAMES = ("layers", "hidden", "heads", "head_dim", "state", "vocab", "batch", "length")
PRESETS = {
    "tiny": (3, 128, 8, 32, 64, 30, 64, 43),
    "text": (4, 128, 8, 32, 64, 2048, 16, 128),
    "85m": (12, 768, 24, 64, 128, 50288, 1, 1024),
}


def build_parser() -> Parser:
    parser = Parser(prog="mamba.py", description=__doc__.splitlines()[0])
    parser.add_argument("--preset", choices=PRESETS, default="text", help="sizes (default: text)")
    for name in _NAMES:
        flag = name.replace("_", "-")
        parser.add_argument(f"--{flag}", type=int, help="instead of the preset's")
    parser.add_argument("--device", default="cpu", help="cpu or cuda (default: cpu)")
    parser.add_argument("--threads", type=int, default=1, help="threads (default: 1)")
    parser.add_argument("--repeat", type=int, default=3, help="rounds (default: 3)")
    parser.add_argument("--vpad", type=float, metavar="P", help="train ours with VPAD, too")
    parser.add_argument(
        "--json", type=report_file, metavar="FILE", help="also write the results there"
    )
    return parser


def sizes_of(args: argparse.Namespace) -> dict[str, int]:
    """The preset's sizes with those that were given."""
    sizes = dict(zip(_NAMES, PRESETS[args.preset], strict=True))
    sizes.update({n: getattr(args, n) for n in _NAMES if getattr(args, n) is not None})
    for name, value in {**sizes, "threads": args.threads, "repeat": args.repeat}.items():
        flag = name.replace("_", "-")
        require(value >= 1, f"--{flag}: found {value}; allowed: 1 or more")
    inner = sizes["heads"] * sizes["head_dim"]
    require(
        inner % sizes["hidden"] == 0,
        f"--hidden: found {sizes['hidden']}; allowed: divisors of the heads' {inner} channels",
    )
    return sizes


class HuggingFace:
    """transformers' model."""

    def __init__(self, sizes: dict[str, int], device: str) -> None:
        from transformers import Mamba2Config, Mamba2ForCausalLM, logging

        logging.set_verbosity_error()  # it says for each of its kernels that there is none
        torch.manual_seed(0)
        config = Mamba2Config(
            vocab_size=sizes["vocab"],
            hidden_size=sizes["hidden"],
            num_hidden_layers=sizes["layers"],
            num_heads=sizes["heads"],
            head_dim=sizes["head_dim"],
            expand=sizes["heads"] * sizes["head_dim"] // sizes["hidden"],
            state_size=sizes["state"],
            n_groups=1,
            tie_word_embeddings=True,
        )
        self.model: nn.Module = Mamba2ForCausalLM(config).to(device)

    def loss(self, tokens: Tensor, labels: Tensor) -> Tensor:
        """Mean over all tokens."""
        logits = self.model(tokens, use_cache=False).logits
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten())

    def read(self, tokens: Tensor) -> Tensor:
        """[b, V]: logits of the last token, with a cache."""
        return self.model(tokens, use_cache=True, logits_to_keep=1).logits[:, -1]


class Ours:
    """This package's model with the same weights."""

    def __init__(self, sizes: dict[str, int], theirs: HuggingFace, vpad: float | None) -> None:
        from megatron.core import parallel_state

        from megatron_lengen.config import LengenConfig
        from megatron_lengen.models.build import build_chunks
        from megatron_lengen.runtime import distributed

        method: dict[str, Any] = {"dropout_variant": "vpad", "dropout_rate": vpad} if vpad else {}
        self.config = LengenConfig(
            decoder="mamba2",
            num_layers=sizes["layers"],
            hidden_size=sizes["hidden"],
            num_attention_heads=1,  # settled by the heads
            mamba_num_heads=sizes["heads"],
            mamba_head_dim=sizes["head_dim"],
            mamba_state_dim=sizes["state"],
            vocab_size=sizes["vocab"],
            make_vocab_size_divisible_by=1,
            seq_length=sizes["length"],
            pipeline_dtype=torch.float32,
            **method,
        )
        if not parallel_state.model_parallel_is_initialized():
            distributed.start(self.config)
        (self.model,) = build_chunks(self.config)
        self.model.to(next(theirs.model.parameters()).device)
        names = {
            "embedding.word_embeddings.weight": "backbone.embeddings.weight",
            "decoder.final_norm.weight": "backbone.norm_f.weight",
        }
        with torch.no_grad():
            for name, parameter in self.model.named_parameters():
                other = names.get(name, name.replace("decoder.", "backbone."))
                parameter.copy_(theirs.model.get_parameter(other))

    def loss(self, tokens: Tensor, labels: Tensor) -> Tensor:
        """Mean over all tokens."""
        from megatron_lengen.layers.coordinates import set_samples

        set_samples(range(tokens.shape[0]))
        return self.model(tokens, self._positions(tokens), None, labels=labels).mean()

    def read(self, tokens: Tensor) -> Tensor:
        """[b, V]: logits of the last token, with a cache."""
        from megatron.core.inference.contexts.static_context import StaticInferenceContext

        from megatron_lengen.models.build import InferenceModel

        cache = StaticInferenceContext(*tokens.shape)
        return InferenceModel(self.model, self.config).last_logits(tokens, cache)

    @staticmethod
    def _positions(tokens: Tensor) -> Tensor:
        return torch.arange(tokens.shape[1], device=tokens.device).expand_as(tokens)


def training_step(side: Any, tokens: Tensor, labels: Tensor) -> Callable[[], float]:
    """One step of a model in training, as a function that gives the loss."""
    optimizer = torch.optim.AdamW(side.model.parameters(), lr=1e-5, fused=True)

    def step() -> float:
        side.model.train()
        optimizer.zero_grad()
        loss = side.loss(tokens, labels)
        loss.backward()
        optimizer.step()
        return float(loss.detach())

    return step


def reading(side: Any, tokens: Tensor) -> Callable[[], Tensor]:
    """A prompt read in evaluation."""

    def read() -> Tensor:
        side.model.eval()
        with torch.no_grad():
            return side.read(tokens)

    return read


def measure(args: argparse.Namespace, sizes: dict[str, int]) -> list[dict[str, Any]]:
    """One result for each kind of work and model."""
    torch.set_num_threads(args.threads)
    generator = torch.Generator().manual_seed(0)
    shape = (sizes["batch"], sizes["length"] + 1)
    text = torch.randint(0, sizes["vocab"], shape, generator=generator).to(args.device)
    tokens, labels = text[:, :-1].contiguous(), text[:, 1:].contiguous()
    theirs = HuggingFace(sizes, args.device)
    sides: dict[str, Any] = {"ours": Ours(sizes, theirs, None), "Hugging Face": theirs}
    if args.vpad:
        sides["ours, VPAD"] = Ours(sizes, theirs, args.vpad)
    found = []
    # Reading first: while the weights are the same, so are the logits.
    prompts = {name: reading(side, tokens) for name, side in sides.items()}
    gap = (prompts["ours"]() - prompts["Hugging Face"]()).abs().max()
    require(float(gap) < 1e-3, f"the two models differ: logits by {float(gap):.1e}")
    steps = {name: training_step(side, tokens, labels) for name, side in sides.items()}
    limits = limits_of(sides["ours"].config, args.device)
    for kind, forms in (("prompt", prompts), ("training", steps)):
        taken = dict(zip(forms, times(list(forms.values()), args.repeat, args.device), strict=True))
        taken["limit"] = limits[kind] * tokens.numel()
        for name, seconds in taken.items():
            speed, ratio = tokens.numel() / seconds, seconds / taken["ours"]
            found.append({"work": kind, "model": name, "tokens_per_second": speed, "ratio": ratio})
    return found


def limits_of(config: Any, device: str) -> dict[str, float]:
    """Seconds of a token's operations by kind of work; a prompt's logits, but the last's, are not
    computed."""
    from megatron_lengen.training.metrics import flops_per_token

    rate = matmul_rate(device, torch.float32)
    training = flops_per_token(config)
    head = 2 * config.hidden_size * config.padded_vocab_size
    return {"prompt": (training / 3 - head) / rate, "training": training / rate}


def table(results: list[dict[str, Any]]) -> str:
    """The results as text."""
    lines = [f"{'work':<9} {'model':<13} {'tokens/s':>9} {'time to ours':>13}"]
    for row in results:
        speed, ratio = row["tokens_per_second"], row["ratio"]
        lines.append(f"{row['work']:<9} {row['model']:<13} {speed:>9.0f} {ratio:>13.2f}")
    return "\n".join(lines)


def main() -> int:
    """Measure, print, write."""
    args = build_parser().parse_args()
    sizes = sizes_of(args)
    check_device(args.device)
    if not is_installed("transformers"):
        raise missing_package("transformers", "the comparison with Hugging Face")
    results = measure(args, sizes)
    described = ", ".join(f"{name} {value}" for name, value in sizes.items())
    print(f"{described}; fp32, {args.device}, threads: {args.threads}")
    print(table(results))
    write_report(args.json, {**vars(args), **sizes}, results=results)
    return 0


if __name__ == "__main__":
    run_main(main)
