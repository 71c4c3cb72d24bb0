"""What a training step sends on one rank, and the pipeline's idle share, computed.

Bytes sent, counted as in a ring: an all-gather or a reduce-scatter of a whole tensor among n ranks
sends (n - 1) / n of it, an all-reduce twice that. `tools/benchmark/memory.py --check` compares them
with runs. Symbols are those of `sizing.activations`.
"""

from __future__ import annotations

from typing import NamedTuple

from megatron_lengen.config import LengenConfig
from megatron_lengen.sizing.activations import Chunk, Sizes, Step
from megatron_lengen.sizing.memory import chunk_parameters, chunks_of_stage


class Traffic(NamedTuple):
    """Bytes that a rank sends in a step, by what they serve.

    Args:
        tensor: activations and their gradients among the ranks that share layers (with SP or not).
        context: keys, values and their gradients among the ranks that share rows.
        pipeline: activations and their gradients to the neighbouring stages.
        data: gradients and weights among replicas.
        embedding: gradients of tied weights between the first and the last stage.
    """

    tensor: int
    context: int
    pipeline: int
    data: int
    embedding: int


def stage_traffic(config: LengenConfig, step: Step, stage: int) -> Traffic:
    """Bytes that a rank of pipeline stage `stage` sends in a step."""
    z = Sizes.of(config, step)
    chunks = chunks_of_stage(config, stage)
    count = step.micro_batches
    tensor = count * sum(_tensor_messages(config, z, chunk) for chunk in chunks)
    stages, cp = config.pipeline_model_parallel_size, config.context_parallel_size
    if config.sequence_parallel:  # gradients of the norms' gains, once a step
        norms = sum(2 * len(chunk.layers) + chunk.predicts for chunk in chunks)
        tensor += round(2 * ring(config.tensor_model_parallel_size) * 4 * norms * z.h)
    # Keys and values forward, their gradients back, and again where attention is recomputed.
    times = 3 if repeats(config, "core_attn") else 2
    layers = sum(len(chunk.layers) for chunk in chunks)
    context = times * count * layers * (cp - 1) * 2 * z.t * z.k * z.e
    borders = sum((not chunk.embeds) + (not chunk.predicts) for chunk in chunks)
    pipeline = count * borders * z.u * z.h * z.e if stages > 1 else 0
    parameters = sum(chunk_parameters(config, chunk) for chunk in chunks)
    ends = sum(chunk.embeds or chunk.predicts for chunk in chunks)
    tied = stages > 1 and not config.untie_embeddings_and_output_weights
    return Traffic(
        tensor=tensor,
        context=context,
        pipeline=pipeline,
        data=data_traffic(parameters, config.bf16, step.data_parallel_size * cp, step),
        embedding=round(2 * ring(2) * 4 * z.v * z.h) * ends if tied else 0,
    )


def ring(ranks: int) -> float:
    """Share of a whole tensor that one rank sends in an all-gather or a reduce-scatter."""
    return (ranks - 1) / ranks


def bubble(config: LengenConfig, step: Step) -> float:
    """Share of a step in which a stage waits: the pipeline fills and empties once.

    With P stages, v chunks each and m micro-batches, (P - 1) / (v m + P - 1).
    """
    idle = config.pipeline_model_parallel_size - 1
    chunks = config.virtual_pipeline_model_parallel_size or 1
    return idle / (chunks * step.micro_batches + idle)


def data_traffic(parameters: int, bf16: bool, replicas: int, step: Step) -> int:
    """Gradients summed in fp32 once a step; shared states also gather the new weights.

    ZeRO's stages 2 and 3 sum the gradients of every micro-batch, stages 1 and 2 whole buckets of
    them on every rank; stage 3 gathers the weights for every forward and backward instead of once.
    """
    weights, gradients = (2 if bf16 else 4) * parameters, 4 * parameters
    if step.zero_stage == 3:
        sent = step.micro_batches * (gradients + 2 * weights)
    elif step.zero_stage:
        sums = step.micro_batches if step.zero_stage == 2 else 1
        sent = sums * 2 * gradients + weights
    elif step.distributed_optimizer:
        sent = gradients + weights
    else:
        sent = 2 * gradients
    return round(ring(replicas) * sent)


def _tensor_messages(config: LengenConfig, z: Sizes, chunk: Chunk) -> int:
    """Bytes of one micro-batch through a chunk."""
    tp = config.tensor_model_parallel_size
    if config.sequence_parallel:
        # Forward gathers before and scatters after each sublayer; backward does the reverse and
        # gathers the input again for the weights' gradients, which a fused loss has by then.
        output = 2 if config.cross_entropy_fusion_impl == "linear" else 3
        forward, backward, embedding, share = 4, 6, 2, ring(tp)
        again = 4 if repeats(config, "all") else 2 if repeats(config, "mlp") else 0
    else:
        forward, backward, embedding, output, share = 2, 2, 1, 1, 2 * ring(tp)
        again = 2 if repeats(config, "all") else 1 if repeats(config, "mlp") else 0
    whole = len(chunk.layers) * (forward + backward + again)
    whole += chunk.embeds * embedding + chunk.predicts * output
    sent = whole * share * z.t * z.h * z.e
    if chunk.predicts:  # maximum, sum and target of each row of logits: gathered, or summed
        gathers = config.cross_entropy_fusion_impl == "linear"
        sent += 3 * (tp if gathers else 2) * ring(tp) * 4 * z.t
    return round(sent)


def repeats(config: LengenConfig, part: str) -> bool:
    """Whether backward runs `core_attn`, `mlp` or `all` of a layer's forward again."""
    if config.recompute_granularity == "full":
        return True
    return config.recompute_granularity == "selective" and part in (config.recompute_modules or ())
