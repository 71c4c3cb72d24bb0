"""The state space recurrence of Mamba2 in chunks, as PyTorch operations on any device.

Within a chunk the recurrence is a masked matrix product (Dao & Gu 2024, section 6); between chunks
only the state goes on. Chunks are worked off in pieces of bounded size: forward keeps the state at
the start of every piece, backward computes the rest again.

Shapes: b rows, m chunks of q tokens, g groups, h = g * r heads, p channels of a head, n numbers of
state for each of them. All sums are fp32, or fp64 for fp64 inputs.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

CHUNK = 64
# Numbers in the largest temporary tensor of a piece: what stays in a CPU's cache, or what keeps a
# GPU busy.
PIECE_NUMBERS = {"cpu": 1 << 21, "cuda": 1 << 27}


class Inputs(NamedTuple):
    """What the scan reads.

    Args:
        x: [b, l, h, p].
        dt: [b, l, h].
        A: [h].
        B, C: [b, l, g, n].
        D: [h] or None.
        documents: int [b, l], a number that changes where a document starts, or None.
    """

    x: Tensor
    dt: Tensor
    A: Tensor
    B: Tensor
    C: Tensor
    D: Tensor | None
    documents: Tensor | None

    @property
    def wide(self) -> torch.dtype:
        """fp32, or fp64 where x is."""
        return torch.promote_types(self.x.dtype, torch.float32)


class Grads(NamedTuple):
    """Gradients of x, dt, A, B, C and D, shaped like them, in the wide dtype."""

    x: Tensor
    dt: Tensor
    A: Tensor
    B: Tensor
    C: Tensor
    D: Tensor


class _Part(NamedTuple):
    """Which rows and tokens are worked off together, in chunks of how many tokens."""

    rows: slice
    tokens: slice
    chunk: int


def parts(inputs: Inputs) -> list[list[_Part]]:
    """The whole work: for each set of rows its pieces in the order of tokens."""
    b, length, h, p = inputs.x.shape
    n = inputs.B.shape[3]
    most = PIECE_NUMBERS.get(inputs.x.device.type, PIECE_NUMBERS["cuda"])
    of_chunk = max(1, h * CHUNK * max(CHUNK, p), h * p * n)
    chunks = max(1, most // of_chunk)
    in_row = max(1, min(chunks, -(-length // CHUNK)))
    rows = max(1, chunks // in_row)
    return [
        list(_pieces(slice(first, min(b, first + rows)), length, in_row * CHUNK))
        for first in range(0, b, rows)
    ]


def _pieces(rows: slice, length: int, most: int) -> Iterator[_Part]:
    """Whole chunks, at most `most` tokens of them at a time, and a shorter chunk at the end."""
    whole = length - length % CHUNK
    for first in range(0, whole, most):
        yield _Part(rows, slice(first, min(whole, first + most)), CHUNK)
    if whole < length:
        yield _Part(rows, slice(whole, length), length - whole)


def forward(inputs: Inputs, initial: Tensor | None) -> tuple[Tensor, Tensor, list[Tensor]]:
    """The scan.

    Args:
        initial: [b, h, p, n], the state before the first token, or None for zeros.

    Returns:
        y [b, l, h, p] in x's dtype, the last state [b, h, p, n], and the states at the start of
        every piece.
    """
    y = torch.empty(inputs.x.shape, dtype=inputs.x.dtype, device=inputs.x.device)
    first = _wide_state(inputs, initial)
    final, kept = torch.empty_like(first), []
    for pieces in parts(inputs):
        state = _inner(first[pieces[0].rows], inputs)
        for part in pieces:
            kept.append(state)
            y[part.rows, part.tokens], state = _Piece(inputs, part).forward(state)
        final[pieces[0].rows] = _outer(state, inputs)
    return y, final, kept


def backward(
    inputs: Inputs, kept: list[Tensor], dy: Tensor, dfinal: Tensor | None
) -> tuple[Grads, Tensor]:
    """Gradients of everything in `Inputs`, and of the initial state [b, h, p, n]."""
    sources = (inputs.x, inputs.dt, inputs.A, inputs.B, inputs.C, inputs.A)
    grads = Grads(*(torch.zeros_like(x, dtype=inputs.wide) for x in sources))
    dlast = _wide_state(inputs, dfinal)
    dinitial, states = torch.empty_like(dlast), list(kept)
    for pieces in reversed(parts(inputs)):
        dstate = _inner(dlast[pieces[0].rows], inputs)
        for part in reversed(pieces):
            where = (part.rows, part.tokens)
            piece = _Piece(inputs, part)
            found, dstate = piece.backward(states.pop(), dy[where].to(inputs.wide), dstate)
            for whole, own in zip(grads, found, strict=True):
                if own.shape == inputs.A.shape:
                    whole += own
                else:
                    whole[where] = own
        dinitial[pieces[0].rows] = _outer(dstate, inputs)
    return grads, dinitial


def _wide_state(inputs: Inputs, state: Tensor | None) -> Tensor:
    if state is not None:
        return state.to(inputs.wide)
    b, _, h, p = inputs.x.shape
    return inputs.x.new_zeros(b, h, p, inputs.B.shape[3], dtype=inputs.wide)


def _inner(state: Tensor, inputs: Inputs) -> Tensor:
    """[b, h, p, n] -> [b, g, n, r * p]: the heads of a group side by side in one product."""
    g = inputs.B.shape[2]
    b, h, p, n = state.shape
    return state.reshape(b, g, h // g * p, n).transpose(2, 3).contiguous()


def _outer(state: Tensor, inputs: Inputs) -> Tensor:
    """The reverse of `_inner`."""
    _, _, h, p = inputs.x.shape
    return state.transpose(2, 3).reshape(state.shape[0], h, p, state.shape[2])


class _Piece:
    """Some whole chunks: their inputs, and the decays between their tokens.

    Attributes:
        x: [b, m, q, h, p]; dt [b, m, q, h]; B, C [b, m, g, q, n].
        within: [b, m, h, q, q], the decay from token j to token i >= j, 0 across documents.
        enter, leave: [b, m, q, h], from the chunk's start to a token and from it to the end.
        through: [b, m, h], from start to end.
    """

    def __init__(self, inputs: Inputs, part: _Part) -> None:
        def cut(x: Tensor) -> Tensor:
            x = x[part.rows, part.tokens]
            return x.unflatten(1, (x.shape[1] // part.chunk, part.chunk))

        self.wide = inputs.wide
        self.x, self.dt = cut(inputs.x).to(self.wide), cut(inputs.dt).to(self.wide)
        self.B, self.C = (cut(x).to(self.wide).transpose(2, 3) for x in (inputs.B, inputs.C))
        self.A = inputs.A.to(self.wide)
        self.D = None if inputs.D is None else inputs.D.to(self.wide)
        self.groups = inputs.B.shape[2]
        same, before, after = _document_masks(inputs.documents, part)
        # Sums of many steps lose what is left of their differences in fp32.
        sums = (self.dt.double() * self.A.double()).cumsum(2)
        q = part.chunk
        visible = torch.ones(q, q, dtype=torch.bool, device=sums.device).tril()
        if same is not None:
            visible = visible & same[:, :, None]
        by_head = sums.transpose(2, 3)
        steps = (by_head[..., :, None] - by_head[..., None, :]).to(self.wide)
        self.within = steps.masked_fill_(~visible, -torch.inf).exp_()
        self.enter = sums.to(self.wide).exp()
        self.leave = (sums[:, :, -1:] - sums).to(self.wide).exp()
        self.through = self.enter[:, :, -1].clone()
        if before is not None and after is not None:
            self.enter = self.enter * before[..., None]
            self.leave = self.leave * after[..., None]
            self.through = self.through * before[:, :, -1, None]

    # ---- layouts -------------------------------------------------------------------------------

    def by_head(self, x: Tensor) -> Tensor:
        """[b, m, q, h, p] -> [b, m, h, q, p]."""
        return x.transpose(2, 3)

    def by_group(self, x: Tensor) -> Tensor:
        """[b, m, q, h, p] -> [b, m, g, q, r * p]."""
        return x.unflatten(3, (self.groups, -1)).flatten(4).transpose(2, 3)

    def tokens(self, x: Tensor) -> Tensor:
        """The reverse of `by_group`."""
        return x.transpose(2, 3).unflatten(4, (-1, self.x.shape[4])).flatten(3, 4)

    def repeated(self, x: Tensor) -> Tensor:
        """[b, m, h, ...] -> [b, m, g, r, ...]."""
        return x.unflatten(2, (self.groups, -1))

    def per_channel(self, x: Tensor) -> Tensor:
        """[b, m, h] -> [b, m, g, 1, r * p]."""
        x = x[..., None].expand(*x.shape, self.x.shape[4])
        return x.unflatten(2, (self.groups, -1)).flatten(3)[:, :, :, None]

    # ---- arithmetic ----------------------------------------------------------------------------

    def states(self, first: Tensor) -> tuple[Tensor, Tensor]:
        """The state before each chunk [b, m, g, n, r * p], and after the last."""
        scaled = self.x * (self.leave * self.dt)[..., None]
        added = self.B.transpose(3, 4) @ self.by_group(scaled)
        through = self.per_channel(self.through)
        state, before = first, torch.empty_like(added)
        for i in range(added.shape[1]):
            before[:, i] = state
            state = torch.addcmul(added[:, i], through[:, i], state)
        return before, state

    def forward(self, first: Tensor) -> tuple[Tensor, Tensor]:
        """y [b, m * q, h, p], and the state after the piece."""
        before, after = self.states(first)
        y = self.tokens(self.C @ before) * self.enter[..., None]
        scores = self.C @ self.B.transpose(3, 4)
        weights = (self.repeated(self.within) * scores[:, :, :, None]).flatten(2, 3)
        y += self.by_head(weights @ self.by_head(self.x * self.dt[..., None]))
        if self.D is not None:
            y = torch.addcmul(y, self.x, self.D[:, None])
        return y.flatten(1, 2), after

    def backward(self, first: Tensor, dy: Tensor, dafter: Tensor) -> tuple[Grads, Tensor]:
        """Gradients of the piece's inputs, and of the state before it."""
        dy = dy.unflatten(1, self.x.shape[1:3])
        before, _ = self.states(first)
        entered = dy * self.enter[..., None]
        dbefore = self.C.transpose(3, 4) @ self.by_group(entered)
        dfirst, dafters = self._states_back(dbefore, dafter)

        # Within chunks.
        scores = self.C @ self.B.transpose(3, 4)
        x_dt = self.by_head(self.x * self.dt[..., None])
        dweights = self.by_head(dy) @ x_dt.transpose(3, 4)
        weights = (self.repeated(self.within) * scores[:, :, :, None]).flatten(2, 3)
        dx = self.by_head(weights.transpose(3, 4) @ self.by_head(dy))
        dscores = (self.repeated(dweights) * self.repeated(self.within)).sum(3)
        # A token's step matters to all pairs that it lies between, from j < t to i >= t. Sums of
        # what each pair adds and takes away again would lose them where decays are strong.
        moved = _from_behind(dweights.mul_(weights), 3).tril_(-1)
        dsteps = moved.sum(4).transpose(2, 3)

        # Between them.
        dx_out = self.tokens(self.B @ dafters) * self.leave[..., None]
        dC = dscores @ self.B + self.by_group(entered) @ before.transpose(3, 4)
        scaled = self.x * (self.leave * self.dt)[..., None]
        dB = dscores.transpose(3, 4) @ self.C + self.by_group(scaled) @ dafters.transpose(3, 4)
        entering = (self.tokens(self.C @ before) * entered).sum(4)
        left = (dx_out * self.x).sum(4) * self.dt
        dthrough = (before * dafters).sum(3).unflatten(3, (-1, self.x.shape[4])).sum(4)
        through = (dthrough.flatten(2) * self.through)[:, :, None]
        dsteps = dsteps + _from_behind(entering, 2) + (left.cumsum(2) - left) + through

        dx += dx_out
        ddt = torch.addcmul((dx * self.x).sum(4), dsteps, self.A)
        dx *= self.dt[..., None]
        if self.D is not None:
            dx = torch.addcmul(dx, dy, self.D[:, None])
        grads = Grads(
            dx.flatten(1, 2),
            ddt.flatten(1, 2),
            (dsteps * self.dt).sum((0, 1, 2)),
            dB.transpose(2, 3).flatten(1, 2),
            dC.transpose(2, 3).flatten(1, 2),
            (dy * self.x).sum((0, 1, 2, 4)),
        )
        return grads, dfirst

    def _states_back(self, dbefore: Tensor, dafter: Tensor) -> tuple[Tensor, Tensor]:
        """Gradients of the first state, and of the state after each chunk.

        Args:
            dbefore: [b, m, g, n, r * p], through the outputs of each chunk.
        """
        through = self.per_channel(self.through)
        dstate, dafters = dafter, torch.empty_like(dbefore)
        for i in reversed(range(dbefore.shape[1])):
            dafters[:, i] = dstate
            dstate = torch.addcmul(dbefore[:, i], through[:, i], dstate)
        return dstate, dafters


def _from_behind(x: Tensor, dim: int) -> Tensor:
    """Sums from each place to the end."""
    return x.flip(dim).cumsum(dim).flip(dim)


def _document_masks(
    documents: Tensor | None, part: _Part
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Which pairs of tokens share a document, which tokens share it with the token before their
    chunk, and which with the chunk's last: [b, m, q, q], [b, m, q], [b, m, q]."""
    if documents is None:
        return None, None, None
    rows = documents[part.rows]
    mine = rows[:, part.tokens].unflatten(1, (-1, part.chunk))
    # The state that a row starts with belongs to its first document.
    shifted = F.pad(rows, (1, 0))[:, part.tokens]
    if part.tokens.start == 0:
        shifted = torch.cat((rows[:, :1], shifted[:, 1:]), dim=1)
    previous = shifted.unflatten(1, (-1, part.chunk))[:, :, :1]
    same = mine[..., :, None] == mine[..., None, :]
    return same, mine == previous, mine == mine[..., -1:]
