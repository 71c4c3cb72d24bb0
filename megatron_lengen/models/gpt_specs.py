"""Layer specs of GPT models.

A spec is chosen by two things:

| backend | dropout behind norm | norm slot          | projection behind it              |
|---------|---------------------|--------------------|-----------------------------------|
| torch   | any                 | DropoutRMSNorm     | Megatron's column-parallel        |
| te      | yes                 | TEDropoutRMSNorm   | TE's column-parallel              |
| te      | no                  | inside the linear  | TE's fused norm and linear        |

Layers that --dropout-layers leaves out are layers without dropout. `sharded_state_dict_keys_map`
gives all of them the keys of TE's fused layers, so one checkpoint serves training with dropout,
training without, and evaluation.
"""

from __future__ import annotations

from megatron.core.transformer.attention import SelfAttention, SelfAttentionSubmodules
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.mlp import MLPSubmodules
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import (
    TransformerBlockSubmodules,
    get_num_layers_to_build,
)
from megatron.core.transformer.transformer_layer import (
    TransformerLayer,
    TransformerLayerSubmodules,
    get_transformer_layer_offset,
)

from megatron_lengen.config import LengenConfig
from megatron_lengen.layers.attention import CausalAttention
from megatron_lengen.layers.dropout import ResidualAdd
from megatron_lengen.layers.mlp import FeedForward
from megatron_lengen.layers.projections import MaskedGateUp, MaskedQKV, MaskedRows, MaskedUp
from megatron_lengen.layers.query_scaling import ScaledSelfAttention, scaled_heads
from megatron_lengen.layers.te_attention import TEAttention
from megatron_lengen.models.backends import backend_of, norm_of, uses_te
from megatron_lengen.ops.variants import get_variant

KEYS_OF_FUSED_LAYERS = {
    "input_layernorm.": "self_attention.linear_qkv.layer_norm_",
    "pre_mlp_layernorm.": "mlp.linear_fc1.layer_norm_",
}


def gpt_layer_spec(config: LengenConfig, layer: int) -> ModuleSpec:
    """A decoder layer for `config`'s backend and dropout placement, by zero-based number.

    Raises:
        BadInput: for the `te` backend without Transformer Engine.
    """
    te, backend = uses_te(config), backend_of(config)
    dropped = config.dropout_on and layer in config.dropout_layer_set()
    masked_projections = bool(dropped and config.dropout_letters)
    between = dropped and get_variant(config.dropout_variant).placement == "after_norm"
    scaled = any(scaled_heads(config, layer))
    # Scaling reads what the projections read, which only a norm of its own shows.
    norm_in_linear = te and not between and not scaled
    norm = IdentityOp if norm_in_linear else norm_of(config)
    columns = (
        backend.column_parallel_layer_norm_linear()
        if norm_in_linear
        else backend.column_parallel_linear()
    )
    rows = backend.row_parallel_linear()
    qkv, fc1 = columns, columns
    if masked_projections:
        qkv, rows = MaskedQKV, MaskedRows
        fc1 = MaskedGateUp if config.gated_linear_unit else MaskedUp
    attention = ModuleSpec(
        module=ScaledSelfAttention if scaled else SelfAttention,
        params={"attn_mask_type": AttnMaskType.causal},
        submodules=SelfAttentionSubmodules(
            linear_qkv=qkv,
            core_attention=TEAttention if te else CausalAttention,
            linear_proj=rows,
            q_layernorm=IdentityOp,
            k_layernorm=IdentityOp,
        ),
    )
    return ModuleSpec(
        module=TransformerLayer,
        submodules=TransformerLayerSubmodules(
            input_layernorm=norm,
            self_attention=attention,
            self_attn_bda=ResidualAdd,
            pre_mlp_layernorm=norm,
            mlp=ModuleSpec(
                module=FeedForward, submodules=MLPSubmodules(linear_fc1=fc1, linear_fc2=rows)
            ),
            mlp_bda=ResidualAdd,
            sharded_state_dict_keys_map={} if norm_in_linear else dict(KEYS_OF_FUSED_LAYERS),
        ),
    )


def gpt_block_spec(config: LengenConfig, vp_stage: int | None = None) -> TransformerBlockSubmodules:
    """The layers of this pipeline stage (or virtual chunk) and the final norm."""
    first = get_transformer_layer_offset(config, vp_stage=vp_stage)
    layers = get_num_layers_to_build(config, vp_stage=vp_stage)
    return TransformerBlockSubmodules(
        layer_specs=[gpt_layer_spec(config, first + i) for i in range(layers)],
        layer_norm=norm_of(config),
    )
