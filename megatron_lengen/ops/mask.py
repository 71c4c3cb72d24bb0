"""Dropout masks as a function of coordinates, not of a generator's state.

An element is kept or dropped by Philox4x32-10 (Salmon et al. 2011, Random123) of its coordinates:
the key is the seed; the counter is

    c0 = channel // 8    c1 = position    c2 = sample    c3 = layer << 20 | site << 12 | head

The four 32-bit words of one call are eight 16-bit values, low half before high half, for the
channels 8 c0 .. 8 c0 + 7. A channel is dropped iff its value is below k = round(65536 p).

So masks are equal wherever the same element is computed (tensor-parallel replicas, recomputation,
another layout after a resume) and independent everywhere else, with nothing stored or restored.
Changing anything here changes every run: the tests pin literal bits.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

STEPS = 1 << 16  # rates are multiples of 1 / STEPS
CHANNELS_PER_CALL = 8
MAX_LAYER, MAX_SITE, MAX_HEAD = 1 << 12, 1 << 8, 1 << 12

_LOW = 0xFFFFFFFF
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_KEY_STEPS = (0x9E3779B9, 0xBB67AE85)
_ROUNDS = 10


@dataclass(frozen=True)
class MaskCoordinates:
    """Where a [s, b, channels] tensor lies in the run.

    Args:
        seed: the run's seed, 64 bits.
        samples: [b] int64, number of each row in training order, counted over the whole run.
        positions: [s] int64, index of each token in its row (global under SP and CP).
        layer: zero-based global layer number.
        site: which norm, projection or output of the layer.
        first_channel: global index of the tensor's first channel (above 0 where it is sharded).
        head: global head, where masks are drawn head by head.
    """

    seed: int
    samples: Tensor
    positions: Tensor
    layer: int
    site: int
    first_channel: int = 0
    head: int = 0

    @property
    def stream(self) -> int:
        """The counter word c3."""
        if not (
            0 <= self.layer < MAX_LAYER and 0 <= self.site < MAX_SITE and 0 <= self.head < MAX_HEAD
        ):
            raise ValueError(f"layer {self.layer}, site {self.site}, head {self.head}: too large")
        return self.layer << 20 | self.site << 12 | self.head


def drop_threshold(rate: float) -> int:
    """k = round(65536 p), the number of 16-bit values that drop.

    Raises:
        ValueError: unless the rate is 0 or gives 1 <= k <= 65535.
    """
    k = round(STEPS * rate) if 0 <= rate < 1 else STEPS
    if rate != 0 and not 1 <= k < STEPS:
        raise ValueError(f"dropout rate {rate} is not 0 or in [{1 / STEPS}, 1)")
    return k


def philox4x32(key: int, counter: tuple[Tensor, Tensor, Tensor, Tensor]) -> tuple[Tensor, ...]:
    """Philox4x32-10 on int64 tensors that hold 32-bit unsigned values.

    Args:
        key: 64 bits, low word first.
        counter: c0..c3, broadcastable against each other.

    Returns:
        Four int64 tensors with values in [0, 2^32).
    """
    c0, c1, c2, c3 = counter
    k0, k1 = key & _LOW, (key >> 32) & _LOW
    for _ in range(_ROUNDS):
        high0, low0 = _multiply(c0, _MULTIPLIERS[0])
        high1, low1 = _multiply(c2, _MULTIPLIERS[1])
        c0, c1, c2, c3 = high1 ^ c1 ^ k0, low1, high0 ^ c3 ^ k1, low0
        k0, k1 = (k0 + _KEY_STEPS[0]) & _LOW, (k1 + _KEY_STEPS[1]) & _LOW
    return c0, c1, c2, c3


def _multiply(value: Tensor, factor: int) -> tuple[Tensor, Tensor]:
    """High and low 32 bits of a 32 x 32 bit product; halves keep it inside signed 64 bits."""
    low = value * (factor & 0xFFFF)
    high = value * (factor >> 16) + (low >> 16)
    return high >> 16, ((high & 0xFFFF) << 16) | (low & 0xFFFF)


def keep_mask(coordinates: MaskCoordinates, channels: int, rate: float) -> Tensor:
    """The mask of a [s, b, channels] tensor: bool, True where the element is kept."""
    values = mask_values(coordinates, channels)
    return values >= drop_threshold(rate)


def mask_values(coordinates: MaskCoordinates, channels: int) -> Tensor:
    """The 16-bit values behind a mask: int64 [s, b, channels], each in [0, 65536)."""
    device = coordinates.samples.device
    first = coordinates.first_channel // CHANNELS_PER_CALL
    last = -(-(coordinates.first_channel + channels) // CHANNELS_PER_CALL)
    c0 = torch.arange(first, last, device=device)[None, None, :]
    c1 = coordinates.positions.to(device)[:, None, None] & _LOW
    c2 = coordinates.samples[None, :, None] & _LOW
    c3 = torch.full((1, 1, 1), coordinates.stream, dtype=torch.int64, device=device)
    words = philox4x32(coordinates.seed, (c0, c1, c2, c3))
    halves = [half for word in words for half in (word & 0xFFFF, word >> 16)]
    values = torch.stack(torch.broadcast_tensors(*halves), dim=-1).flatten(2)
    skip = coordinates.first_channel - first * CHANNELS_PER_CALL
    return values[:, :, skip : skip + channels]
