"""How far back a tile of queries can look, before any score of it is computed.

Windows and documents say so directly. Under ALiBi's bias entmax does as well: a key at distance
r scores at most scale |q| max|k| - slope r, the query's own key scores scale <q, k>, and what lies
1 / (alpha - 1) below the largest score of its row has no weight at all. Heads with a slope
therefore reach a bounded number of keys, however long the row is.
"""

from __future__ import annotations

import torch
from torch import Tensor

from megatron_lengen.ops.weighting import Weighting

# Rounding of scores, relative to |q| |k|, and absolute.
_RELATIVE_SLACK, _SLACK = 1e-4, 1e-3


def first_keys(q: Tensor, k: Tensor, weighting: Weighting, tile: int) -> Tensor:
    """The first key that may have weight for any query of each tile.

    Args:
        q: [b, hq, sq, d].
        k: [b, hkv, sk, d].
        tile: queries of a tile.

    Returns:
        [b, hq, tiles] int64, numbers among the keys at hand.
    """
    (b, heads, sq, _), sk = q.shape, k.shape[2]
    first_queries = torch.arange(sk - sq, sk, tile, device=q.device)
    first = torch.zeros(b, 1, len(first_queries), dtype=torch.int64, device=q.device)
    if weighting.window is not None:
        first = first.maximum(first_queries - weighting.window + 1)
    if weighting.documents is not None:
        documents = weighting.documents.contiguous()
        begins = torch.searchsorted(documents, documents[:, first_queries].contiguous())
        first = first.maximum(begins[:, None])
    first = first.expand(b, heads, -1)
    if weighting.slopes is not None and weighting.alpha != 1:
        of_queries = _first_under_slopes(q, k, weighting)
        padded = torch.nn.functional.pad(of_queries, (0, -sq % tile), value=sk)
        first = first.maximum(padded.unflatten(2, (-1, tile)).amin(-1))
    return first


def _first_under_slopes(q: Tensor, k: Tensor, weighting: Weighting) -> Tensor:
    """The first key that entmax may give weight to, by query: [b, hq, sq] int64."""
    assert weighting.slopes is not None
    sq, (_, groups, sk, _) = q.shape[2], k.shape
    scale = weighting.scale_for(q)
    wide = torch.promote_types(q.dtype, torch.float32)
    queries = q.detach().to(wide).unflatten(1, (groups, -1))
    keys = k.detach().to(wide)
    largest = keys.norm(dim=-1).cummax(dim=-1).values[:, :, None, sk - sq :]
    highest = abs(scale) * queries.norm(dim=-1) * largest
    own = scale * (queries * keys[:, :, None, sk - sq :]).sum(-1)
    above = highest * (1 + _RELATIVE_SLACK) - own + 1 / (weighting.alpha - 1) + _SLACK
    slopes = weighting.slopes.to(wide)[:, None]
    distance = torch.where(slopes > 0, above.flatten(1, 2) / slopes, torch.inf)
    i = torch.arange(sk - sq, sk, device=q.device)
    return i - distance.clamp(max=sk).ceil().to(torch.int64)
