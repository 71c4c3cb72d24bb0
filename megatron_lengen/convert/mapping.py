"""Rules that carry tensors between the two layouts; a family is a table of them.

Names of ours are Megatron's checkpoint keys, names of theirs Hugging Face's; `{i}` stands for the
layer. Shapes: h hidden, d head channels, n query heads per group, G groups, f feed-forward, V
vocabulary, P padded vocabulary. Biases (one dimension less) follow the same rules.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from megatron_lengen.config import LengenConfig
from megatron_lengen.errors import BadInput, require


@dataclass(frozen=True)
class Rule:
    """Tensors of ours and the tensors of theirs that hold the same numbers; one side is single."""

    ours: tuple[str, ...]
    theirs: tuple[str, ...]
    split: Callable[[Sequence[Tensor], LengenConfig], Sequence[Tensor]]
    """Ours -> theirs, both in the order of the names."""
    join: Callable[[Sequence[Tensor], LengenConfig], Sequence[Tensor]]
    """Theirs -> ours; also works on meta tensors, which is how shapes are planned."""
    fp32: bool = False
    """Whether the numbers are fp32 in every model."""
    rows: Callable[[LengenConfig], Sequence[int]] | None = None
    """Rows of each of ours, where theirs is nothing but ours one below the other."""

    def at_layer(self, layer: int) -> Rule:
        """The rule with the layer's number in its names."""

        def numbered(names: tuple[str, ...]) -> tuple[str, ...]:
            return tuple(name.replace("{i}", str(layer)) for name in names)

        return replace(self, ours=numbered(self.ours), theirs=numbered(self.theirs))

    def to_theirs(self, tensors: Sequence[Tensor], config: LengenConfig) -> dict[str, Tensor]:
        """Their tensors by name, from ours in the order of the names.

        Raises:
            BadInput: if a shape does not fit the configuration.
        """
        return self._converted(self.split, tensors, config, self.ours, self.theirs)

    def to_ours(self, tensors: Sequence[Tensor], config: LengenConfig) -> dict[str, Tensor]:
        """Our tensors by name, from theirs in the order of the names.

        Raises:
            BadInput: if a shape does not fit the configuration.
        """
        return self._converted(self.join, tensors, config, self.theirs, self.ours)

    def cast(self, tensor: Tensor, dtype: torch.dtype | None) -> Tensor:
        """In the dtype asked for (None: as it is), or in fp32 where that is a must."""
        dtype = torch.float32 if self.fp32 else dtype
        return tensor if dtype is None else tensor.to(dtype)

    def rows_of(self, ours: str, config: LengenConfig) -> tuple[int, int] | None:
        """The rows (from, to) of theirs that one of ours is, or None where that is not so."""
        if self.rows is None:
            return None
        sizes, place = list(self.rows(config)), self.ours.index(ours)
        first = sum(sizes[:place])
        return first, first + sizes[place]

    @staticmethod
    def _converted(
        work: Callable[[Sequence[Tensor], LengenConfig], Sequence[Tensor]],
        tensors: Sequence[Tensor],
        config: LengenConfig,
        names: tuple[str, ...],
        new_names: tuple[str, ...],
    ) -> dict[str, Tensor]:
        try:
            made = work(tensors, config)
        except BadInput as error:
            raise BadInput(f"{', '.join(names)}: {error}") from None
        return dict(zip(new_names, (tensor.contiguous() for tensor in made), strict=True))


def expand(rules: Iterable[Rule], num_layers: int) -> list[Rule]:
    """The table with one rule per layer in place of every rule that has `{i}`."""
    out: list[Rule] = []
    for rule in rules:
        many = any("{i}" in name for name in rule.ours)
        out += [rule.at_layer(i) for i in range(num_layers)] if many else [rule]
    return out


def direct(ours: str, theirs: str, fp32: bool = False) -> Rule:
    """The same tensor under another name."""
    return Rule((ours,), (theirs,), _as_they_are, _as_they_are, fp32)


def per_head(ours: str, theirs: str) -> Rule:
    """The same tensor under another name, with a row for every query head."""

    def checked(tensors: Sequence[Tensor], config: LengenConfig) -> Sequence[Tensor]:
        _rows(tensors[0], config.num_attention_heads)
        return tensors

    return Rule((ours,), (theirs,), checked, checked)


def grouped_qkv(ours: str, q: str, k: str, v: str) -> Rule:
    """Rows grouped per KV group as [n query heads, key, value] <-> q, k and v apart.

    Ours [G * (n + 2) * d, h]; theirs [G * n * d, h], [G * d, h], [G * d, h].
    """
    return Rule((ours,), (q, k, v), _split_qkv, _join_qkv)


