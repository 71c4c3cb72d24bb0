"""What no class of transformers holds: query scaling, NAPE, entmax, on SmolLM3's decoder.

`modeling_lengen.py` is these models' code and travels with them. Its configuration is SmolLM3's
with the entries below, named as in the paper's repository where its README names them. That
repository's own scaled checkpoints are read too, as far as the README says what they are.
"""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from typing import Any

from megatron_lengen.attention_checks import CHOICES
from megatron_lengen.config import LengenConfig
from megatron_lengen.convert.family import SCALING_SETTINGS, AttentionKind
from megatron_lengen.convert.mapping import Rule, per_head
from megatron_lengen.convert.smollm3 import SmolLM3
from megatron_lengen.errors import BadInput, require
from megatron_lengen.layers.positions import alibi_slopes, head_slopes
from megatron_lengen.layers.query_scaling import scaled_heads

# config.json's names of our settings of query scaling.
_SCALING = {
    "attention_scaling_type": "query_scaling",
    "attention_scaling_scope": "query_scaling_scope",
    "attention_scaling_coef_bound": "query_scaling_coef_bound",
    "attention_scaling_pow_bound": "query_scaling_pow_bound",
    "attention_scaling_coef_activation": "query_scaling_coef_activation",
    "attention_scaling_coef_shift": "query_scaling_coef_shift",
    "attention_scaling_log_base": "query_scaling_log_base",
    "attention_scaling_proj_bias": "query_scaling_proj_bias",
    "attention_scaling_weight_scale_alpha": "query_scaling_weight_scale",
    "attention_scaling_identity_init": "query_scaling_identity_init",
}
# What the README's formula settles for checkpoints that it describes.
_SETTLED = ("attention_scaling_type", "attention_scaling_log_base")
_KINDS = {float: "a number", bool: "true, false", str: "a word"}


