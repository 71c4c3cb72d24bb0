"""Attention of every weighting against one written here, query by query, in float64."""

from __future__ import annotations

import subprocess
import sys

import entmax as package
import pure_philox
import pytest
import torch
from attention_cases import FEATURES, LAYER, RATE, SEED, SITE, assert_same, inputs, weighting_of
from torch import Tensor

from megatron_lengen.ops import tiles
from megatron_lengen.ops.attention import attention
from megatron_lengen.ops.tiles import tiled_attention
from megatron_lengen.ops.weighting import WeightDropout, Weighting, naive_attention


def explicit(q: Tensor, k: Tensor, v: Tensor, weighting: Weighting) -> Tensor:
    """[b, hq, sq, d], each query over the list of keys that it may see."""
    q, k, v = q.double(), k.double(), v.double()
    group, offset = q.shape[1] // k.shape[1], k.shape[2] - q.shape[2]
    scale = q.shape[3] ** -0.5 if weighting.scale is None else weighting.scale
    rows = []
    for b in range(q.shape[0]):
        for h in range(q.shape[1]):
            for query in range(q.shape[2]):
                i = query + offset
                seen = [
                    j for j in range(i + 1) if weighting.window is None or i - j < weighting.window
                ]
                if weighting.documents is not None:
                    document = weighting.documents[b]
                    seen = [j for j in seen if document[j] == document[i]]
                scores = k[b, h // group, seen] @ q[b, h, query] * scale
                if weighting.slopes is not None:
                    scores = scores - weighting.slopes[h].double() * (i - torch.tensor(seen))
                if weighting.alpha == 1:
                    weights = scores.softmax(-1)
                else:
                    weights = package.entmax_bisect(scores, weighting.alpha, n_iter=100)
                if weighting.dropout is not None:
                    weights = weights * kept(weighting.dropout, b, h, i, seen) / (1 - RATE)
                rows.append(weights @ v[b, h // group, seen])
    return torch.stack(rows).view(*q.shape[:3], -1)


def kept(dropout: WeightDropout, b: int, h: int, i: int, seen: list[int]) -> Tensor:
    position = dropout.first_key + i
    values = [
        pure_philox.value(
            SEED, int(dropout.samples[b]), position, LAYER, SITE,
            dropout.first_key + j, dropout.first_head + h,
        )
        for j in seen
    ]  # fmt: skip
    return torch.tensor([float(value >= RATE * 65536) for value in values], dtype=torch.float64)


@pytest.mark.parametrize("alpha", [1.0, 1.3, 1.5, 2.0])
@pytest.mark.parametrize("names", FEATURES)
@pytest.mark.parametrize("sq, sk, groups", [(1, 1, 4), (23, 23, 2), (5, 21, 1)])
def test_tiles_and_the_naive_form_equal_the_formula(sq, sk, groups, names, alpha):
    qkv, weighting = inputs(sq, sk, groups), weighting_of(names, sk, alpha)
    expected = explicit(*qkv, weighting)
    assert_same(qkv, naive_attention(*qkv, weighting), expected, 1e-5)
    assert_same(qkv, tiled_attention(*qkv, weighting), expected, 1e-5)


@pytest.mark.parametrize("dtype, tolerance", [(torch.float32, 1e-5), (torch.bfloat16, 2e-2)])
@pytest.mark.parametrize("alpha", [1.0, 1.5])
@pytest.mark.parametrize("names", FEATURES)
@pytest.mark.parametrize(
    "sq, sk, groups", [(1, 1, 2), (63, 63, 4), (65, 65, 1), (257, 257, 2), (100, 257, 4)]
)
def test_many_tiles(monkeypatch, sq, sk, groups, names, alpha, dtype, tolerance):
    """Small tiles and blocks, so that every edge is met."""
    monkeypatch.setattr(tiles, "QUERY_TILE", 32)
    monkeypatch.setattr(tiles, "KEY_BLOCK", 4)
    qkv, weighting = inputs(sq, sk, groups, dtype), weighting_of(names, sk, alpha)
    expected = naive_attention(*qkv, weighting)
    assert_same(qkv, attention(*qkv, weighting), expected, tolerance)


def test_blocks_without_weight_are_left_out(monkeypatch):
    """A steep slope leaves near keys only; what is left out changes nothing."""
    monkeypatch.setattr(tiles, "KEY_BLOCK", 4)
    q, k, v = inputs(128, 128, 4)
    weighting = Weighting(slopes=torch.tensor([4.0, 4.0, 4.0, 4.0]), alpha=1.5)
    visited = []
    again = tiles._Tile.weigh_again
    monkeypatch.setattr(
        tiles._Tile,
        "weigh_again",
        lambda tile, scores: visited.append(scores.shape[-1]) or again(tile, scores),
    )
    monkeypatch.setattr(tiles, "QUERY_TILE", 16)
    assert_same(
        [q, k, v], tiled_attention(q, k, v, weighting), naive_attention(q, k, v, weighting), 1e-5
    )
    assert max(visited) <= 40  # of up to 128 keys: 16 queries and a few keys before them


def test_another_document_changes_no_bit():
    """Report 21 of the field: the last token of document A, and the outputs of document B."""
    for names in ("documents", "documents window slopes", "documents dropout"):
        for alpha in (1.0, 1.5):
            q, k, v = (x.detach() for x in inputs(18, 18, 2))
            weighting = weighting_of(names, 18, alpha)  # row 0: documents of 9 keys
            before = tiled_attention(q, k, v, weighting)
            k[0, :, 8] += 3
            v[0, :, 8] -= 5
            after = tiled_attention(q, k, v, weighting)
            assert torch.equal(before[0, :, 9:], after[0, :, 9:])
            assert not torch.equal(before[0, :, 8], after[0, :, 8])


def test_a_part_of_the_row_draws_the_rows_mask():
    """Queries and keys from the middle of a row, with their numbers, as in one piece."""
    qkv = [x.detach() for x in inputs(20, 20, 4)]
    whole = weighting_of("window dropout", 20)
    expected = tiled_attention(*qkv, whole)[:, :, 15:]
    first = 9  # the window of the last five queries reaches back to here
    dropout = WeightDropout(RATE, SEED, torch.tensor([4, 11]), LAYER, SITE, 2, 5 + first)
    part = Weighting(window=7, dropout=dropout)
    found = tiled_attention(qkv[0][:, :, 15:], qkv[1][:, :, first:], qkv[2][:, :, first:], part)
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("alpha", [1.0, 1.5])
def test_what_stays_is_linear(monkeypatch, alpha):
    """What stays until backward at twice the length is twice as much, not four times."""
    monkeypatch.setattr(tiles, "MOST_BLOCKS", 8)
    kept = []
    for length in (1024, 2048):
        q, k, v = inputs(length, length, 4)
        saved = []
        with torch.autograd.graph.saved_tensors_hooks(
            lambda x, s=saved: s.append(x) or x, lambda x: x
        ):
            output = tiled_attention(q, k, v, weighting_of("", length, alpha))
        for tile in output.grad_fn.tiles:
            assert tile.largest is tile.second is tile.marks is None
            assert isinstance(tile.keys, slice)
        kept.append(sum(x.numel() for x in saved))
    assert kept[1] <= 2.01 * kept[0]


PEAK = """
import torch
from pathlib import Path
from megatron_lengen.ops.tiles import tiled_attention
from megatron_lengen.ops.weighting import Weighting

def peak():
    return next(int(l.split()[1]) for l in Path("/proc/self/status").read_text().splitlines()
                if l.startswith("VmHWM"))

torch.set_num_threads(1)
for length in (512, 3072, 6144):
    q, k, v = (torch.randn(1, 2, length, 16, requires_grad=True) for _ in range(3))
    before = peak()
    tiled_attention(q, k, v, Weighting(alpha=1.5)).sum().backward()
    print(peak() - before)
"""


def test_the_peak_is_linear_too():
    """Rows of growing tiles, where memory that is let go of must serve again."""
    done = subprocess.run([sys.executable, "-c", PEAK], capture_output=True, text=True, check=True)
    _, short, long = map(int, done.stdout.split())
    assert long < 2.5 * short


@pytest.mark.parametrize(
    "wrong", [{"window": 0}, {"alpha": 0.9}, {"alpha": 2.5}], ids=lambda wrong: str(wrong)
)
def test_weightings_that_do_not_exist(wrong):
    with pytest.raises(ValueError):
        Weighting(**wrong)
