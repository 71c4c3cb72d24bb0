"""The modules that layer specs take from Transformer Engine, or do without it."""

from __future__ import annotations

from megatron.core.models.backends import BackendSpecProvider, LocalSpecProvider

from megatron_lengen.compat import have_transformer_engine
from megatron_lengen.errors import missing_package
from megatron_lengen.layers.linear import ColumnLinear, RowLinear


class LocalBackend(LocalSpecProvider):
    """Megatron-Core's own modules, with faster products on the CPU."""

    def column_parallel_linear(self) -> type:
        """The column-parallel projection."""
        return ColumnLinear

    def row_parallel_linear(self) -> type:
        """The row-parallel projection."""
        return RowLinear


def te_backend() -> BackendSpecProvider:
    """Megatron-Core's provider of Transformer Engine's modules.

    Raises:
        BadInput: where Transformer Engine cannot be imported.
    """
    if not have_transformer_engine():
        raise missing_package(
            "Transformer Engine",
            "--transformer-impl transformer_engine",
            "--no-build-isolation 'transformer-engine[pytorch]'",
        )
    from megatron.core.extensions.transformer_engine_spec_provider import TESpecProvider

    return TESpecProvider()
