"""RMSNorm for a spec's norm slots, with the dropout family between it and the projection."""

from __future__ import annotations

import torch
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor, nn

from megatron_lengen.layers.dropout import DropoutSite
from megatron_lengen.ops.rmsnorm import Dropout, add_rms_norm_dropout, rms_norm_dropout


class NormWithSite:
    """What the norms of both backends have in common: a place of the dropout family.

    A spec's slot gives only sizes; `site` is set after the model is built (models.sites) and stays
    None where no dropout acts.
    """

    site: DropoutSite | None = None
    training: bool
    weight: nn.Parameter
    eps: float
    _ready: tuple[Tensor, Tensor] | None = None

    def dropout_of(self, x: Tensor) -> Dropout | None:
        """What acts on the norm of x [s, b, h] now: None in evaluation and without a site."""
        return self.site.for_tensor(x) if self.training and self.site is not None else None

    def sum_with(self, x: Tensor, residual: Tensor) -> Tensor:
        """residual + x of [s, b, h], normalized in the same pass.

        The norm of the sum waits for the call with just this sum, which comes next. Both are calls
        of the module: others hang on to them to have its weight there (ZeRO 3, the overlapped
        gathering of weights).
        """
        return self(x, residual)  # type: ignore[operator]

    def _sum(self, x: Tensor, residual: Tensor) -> Tensor:
        z, total = add_rms_norm_dropout(x, residual, self.weight, self.eps, self.dropout_of(x))
        self._ready = (total, z)
        return total

    def take_ready(self, x: Tensor) -> Tensor | None:
        """The norm of x, if it was made with the sum that x is."""
        ready, self._ready = self._ready, None
        return ready[1] if ready is not None and ready[0] is x else None


class DropoutRMSNorm(NormWithSite, nn.Module):
    """RMSNorm whose output passes through affine dropout while training (Eq. 7, Eq. 12).

    Evaluation sees the plain norm. `layers.te_norm` is the same over Transformer Engine's norm.
    `eps` is the configuration's unless given: Mamba's layer names none before Megatron-Core 0.19.
    """

    def __init__(
        self, config: TransformerConfig, hidden_size: int, eps: float | None = None
    ) -> None:
        super().__init__()
        self.eps = config.layernorm_epsilon if eps is None else eps
        self.weight = nn.Parameter(torch.ones(hidden_size, dtype=config.params_dtype))
        # Under SP every rank sees other tokens: Megatron sums such gradients over TP.
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]

    def forward(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        """[s, b, h] -> [s, b, h]; with a residual see `sum_with`."""
        if residual is not None:
            return self._sum(x, residual)
        ready = self.take_ready(x)
        if ready is not None:
            return ready
        return rms_norm_dropout(x, self.weight, self.eps, self.dropout_of(x))

    def extra_repr(self) -> str:
        """Width and epsilon, for printing."""
        return f"{self.weight.shape[0]}, eps={self.eps}"
