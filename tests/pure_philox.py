"""A second implementation of the mask's generator, in plain Python integers.

Written from the description in Salmon et al. 2011 ("Parallel random numbers: as easy as 1, 2, 3"),
not from the package, so that the two can be held against each other.
"""

from __future__ import annotations

import torch

WORD = 1 << 32


def philox4x32_10(key: int, counter: tuple[int, int, int, int]) -> tuple[int, int, int, int]:
    """Ten rounds of Philox4x32; the key's low 32 bits are its first word."""
    left, right = key % WORD, key // WORD % WORD
    a, b, c, d = counter
    for _ in range(10):
        first, second = 0xD2511F53 * a, 0xCD9E8D57 * c
        a, b, c, d = (
            second // WORD ^ b ^ left,
            second % WORD,
            first // WORD ^ d ^ right,
            first % WORD,
        )
        left, right = (left + 0x9E3779B9) % WORD, (right + 0xBB67AE85) % WORD
    return a, b, c, d


def value(
    seed: int, sample: int, position: int, layer: int, site: int, channel: int, head: int = 0
) -> int:
    """The 16-bit value that decides over one element."""
    stream = layer * 2**20 + site * 2**12 + head
    words = philox4x32_10(seed, (channel // 8, position % WORD, sample % WORD, stream))
    place = channel % 8
    return words[place // 2] >> (16 if place % 2 else 0) & 0xFFFF


def keep(
    seed: int,
    samples: list[int],
    positions: list[int],
    layer: int,
    site: int,
    channels: range,
    rate: float,
) -> torch.Tensor:
    """The mask of a [positions, samples, channels] tensor as float64 zeros and ones."""
    threshold = round(rate * 65536)
    rows = [
        [[float(value(seed, n, t, layer, site, c) >= threshold) for c in channels] for n in samples]
        for t in positions
    ]
    return torch.tensor(rows, dtype=torch.float64)