class Lengen(SmolLM3):
    """Models of `modeling_lengen.LengenForCausalLM`."""

    name = "lengen"
    architecture_class = "LengenForCausalLM"
    code = Path(__file__).with_name("modeling_lengen.py")
    settable = SmolLM3.settable | set(_SCALING) | {"attention_entmax_alpha"}

    def rules(self, config: LengenConfig) -> list[Rule]:
        parameters = {"learned": ["coef_weight", "pow_weight"], "ssmax": ["ssmax_scale"]}
        names = parameters.get(config.query_scaling, [])
        if config.query_scaling == "learned" and config.query_scaling_proj_bias:
            names += ["coef_bias", "pow_bias"]
        return super().rules(config) + [
            per_head(
                f"decoder.layers.{layer}.self_attention.query_scaling.{name}",
                f"model.layers.{layer}.self_attn.attention_scaling.{name}",
            )
            for layer in range(config.num_layers)
            for name in names
            if any(scaled_heads(config, layer))
        ]

    def hf_config(self, config: LengenConfig) -> dict[str, Any]:
        slopes, scaled = head_slopes(config), config.query_scaling != "none"
        module = self.code.stem
        hf = {
            **super().hf_config(config),
            "auto_map": {
                "AutoConfig": f"{module}.LengenModelConfig",
                "AutoModel": f"{module}.LengenModel",
                "AutoModelForCausalLM": f"{module}.LengenForCausalLM",
            },
            "attention_function": config.attention_function,
            "attention_entmax_alpha": config.entmax_alpha,
            "attention_alibi_slopes": slopes if any(slopes) else None,
            "attention_scaling_enabled": scaled,
        }
        entries = {theirs: getattr(config, ours) for theirs, ours in _SCALING.items()}
        return {**hf, **entries} if scaled else hf

    def architecture(self, hf: dict[str, Any]) -> dict[str, Any]:
        fields = {
            **super().architecture(hf),
            "attention_function": hf["attention_function"],
            "entmax_alpha": hf["attention_entmax_alpha"],
        }
        if hf["attention_scaling_enabled"]:
            fields |= {ours: hf[theirs] for theirs, ours in _SCALING.items()}
            # Ours cannot start as the identity without a bias; these weights have started already.
            fields["query_scaling_identity_init"] &= fields["query_scaling_proj_bias"]
        if hf["attention_alibi_slopes"] is not None:
            rope = fields["position_embedding_type"] != "none"
            require(not rope, "attention_alibi_slopes: found with rotary positions; allowed: none")
            fields |= _nape(hf["attention_alibi_slopes"], hf["num_attention_heads"])
        return fields

    def with_settings(self, hf: dict[str, Any], settings: dict[str, Any]) -> dict[str, Any]:
        entries = {**_SCALING, "attention_entmax_alpha": "entmax_alpha"}
        for name in sorted(entries.keys() & settings.keys()):
            kind = type(LengenConfig.__dataclass_fields__[entries[name]].default)
            value = settings[name]
            fits = type(value) is kind or (kind is float and type(value) is int)
            require(fits, f"--set {name}: found {value}; allowed: {_KINDS[kind]}")
        return super().with_settings(hf, settings)

    def attention_kinds(self, model: Any) -> list[AttentionKind]:
        modules = [layer.self_attn for layer in model.model.layers]
        kinds = []
        for kind, attention in zip(super().attention_kinds(model), modules, strict=True):
            slopes, scaling = attention.alibi_slopes, attention.attention_scaling
            kinds.append(
                kind._replace(
                    slopes=None if slopes is None else tuple(slopes),
                    alpha=attention.entmax_alpha,
                    scaling=None if scaling is None else _settings_of(scaling),
                )
            )
        return kinds

    def check_source(self, raw: dict[str, Any], settings: dict[str, Any]) -> None:
        if not is_foreign(raw):
            super().check_source(raw, settings)
            return
        activation = {**raw, **settings}.get("attention_scaling_coef_activation")
        open_ones = set(_SCALING) - set(_SETTLED) - {"attention_scaling_identity_init"}
        if activation == "sigmoid":
            open_ones.remove("attention_scaling_coef_shift")
        missing = sorted(open_ones - set(raw) - set(settings))
        if missing:
            given = " ".join(f"{name}=VALUE" for name in missing)
            raise BadInput(
                f"config.json: does not say {', '.join(missing)}; allowed: --set {given}"
            )

    def config_class(self) -> Any:
        return self.model_class().config_class

    def model_class(self, folder: Path | None = None) -> Any:
        if folder is None:
            from megatron_lengen.convert.modeling_lengen import LengenForCausalLM

            return LengenForCausalLM
        # Under a name of its own, where transformers looks for the source of classes.
        name = f"exported_{self.code.stem}"
        spec = importlib.util.spec_from_file_location(name, folder / self.code.name)
        assert spec is not None and spec.loader is not None
        module = sys.modules[name] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        return module.LengenForCausalLM


def register_lengen() -> None:
    """Let transformers' Auto classes load these models with this package's code."""
    from transformers import AutoConfig, AutoModelForCausalLM

    from megatron_lengen.convert.modeling_lengen import LengenForCausalLM, LengenModelConfig

    AutoConfig.register(Lengen.name, LengenModelConfig, exist_ok=True)
    AutoModelForCausalLM.register(LengenModelConfig, LengenForCausalLM, exist_ok=True)


def is_foreign(raw: dict[str, Any]) -> bool:
    """Whether a `config.json` is that of a scaled model which this package did not write."""
    return bool(raw.get("attention_scaling_enabled")) and raw.get("model_type") != Lengen.name


def _settings_of(scaling: Any) -> dict[str, Any]:
    settings = {name: getattr(scaling, name) for name in SCALING_SETTINGS}
    return {"kind": scaling.kind, "heads": scaling.heads, **settings}


def _nape(slopes: list[float], heads: int) -> dict[str, Any]:
    """Our settings of NAPE for a slope of every head.

    Raises:
        BadInput: for slopes that no rule of ours gives.
    """
    biased = sum(slope != 0 for slope in slopes)
    if len(slopes) == heads:
        for rule in CHOICES["alibi_slopes"]:
            if slopes == alibi_slopes(biased, rule) + [0.0] * (heads - biased):
                return {
                    "position_embedding_type": "nape",
                    "nape_alibi_heads": biased,
                    "alibi_slopes": rule,
                }
    raise BadInput(
        f"attention_alibi_slopes: found {slopes}; allowed: for {heads} heads, the slopes of "
        f"--alibi-slopes {', '.join(CHOICES['alibi_slopes'])}, then zeros"
    )
