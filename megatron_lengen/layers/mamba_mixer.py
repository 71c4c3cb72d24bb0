"""The Mamba2 mixer: two projections around a causal convolution, a state space and a gated norm.

Dao & Gu (2024, arXiv 2405.21060), with the released models' choices: z, x, B, C and dt from one
projection, the gate before the norm. Names of parameters and keys of checkpoints are those of
Megatron-Core's MambaMixer.

Tensor parallelism divides the heads. Groups that share B and C are divided too; a single group's B
and C are computed on every rank, by parameters of their own (`shared_*`) whose gradients add up.

Shapes: s tokens, b rows, h hidden; on a rank d channels, H heads of P, G groups, N state channels.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from megatron.core.dist_checkpointing.mapping import ShardedStateDict
from megatron.core.inference.contexts import BaseInferenceContext
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel import copy_to_tensor_model_parallel_region
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.spec_utils import ModuleSpec, build_module
from torch import Tensor, nn

from megatron_lengen.config import LengenConfig
from megatron_lengen.layers.coordinates import current_documents
from megatron_lengen.layers.dropout import DropoutSite
from megatron_lengen.layers.gated_norm import GatedRMSNorm
from megatron_lengen.layers.linear import ColumnLinear
from megatron_lengen.layers.parts import (
    divided,
    local_rows,
    owned,
    parameter_of,
    replicated,
    sharded_parameters,
)
from megatron_lengen.mamba_config import (
    convolved_parts,
    inner_size,
    local_groups,
    projected_parts,
)
from megatron_lengen.ops.causal_conv import causal_conv1d, conv_step
from megatron_lengen.ops.rmsnorm import affine_dropout
from megatron_lengen.ops.ssd import ssd_scan, ssd_step


@dataclass
class MixerSubmodules:
    """The projections of a mixer."""

    in_proj: ModuleSpec | type
    out_proj: ModuleSpec | type


class Carried(NamedTuple):
    """What a row's next tokens go on from."""

    window: Tensor
    """[b, channels, taps - 1]: the last inputs of the convolution."""
    state: Tensor
    """[b, H, P, N] fp32."""


