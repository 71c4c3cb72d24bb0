"""Command lines of tiny runs, and the objects they become."""

from __future__ import annotations

import resource
from typing import Any

from megatron_lengen.training.arguments import Settings, parse_settings

MODEL = """
    --num-layers 4 --hidden-size 32 --ffn-hidden-size 48 --num-attention-heads 4
    --num-query-groups 2 --swiglu --disable-bias-linear --seq-length 24 --sliding-window 8
    --window-attn-skip-freq 4 --no-rope-freq 4 --init-method-std 0.1 --vocab-size 101
    --make-vocab-size-divisible-by 16 --tokenizer-type NullTokenizer
"""
MAMBA = """
    --num-layers 4 --hidden-size 32 --mamba-head-dim 8 --mamba-state-dim 12 --seq-length 24
    --vocab-size 101 --make-vocab-size-divisible-by 16 --tokenizer-type NullTokenizer
"""
RUN = "--mock-data --num-workers 0 --train-iters 12 --lr 1e-3 --global-batch-size 4"


def cpu_seconds() -> float:
    """Processor time of all finished child processes: what a busy machine does not stretch."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def settings_of(flags: str = "", base: str | None = None, decoder: str = "transformer") -> Settings:
    """The settings of a tiny run; flags given here win."""
    model = MAMBA if decoder == "mamba2" else MODEL
    base = f"{model} {RUN}" if base is None else base
    return parse_settings(f"{base} {flags}".split(), "test", decoder)


def trainer_of(flags: str = "", decoder: str = "transformer", base: str | None = None) -> Any:
    """A trainer of a tiny run; process groups of a single process must exist."""
    from megatron_lengen.models.build import build_chunks
    from megatron_lengen.training.loop import Trainer

    return Trainer(settings_of(flags, base, decoder), build_chunks)
