"""Which families of models there are, how one is found, and settings on the way."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any

from megatron_lengen.config import LengenConfig
from megatron_lengen.convert.family import Family
from megatron_lengen.convert.lengen import Lengen, is_foreign
from megatron_lengen.convert.llama import Llama
from megatron_lengen.convert.mamba2 import Mamba2, is_of_mamba_ssm
from megatron_lengen.convert.mistral import Mistral
from megatron_lengen.convert.smollm3 import SmolLM3
from megatron_lengen.errors import BadInput, require


def families() -> tuple[Family, ...]:
    """All known families, in the order in which a model is offered to them."""
    return (SmolLM3(), Llama(), Mistral(), Mamba2(), Lengen())


def family_named(name: str, flag: str = "--family") -> Family:
    """The family of a Hugging Face `model_type`.

    Raises:
        BadInput: listing the known ones.
    """
    known = {family.name: family for family in families()}
    require(name in known, f"{flag}: found {name}; allowed: {', '.join(known)}")
    return known[name]


def family_of(raw: dict[str, Any]) -> Family:
    """The family of a folder by its `config.json`, as written."""
    kind = str(raw.get("model_type"))
    if is_foreign(raw):
        kind = Lengen.name
    elif is_of_mamba_ssm(raw):
        kind = Mamba2.name
    return family_named(kind, "model_type")


def family_for(config: LengenConfig, name: str | None = None, source: str | None = None) -> Family:
    """The family to export a model of ours to: the named one, or the first that can.

    Args:
        config: the model.
        name: the user's choice.
        source: family of the model that training began with; it is tried first.

    Raises:
        BadInput: saying why none (or not this one) can represent it.
    """
    candidates = list(families())
    if name:
        candidates = [family_named(name)]
    candidates.sort(key=lambda family: family.name != source)
    reasons = []
    for family in candidates:
        same = family.decoder == config.decoder
        reason = family.objection(config) if same else f"the layers of {config.decoder}"
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


def parse_renames(items: Iterable[str]) -> dict[str, str]:
    """`THEIRS=OURS` strings as a dictionary.

    Raises:
        BadInput: for an item without text on both sides of `=`.
    """
    renames: dict[str, str] = {}
    for item in items:
        theirs, _, ours = item.partition("=")
        require(bool(theirs and ours), f"--rename: found {item!r}; allowed: THEIRS=OURS")
        renames[theirs] = ours
    return renames


def _value(text: str) -> Any:
    words = {"true": True, "false": False, "none": None, "null": None}
    if text.lower() in words:
        return words[text.lower()]
    try:
        return json.loads(text)
    except ValueError:
        return [_value(part) for part in text.split(",")] if "," in text else text
