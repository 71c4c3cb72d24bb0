"""The modules of layer specs, with Transformer Engine and without, and what it can do here."""

from __future__ import annotations

from typing import Any

from megatron.core.models.backends import BackendSpecProvider, LocalSpecProvider

from megatron_lengen.compat import have_transformer_engine
from megatron_lengen.config import LengenConfig
from megatron_lengen.errors import missing_package
from megatron_lengen.layers.linear import ColumnLinear, RowLinear
from megatron_lengen.layers.norm import DropoutRMSNorm
from megatron_lengen.layers.te_norm import te_dropout_norm


class LocalBackend(LocalSpecProvider):
    """Megatron-Core's own modules, with faster products on the CPU."""

    def column_parallel_linear(self) -> type:
        """The column-parallel projection."""
        return ColumnLinear

    def row_parallel_linear(self) -> type:
        """The row-parallel projection."""
        return RowLinear


def uses_te(config: LengenConfig) -> bool:
    """Whether layers are Transformer Engine's."""
    return config.transformer_impl == "transformer_engine"


def backend_of(config: LengenConfig) -> BackendSpecProvider:
    """Megatron-Core's provider of modules for a configuration.

    Raises:
        BadInput: where Transformer Engine is asked for and cannot be imported.
    """
    if not uses_te(config):
        return LocalBackend()
    _require_te()
    from megatron.core.extensions.transformer_engine_spec_provider import TESpecProvider

    return TESpecProvider()


def norm_of(config: LengenConfig) -> Any:
    """The class of a norm that stands alone, with a place for dropout.

    Raises:
        BadInput: where Transformer Engine is asked for and cannot be imported.
    """
    if not uses_te(config):
        return DropoutRMSNorm
    _require_te()
    return te_dropout_norm()


def why_no_fp8(recipe: str) -> str | None:
    """Why this GPU cannot compute in fp8 by a recipe, in Transformer Engine's words; or None."""
    from transformer_engine.pytorch.fp8 import FP8GlobalStateManager

    ask = {
        "blockwise": "is_fp8_block_scaling_available",
        "mxfp8": "is_mxfp8_available",
    }.get(recipe, "is_fp8_available")
    available, reason = getattr(FP8GlobalStateManager, ask)()
    return None if available else reason


def _require_te() -> None:
    if not have_transformer_engine():
        raise missing_package(
            "Transformer Engine",
            "--transformer-impl transformer_engine",
            "--no-build-isolation 'transformer-engine[pytorch]'",
        )
