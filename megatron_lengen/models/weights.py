"""Initial weights as a function of (seed, global parameter name), on every layout.

A parameter's full tensor is drawn from a generator seeded by its global name, then cut to the
rank's shard, so tensor and pipeline parallelism start from the same model as a single process.
A few threads draw, each a full tensor that is in memory for that time. Distributions are
Megatron's: normal with --init-method-std, divided by sqrt(2 layers) for the projections that feed
the residual stream; gains are 1, biases 0. Mamba2 blocks have rules of their own (mamba_weights).
"""

from __future__ import annotations

import hashlib
import math
import os
from collections import deque
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor

import torch
from megatron.core import parallel_state
from megatron.core.models.common.language_module.language_module import LanguageModule
from torch import Tensor, nn

from megatron_lengen.config import LengenConfig
from megatron_lengen.layers import parts, query_scaling
from megatron_lengen.mamba_config import Part
from megatron_lengen.models import mamba_weights
from megatron_lengen.runtime.cores import available_cores

EMBEDDING = "embedding.word_embeddings.weight"
OUTPUT = "output_layer.weight"
_MOST_THREADS = 4


def global_name(name: str, model: LanguageModule) -> str:
    """A chunk's parameter name with the layer's global number in place of its local one."""
    parts = name.split(".")
    if parts[:2] == ["decoder", "layers"]:
        parts[2] = str(model.decoder.layers[int(parts[2])].layer_number - 1)
    if name == OUTPUT and model.share_embeddings_and_output_weights:
        return EMBEDDING  # the last stage's copy of tied weights
    return ".".join(parts)


@torch.no_grad()
def initialize_weights(model: LanguageModule, config: LengenConfig) -> None:
    """Draw every parameter of a model chunk."""
    named = [(global_name(name, model), parameter) for name, parameter in model.named_parameters()]

    def draw(name: str, parameter: nn.Parameter) -> Tensor:
        if not hasattr(parameter, "parts"):
            full = _draw(name, _full_shape(name, parameter, config), config)
            return cut_to_rank(name, full, parameter, config)
        shape = list(parameter.shape[1:])
        drawn = (_draw(key, [part.rows, *shape], config) for part, key in _parts(name, parameter))
        return _joined(parameter, drawn)

    threads = _threads()
    with ThreadPoolExecutor(threads) as pool:
        # Threads only draw: on a GPU other than the first they would copy from its context.
        drawn = deque(pool.submit(draw, *one) for one in named[:threads])
        for number, (_, parameter) in enumerate(named):
            parameter.copy_(drawn.popleft().result())
            if number + threads < len(named):
                drawn.append(pool.submit(draw, *named[number + threads]))


def _threads() -> int:
    """How many tensors to draw at a time: by this rank's share of the cores, few for memory."""
    share = available_cores() // int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    return max(1, min(_MOST_THREADS, share))


@torch.no_grad()
def fill_weights(
    model: LanguageModule, config: LengenConfig, tensors: Callable[[str], Tensor]
) -> None:
    """Set every parameter of a chunk from full tensors given by global name."""
    for name, parameter in model.named_parameters():
        parameter.copy_(weight_of(global_name(name, model), parameter, config, tensors))


def weight_of(
    name: str, parameter: nn.Parameter, config: LengenConfig, tensors: Callable[[str], Tensor]
) -> Tensor:
    """What this rank's parameter is, from full tensors given by global name."""
    if hasattr(parameter, "parts"):
        return _joined(parameter, (tensors(key) for _, key in _parts(name, parameter)))
    return cut_to_rank(name, tensors(name), parameter, config)


def cut_to_rank(name: str, full: Tensor, parameter: nn.Parameter, config: LengenConfig) -> Tensor:
    """The part of a full tensor that this tensor-parallel rank holds.

    Args:
        full: the whole parameter; gate rows before up rows for a gated fc1; vocabulary tables may
            have any padding.
    """
    if name in (EMBEDDING, OUTPUT):
        full = _pad_rows(full[: config.vocab_size], config.padded_vocab_size)
    dimension = getattr(parameter, "partition_dim", -1)
    ranks = parallel_state.get_tensor_model_parallel_world_size()
    if not getattr(parameter, "tensor_model_parallel", False) or ranks == 1:
        return full
    rank = parallel_state.get_tensor_model_parallel_rank()
    blocks = 2 if _is_gated_fc1(name, config) else 1
    parts = [block.chunk(ranks, dimension)[rank] for block in full.chunk(blocks, dimension)]
    return torch.cat(parts, dimension)


def _parts(name: str, parameter: nn.Parameter) -> list[tuple[Part, str]]:
    """The parts of a fused parameter with their names."""
    return [(part, parts.key_of(name, part)) for part in parameter.parts]  # type: ignore[attr-defined]


def _joined(parameter: nn.Parameter, wholes: Iterable[Tensor]) -> Tensor:
    """A fused parameter of this rank from its whole parts."""
    pairs = zip(parameter.parts, wholes, strict=True)  # type: ignore[attr-defined]
    return torch.cat([parts.cut(part, whole) for part, whole in pairs])


def _is_gated_fc1(name: str, config: LengenConfig) -> bool:
    return config.gated_linear_unit and ".mlp.linear_fc1." in name and "layer_norm" not in name


def _pad_rows(table: Tensor, rows: int) -> Tensor:
    return torch.cat((table, table.new_zeros(rows - table.shape[0], *table.shape[1:])))


def _full_shape(name: str, parameter: nn.Parameter, config: LengenConfig) -> list[int]:
    shape = list(parameter.shape)
    if name in (EMBEDDING, OUTPUT):
        return [config.vocab_size, *shape[1:]]
    if getattr(parameter, "tensor_model_parallel", False):
        ranks = parallel_state.get_tensor_model_parallel_world_size()
        shape[parameter.partition_dim] *= ranks  # type: ignore[attr-defined]
    return shape


def _draw(name: str, shape: list[int], config: LengenConfig) -> Tensor:
    if ".query_scaling." in name:
        value = query_scaling.initial_value(name, config)
        if value is not None:
            return torch.full(shape, value)
    digest = hashlib.sha256(f"{config.seed}:{name}".encode()).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "little") >> 1)
    if config.decoder == "mamba2":
        drawn = mamba_weights.draw(name, shape, generator, config)
        if drawn is not None:
            return drawn
    if name.endswith("bias"):
        return torch.zeros(shape)
    if len(shape) == 1:
        return torch.ones(shape)
    std = config.init_method_std
    if name.endswith(("linear_proj.weight", "linear_fc2.weight")):
        std /= math.sqrt(2.0 * config.num_layers)
    return torch.empty(shape).normal_(0.0, std, generator=generator)
