"""The feed-forward of a layer, its gate in one pass over memory."""

from __future__ import annotations

from typing import Any

import torch.nn.functional as F
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.mlp import MLP, MLPSubmodules
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from megatron_lengen.ops.swiglu import swiglu


class FeedForward(MLP):
    """Megatron's MLP; a SwiGLU without bias goes through `ops.swiglu`.

    Layers of Megatron-Core 0.19 and later pass their process groups and what they are for.
    """

    def __init__(
        self,
        config: TransformerConfig,
        submodules: MLPSubmodules,
        *,
        pg_collection: ProcessGroupCollection | None = None,
        is_mtp_layer: bool = False,
        **others: Any,
    ) -> None:
        if pg_collection is not None:
            others["tp_group"] = pg_collection.tp
        super().__init__(config, submodules, **others)

    def forward(
        self, hidden_states: Tensor, per_token_scale: Tensor | None = None, **kwargs: Any
    ) -> tuple[Tensor, Tensor | None]:
        """[s, b, h] -> [s, b, h] (a part of s under SP) and the bias to add later."""
        config = self.config
        gated = config.gated_linear_unit and config.activation_func is F.silu
        if not gated or config.add_bias_linear or per_token_scale is not None:
            return super().forward(hidden_states, per_token_scale, **kwargs)
        gate_and_up, _ = self.linear_fc1(hidden_states)
        return self.linear_fc2(swiglu(gate_and_up))
