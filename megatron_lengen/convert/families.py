"""What a family of models is, and which ones there are.

To add one: subclass `Family` in a file of its own and list it in `families`.
"""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Iterable
from typing import Any, NamedTuple

from megatron_lengen.config import LengenConfig
from megatron_lengen.convert.mapping import Rule, expand
from megatron_lengen.errors import BadInput, require


class AttentionKind(NamedTuple):
    """What one attention layer of a Hugging Face model really does."""

    rope: bool
    window: int | None
    """Visible keys, the query's own included; None: all earlier ones."""


class Family(ABC):
    """Translation of one kind of model: a table of tensor rules and a configuration map."""

    name: str
    """Hugging Face's `model_type`."""

    settable: frozenset[str]
    """Configuration keys that `--set` may change on the way."""

    @abstractmethod
    def objection(self, config: LengenConfig) -> str | None:
        """Why this family cannot represent the model, or None."""

    @abstractmethod
    def rules(self, config: LengenConfig) -> list[Rule]:
        """The tensor table; `{i}` stands for every layer."""

    @abstractmethod
    def hf_config(self, config: LengenConfig) -> dict[str, Any]:
        """Hugging Face's configuration, complete: nothing is left to defaults of a class."""

    @abstractmethod
    def architecture(self, hf: dict[str, Any]) -> dict[str, Any]:
        """The fields of `LengenConfig` for an effective Hugging Face configuration.

        Raises:
            BadInput: for settings that our models do not have.
        """

    @abstractmethod
    def with_settings(self, hf: dict[str, Any], settings: dict[str, Any]) -> dict[str, Any]:
        """The configuration with the user's settings and what follows from them.

        Raises:
            BadInput: for a value that cannot be.
        """

    @abstractmethod
    def attention_kinds(self, model: Any) -> list[AttentionKind]:
        """Read off the modules of a loaded Hugging Face model, not off its configuration."""

    def apply(self, hf: dict[str, Any], settings: dict[str, Any]) -> dict[str, Any]:
        """`with_settings` after refusing unknown keys."""
        unknown = sorted(set(settings) - self.settable)
        require(
            not unknown,
            f"--set: found {', '.join(unknown)}; allowed for {self.name}: "
            f"{', '.join(sorted(self.settable))}",
        )
        return self.with_settings(hf, settings) if settings else hf

    def tensor_rules(self, config: LengenConfig) -> list[Rule]:
        """The tensor table, layer by layer."""
        return expand(self.rules(config), config.num_layers)


def families() -> tuple[Family, ...]:
    """All known families, in the order in which a model is offered to them."""
    from megatron_lengen.convert.smollm3 import SmolLM3

    return (SmolLM3(),)


def family_named(name: str, flag: str = "--family") -> Family:
    """The family of a Hugging Face `model_type`.

    Raises:
        BadInput: listing the known ones.
    """
    known = {family.name: family for family in families()}
    require(name in known, f"{flag}: found {name}; allowed: {', '.join(known)}")
    return known[name]


def family_for(config: LengenConfig, name: str | None = None) -> Family:
    """The family to export a model of ours to: the named one, or the first that can.

    Raises:
        BadInput: saying why none (or not this one) can represent it.
    """
    candidates = (family_named(name),) if name else families()
    reasons = []
    for family in candidates:
        reason = family.objection(config)
        if reason is None:
            return family
        reasons.append(f"{family.name} cannot represent {reason}")
    raise BadInput("to-hf: " + "; ".join(reasons))


def parse_settings(items: Iterable[str]) -> dict[str, Any]:
    """`KEY=VALUE` strings as a dictionary; a value is JSON, a comma list, or a word.

    >>> parse_settings(["sliding_window=4096", "no_rope_layers=1,1,0", "use_sliding_window=true"])
    {'sliding_window': 4096, 'no_rope_layers': [1, 1, 0], 'use_sliding_window': True}

    Raises:
        BadInput: for an item without `=` or a key given twice.
    """
    settings: dict[str, Any] = {}
    for item in items:
        key, equals, text = item.partition("=")
        require(bool(equals and key), f"--set: found {item!r}; allowed: KEY=VALUE")
        require(key not in settings, f"--set: found {key} twice")
        settings[key] = _value(text)
    return settings


def _value(text: str) -> Any:
    words = {"true": True, "false": False, "none": None, "null": None}
    if text.lower() in words:
        return words[text.lower()]
    try:
        return json.loads(text)
    except ValueError:
        return [_value(part) for part in text.split(",")] if "," in text else text
