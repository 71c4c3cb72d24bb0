"""Published models whose layouts are compared: sizes as flags of pretrain_gpt.py."""

from __future__ import annotations

from typing import NamedTuple

from megatron_lengen.sizing.mamba2 import Mamba2Shape


class Preset(NamedTuple):
    """A published model.

    Args:
        title: its name, with where the sizes come from.
        flags: the model and the run's constants, as flags of pretrain_gpt.py.
        batch_tokens: tokens of a step.
        mamba2: sizes of a Mamba2 model; the flags then say only what training shares.
    """

    title: str
    flags: str
    batch_tokens: int
    mamba2: Mamba2Shape | None = None


def _mamba2(title: str, shape: Mamba2Shape, length: int, batch_tokens: int) -> Preset:
    flags = (
        f"--num-layers {shape.layers} --hidden-size {shape.hidden} --num-attention-heads "
        f"{shape.heads} --vocab-size {shape.vocab} --seq-length {length} --bf16"
    )
    return Preset(title, flags, batch_tokens, shape)


PRESETS = {
    "smollm3-3b": Preset(
        "SmolLM3-3B",
        """--num-layers 36 --hidden-size 2048 --ffn-hidden-size 11008 --num-attention-heads 16
        --num-query-groups 4 --swiglu --disable-bias-linear --vocab-size 128256 --seq-length 4096
        --sliding-window 4096 --window-attn-skip-freq 4 --no-rope-freq 4
        --dropout-variant vpad --dropout-rate 0.3 --bf16""",
        1 << 20,
    ),
    "nape-400m": Preset(
        "NAPE 400M",
        """--num-layers 24 --hidden-size 768 --ffn-hidden-size 3072 --num-attention-heads 12
        --swiglu --disable-bias-linear --untie-embeddings-and-output-weights --vocab-size 128256
        --seq-length 2048 --position-embedding-type nape
        --dropout-variant vpad --dropout-rate 0.1 --bf16""",
        1 << 19,
    ),
    "mamba2-45m": _mamba2("Mamba2-45M", Mamba2Shape(12, 768, 24, 30), 256, 19200),
    "mamba2-85m": _mamba2("Mamba2-85M", Mamba2Shape(12, 768, 24, 50288), 1024, 1 << 19),
    "mamba2-1.3b": _mamba2("Mamba2-1.3B", Mamba2Shape(48, 2048, 64, 50288), 2048, 1 << 18),
}