class Mamba2Mixer(MegatronModule):
    """[s, b, h] -> [s, b, h]; a part of s on each rank under sequence parallelism.

    `site` masks the input projection's input (`--dropout-apply-to i`); None without. `name` is what
    Megatron-Core calls the module from 0.19 on; nothing here goes by it.
    """

    def __init__(
        self,
        config: LengenConfig,
        submodules: MixerSubmodules,
        d_model: int,
        layer_number: int,
        pg_collection: ProcessGroupCollection,
        pp_layer_offset: int = 0,
        name: str | None = None,
    ) -> None:
        super().__init__(config)
        self.layer_number = layer_number
        self.site: DropoutSite | None = None
        tp = config.tensor_model_parallel_size
        self.head_dim, self.state = config.mamba_head_dim, config.mamba_state_dim
        self.heads = config.mamba_num_heads // tp
        self.groups = local_groups(config)
        self.inner = self.heads * self.head_dim
        projected = projected_parts(config)
        self.in_proj = build_module(
            submodules.in_proj,
            d_model,
            tp * sum(local_rows(part) for part in projected),
            config=config,
            init_method=config.init_method,
            gather_output=False,
            bias=False,
            skip_bias_add=False,
            is_expert=False,
            tp_comm_buffer_name="fc1",
            tp_group=pg_collection.tp,
        )
        if not replicated(projected):
            self.in_proj.weight.parts = projected
        self.conv1d = Convolution(config)
        self.dt_bias = self._of_heads()
        self.A_log = self._of_heads()
        self.D = self._of_heads()
        self.norm = GatedRMSNorm(config)
        self.out_proj = build_module(
            submodules.out_proj,
            inner_size(config),
            d_model,
            config=config,
            init_method=config.output_layer_init_method,
            bias=False,
            input_is_parallel=True,
            skip_bias_add=True,
            is_expert=False,
            tp_comm_buffer_name="fc2",
            tp_group=pg_collection.tp,
        )

    def forward(
        self,
        hidden_states: Tensor,
        inference_context: BaseInferenceContext | None = None,
        *,
        inference_params: BaseInferenceContext | None = None,
        packed_seq_params: PackedSeqParams | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        """Output and bias (None) for the residual addition.

        Args:
            hidden_states: normalized, [s, b, h].
            inference_context: where the state of what came before is kept, if anywhere.
        """
        if self.training and self.site is not None:
            dropout = self.site.for_tensor(hidden_states)
            hidden_states = affine_dropout(hidden_states, dropout)
        projected, _ = self.in_proj(hidden_states)
        z, xbc, dt = projected.split([self.inner, self.conv1d.channels, self.heads], dim=-1)
        xbc, dt = xbc.transpose(0, 1), dt.transpose(0, 1)
        if inference_context is None:
            y, _ = self._scan(xbc, dt, current_documents(), None)
        else:
            carried = inference_context.key_value_memory_dict
            before = carried.get(self.layer_number)
            documents, before = _documents_of_piece(xbc.shape[1], before)
            if before is not None and xbc.shape[1] == 1:
                y, after = self._step(xbc, dt, before)
            else:
                y, after = self._scan(xbc, dt, documents, before)
            carried[self.layer_number] = after
        return self.out_proj(self.norm(y.flatten(2).transpose(0, 1), z))

    def _scan(
        self, xbc: Tensor, dt: Tensor, documents: Tensor | None, before: Carried | None
    ) -> tuple[Tensor, Carried]:
        """Convolution and state space: [b, s, ...] -> [b, s, H, P], and what is carried on."""
        weight, bias = self.conv1d.weights()
        window, state = before or (None, None)
        xbc, window = causal_conv1d(
            xbc, weight, bias, seq_idx=documents, initial_state=window, return_final_state=True
        )
        x, b, c = self._heads_of(xbc)
        y, state = ssd_scan(
            x,
            self._time_steps(dt),
            self._decay(),
            b,
            c,
            chunk_size=self.config.mamba_chunk_size,
            D=self.D,
            seq_idx=documents,
            initial_states=state,
            return_final_states=True,
        )
        return y, Carried(window, state)

    def _step(self, xbc: Tensor, dt: Tensor, before: Carried) -> tuple[Tensor, Carried]:
        """The same of one more token: [b, 1, ...] -> [b, 1, H, P]."""
        xbc, window = conv_step(xbc[:, 0], before.window, *self.conv1d.weights())
        x, b, c = self._heads_of(xbc)
        y, state = ssd_step(
            x, self._time_steps(dt[:, 0]), self._decay(), b, c, before.state, D=self.D
        )
        return y[:, None], Carried(window, state)

    def _time_steps(self, dt: Tensor) -> Tensor:
        return F.softplus(dt.float() + self.dt_bias)

    def _decay(self) -> Tensor:
        return -torch.exp(self.A_log.float())

    def _heads_of(self, xbc: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """[..., d + 2 G N] -> x [..., H, P], B and C [..., G, N]."""
        shared = self.groups * self.state
        x, b, c = xbc.split([self.inner, shared, shared], dim=-1)
        return (
            x.unflatten(-1, (self.heads, self.head_dim)),
            b.unflatten(-1, (self.groups, self.state)),
            c.unflatten(-1, (self.groups, self.state)),
        )

    def _of_heads(self) -> nn.Parameter:
        """A number of each head, fp32 in every precision."""
        parameter = nn.Parameter(torch.zeros(self.heads, dtype=torch.float32))
        parameter.keep_in_fp32 = True  # type: ignore[attr-defined]
        return divided(parameter)

    def sharded_state_dict(
        self,
        prefix: str = "",
        sharded_offsets: tuple = (),
        metadata: dict[str, Any] | None = None,
    ) -> ShardedStateDict:
        """Keys of Megatron-Core's MambaMixer: z, x, B, C and dt apart."""
        return sharded_parameters(self, prefix, sharded_offsets)


class Convolution(nn.Module):
    """Weights of the depthwise convolution over this rank's x, B and C."""

    def __init__(self, config: LengenConfig) -> None:
        super().__init__()
        parts, taps = convolved_parts(config), config.mamba_conv_kernel
        self.channels = sum(local_rows(part) for part in parts)
        dtype = config.params_dtype
        own, shared = owned(parts), replicated(parts)
        self.weight = parameter_of(own, (1, taps), dtype)
        self.bias = parameter_of(own, (), dtype)
        if shared:
            self.shared_weight = parameter_of(shared, (1, taps), dtype)
            self.shared_bias = parameter_of(shared, (), dtype)

    def weights(self) -> tuple[Tensor, Tensor]:
        """[channels, taps] and [channels], in the order x, B, C."""
        if not hasattr(self, "shared_weight"):
            return self.weight[:, 0], self.bias
        shared = (
            copy_to_tensor_model_parallel_region(parameter)
            for parameter in (self.shared_weight, self.shared_bias)
        )
        weight, bias = map(torch.cat, zip((self.weight, self.bias), shared, strict=True))
        return weight[:, 0], bias


class SharedGroupProjection(ColumnLinear):
    """The input projection where every rank computes all of B and C.

    Their rows are `shared_weight`, a parameter that is the same on all ranks: each rank's gradient
    is that of its own heads, and backward adds them up.
    """

    def __init__(self, input_size: int, output_size: int, **kwargs: Any) -> None:
        super().__init__(input_size, output_size, skip_weight_param_allocation=True, **kwargs)
        parts = projected_parts(self.config)
        self._before = sum(local_rows(part) for part in parts[: parts.index(replicated(parts)[0])])
        dtype = self.config.params_dtype
        self.weight = parameter_of(owned(parts), (input_size,), dtype)
        self.shared_weight = parameter_of(replicated(parts), (input_size,), dtype)

    def forward(
        self,
        input_: Tensor,
        weight: Tensor | None = None,
        runtime_gather_output: bool | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        """[s, b, h] -> [s, b, rows of this rank] in the order z, x, B, C, dt."""
        shared = copy_to_tensor_model_parallel_region(self.shared_weight)
        before, after = self.weight.tensor_split((self._before,))
        return super().forward(input_, torch.cat((before, shared, after)), runtime_gather_output)


def _documents_of_piece(
    length: int, before: Carried | None
) -> tuple[Tensor | None, Carried | None]:
    """Documents [b, s] of the last tokens, and what they go on from.

    Where a piece begins with a document of its own, nothing is carried into it.
    """
    documents = current_documents()
    if documents is None:
        return None, before
    piece = documents[:, -length:]
    if before is not None and documents.shape[1] > length:
        goes_on = documents[:, -length - 1] == piece[:, 0]
        window = before.window * goes_on[:, None, None]
        before = Carried(window, before.state * goes_on[:, None, None, None])
    return piece, before
