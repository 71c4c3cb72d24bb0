"""Memory of a training step on one rank, computed: weights, gradients, optimizer, activations."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

from megatron.core.pipeline_parallel.schedules import get_schedule_table
from megatron.core.transformer.transformer_block import get_num_layers_to_build
from megatron.core.transformer.transformer_layer import get_transformer_layer_offset

from megatron_lengen.config import LengenConfig
from megatron_lengen.sizing.activations import Chunk, Sizes, Step, check_computable, chunk_memory


@dataclass(frozen=True)
class StageMemory:
    """Bytes of a rank of one pipeline stage at the step's highest point.

    Args:
        parameters: number of parameters that the rank computes with.
        weights, gradients, optimizer: what stays between steps.
        buffer: Megatron's buffer for gathered inputs (sequence parallelism), never given back.
        activations: tensors that forward keeps for backward, of all micro-batches in flight.
        working: tensors that live for a moment of backward.
    """

    parameters: int
    weights: int
    gradients: int
    optimizer: int
    buffer: int
    activations: int
    working: int

    @property
    def state(self) -> int:
        """Bytes that stay between steps."""
        return self.weights + self.gradients + self.optimizer + self.buffer

    @property
    def total(self) -> int:
        """Bytes at the highest point."""
        return self.state + self.activations + self.working


def chunks_of_stage(config: LengenConfig, stage: int) -> list[Chunk]:
    """The chunks of a pipeline stage: one, or one for each virtual stage."""
    stages = config.pipeline_model_parallel_size
    virtual = config.virtual_pipeline_model_parallel_size
    chunks = []
    for index in [None] if virtual is None else list(range(virtual)):
        first = get_transformer_layer_offset(config, index, stage)
        count = get_num_layers_to_build(config, index, stage)
        embeds = stage == 0 and index in (None, 0)
        predicts = stage == stages - 1 and index in (None, (virtual or 1) - 1)
        chunks.append(Chunk(range(first, first + count), embeds, predicts))
    return chunks


# ---- what stays between steps --------------------------------------------------------------------


def layer_parameters(config: LengenConfig) -> int:
    """Parameters of one layer on one tensor-parallel rank."""
    z = Sizes.of(config)
    fc1 = (2 if config.gated_linear_unit else 1) * z.f
    qkv = z.q + 2 * z.k
    weights = z.h * (qkv + z.q + fc1 + z.f) + 2 * z.h
    if config.add_bias_linear:
        weights += fc1 + 2 * z.h
    if config.add_bias_linear or config.add_qkv_bias:
        weights += qkv
    return weights


def chunk_parameters(config: LengenConfig, chunk: Chunk) -> int:
    """Parameters of a chunk on one tensor-parallel rank; tied weights that meet count once."""
    z = Sizes.of(config)
    count = len(chunk.layers) * layer_parameters(config)
    if chunk.embeds:
        count += z.v * z.h
    if chunk.predicts:
        tied_here = chunk.embeds and not config.untie_embeddings_and_output_weights
        count += z.h + (0 if tied_here else z.v * z.h)
    return count


def state_bytes(parameters: int, bf16: bool, replicas: int, step: Step) -> tuple[int, int, int]:
    """Weights, gradients and optimizer state of `parameters` in bytes.

    Gradients add up in fp32. Adam keeps two fp32 moments, and fp32 master weights where the
    weights are bf16; sharing divides what is shared by the replicas.
    """
    weights = parameters * (2 if bf16 else 4)
    gradients = 4 * parameters
    optimizer = (12 if bf16 else 8) * parameters
    if step.distributed_optimizer or step.zero_stage >= 1:
        optimizer = -(-optimizer // replicas)
    if step.zero_stage >= 2:
        gradients = -(-gradients // replicas)
    if step.zero_stage >= 3:
        weights = -(-weights // replicas)
    return weights, gradients, optimizer


# ---- the whole rank ------------------------------------------------------------------------------


def stage_memory(config: LengenConfig, step: Step, stage: int) -> StageMemory:
    """What a rank of pipeline stage `stage` holds at the highest point of a step.

    Raises:
        BadInput: for settings whose memory is not computed here.
    """
    check_computable(config)
    chunks = chunks_of_stage(config, stage)
    parameters = sum(chunk_parameters(config, chunk) for chunk in chunks)
    replicas = step.data_parallel_size * config.context_parallel_size
    weights, gradients, optimizer = state_bytes(parameters, config.bf16, replicas, step)
    memory = [chunk_memory(config, chunk, step) for chunk in chunks]
    highest = (0, 0)
    for alive, current in backward_moments(config, stage, step.micro_batches):
        kept = sum(count * memory[index].kept for index, count in alive.items())
        highest = max(highest, (kept, memory[current].working), key=sum)
    z = Sizes.of(config, step)
    buffer = z.t * z.h * z.e if config.sequence_parallel else 0
    return StageMemory(parameters, weights, gradients, optimizer, buffer, *highest)


def step_memory(config: LengenConfig, step: Step) -> list[StageMemory]:
    """`stage_memory` of every pipeline stage."""
    return [
        stage_memory(config, step, stage) for stage in range(config.pipeline_model_parallel_size)
    ]


def backward_moments(
    config: LengenConfig, stage: int, micro_batches: int
) -> Iterator[tuple[Counter[int], int]]:
    """Before each backward of a step: micro-batches alive in each chunk, and the chunk whose turn
    it is. The order is Megatron's: some forwards first, then one forward and one backward in turn.
    """
    stages = config.pipeline_model_parallel_size
    chunks = config.virtual_pipeline_model_parallel_size or 1
    count = min(micro_batches, 4 * stages)  # later ones repeat the pattern
    order = [chunk for _, chunk in get_schedule_table(count, chunks, stages)]
    ahead = stages - stage - 1
    if chunks > 1:
        ahead = 2 * ahead + (chunks - 1) * stages
    alive: Counter[int] = Counter(order[:ahead])
    forwards = iter(order[ahead:])
    for chunk in order:
        following = next(forwards, None)
        if following is not None:
            alive[following] += 1
        current = chunks - 1 - chunk
        yield Counter(alive), current
        alive[current] -= 1
