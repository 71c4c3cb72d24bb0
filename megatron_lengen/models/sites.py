"""Tells every norm, projection and residual addition which dropout site it is.

A spec's slots receive only sizes, so layer numbers and sites are set here, after the build: the
one place that knows which modules of which layers draw masks.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from megatron.core.models.common.language_module.language_module import LanguageModule
from torch import nn

from megatron_lengen.config import LengenConfig
from megatron_lengen.layers.dropout import DropoutSite, ResidualAdd, Site
from megatron_lengen.layers.mamba_mixer import Mamba2Mixer
from megatron_lengen.layers.norm import NormWithSite
from megatron_lengen.layers.projections import MaskedRows
from megatron_lengen.ops.variants import get_variant


def assign_sites(model: LanguageModule, config: LengenConfig) -> dict[str, DropoutSite]:
    """Set the dropout sites of a model chunk; returns them by global module name."""
    mamba = config.decoder == "mamba2"
    assigned = {} if mamba else _assign_to_attention(model, config)
    if not config.dropout_on:
        return assigned
    layers = config.dropout_layer_set()
    for layer in model.decoder.layers:
        number = layer.layer_number - 1
        if number not in layers:
            continue
        places = _sites_of_block(layer, config) if mamba else _sites_of_layer(layer, config)
        for name, module, site, part in places:
            full_name = f"decoder.layers.{number}.{name}"
            if not _skipped(full_name, config):
                assigned[full_name] = _set(module, part, _site(config, number, site, module))
    final_name = "final_norm" if mamba else "final_layernorm"
    final = getattr(model.decoder, final_name)
    if config.dropout_keep_final_norm and isinstance(final, NormWithSite):
        name = f"decoder.{final_name}"
        if not _skipped(name, config):
            assigned[name] = _set(
                final, None, _site(config, config.num_layers, Site.FINAL_NORM, final)
            )
    return assigned


def _assign_to_attention(model: LanguageModule, config: LengenConfig) -> dict[str, DropoutSite]:
    """Dropout of attention weights (`--attention-dropout`)."""
    assigned: dict[str, DropoutSite] = {}
    layers = config.attention_dropout_layer_set()
    for layer in model.decoder.layers:
        number = layer.layer_number - 1
        if number in layers:
            module = layer.self_attention.core_attention
            site = _site(config, number, Site.ATTENTION_WEIGHTS, module)
            name = f"decoder.layers.{number}.self_attention.core_attention"
            assigned[name] = _set(module, None, replace(site, rate=config.attention_dropout))
    return assigned


def _sites_of_layer(
    layer: Any, config: LengenConfig
) -> Iterator[tuple[str, nn.Module, Site, str | None]]:
    """(name in the layer, module, site, part of a fused projection) of every active place."""
    if get_variant(config.dropout_variant).placement == "before_residual":
        yield "self_attn_bda", layer.self_attn_bda, Site.ATTENTION_OUTPUT, None
        yield "mlp_bda", layer.mlp_bda, Site.MLP_OUTPUT, None
    elif not config.dropout_letters:
        yield "input_layernorm", layer.input_layernorm, Site.ATTENTION_NORM, None
        yield "pre_mlp_layernorm", layer.pre_mlp_layernorm, Site.MLP_NORM, None
    else:
        homes = {
            **dict.fromkeys("qkv", ("self_attention.linear_qkv", layer.self_attention.linear_qkv)),
            "o": ("self_attention.linear_proj", layer.self_attention.linear_proj),
            **dict.fromkeys("gu", ("mlp.linear_fc1", layer.mlp.linear_fc1)),
            "d": ("mlp.linear_fc2", layer.mlp.linear_fc2),
        }
        for letter in config.dropout_letters:
            name, module = homes[letter]
            part = None if isinstance(module, MaskedRows) else letter
            yield f"{name}.{letter}", module, Site[letter.upper()], part


def _sites_of_block(
    layer: Any, config: LengenConfig
) -> Iterator[tuple[str, nn.Module, Site, str | None]]:
    """The same of a Mamba2 block."""
    mixer = layer.mixer
    if get_variant(config.dropout_variant).placement == "before_residual":
        yield "mamba_bda", layer.mamba_bda, Site.MIXER_OUTPUT, None
        return
    if not config.dropout_letters:
        yield "norm", layer.norm, Site.MIXER_NORM, None
    if "i" in config.dropout_letters:
        yield "mixer.in_proj.i", mixer, Site.I, None
    if "o" in config.dropout_letters:
        yield "mixer.out_proj.o", mixer.out_proj, Site.O, None
    if config.include_mixer_norms:
        yield "mixer.norm", mixer.norm, Site.GATED_NORM, None


def _site(config: LengenConfig, layer: int, site: Site, module: object) -> DropoutSite:
    at_sequence_shard = isinstance(module, NormWithSite | ResidualAdd | Mamba2Mixer)
    return DropoutSite(
        variant=config.dropout_variant,
        rate=config.dropout_rate,
        detach_alpha=config.dropout_detach_alpha,
        detach_beta=config.dropout_detach_beta,
        seed=config.seed,
        layer=layer,
        site=site,
        sequence_sharded=config.sequence_parallel and at_sequence_shard,
    )


def _set(module: Any, part: str | None, site: DropoutSite) -> DropoutSite:
    if part is None:
        module.site = site
    else:
        module.sites[part] = site
    return site


def _skipped(name: str, config: LengenConfig) -> bool:
    patterns = (config.dropout_skip_modules or "").split(",")
    return any(fnmatch.fnmatchcase(name, pattern.strip()) for pattern in patterns)
