"""Attention in tiles of queries: any weighting, memory linear in the length.

Forward goes through tiles of queries, each against the keys it can reach (`ops.reach`), and keeps
two numbers a query: the largest score, and softmax's sum or entmax's threshold. Backward computes
each tile's weights again from them.

Entmax gives most keys no weight, so its heads go one by one and leave out blocks of keys: those
whose scores all lie more than 1 / (alpha - 1) below the largest of their rows before the threshold
is sought, and those without weight afterwards, in the product with the values and in backward.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from megatron_lengen.ops.entmax import entmax_score_grads, entmax_threshold, weights_above
from megatron_lengen.ops.reach import first_keys
from megatron_lengen.ops.weighting import Weighting, check_shapes

QUERY_TILE = 256
KEY_BLOCK = 64
# Blocks of keys that a tile of one head remembers: longer rows have longer blocks, so that what
# is remembered of all tiles together is linear in the length.
MOST_BLOCKS = 512
# Scores at a time: tiles get fewer queries where rows are long or heads are many.
TILE_SCORES = 1 << 24


def tiled_attention(q: Tensor, k: Tensor, v: Tensor, weighting: Weighting) -> Tensor:
    """Attention with weights by `weighting`.

    Args:
        q: [b, hq, sq, d].
        k, v: [b, hkv, sk, d], sk >= sq.

    Returns:
        [b, hq, sq, d], in q's dtype; scores and weights are fp32 (fp64 for fp64 inputs).
    """
    check_shapes(q, k, v)
    return _Tiled.apply(q, k, v, weighting)


class _Tiled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, weighting: Weighting) -> Tensor:
        output = torch.empty(*q.shape[:3], v.shape[3], dtype=q.dtype, device=q.device)
        wide = torch.promote_types(q.dtype, torch.float32)
        # All that stays is made at once: small tensors that stay between large ones that go
        # would keep the allocator from using the same memory again.
        numbers = torch.empty(2, *q.shape[:3], 1, dtype=wide, device=q.device)
        ctx.tiles = list(_tiles(q, k, weighting))
        blocks = sum(len(tile.blocks) for tile in ctx.tiles) if weighting.alpha != 1 else 0
        marks = torch.ones(blocks, dtype=torch.bool, device=q.device)
        for tile in ctx.tiles:
            tile.remember(numbers, marks)
            weights = tile.weigh(tile.scores(q, k))
            tile.of_queries(output).copy_(tile.product(tile.drop(weights), tile.of_keys(v)))
            tile.forget()
        ctx.save_for_backward(q, k, v, numbers, marks)
        return output

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:
        q, k, v, numbers, marks = ctx.saved_tensors
        dq = torch.empty_like(q)
        wide = torch.promote_types(q.dtype, torch.float32)
        dk, dv = torch.zeros_like(k, dtype=wide), torch.zeros_like(v, dtype=wide)
        for tile in ctx.tiles:
            tile.remember(numbers, marks)
            weights = tile.weigh_again(tile.scores(q, k))
            tile.backward(weights, grad, (q, k, v), (dq, dk, dv))
            tile.forget()
        return dq, dk.to(k.dtype), dv.to(v.dtype), None


@dataclass
class _Tile:
    """Some queries of some heads, and the keys that they reach.

    Args:
        heads, groups: query heads, and the key/value heads that they share.
        queries: numbers among the queries at hand.
        span: numbers of the keys that may have weight.
        first_query: the number, among the keys, of the first query at hand.
        first_block: the number, among the marks of all tiles, of this one's first.
    """

    weighting: Weighting
    heads: range
    groups: range
    queries: range
    span: range
    first_query: int
    first_block: int = 0

    def __post_init__(self) -> None:
        self.left_out = False
        self.largest: Tensor | None = None
        self.second: Tensor | None = None
        self.marks: Tensor | None = None
        self.keys: slice | Tensor = slice(self.span.start, self.span.stop)

    def remember(self, numbers: Tensor, marks: Tensor) -> None:
        """Find one's own part of what stays until backward.

        Args:
            numbers: [2, b, hq, sq, 1], the largest score, and the sum or the threshold.
            marks: [blocks of all tiles], True for blocks of keys with weight.
        """
        self.largest, self.second = (self.of_queries(x) for x in numbers)
        if self.weighting.alpha == 1:
            return
        self.marks = marks[self.first_block : self.first_block + len(self.blocks)]
        if self.left_out:
            self.keys = self._marked_keys()

    def forget(self) -> None:
        """Let go of it, and of the list of keys."""
        self.largest = self.second = self.marks = None
        self.keys = slice(self.span.start, self.span.stop)

    @property
    def block(self) -> int:
        """Keys of a block."""
        return KEY_BLOCK * -(-len(self.span) // (KEY_BLOCK * MOST_BLOCKS))

    @property
    def blocks(self) -> range:
        """Numbers of the blocks of the span."""
        return range(-(-len(self.span) // self.block))

    # ---- parts of tensors ----------------------------------------------------------------------

    def of_queries(self, x: Tensor) -> Tensor:
        """[b, hq, sq, d] -> [b, heads, queries, d], a view."""
        heads, queries = self.heads, self.queries
        return x[:, heads.start : heads.stop, queries.start : queries.stop]

    def of_keys(self, x: Tensor) -> Tensor:
        """[b, hkv, sk, d] -> [b, groups, keys, d]."""
        return x[:, self.groups.start : self.groups.stop, self.keys]

    def by_group(self, x: Tensor) -> Tensor:
        """[b, heads, queries, n] -> [b, groups, heads of a group x queries, n], in fp32 or fp64."""
        wide = torch.promote_types(x.dtype, torch.float32)
        return x.to(wide).reshape(x.shape[0], len(self.groups), -1, x.shape[3])

    def by_head(self, x: Tensor) -> Tensor:
        """The reverse of `by_group`."""
        return x.view(x.shape[0], len(self.heads), len(self.queries), x.shape[3])

    def key_numbers(self, device: torch.device) -> Tensor:
        """[n] int64."""
        if isinstance(self.keys, slice):
            return torch.arange(self.keys.start, self.keys.stop, device=device)
        return self.keys

    # ---- forward -------------------------------------------------------------------------------

    def scores(self, q: Tensor, k: Tensor) -> Tensor:
        """[b, heads, queries, keys] fp32 or fp64, -inf where a key is not seen."""
        queries = self.by_group(self.of_queries(q)) * self.weighting.scale_for(q)
        scores = self.by_head(queries @ self.of_keys(k).to(queries.dtype).transpose(-2, -1))
        i, j = self._query_numbers(q.device), self.key_numbers(q.device)
        bias = self.weighting.bias(self.heads, i, j)
        if bias is not None:
            scores += bias
        return scores.masked_fill_(~self.weighting.visible(i, j)[:, None], float("-inf"))

    def weigh(self, scores: Tensor) -> Tensor:
        """Weights of scores (overwritten); for entmax of the keys that have some, which stay."""
        assert self.largest is not None and self.second is not None
        self.largest.copy_(scores.amax(-1, keepdim=True))
        scores -= self.largest
        alpha = self.weighting.alpha
        if alpha == 1:
            weights = scores.exp_()
            self.second.copy_(weights.sum(-1, keepdim=True))
            return weights.div_(self.second)
        scores *= alpha - 1
        scores = self._leave_out(scores, scores > -1)
        self.second.copy_(entmax_threshold(scores, alpha))
        weights = weights_above(scores, self.second, alpha)
        return self._leave_out(weights, weights > 0)

    def weigh_again(self, scores: Tensor) -> Tensor:
        """The weights of `weigh`, from what it kept."""
        assert self.largest is not None and self.second is not None
        scores -= self.largest
        if self.weighting.alpha == 1:
            return scores.exp_().div_(self.second)
        scores *= self.weighting.alpha - 1
        return weights_above(scores, self.second, self.weighting.alpha)

    def drop(self, weights: Tensor) -> Tensor:
        """Weights, or their gradient, with dropout."""
        dropout = self.weighting.dropout
        if dropout is None:
            return weights
        j = self.key_numbers(weights.device)
        span = range(int(j[0]), int(j[-1]) + 1)
        factors = dropout.factors(self.heads, self._query_numbers(weights.device), span)
        return weights * factors[..., j - span.start]

    def product(self, weights: Tensor, values: Tensor) -> Tensor:
        """[b, heads, queries, d] of weights [b, heads, queries, keys] and values."""
        grouped = self.by_group(weights)
        return self.by_head(grouped @ values.to(grouped.dtype))

    # ---- backward ------------------------------------------------------------------------------

    def backward(
        self,
        weights: Tensor,
        output_grad: Tensor,
        inputs: tuple[Tensor, Tensor, Tensor],
        grads: tuple[Tensor, Tensor, Tensor],
    ) -> None:
        """Write this tile's part of dq and add its parts of dk and dv."""
        q, k, v = inputs
        dq, dk, dv = grads
        grad = self.by_group(self.of_queries(output_grad))
        self._add(dv, self.by_group(self.drop(weights)).transpose(-2, -1) @ grad)
        values = self.of_keys(v).to(grad.dtype)
        weight_grads = self.drop(self.by_head(grad @ values.transpose(-2, -1)))
        alpha = self.weighting.alpha
        if alpha == 1:
            mean = (weights * weight_grads).sum(-1, keepdim=True)
            score_grads = weights.mul_(weight_grads.sub_(mean))
        else:
            score_grads = entmax_score_grads(weights, weight_grads, alpha)
        score_grads *= self.weighting.scale_for(q)
        self.of_queries(dq).copy_(self.product(score_grads, self.of_keys(k)))
        queries = self.by_group(self.of_queries(q))
        self._add(dk, self.by_group(score_grads).transpose(-2, -1) @ queries)

    def _add(self, total: Tensor, part: Tensor) -> None:
        groups = slice(self.groups.start, self.groups.stop)
        total[:, groups, self.keys] += part

    def _query_numbers(self, device: torch.device) -> Tensor:
        first = self.first_query
        return torch.arange(first + self.queries.start, first + self.queries.stop, device=device)

    def _leave_out(self, x: Tensor, needed: Tensor) -> Tensor:
        """x [b, heads, queries, keys] without the blocks of keys that nobody needs."""
        assert self.marks is not None
        of_key = (self.key_numbers(x.device) - self.span.start) // self.block
        any_query = needed.flatten(0, 2).any(0)
        blocks = torch.zeros_like(self.marks).index_fill_(0, of_key[any_query], True)
        kept = blocks[of_key].nonzero().squeeze(1)
        if len(kept) > 0.75 * len(any_query):  # copying would cost more than it saves
            return x
        self.marks.copy_(blocks)
        self.left_out = True
        self.keys = self._marked_keys()
        return x[..., kept]

    def _marked_keys(self) -> Tensor:
        """[n] int64, the keys of the marked blocks."""
        assert self.marks is not None
        of_span = self.marks.repeat_interleave(self.block)[: len(self.span)]
        return of_span.nonzero().squeeze(1) + self.span.start


def _tiles(q: Tensor, k: Tensor, weighting: Weighting) -> Iterator[_Tile]:
    """Tiles that cover all queries of all heads."""
    b, heads, sq, _ = q.shape
    groups, sk = k.shape[1], k.shape[2]
    share = heads // groups
    at_once = heads if weighting.alpha == 1 else 1
    reach = sk if weighting.window is None else min(sk, QUERY_TILE + weighting.window)
    rows = max(16, min(QUERY_TILE, TILE_SCORES // (b * at_once * reach)))
    firsts = first_keys(q, k, weighting, rows).amin(0).tolist()
    blocks = 0
    for number, start in enumerate(range(0, sq, rows)):
        stop = min(start + rows, sq)
        for head in range(0, heads, at_once):
            first = min(of_head[number] for of_head in firsts[head : head + at_once])
            tile = _Tile(
                weighting=weighting,
                heads=range(head, head + at_once),
                groups=range(head // share, max(head // share + 1, (head + at_once) // share)),
                queries=range(start, stop),
                span=range(first, sk - sq + stop),
                first_query=sk - sq,
                first_block=blocks,
            )
            blocks += len(tile.blocks)
            yield tile
