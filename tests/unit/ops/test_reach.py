"""How far back tiles look, against the weights of every query."""

from __future__ import annotations

import pytest
import torch
from attention_cases import inputs, weighting_of

from megatron_lengen.ops.reach import first_keys
from megatron_lengen.ops.weighting import Weighting, naive_attention

TILE = 16


def weights_of(q, k, weighting):
    """[b, hq, sq, sk]: what each key's value is multiplied by."""
    keys = torch.eye(k.shape[2]).expand(*k.shape[:3], -1)
    return naive_attention(q, k, keys, weighting)


@pytest.mark.parametrize("names", ["", "window", "slopes", "documents", "window slopes documents"])
@pytest.mark.parametrize("alpha", [1.0, 1.3, 1.5, 2.0])
@pytest.mark.parametrize("sq, sk", [(1, 1), (65, 65), (40, 97)])
def test_nothing_before_the_first_key_has_weight(sq, sk, names, alpha):
    q, k, _ = (x.detach() for x in inputs(sq, sk, 2))
    weighting = weighting_of(names, sk, alpha)
    first = first_keys(q, k, weighting, TILE)
    with_weight = weights_of(q, k, weighting) > 0
    earliest = with_weight.int().argmax(-1)
    padded = torch.nn.functional.pad(earliest, (0, -sq % TILE), value=sk)
    assert (first <= padded.unflatten(2, (-1, TILE)).amin(-1)).all()
    if names == "window":
        assert first[0, 0].tolist() == [max(0, i - 6) for i in range(sk - sq, sk, TILE)]


def test_documents_begin_where_they_begin():
    documents = torch.tensor([[0] * 20 + [1] * 44, [0] * 64])
    q, k, _ = inputs(64, 64, 4)
    first = first_keys(q, k, Weighting(documents=documents), TILE)
    assert first[0, 0].tolist() == [0, 0, 20, 20]
    assert first[1, 0].tolist() == [0, 0, 0, 0]


def test_slopes_bound_the_reach_of_entmax_whatever_the_length():
    """Keys of norm n and a query's own key: 2 n^2 scale + 2 score apart at most, over the slope."""
    generator = torch.Generator().manual_seed(0)
    q = torch.nn.functional.normalize(torch.randn(1, 2, 4096, 8, generator=generator), dim=-1)
    weighting = Weighting(alpha=1.5, slopes=torch.tensor([0.5, 0.0]), scale=3.0)
    first = first_keys(q, q, weighting, TILE)
    # A query scores its own key 3, which is the most there is.
    reach = torch.arange(0, 4096, TILE) - first[0, 0]
    assert reach[-1] == reach[100] <= (1 / (1.5 - 1)) / 0.5 + 2
    assert first[0, 1].max() == 0
    softmax = Weighting(slopes=weighting.slopes, scale=3.0)
    assert first_keys(q, q, softmax, TILE).max() == 0
