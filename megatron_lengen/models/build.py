"""Building models: chunks of a pipeline for training, a whole model for inference."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.inference.contexts.static_context import StaticInferenceContext
from megatron.core.models.common.language_module.language_module import LanguageModule
from megatron.core.models.gpt import GPTModel
from torch import Tensor, nn

from megatron_lengen.config import LengenConfig
from megatron_lengen.layers.linear import ColumnLinear
from megatron_lengen.layers.norm import DropoutRMSNorm, NormWithSite
from megatron_lengen.layers.rotary import fuse_rotation, scale_frequencies
from megatron_lengen.models import gpt_specs, mamba_specs
from megatron_lengen.models.by_layer import load_by_layer, without_weights
from megatron_lengen.models.gpt_specs import gpt_block_spec
from megatron_lengen.models.mamba_specs import Mamba2Model, mamba_stack_spec
from megatron_lengen.models.sites import assign_sites
from megatron_lengen.models.weights import (
    fill_weights,
    global_name,
    initialize_weights,
    weight_of,
)
from megatron_lengen.runtime import distributed, host


def build_chunks(config: LengenConfig) -> list[LanguageModule]:
    """This rank's model chunks (one, or one per virtual stage), with initial weights."""
    virtual = config.virtual_pipeline_model_parallel_size
    stages: list[int | None] = [None] if virtual is None else list(range(virtual))
    chunks = [build_chunk(config, vp_stage=stage) for stage in stages]
    for chunk in chunks:
        initialize_weights(chunk, config)
    return chunks


def build_chunk(config: LengenConfig, vp_stage: int | None = None) -> LanguageModule:
    """One chunk of the decoder, its weights not yet set."""
    first = parallel_state.is_pipeline_first_stage(ignore_virtual=False, vp_stage=vp_stage)
    last = parallel_state.is_pipeline_last_stage(ignore_virtual=False, vp_stage=vp_stage)
    common = {
        "config": config,
        "vocab_size": config.padded_vocab_size,
        "max_sequence_length": config.max_position_embeddings,
        "pre_process": first,
        "post_process": last,
        "parallel_output": True,
        "share_embeddings_and_output_weights": not config.untie_embeddings_and_output_weights,
    }
    if config.decoder == "mamba2":
        model = Mamba2Model(mamba_stack_spec=mamba_stack_spec(config, vp_stage), **common)
    else:
        model = _gpt_model(config, vp_stage, common)
    assign_sites(model, config)
    if config.decoder == "transformer":
        _fuse_residual_additions(model, config)
    if last:
        # Megatron-Core's models build this one by themselves; it differs in its arithmetic only.
        model.output_layer.__class__ = ColumnLinear
        _hide_padded_vocabulary(model, config)
    return model


def _gpt_model(config: LengenConfig, vp_stage: int | None, common: dict[str, Any]) -> GPTModel:
    model = GPTModel(
        transformer_layer_spec=gpt_block_spec(config, vp_stage),
        # NAPE is a bias of the core attention; nothing is added to embeddings or rotated.
        position_embedding_type=(
            "none" if config.position_embedding_type == "nape" else config.position_embedding_type
        ),
        rotary_percent=config.rotary_percent,
        rotary_base=config.rotary_base,
        vp_stage=vp_stage,
        **common,
    )
    if config.position_embedding_type == "rope":
        fuse_rotation(config)
        scale_frequencies(model.rotary_pos_emb, config)
    return model


def _fuse_residual_additions(model: GPTModel, config: LengenConfig) -> None:
    """Let the norm in front of each MLP be computed with the sum that it reads, while training."""
    if "layernorm" in (config.recompute_modules or ()):
        return  # what is computed again starts from the sum
    for layer in model.decoder.layers:
        norm = layer.pre_mlp_layernorm
        # Without dropout, Transformer Engine's norm is its own kernel.
        ours = isinstance(norm, DropoutRMSNorm)
        if ours or (isinstance(norm, NormWithSite) and norm.site is not None):
            layer.self_attn_bda.sums = norm.sum_with


