"""Positions that are no rotation: NAPE's split of the heads and ALiBi's slopes.

NAPE (Vasylenko et al. 2026): of H heads the first A have ALiBi's bias -m (i - j) on their scores
and the others nothing. A is half of H, rounded down. Slopes are constants and belong to global
head numbers, so tensor parallelism changes nothing.
"""

from __future__ import annotations

import math

from megatron_lengen.config import LengenConfig


def alibi_heads(config: LengenConfig) -> int:
    """How many of the first heads have ALiBi's bias."""
    if config.position_embedding_type != "nape":
        return 0
    half = config.num_attention_heads // 2
    return half if config.nape_alibi_heads is None else config.nape_alibi_heads


def head_slopes(config: LengenConfig) -> list[float]:
    """ALiBi's slope of every head by global number; 0 for none."""
    count = alibi_heads(config)
    slopes = alibi_slopes(count, config.alibi_slopes)
    return slopes + [0.0] * (config.num_attention_heads - count)


def alibi_slopes(heads: int, rule: str) -> list[float]:
    """Slopes of `heads` heads by a rule of `--alibi-slopes`; head i = 1 .. A.

    `inverse` is 1/i (the synthetic experiments of NAPE's authors), `power` is 2^(-8i/A), `relu` is
    1 - (i - 1)/A (alternatives in their code; which one their language models used is not
    published). `alibi` is Press et al. 2022: 2^(-8i/A) where A is a power of two; otherwise the
    slopes of the next lower power of two, then every second of the next higher one's.
    """
    if rule == "inverse":
        return [1 / i for i in range(1, heads + 1)]
    if rule == "relu":
        return [1 - (i - 1) / heads for i in range(1, heads + 1)]
    if rule == "power" or heads == 0:
        return _powers(heads)
    lower = 2 ** math.floor(math.log2(heads))
    return _powers(lower) + _powers(2 * lower)[::2][: heads - lower]


def _powers(heads: int) -> list[float]:
    return [2 ** (-8 * i / heads) for i in range(1, heads + 1)]


def heads_without_positions(config: LengenConfig, layer: int) -> list[bool]:
    """Which heads of a zero-based layer know nothing of positions but causality."""
    if config.layer_pattern()[layer].rope:
        return [False] * config.num_attention_heads
    return [slope == 0 for slope in head_slopes(config)]
