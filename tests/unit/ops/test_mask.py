"""The mask: known answers, pinned bits, agreement of its implementations, statistics."""

from __future__ import annotations

import pure_philox
import pytest
import torch
from triton_process import INTERPRETED, output_of

from megatron_lengen.ops import native
from megatron_lengen.ops.mask import (
    MaskCoordinates,
    drop_threshold,
    keep_mask,
    mask_values,
    philox4x32,
)
from megatron_lengen.ops.rmsnorm import Dropout, rms_norm_dropout

ONES = 0xFFFFFFFF

# Random123's kat_vectors for philox4x32, 10 rounds.
KNOWN_ANSWERS = [
    (0, (0, 0, 0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    (2**64 - 1, (ONES,) * 4, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    (
        0x299F31D0A4093822,
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
]

# Sixteen channels at p = 0.5 as text, from pure_philox: these bits must never change.
# (seed, sample, position, layer, site, first channel)
PINNED = {
    (0, 0, 0, 0, 0, 0): "1011111111000110",
    (1234, 0, 0, 0, 0, 0): "1011100111000110",
    (1234, 1, 0, 0, 0, 0): "1100010010000001",
    (1234, 0, 1, 0, 0, 0): "0010100001010010",
    (1234, 0, 0, 1, 0, 0): "0010100000100110",
    (1234, 0, 0, 0, 1, 0): "1101110001101001",
    (1234, 2**31 + 5, 4095, 35, 14, 2044): "1011000101001011",
    ((7 << 32) + 1234, 123456789, 32767, 27, 2, 3): "0001010111010110",
}

# Coordinates that reach into every field of the counter and every half of the key.
PLACES = [
    # seed, samples, positions, layer, site, first channel
    (1234, [0, 1], [0, 1, 7], 0, 0, 0),
    (2**63 + 5, [2**31 + 3], [4095], 35, 1, 16),
    (-1, [2**31 - 1, 2**32 - 1], [2**31 + 9], 4095, 255, 5),
    (7, [3], [131071, 3], 3, 14, 2047),
]


def coordinates(
    seed=1234, samples=(0,), positions=(0,), layer=0, site=0, first_channel=0
) -> MaskCoordinates:
    return MaskCoordinates(
        seed, torch.tensor(samples), torch.tensor(positions), layer, site, first_channel
    )


def pure_values(place: tuple, channels: int) -> list[list[list[int]]]:
    seed, samples, positions, layer, site, first = place
    columns = range(first, first + channels)
    return [
        [[pure_philox.value(seed % 2**64, n, t, layer, site, c) for c in columns] for n in samples]
        for t in positions
    ]


@pytest.mark.parametrize("key, counter, answer", KNOWN_ANSWERS)
def test_generator_gives_random123s_known_answers(key, counter, answer):
    words = philox4x32(key, tuple(torch.tensor([c]) for c in counter))
    assert tuple(int(w) for w in words) == answer
    assert pure_philox.philox4x32_10(key, counter) == answer


@pytest.mark.parametrize("place, bits", PINNED.items())
def test_mask_bits_never_change(place, bits):
    seed, sample, position, layer, site, first = place
    mask = keep_mask(coordinates(seed, [sample], [position], layer, site, first), len(bits), 0.5)
    assert "".join(str(int(b)) for b in mask.flatten()) == bits


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("channels", [1, 8, 19])
def test_tensor_form_equals_plain_python(place, channels):
    assert mask_values(coordinates(*place), channels).tolist() == pure_values(place, channels)


def test_head_is_the_low_part_of_the_stream():
    where = MaskCoordinates(9, torch.tensor([1]), torch.tensor([2]), layer=3, site=4, head=5)
    expected = [pure_philox.value(9, 1, 2, 3, 4, c, head=5) for c in range(8)]
    assert mask_values(where, 8).flatten().tolist() == expected


def _require_kernels() -> None:
    if native.load_library() is None:
        pytest.skip("no C++ compiler: the CPU kernels are not built")


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("channels", [1, 8, 19, 300])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_cpu_kernel_draws_the_same_bits(place, channels, dtype):
    _require_kernels()
    where = coordinates(*place)
    x = torch.ones(len(where.positions), len(where.samples), channels, dtype=dtype)
    dropout = Dropout("pre_linear", 0.3, where)
    z = rms_norm_dropout(x, torch.ones(channels), 0.0, dropout)
    assert torch.equal(z != 0, torch.tensor(pure_values(place, channels)) >= round(0.3 * 65536))


def _triton_program() -> str:
    return """
import torch, triton, triton.language as tl

@triton.jit
def words(out, seed, c0, c1, c2, c3):
    a, b, c, d = tl.philox(seed, c0 + tl.arange(0, 4), c1 + tl.zeros((4,), tl.int32),
                           c2 + tl.zeros((4,), tl.int32), c3 + tl.zeros((4,), tl.int32))
    i = tl.arange(0, 4) * 4
    tl.store(out + i, a.to(tl.int64))
    tl.store(out + i + 1, b.to(tl.int64))
    tl.store(out + i + 2, c.to(tl.int64))
    tl.store(out + i + 3, d.to(tl.int64))

out = torch.zeros(16, dtype=torch.int64)
words[(1,)](out, (7 << 32) + 1234, 3, 4095, 77, 35 << 20 | 1 << 12)
print(" ".join(str(int(v) & 0xFFFFFFFF) for v in out))
"""


def test_triton_draws_the_same_words(tmp_path):
    # The interpreter reads the functions' source.
    program = tmp_path / "words.py"
    program.write_text(_triton_program())
    printed = output_of(program, **INTERPRETED)
    expected = [
        word
        for c0 in range(3, 7)
        for word in pure_philox.philox4x32_10((7 << 32) + 1234, (c0, 4095, 77, 35 << 20 | 1 << 12))
    ]
    assert [int(word) for word in printed.split()] == expected


@pytest.mark.parametrize("first", [1, 5, 8, 13, 64])
def test_a_shard_sees_its_part_of_the_full_mask(first):
    place = {"seed": 3, "samples": [5, 6], "positions": [1, 2, 3], "layer": 2, "site": 9}
    full = keep_mask(coordinates(**place), 96, 0.4)
    part = keep_mask(coordinates(**place, first_channel=first), 96 - first, 0.4)
    assert torch.equal(part, full[..., first:])


def test_samples_above_two_to_the_31_do_not_repeat():
    samples = [0, 2**31, 2**31 + 1, 2**32 - 1]
    masks = keep_mask(coordinates(samples=samples, positions=range(64)), 64, 0.5)
    for i in range(len(samples)):
        for j in range(i):
            # Agreement of two independent masks of 4096 bits: 0.5 +- 0.0078.
            agreement = (masks[:, i] == masks[:, j]).double().mean().item()
            assert abs(agreement - 0.5) < 5 * 0.0079


@pytest.mark.parametrize("rate", [0.05, 0.1, 0.3, 0.5])
def test_keep_rate_is_the_exact_rate(rate):
    mask = keep_mask(coordinates(seed=11, samples=range(4), positions=range(256)), 1024, rate)
    exact = round(rate * 65536) / 65536
    sigma = (exact * (1 - exact) / mask.numel()) ** 0.5
    assert abs(mask.double().mean().item() - (1 - exact)) < 5 * sigma


def _correlation(a: torch.Tensor, b: torch.Tensor) -> float:
    both = torch.stack((a.flatten().double(), b.flatten().double()))
    return torch.corrcoef(both)[0, 1].item()


@pytest.mark.parametrize("rate", [0.1, 0.5])
def test_neighbours_are_uncorrelated(rate):
    def mask(**changes):
        place = {"seed": 21, "samples": range(4), "positions": range(128), "layer": 3, "site": 1}
        return keep_mask(coordinates(**{**place, **changes}), 512, rate)

    here = mask()
    pairs = {
        "channels": (here[..., 1:], here[..., :-1]),
        "channels of neighbouring calls": (here[..., 8:], here[..., :-8]),
        "channels of neighbouring words": (here[..., 2:], here[..., :-2]),
        "positions": (here[1:], here[:-1]),
        "samples": (here[:, 1:], here[:, :-1]),
        "layers": (here, mask(layer=4)),
        "sites": (here, mask(site=0)),
        "seeds": (here, mask(seed=22)),
        "steps": (here, mask(samples=range(4, 8))),
        "layer and site swapped": (here, mask(layer=1, site=3)),
        "position and sample swapped": (
            mask(samples=range(64), positions=range(100, 164)),
            mask(samples=range(100, 164), positions=range(64)).transpose(0, 1),
        ),
    }
    for name, (a, b) in pairs.items():
        # The correlation of n independent pairs has standard deviation 1 / sqrt(n).
        assert abs(_correlation(a, b)) < 5 / a.numel() ** 0.5, name


def test_masks_do_not_depend_on_the_number_of_threads():
    where = coordinates(samples=range(3), positions=range(50))
    x = torch.ones(50, 3, 77)
    dropout = Dropout("pre_linear", 0.5, where)
    before, found = torch.get_num_threads(), []
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            found.append(
                (keep_mask(where, 77, 0.5), rms_norm_dropout(x, torch.ones(77), 0.0, dropout))
            )
    finally:
        torch.set_num_threads(before)
    for mask, z in found:
        assert torch.equal(mask, found[0][0])
        assert torch.equal(z != 0, mask)


@pytest.mark.parametrize(
    "rate, steps", [(0.0, 0), (0.1, 6554), (0.5, 32768), (1 / 65536, 1), (65535 / 65536, 65535)]
)
def test_rate_becomes_the_nearest_number_of_steps(rate, steps):
    assert drop_threshold(rate) == steps


@pytest.mark.parametrize("rate", [-0.1, 1.0, 1.5, 1e-6, 0.999999, float("nan"), float("inf")])
def test_impossible_rates_are_refused(rate):
    with pytest.raises(ValueError, match="dropout rate"):
        drop_threshold(rate)


@pytest.mark.parametrize("change", [{"layer": 4096}, {"site": 256}, {"layer": -1}])
def test_coordinates_that_would_overlap_are_refused(change):
    with pytest.raises(ValueError, match="too large"):
        keep_mask(coordinates(**change), 8, 0.5)