def gate_up(ours: str, gate: str, up: str) -> Rule:
    """Ours [2f, h], gate rows first; theirs [f, h] twice."""
    return Rule((ours,), (gate, up), _split_gate_up, _join_gate_up)


def vocabulary(ours: str, theirs: str) -> Rule:
    """Ours [P, h] with zero rows behind the vocabulary; theirs [V, h]."""

    def join(tensors: Sequence[Tensor], config: LengenConfig) -> Sequence[Tensor]:
        _rows(tensors[0], config.vocab_size)
        return [pad_vocabulary(tensors[0], config)]

    return Rule((ours,), (theirs,), _cut_vocabulary, join)


def stacked(
    ours: Sequence[str],
    theirs: str,
    rows: Callable[[LengenConfig], Sequence[int]],
    last: Callable[[LengenConfig], int] | None = None,
) -> Rule:
    """Ours, whose rows are told apart; theirs, one tensor of all their rows in this order.

    Args:
        rows: of each of ours.
        last: the last dimension, where that says something of the model.
    """

    def join(tensors: Sequence[Tensor], config: LengenConfig) -> Sequence[Tensor]:
        sizes = list(rows(config))
        _rows(tensors[0], sum(sizes))
        if last is not None:
            found, expected = tensors[0].shape[-1], last(config)
            require(
                found == expected,
                f"found {found} in the last dimension; the configuration asks for {expected}",
            )
        return tensors[0].split(sizes)

    def split(tensors: Sequence[Tensor], config: LengenConfig) -> Sequence[Tensor]:
        for tensor, size in zip(tensors, rows(config), strict=True):
            _rows(tensor, size)
        return [torch.cat(list(tensors))]

    return Rule(tuple(ours), (theirs,), split, join, rows=rows)


def _as_they_are(tensors: Sequence[Tensor], config: LengenConfig) -> Sequence[Tensor]:
    return tensors


def _head_sizes(config: LengenConfig) -> tuple[int, int, int]:
    """(groups G, query rows of a group n * d, key rows of a group d)."""
    groups = config.num_query_groups
    return groups, config.num_attention_heads // groups * config.kv_channels, config.kv_channels


def _split_qkv(tensors: Sequence[Tensor], config: LengenConfig) -> Sequence[Tensor]:
    groups, query, key = _head_sizes(config)
    (tensor,) = tensors
    _rows(tensor, groups * (query + 2 * key))
    grouped = tensor.unflatten(0, (groups, query + 2 * key))
    return [part.flatten(0, 1) for part in grouped.split([query, key, key], dim=1)]


def _join_qkv(tensors: Sequence[Tensor], config: LengenConfig) -> Sequence[Tensor]:
    groups, query, key = _head_sizes(config)
    parts = []
    for tensor, rows in zip(tensors, (query, key, key), strict=True):
        _rows(tensor, groups * rows)
        parts.append(tensor.unflatten(0, (groups, rows)))
    return [torch.cat(parts, dim=1).flatten(0, 1)]


def _split_gate_up(tensors: Sequence[Tensor], config: LengenConfig) -> Sequence[Tensor]:
    _rows(tensors[0], 2 * config.ffn_hidden_size)
    return tensors[0].chunk(2, dim=0)


def _join_gate_up(tensors: Sequence[Tensor], config: LengenConfig) -> Sequence[Tensor]:
    for tensor in tensors:
        _rows(tensor, config.ffn_hidden_size)
    return [torch.cat(list(tensors), dim=0)]


def _cut_vocabulary(tensors: Sequence[Tensor], config: LengenConfig) -> Sequence[Tensor]:
    found, size = tensors[0].shape[0], config.vocab_size
    require(found >= size, f"found {found} rows; the vocabulary has {size}")
    return [tensors[0][:size]]


def pad_vocabulary(tensor: Tensor, config: LengenConfig) -> Tensor:
    """[at least V, h] -> [P, h]: the vocabulary's rows, then rows of zeros."""
    (rows,) = _cut_vocabulary([tensor], config)
    extra = config.padded_vocab_size - config.vocab_size
    return torch.cat([rows, rows.new_zeros(extra, *rows.shape[1:])], dim=0) if extra else rows


def _rows(tensor: Tensor, expected: int) -> None:
    found = tensor.shape[0]
    require(found == expected, f"found {found} rows; the configuration asks for {expected}")
