"""Hugging Face's `rope_parameters` and our fields that say the same."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from megatron_lengen.config import LengenConfig
from megatron_lengen.errors import require

KINDS = ("default", "linear", "llama3", "yarn")


def rope_parameters(config: LengenConfig) -> dict[str, Any]:
    """What Hugging Face's configuration says about the rotary positions of a model of ours."""
    rotary: dict[str, Any] = {"rope_type": "default", "rope_theta": float(config.rotary_base)}
    if config.position_embedding_type == "yarn":
        rotary |= {
            "rope_type": "yarn",
            "factor": float(config.rotary_scaling_factor),
            "original_max_position_embeddings": config.original_max_position_embeddings,
            "beta_fast": float(config.beta_fast),
            "beta_slow": float(config.beta_slow),
            "truncate": True,
        }
        if config.mscale is not None:
            rotary |= {"mscale": config.mscale, "mscale_all_dim": config.mscale_all_dim}
    elif config.use_rope_scaling:
        rotary |= {
            "rope_type": "llama3",
            "factor": float(config.rope_scaling_factor),
            "low_freq_factor": float(config.low_freq_factor),
            "high_freq_factor": float(config.high_freq_factor),
            "original_max_position_embeddings": config.original_max_position_embeddings,
        }
    elif config.rotary_seq_len_interpolation_factor is not None:
        factor = float(config.rotary_seq_len_interpolation_factor)
        rotary |= {"rope_type": "linear", "factor": factor}
    return rotary


def rotary_fields(rotary: Mapping[str, Any]) -> dict[str, Any]:
    """Fields of `LengenConfig` for `rope_parameters`.

    Raises:
        BadInput: for a kind of rotary positions that our models do not have, or a bad number.
    """
    kind = rotary.get("rope_type", "default")
    require(kind in KINDS, f"rope_parameters: found rope_type {kind}; allowed: {', '.join(KINDS)}")
    part = rotary.get("partial_rotary_factor") or 1.0
    require(part == 1.0, f"partial_rotary_factor: found {part}; allowed: 1")
    fields = {
        "rotary_base": _number(rotary, "rope_theta", above=0),
        "rotary_percent": 1.0,
        "position_embedding_type": "yarn" if kind == "yarn" else "rope",
    }
    if kind == "default":
        return fields
    factor = _number(rotary, "factor", least=1)
    if kind == "linear":
        return {**fields, "rotary_seq_len_interpolation_factor": factor}
    original = {"original_max_position_embeddings": _positions(rotary)}
    if kind == "yarn":
        return {**fields, **original, **_yarn_fields(rotary, factor)}
    low, high = (_number(rotary, f"{name}_freq_factor", above=0) for name in ("low", "high"))
    require(
        low < high,
        f"rope_parameters: found low_freq_factor {low} and high_freq_factor {high}; "
        "allowed: low below high",
    )
    return {
        **fields,
        **original,
        "use_rope_scaling": True,
        "rope_scaling_factor": factor,
        "low_freq_factor": low,
        "high_freq_factor": high,
    }


def changed_rope(hf: Mapping[str, Any], settings: Mapping[str, Any]) -> dict[str, Any]:
    """`rope_parameters` of a configuration after `--set rope_theta=... rope_parameters=...`.

    Raises:
        BadInput: for values that cannot be.
    """
    rotary, stored = settings.get("rope_parameters", {}), hf["rope_parameters"]
    require(
        isinstance(rotary, dict),
        f'--set rope_parameters: found {rotary}; allowed: as in {{"rope_type": "yarn", '
        '"factor": 4}',
    )
    theta = settings.get("rope_theta", rotary.get("rope_theta", stored["rope_theta"]))
    rotary = {**(rotary or stored), "rope_theta": theta}
    kind = rotary.setdefault("rope_type", "default")
    if kind in ("llama3", "yarn"):
        # What the weights were trained for, not what they are declared for from now on.
        rotary.setdefault("original_max_position_embeddings", hf["max_position_embeddings"])
    if kind == "llama3":
        # Llama 3.1's own.
        rotary = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, **rotary}
    rotary_fields(rotary)  # refuses what cannot be
    return {**rotary, "rope_theta": float(theta)}


def _yarn_fields(rotary: Mapping[str, Any], factor: float) -> dict[str, Any]:
    require(
        rotary.get("truncate", True) is not False,
        "rope_parameters: found truncate false; allowed: true",
    )
    given = {name: value for name, value in rotary.items() if value is not None}
    mscale = all_dim = None
    if given.get("mscale") and given.get("mscale_all_dim"):  # one alone does nothing
        mscale, all_dim = (_number(given, name, above=0) for name in ("mscale", "mscale_all_dim"))
    usual = _mscale(factor, mscale or 1) / (_mscale(factor, all_dim) if all_dim else 1)
    stretched = _number({"attention_factor": usual, **given}, "attention_factor", above=0)
    require(
        math.isclose(stretched, usual, rel_tol=1e-6),
        f"rope_parameters: found attention_factor {stretched}; allowed: {usual:.6g}",
    )
    return {
        "rotary_scaling_factor": factor,
        "beta_fast": _number({"beta_fast": 32.0, **given}, "beta_fast", above=0),
        "beta_slow": _number({"beta_slow": 1.0, **given}, "beta_slow", above=0),
        "mscale": mscale,
        "mscale_all_dim": all_dim,
    }


def _number(
    rotary: Mapping[str, Any], name: str, least: float = -math.inf, above: float = -math.inf
) -> float:
    """A finite number of at least `least` and above `above`."""
    value: Any = rotary.get(name)
    allowed = f"{least} or more" if least > above else f"a number above {above}"
    known = isinstance(value, int | float) and not isinstance(value, bool)
    fits = known and math.isfinite(value) and value >= least and value > above
    require(fits, f"rope_parameters: found {name} {value}; allowed: {allowed}")
    return value


def _positions(rotary: Mapping[str, Any]) -> int:
    value: Any = rotary.get("original_max_position_embeddings")
    fits = isinstance(value, int) and not isinstance(value, bool) and value >= 1
    found = f"found original_max_position_embeddings {value}"
    require(fits, f"rope_parameters: {found}; allowed: 1 or more")
    return value


def _mscale(factor: float, multiplier: float) -> float:
    """YaRN's factor on cosines and sines (Peng et al. 2023)."""
    return 1.0 if factor <= 1 else 0.1 * multiplier * math.log(factor) + 1.0
