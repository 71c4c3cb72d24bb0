"""Transformer Engine's RMSNorm for a spec's norm slots, with the dropout family on top.

Where no dropout acts (evaluation, generation, layers without dropout) the forward is Transformer
Engine's own, kernel and all. Where dropout acts, norm and mask are one step of this package on the
same weight and epsilon (`ops.rmsnorm`): Transformer Engine has no place for a mask between its norm
and what follows.
"""

from __future__ import annotations

import functools
from typing import Any

from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor, nn

from megatron_lengen.layers.norm import NormWithSite
from megatron_lengen.ops.rmsnorm import rms_norm_dropout


@functools.cache
def te_dropout_norm() -> Any:
    """The class of norms over Transformer Engine's, which must be importable.

    Made when it is first asked for: its base exists only where Transformer Engine does.
    """
    from megatron.core.extensions.transformer_engine import _get_extra_te_kwargs
    from transformer_engine.pytorch import RMSNorm

    class TEDropoutRMSNorm(NormWithSite, RMSNorm):
        """As `layers.norm.DropoutRMSNorm`, built with the settings of Megatron-Core's TENorm."""

        # A norm alone quantizes nothing, so it has no state beside its weight: the keys of
        # checkpoints are those of every other spec.
        get_extra_state = nn.Module.get_extra_state
        set_extra_state = nn.Module.set_extra_state

        def __init__(
            self, config: TransformerConfig, hidden_size: int, eps: float | None = None
        ) -> None:
            super().__init__(
                hidden_size,
                eps=config.layernorm_epsilon if eps is None else eps,
                sequence_parallel=config.sequence_parallel,
                zero_centered_gamma=False,  # gains are stored as they multiply
                **_get_extra_te_kwargs(config),
            )

        def forward(
            self, x: Tensor, residual: Tensor | None = None, *args: Any, **kwargs: Any
        ) -> Tensor:
            """[s, b, h] -> [s, b, h]; with a residual see `sum_with`."""
            if residual is not None:
                return self._sum(x, residual)
            ready = self.take_ready(x)
            if ready is not None:
                return ready
            dropout = self.dropout_of(x)
            if dropout is None:
                return super().forward(x, *args, **kwargs)
            return rms_norm_dropout(x, self.weight, self.eps, dropout)

    return TEDropoutRMSNorm
