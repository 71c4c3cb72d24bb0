"""Layer specs of Mamba2 models, and the stack that Megatron-Core's MambaModel runs them in.

| backend | dropout behind norm | norm slot         | projections of the mixer             |
|---------|---------------------|-------------------|--------------------------------------|
| torch   | any                 | DropoutRMSNorm    | Megatron's column- and row-parallel  |
| te      | yes                 | TEDropoutRMSNorm  | TE's column- and row-parallel        |
| te      | no                  | inside the linear | TE's fused norm and linear, TE's row |

Where ranks share one group's B and C, the first projection is SharedGroupProjection, which is
Megatron's column-parallel, with a norm in front. Checkpoints have the keys of Megatron-Core's own
specs, whose norm is fused into the projection.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from megatron.core.dist_checkpointing.mapping import ShardedStateDict
from megatron.core.dist_checkpointing.utils import replace_prefix_for_sharding
from megatron.core.models.mamba.mamba_model import MambaModel
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.ssm.mamba_layer import MambaLayer, MambaLayerSubmodules
from megatron.core.tensor_parallel import checkpoint
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.spec_utils import ModuleSpec, build_module
from megatron.core.transformer.transformer_block import get_num_layers_to_build
from megatron.core.transformer.transformer_layer import get_transformer_layer_offset
from megatron.core.transformer.utils import sharded_state_dict_default
from megatron.core.utils import WrappedTensor, make_viewless_tensor
from torch import Tensor, nn

from megatron_lengen.config import LengenConfig
from megatron_lengen.layers.dropout import ResidualAdd
from megatron_lengen.layers.mamba_mixer import (
    Mamba2Mixer,
    MixerSubmodules,
    SharedGroupProjection,
)
from megatron_lengen.layers.projections import MaskedRows
from megatron_lengen.mamba_config import groups_are_shared
from megatron_lengen.models.backends import backend_of, norm_of, uses_te
from megatron_lengen.models.losses import WeightedLosses
from megatron_lengen.ops.variants import get_variant

KEYS_OF_FUSED_LAYERS = {"norm.": "mixer.in_proj.layer_norm_"}


def mamba_layer_spec(config: LengenConfig) -> ModuleSpec:
    """A block: norm, mixer, residual addition.

    Raises:
        BadInput: for the `te` backend without Transformer Engine.
    """
    backend = backend_of(config)
    between = config.dropout_on and get_variant(config.dropout_variant).placement == "after_norm"
    norm_in_linear = uses_te(config) and not between and not groups_are_shared(config)
    columns, rows = backend.column_parallel_linear(), backend.row_parallel_linear()
    if groups_are_shared(config):
        columns = SharedGroupProjection
    elif norm_in_linear:
        columns = backend.column_parallel_layer_norm_linear()
    if config.dropout_on and "o" in config.dropout_letters:
        rows = MaskedRows
    return ModuleSpec(
        module=MambaLayer,
        submodules=MambaLayerSubmodules(
            norm=IdentityOp if norm_in_linear else norm_of(config),
            mixer=ModuleSpec(
                module=Mamba2Mixer, submodules=MixerSubmodules(in_proj=columns, out_proj=rows)
            ),
            mamba_bda=ResidualAdd,
            sharded_state_dict_keys_map={} if norm_in_linear else dict(KEYS_OF_FUSED_LAYERS),
        ),
    )


def mamba_stack_spec(config: LengenConfig, vp_stage: int | None = None) -> ModuleSpec:
    """The blocks of this pipeline stage (or virtual chunk) and the final norm."""
    return ModuleSpec(
        module=MambaDecoder, params={"vp_stage": vp_stage}, submodules=mamba_layer_spec(config)
    )


class Mamba2Model(WeightedLosses, MambaModel):
    """Megatron-Core's MambaModel with this package's losses, told which virtual stage it is."""

    def __init__(self, mamba_stack_spec: ModuleSpec, **common: Any) -> None:
        # Megatron-Core's own argument for it is younger than 0.16; its initializer needs it.
        self._stage = mamba_stack_spec.params["vp_stage"]
        super().__init__(mamba_stack_spec=mamba_stack_spec, **common)

    def setup_embeddings_and_output_layer(self) -> None:
        """Marks and ties the embedding tables of the first and last stage."""
        self.vp_stage = self._stage
        super().setup_embeddings_and_output_layer()


class MambaDecoder(MegatronModule):
    """The blocks of a pipeline stage or virtual chunk.

    Takes the place of Megatron-Core's MambaStack, which has neither recomputation nor interleaved
    pipelines and asks Transformer Engine for its final norm.
    """

    def __init__(
        self,
        config: LengenConfig,
        submodules: ModuleSpec,
        pre_process: bool = True,
        post_process: bool = True,
        pg_collection: ProcessGroupCollection | None = None,
        vp_stage: int | None = None,
        **_: Any,  # settings of hybrid stacks, which MambaModel passes on
    ) -> None:
        super().__init__(config)
        assert pg_collection is not None
        self.pre_process, self._tp_group = pre_process, pg_collection.tp
        self.input_tensor: Tensor | None = None
        first = get_transformer_layer_offset(config, vp_stage=vp_stage)
        self.layers = nn.ModuleList(
            build_module(
                submodules,
                config=config,
                layer_number=first + i + 1,
                pp_layer_offset=first,
                pg_collection=pg_collection,
            )
            for i in range(get_num_layers_to_build(config, vp_stage=vp_stage))
        )
        self.final_norm = None
        if post_process:
            self.final_norm = norm_of(config)(config, config.hidden_size, config.layernorm_epsilon)

    def set_input_tensor(self, input_tensor: Tensor) -> None:
        """What the previous stage sent; the schedules call this before `forward`."""
        self.input_tensor = input_tensor

    def forward(
        self,
        hidden_states: Tensor | WrappedTensor | None,
        attention_mask: Tensor | None = None,
        inference_context: Any = None,
        **_: Any,  # what attention layers of a hybrid model would read
    ) -> Tensor:
        """[s, b, h] -> [s, b, h]; a part of s on each rank under sequence parallelism."""
        if not self.pre_process:
            hidden_states = self.input_tensor
        if isinstance(hidden_states, WrappedTensor):
            hidden_states = hidden_states.unwrap()
        assert hidden_states is not None
        if self.config.recompute_granularity == "full" and self.training:
            hidden_states = self._recomputed(hidden_states)
        else:
            for layer in self.layers:
                hidden_states = layer(hidden_states, inference_context=inference_context)
        if self.final_norm is not None:
            hidden_states = self.final_norm(hidden_states)
        return make_viewless_tensor(hidden_states, hidden_states.requires_grad, keep_graph=True)

    def _recomputed(self, hidden_states: Tensor) -> Tensor:
        """Full recomputation: `uniform` in runs of layers, `block` of the first layers."""
        at_once = self.config.recompute_num_layers
        layers = list(self.layers)
        kept: list[nn.Module] = []
        if self.config.recompute_method == "block":
            layers, kept, at_once = layers[:at_once], layers[at_once:], 1
        for start in range(0, len(layers), at_once):
            hidden_states = checkpoint(
                _in_order(layers[start : start + at_once]),
                self.config.distribute_saved_activations,
                hidden_states,
            )
        for layer in kept:
            hidden_states = layer(hidden_states)
        return hidden_states

    def sharded_state_dict(
        self,
        prefix: str = "",
        sharded_offsets: tuple = (),
        metadata: dict[str, Any] | None = None,
    ) -> ShardedStateDict:
        """Every layer under its global number, whatever the pipeline."""
        state: ShardedStateDict = {}
        for index, layer in enumerate(self.layers):
            here = f"{prefix}layers.{index}."
            everywhere = f"{prefix}layers.{layer.layer_number - 1}."  # type: ignore[operator]
            own = layer.sharded_state_dict(here, (), metadata)  # type: ignore[operator]
            replace_prefix_for_sharding(own, here, everywhere)
            state.update(own)
        if self.final_norm is not None:
            state.update(
                sharded_state_dict_default(
                    self.final_norm,
                    f"{prefix}final_norm.",
                    sharded_offsets,
                    metadata,
                    tp_group=self._tp_group,
                )
            )
        return state


def _in_order(layers: list[nn.Module]) -> Callable[[Tensor], Tensor]:
    def run(hidden_states: Tensor) -> Tensor:
        for layer in layers:
            hidden_states = layer(hidden_states)
        return hidden_states

    return run
