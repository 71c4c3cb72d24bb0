"""Rotary positions: fused rotation, and frequencies for rows longer than a model began with.

Megatron-Core's rotary embedding has Llama 3.1's scaling with all but one of its numbers fixed, and
multiplies positions for the linear one; here the frequencies are changed, as in Hugging Face, so
that both give the same angles. YaRN is Megatron-Core's own.
"""

from __future__ import annotations

import math

from megatron.core.models.common.embeddings import rope_utils
from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding
from torch import Tensor

from megatron_lengen.config import LengenConfig
from megatron_lengen.ops.rotary import rotate


def fuse_rotation(config: LengenConfig) -> None:
    """Let attention rotate in one pass: by Transformer Engine where it is there, else by ours.

    Megatron-Core's switch for it takes Transformer Engine's function alone; ours has its form.
    """
    if rope_utils.fused_apply_rotary_pos_emb is None:
        rope_utils.fused_apply_rotary_pos_emb = _rotate_by_frequencies
    config.apply_rope_fusion = True


def _rotate_by_frequencies(t: Tensor, freqs: Tensor, interleaved: bool = False) -> Tensor:
    """t [s, b, n, d] turned by freqs [s, 1, 1, r], whose second half repeats the first."""
    if interleaved:
        raise ValueError("channels that rotate are halves of a head here, not neighbours")
    return rotate(t, freqs[:, 0, 0, : freqs.shape[-1] // 2])


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
