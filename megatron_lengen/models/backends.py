"""Transformer Engine's modules for layer specs."""

from __future__ import annotations

from megatron.core.models.backends import BackendSpecProvider

from megatron_lengen.compat import have_transformer_engine
from megatron_lengen.errors import missing_package


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
