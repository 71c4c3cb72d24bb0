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
    """One tensor of ours and the tensors of theirs that it is made of."""

    ours: str
    theirs: tuple[str, ...]
    split: Callable[[Tensor, LengenConfig], Sequence[Tensor]]
    """Ours -> theirs, in the order of the names."""
    join: Callable[[Sequence[Tensor], LengenConfig], Tensor]
    """Theirs -> ours; also works on meta tensors, which is how shapes are planned."""

    def at_layer(self, layer: int) -> Rule:
        """The rule with the layer's number in its names."""
        theirs = tuple(name.replace("{i}", str(layer)) for name in self.theirs)
        return replace(self, ours=self.ours.replace("{i}", str(layer)), theirs=theirs)

    def to_theirs(self, tensor: Tensor, config: LengenConfig) -> dict[str, Tensor]:
        """Their tensors by name.

        Raises:
            BadInput: if the tensor's shape does not fit the configuration.
        """
        parts = self._named(lambda: self.split(tensor, config), self.ours)
        return dict(zip(self.theirs, (part.contiguous() for part in parts), strict=True))

    def to_ours(self, tensors: Sequence[Tensor], config: LengenConfig) -> Tensor:
        """Our tensor from theirs, given in the order of the names.

        Raises:
            BadInput: if a shape does not fit the configuration.
        """
        return self._named(lambda: self.join(tensors, config), ", ".join(self.theirs)).contiguous()

    def _named(self, work: Callable, name: str):
        try:
            return work()
        except BadInput as error:
            raise BadInput(f"{name}: {error}") from None


def expand(rules: Iterable[Rule], num_layers: int) -> list[Rule]:
    """The table with one rule per layer in place of every rule that has `{i}`."""
    out: list[Rule] = []
    for rule in rules:
        many = "{i}" in rule.ours
        out += [rule.at_layer(i) for i in range(num_layers)] if many else [rule]
    return out


def direct(ours: str, theirs: str) -> Rule:
    """The same tensor under another name."""
    return Rule(ours, (theirs,), lambda tensor, _: [tensor], lambda tensors, _: tensors[0])


def per_head(ours: str, theirs: str) -> Rule:
    """The same tensor under another name, with a row for every query head."""

    def checked(tensor: Tensor, config: LengenConfig) -> Tensor:
        _rows(tensor, config.num_attention_heads)
        return tensor

    return Rule(ours, (theirs,), lambda t, c: [checked(t, c)], lambda t, c: checked(t[0], c))


def grouped_qkv(ours: str, q: str, k: str, v: str) -> Rule:
    """Rows grouped per KV group as [n query heads, key, value] <-> q, k and v apart.

    Ours [G * (n + 2) * d, h]; theirs [G * n * d, h], [G * d, h], [G * d, h].
    """
    return Rule(ours, (q, k, v), _split_qkv, _join_qkv)


def gate_up(ours: str, gate: str, up: str) -> Rule:
    """Ours [2f, h], gate rows first; theirs [f, h] twice."""
    return Rule(ours, (gate, up), _split_gate_up, _join_gate_up)


def vocabulary(ours: str, theirs: str) -> Rule:
    """Ours [P, h] with zero rows behind the vocabulary; theirs [V, h]."""
    return Rule(ours, (theirs,), _cut_vocabulary, lambda t, config: pad_vocabulary(t[0], config))


def _head_sizes(config: LengenConfig) -> tuple[int, int, int]:
    """(groups G, query rows of a group n * d, key rows of a group d)."""
    groups = config.num_query_groups
    return groups, config.num_attention_heads // groups * config.kv_channels, config.kv_channels


def _split_qkv(tensor: Tensor, config: LengenConfig) -> Sequence[Tensor]:
    groups, query, key = _head_sizes(config)
    _rows(tensor, groups * (query + 2 * key))
    grouped = tensor.unflatten(0, (groups, query + 2 * key))
    return [part.flatten(0, 1) for part in grouped.split([query, key, key], dim=1)]


def _join_qkv(tensors: Sequence[Tensor], config: LengenConfig) -> Tensor:
    groups, query, key = _head_sizes(config)
    parts = []
    for tensor, rows in zip(tensors, (query, key, key), strict=True):
        _rows(tensor, groups * rows)
        parts.append(tensor.unflatten(0, (groups, rows)))
    return torch.cat(parts, dim=1).flatten(0, 1)


def _split_gate_up(tensor: Tensor, config: LengenConfig) -> Sequence[Tensor]:
    _rows(tensor, 2 * config.ffn_hidden_size)
    return tensor.chunk(2, dim=0)


def _join_gate_up(tensors: Sequence[Tensor], config: LengenConfig) -> Tensor:
    for tensor in tensors:
        _rows(tensor, config.ffn_hidden_size)
    return torch.cat(list(tensors), dim=0)


def _cut_vocabulary(tensor: Tensor, config: LengenConfig) -> Sequence[Tensor]:
    found, size = tensor.shape[0], config.vocab_size
    require(found >= size, f"found {found} rows; the vocabulary has {size}")
    return [tensor[:size]]


def pad_vocabulary(tensor: Tensor, config: LengenConfig) -> Tensor:
    """[at least V, h] -> [P, h]: the vocabulary's rows, then rows of zeros."""
    (rows,) = _cut_vocabulary(tensor, config)
    extra = config.padded_vocab_size - config.vocab_size
    return torch.cat([rows, rows.new_zeros(extra, *rows.shape[1:])], dim=0) if extra else rows


def _rows(tensor: Tensor, expected: int) -> None:
    found = tensor.shape[0]
    require(found == expected, f"found {found} rows; the configuration asks for {expected}")
