"""How two models differ: settings, names, shapes, dtypes and numbers, also across the two kinds.

A checkpoint beside a Hugging Face folder is seen through the family's rules, under Hugging Face's
names. One tensor of each model is in memory at a time.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from megatron_lengen.convert.family import Family
from megatron_lengen.convert.inspection import PIECE
from megatron_lengen.convert.mapping import Rule
from megatron_lengen.convert.stored import (
    StoredCheckpoint,
    StoredFolder,
    StoredModel,
    forward_settings,
)


def differences(one: StoredModel, other: StoredModel) -> dict[str, Any]:
    """What differs between two models.

    Returns:
        `settings` by name with both values; `only_in_one`, `only_in_other`: names of tensors;
        `tensors`: a row for each that differs, the largest relative difference first; `equal`:
        how many are equal bit for bit; `same`: whether nothing differs; and `arguments`, flags of
        runs that differ, which do not count.
    """
    labels = {"one": one.label, "other": other.label}
    arguments = _arguments(one, other)
    one, other, mine, theirs = _side_by_side(one, other)
    known, there = set(one.names), set(other.names)
    rows = [compare(name, one, other) for name in one.names if name in there]
    differing = sorted((row for row in rows if row is not None), key=_size, reverse=True)
    found: dict[str, Any] = {
        **labels,
        "settings": _unlike(mine, theirs),
        "only_in_one": sorted(known - there),
        "only_in_other": sorted(there - known),
        "tensors": differing,
        "equal": len(rows) - len(differing),
        "compared": len(rows),
    }
    found["same"] = not any(
        found[key] for key in ("settings", "only_in_one", "only_in_other", "tensors")
    )
    return {**found, "arguments": arguments}


def compare(name: str, one: StoredModel, other: StoredModel) -> dict[str, Any] | None:
    """A row on a tensor that both have; None where they are equal bit for bit.

    `relative` is the norm of the difference over the first one's norm.
    """
    a, b = one.meta(name), other.meta(name)
    row = {
        "name": name,
        "shape": [list(a.shape), list(b.shape)],
        "dtype": [str(a.dtype)[6:], str(b.dtype)[6:]],
        "max_abs": math.nan,
        "relative": math.nan,
    }
    if a.shape != b.shape:
        return row
    same, largest, square, size = a.dtype == b.dtype, 0.0, 0.0, 0.0
    pieces = (tensor.reshape(-1).split(PIECE) for tensor in (one.read(name), other.read(name)))
    for left, right in zip(*pieces, strict=True):
        same = same and torch.equal(_bits(left), _bits(right))
        exact = left.double()
        apart = right.double() - exact
        largest = max(largest, _largest(apart), key=_order)
        square += float(apart.square().sum())
        size += float(exact.square().sum())
    if same:
        return None
    relative = math.sqrt(square / size) if size else math.inf if square else 0.0
    return {**row, "max_abs": largest, "relative": relative}


def _largest(values: Tensor) -> float:
    return float(values.abs().max()) if values.numel() else 0.0


def _order(value: float) -> float:
    """What is no number is larger than all numbers."""
    return math.inf if math.isnan(value) else value


def _size(row: dict[str, Any]) -> float:
    return _order(row["relative"])


def _bits(tensor: Tensor) -> Tensor:
    """The bytes of a contiguous tensor: equal numbers may differ in them, and nan never equals."""
    return tensor.contiguous().view(torch.uint8)


# ---- two kinds -----------------------------------------------------------------------------------


class _UnderTheirNames(StoredModel):
    """A checkpoint as the Hugging Face model that it converts to."""

    kind = "checkpoint"

    def __init__(self, stored: StoredCheckpoint, family: Family) -> None:
        super().__init__(stored.label, stored.name, stored.folder)
        self._stored = stored
        present = set(stored.names)
        rules = [r for r in family.tensor_rules(stored.config) if present.issuperset(r.ours)]
        self._rules: dict[str, Rule] = {name: rule for rule in rules for name in rule.theirs}
        known = {name for rule in rules for name in rule.ours}
        self._others = [name for name in stored.names if name not in known]
        self._last: tuple[tuple[str, ...], dict[str, Tensor]] = ((), {})

    @property
    def names(self) -> tuple[str, ...]:
        """Their names, those of one tensor of ours together; ours where there is no rule."""
        return (*self._rules, *self._others)

    def meta(self, name: str) -> Tensor:
        """An empty tensor on the meta device with the shape after conversion."""
        rule = self._rules.get(name)
        if rule is None:
            return self._stored.meta(name)
        metas = [self._stored.meta(ours) for ours in rule.ours]
        return rule.to_theirs(metas, self._stored.config)[name]

    def read(self, name: str) -> Tensor:
        """The tensor after conversion; ours is read once for all that it is made of."""
        rule = self._rules.get(name)
        if rule is None:
            return self._stored.read(name)
        if self._last[0] != rule.ours:
            self._last = ((), {})
            tensors = [self._stored.read(ours) for ours in rule.ours]
            self._last = (rule.ours, rule.to_theirs(tensors, self._stored.config))
        return self._last[1][name]

    def settings(self) -> dict[str, Any]:
        """Not by Hugging Face's names; see `_side_by_side`."""
        return self._stored.settings()


def _side_by_side(
    one: StoredModel, other: StoredModel
) -> tuple[StoredModel, StoredModel, dict[str, Any], dict[str, Any]]:
    """Both models under the same names, and their settings."""
    if one.kind == other.kind:
        return one, other, one.settings(), other.settings()
    if isinstance(one, StoredFolder):
        other, one, theirs, mine = _side_by_side(other, one)
        return one, other, mine, theirs
    assert isinstance(one, StoredCheckpoint) and isinstance(other, StoredFolder)
    settings = forward_settings(one.config), forward_settings(other.config)
    return _UnderTheirNames(one, other.family), other, *settings


def _arguments(one: StoredModel, other: StoredModel) -> dict[str, list[Any]]:
    """Flags that differ between two runs."""
    if not (isinstance(one, StoredCheckpoint) and isinstance(other, StoredCheckpoint)):
        return {}
    flags = []
    for info in (one.checkpoint.info, other.checkpoint.info):
        groups = (info.get("arguments") or {}).items()
        flags.append({f"{g}.{k}": v for g, values in groups for k, v in (values or {}).items()})
    # What was converted or averaged has none.
    return _unlike(*flags) if all(flags) else {}


def _unlike(one: dict[str, Any], other: dict[str, Any]) -> dict[str, list[Any]]:
    keys = sorted({*one, *other})
    return {k: [one.get(k), other.get(k)] for k in keys if one.get(k) != other.get(k)}