def _hide_padded_vocabulary(model: LanguageModule, config: LengenConfig) -> None:
    """Give padded rows of the vocabulary no probability.

    Padding depends on the layout (a multiple of the tensor-parallel size); the loss must not.
    """
    rows = config.padded_vocab_size // config.tensor_model_parallel_size
    first = rows * parallel_state.get_tensor_model_parallel_rank()
    real = max(0, min(rows, config.vocab_size - first))
    if real == rows:
        return

    def hide(module: nn.Module, inputs: tuple, output: tuple[Tensor, Tensor | None]) -> None:
        output[0][..., real:] = torch.finfo(output[0].dtype).min

    model.output_layer.register_forward_hook(hide)


class InferenceModel(nn.Module):
    """A whole model, or this rank's part of a tensor-parallel one: tokens in, logits out.

    Without gradients; not in inference mode, whose tensors a model in training could not use.
    """

    def __init__(self, model: nn.Module, config: LengenConfig) -> None:
        super().__init__()
        self.model, self.config = model, config

    @torch.no_grad()
    def forward(self, tokens: Tensor) -> Tensor:
        """[b, s] token ids -> [b, s, vocab_size] fp32 logits."""
        positions = torch.arange(tokens.shape[1], device=tokens.device).expand_as(tokens)
        logits = self.model(tokens, positions, None, runtime_gather_output=True)
        return logits[..., : self.config.vocab_size].float()

    @torch.no_grad()
    def last_logits(self, tokens: Tensor, cache: StaticInferenceContext) -> Tensor:
        """[b, s] token ids that follow those in the cache -> [b, vocab_size] fp32 logits of the
        last; the cache gets what they leave behind, its offset stays."""
        return self.cached_logits(tokens, cache, last_only=True)[:, -1]

    @torch.no_grad()
    def cached_logits(
        self, tokens: Tensor, cache: StaticInferenceContext, last_only: bool = False
    ) -> Tensor:
        """The same of every token, [b, s, vocab_size], or [b, 1, vocab_size] with `last_only`."""
        first = cache.sequence_len_offset
        positions = torch.arange(first, first + tokens.shape[1], device=tokens.device)
        cache.materialize_only_last_token_logits = last_only
        logits = self.model(
            tokens,
            positions.expand_as(tokens),
            None,
            inference_context=cache,
            runtime_gather_output=True,
        )
        return logits[..., : self.config.vocab_size].float()


def build_for_inference(
    config: LengenConfig, tensors: Callable[[str], Tensor], by_layer: bool = False
) -> InferenceModel:
    """A model in evaluation mode with given weights; starts a single process group if there is
    none.

    Args:
        config: tensor and pipeline sizes must be 1.
        tensors: the full tensor for a checkpoint key.
        by_layer: load a layer's weights whenever it computes, and drop them behind it.
    """
    if not parallel_state.model_parallel_is_initialized():
        distributed.start(config)
    elif dist.get_world_size() > 1:
        raise RuntimeError("build_for_inference works in a single process")
    mamba = config.decoder == "mamba2"
    keys = mamba_specs.KEYS_OF_FUSED_LAYERS if mamba else gpt_specs.KEYS_OF_FUSED_LAYERS

    def by_name(name: str) -> Tensor:
        prefix, dot, rest = name.partition(".layers.")
        layer, _, inside = rest.partition(".")
        for ours, stored in keys.items():
            if inside.startswith(ours):
                inside = stored + inside.removeprefix(ours)
        return tensors(f"{prefix}{dot}{layer}.{inside}" if dot else name)

    if not by_layer:
        model = build_chunk(config)
        fill_weights(model, config, by_name)
        return InferenceModel(model.to(host.device()).eval(), config)
    with without_weights():
        model = build_chunk(config)

    def value(name: str, parameter: nn.Parameter) -> Tensor:
        full = weight_of(global_name(name, model), parameter, config, by_name)
        return full.to(host.device(), torch.float32)

    load_by_layer(model, model.decoder.layers, value)
    return InferenceModel(model.eval(), config)
