"""PyTorch's compiler, a layer at a time (`--torch-compile`)."""

from __future__ import annotations

import contextlib

import torch
from torch import nn

from megatron_lengen.training.arguments import Settings


def compile_layers(settings: Settings, chunks: list[nn.Module]) -> None:
    """Let every layer of the model be compiled when it is first called, if that was asked for.

    Args:
        chunks: this rank's model chunks, before they are wrapped.
    """
    if not settings.training.torch_compile:
        return
    from torch import _dynamo

    layers = [layer for chunk in chunks for layer in chunk.decoder.layers]  # type: ignore[union-attr]
    # The compiler counts its versions of a function, and layers, whose numbers differ, share it.
    for name in ("recompile_limit", "accumulated_recompile_limit"):
        limit = getattr(_dynamo.config, name)
        setattr(_dynamo.config, name, max(limit, 8 * len(layers)))
    for layer in layers:
        layer.compile()


def uncompiled(settings: Settings) -> contextlib.AbstractContextManager[object]:
    """Where no layer is compiled: generation, whose every length would be a version of its own."""
    if not settings.training.torch_compile:
        return contextlib.nullcontext()
    return torch.compiler.set_stance("force_eager")
