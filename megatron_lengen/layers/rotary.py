"""Rotary frequencies for rows longer than those that a model began with.

Megatron-Core's rotary embedding has Llama 3.1's scaling with all but one of its numbers fixed, and
multiplies positions for the linear one; here the frequencies are changed, as in Hugging Face, so
that both give the same angles. YaRN is Megatron-Core's own.
"""

from __future__ import annotations

import math

from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding

from megatron_lengen.config import LengenConfig


def scale_frequencies(embedding: RotaryEmbedding, config: LengenConfig) -> None:
    """Stretch the frequencies (fp32, [rotary channels / 2]) of a new embedding.

    Llama 3.1 (Dubey et al. 2024, their code): a channel that turns more than `high_freq_factor`
    times within the original positions keeps its frequency, one that turns less than
    `low_freq_factor` times is divided by the factor, between them both are mixed linearly.
    """
    linear = config.rotary_seq_len_interpolation_factor
    if linear is not None:
        embedding.inv_freq = embedding.inv_freq / linear
    if config.use_rope_scaling:
        frequencies = embedding.inv_freq.double()
        turns = config.original_max_position_embeddings * frequencies / (2 * math.pi)
        low, high = config.low_freq_factor, config.high_freq_factor
        kept = ((turns - low) / (high - low)).clamp(0, 1)
        scaled = frequencies * (kept + (1 - kept) / config.rope_scaling_factor)
        embedding.inv_freq = scaled.float()
