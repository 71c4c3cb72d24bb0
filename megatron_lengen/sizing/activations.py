"""What layers keep from forward to backward on one rank, computed.

Counted tensor by tensor, as autograd holds them for Megatron-Core's modules with this package's
norm and attention; `tools/benchmark/memory.py --check` compares the sums with runs.

Symbols, all of one rank: e bytes of a number; s tokens of a row (its length over CP); t = s times
the micro-batch; u = t, or t over TP with sequence parallelism; h hidden size; f, q, k, v the widths
of the MLP, of queries and of keys (or values), and the vocabulary, each over TP.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch

from megatron_lengen.config import LengenConfig
from megatron_lengen.errors import require
from megatron_lengen.ops.attention import MIN_BLOCK
from megatron_lengen.ops.attention_choice import Request, available, choose
from megatron_lengen.ops.linear_cross_entropy import ROWS_AT_A_TIME, tokens_of_chunk
from megatron_lengen.ops.products import onednn_is_faster
from megatron_lengen.ops.tiles import QUERY_TILE, TILE_SCORES
from megatron_lengen.ops.variants import get_variant


@dataclass(frozen=True)
class Step:
    """How data parallelism divides a step.

    Args:
        data_parallel_size: replicas, context parallelism not counted.
        micro_batch_size: rows of a micro-batch.
        micro_batches: micro-batches of a step on each replica.
        distributed_optimizer: whether replicas share the optimizer's state.
        zero_stage: DeepSpeed's ZeRO stage instead: 1 shares the optimizer's state, 2 the gradients
            too, 3 the weights too; 0 for Megatron's data parallelism.
        device: `cuda` or `cpu`, which attention's backend depends on.
    """

    data_parallel_size: int
    micro_batch_size: int
    micro_batches: int
    distributed_optimizer: bool = False
    zero_stage: int = 0
    device: str = "cuda"


class Sizes(NamedTuple):
    """Widths and lengths on one rank; the module's symbols."""

    e: int
    s: int
    t: int
    u: int
    h: int
    f: int
    q: int
    k: int
    v: int

    @classmethod
    def of(cls, config: LengenConfig, step: Step | None = None) -> Sizes:
        """The sizes of a configuration's layout; without a step, those of one row."""
        tp = config.tensor_model_parallel_size
        row = config.seq_length // config.context_parallel_size
        tokens = row * (step.micro_batch_size if step else 1)
        assert config.kv_channels and config.ffn_hidden_size and config.num_query_groups
        return cls(
            e=2 if config.bf16 else 4,
            s=row,
            t=tokens,
            u=tokens // tp if config.sequence_parallel else tokens,
            h=config.hidden_size,
            f=config.ffn_hidden_size // tp,
            q=config.num_attention_heads * config.kv_channels // tp,
            k=config.num_query_groups * config.kv_channels // tp,
            v=config.padded_vocab_size // tp,
        )


class Chunk(NamedTuple):
    """Consecutive layers that one rank computes as a unit, with what stands at the model's ends."""

    layers: range
    embeds: bool
    predicts: bool


class LayerMemory(NamedTuple):
    """Bytes of one layer and one micro-batch.

    Args:
        kept: from forward to backward.
        working: the most that lives besides, while the layer's backward runs.
    """

    kept: int
    working: int


def layer_memory(config: LengenConfig, layer: int, step: Step) -> LayerMemory:
    """What a layer holds without full recomputation (whole layers: `chunk_memory`)."""
    z = Sizes.of(config, step)
    norms = _norms(config, z)
    attention = _attention(config, z, layer, step.device)
    mlp = _mlp(config, z)
    selected: Collection[str] = ()
    if config.recompute_granularity == "selective":
        selected = config.recompute_modules or ()
    stream = z.u * z.h * z.e
    output = z.t * z.q * z.e  # the output projection's input
    kept_mlp = 0 if "mlp" in selected else mlp
    core_again = "core_attn" in selected
    kept_attention = attention.given if core_again else attention.shared + attention.made
    kept = norms + kept_attention + output + kept_mlp

    # Backward meets the MLP first, then attention when the MLP's tensors are gone. It holds the
    # gradients of the residual stream, of what is split or multiplied, and one weight's before it
    # joins the fp32 sum; what is recomputed, with its output, comes on top.
    gathered = z.t * z.h * z.e if config.sequence_parallel else 0
    gradients = z.e * max(z.t * z.f + z.h * z.f + gathered // z.e, 2 * z.t * z.f)
    at_mlp = gradients + (mlp + stream if "mlp" in selected else 0)
    at_attention = attention.gradients + (attention.made + output if core_again else 0)
    return LayerMemory(kept, stream + max(at_mlp, at_attention - kept_mlp - norms // 2))


def _norms(config: LengenConfig, z: Sizes) -> int:
    """Both norms keep input, output (the projections' input) and fp32 numbers of each row."""
    numbers = 2 if config.dropout_on else 1
    tensors = 4
    if config.dropout_on and get_variant(config.dropout_variant).placement == "before_residual":
        tensors += 2  # the sublayers' outputs
    return tensors * z.u * z.h * z.e + 2 * numbers * 4 * z.u


def _mlp(config: LengenConfig, z: Sizes) -> int:
    """fc1's output and fc2's input; a gate that is not fused also keeps both of its factors."""
    widths = 2
    if config.gated_linear_unit:
        widths = 5 if config.add_bias_linear else 3
    return widths * z.t * z.f * z.e


class _Attention(NamedTuple):
    """Bytes of core attention, its output [t, q] left out.

    Args:
        given: what projections and rotations hand over.
        shared: what backward needs of that.
        made: what backward needs besides.
        gradients: what backward makes.
    """

    given: int
    shared: int
    made: int
    gradients: int


def _attention(config: LengenConfig, z: Sizes, layer: int, device: str) -> _Attention:
    """Values stay a view of the fused projection's output, which is kept whole for them."""
    kind = config.layer_pattern()[layer]
    grouped = z.q > z.k
    output = z.t * z.q * z.e
    queries = output if kind.rope or grouped else 0
    keys_values = z.e * z.t * (z.q + 2 * z.k + (z.k if kind.rope else 0))
    angles = 0
    if kind.rope:  # cosine and sine, for queries and for keys; fused: of half of the channels
        fused = config.position_embedding_type == "rope"
        angles = z.s * _rotary_width(config) * (8 if fused else 4 * z.e)
    given = queries + keys_values + angles
    heads = z.q // (config.kv_channels or 1)
    sums = 4 * z.t * heads
    cp = config.context_parallel_size
    row = 2 * z.t * cp * z.e  # keys and values of whole rows, a channel
    window = config.sliding_window if kind.windowed else None
    backend = _backend(config, z, layer, device)
    if backend == "blocks":
        # Grouped keys and values are repeated for every query head, which frees what they were.
        shared = queries + angles + (0 if grouped else keys_values)
        if window is not None and window < z.s:
            made = _windowed(z, window, grouped)
            return _Attention(given, shared, made + sums, made)
        return _Attention(given, shared, sums + (2 * output if grouped else 0), 4 * output)
    # Every other backend keeps what it is given and a number or two of each query.
    gathered = row * z.k + output if cp > 1 and backend != "te" else 0
    shared = queries + angles if gathered else given
    scores = 0
    if backend == "tiles":
        at_once = heads if config.attention_function == "softmax" else 1
        scores = min(TILE_SCORES, z.t // z.s * at_once * QUERY_TILE * config.seq_length)
    gradients = 2 * output + 2 * row * z.k + 2 * 4 * scores
    return _Attention(given, shared, 2 * sums + gathered, gradients)


def _backend(config: LengenConfig, z: Sizes, layer: int, device: str) -> str:
    """The attention of a layer, where Triton and flash-attn are there if there is a GPU."""
    assert config.kv_channels
    windowed = config.layer_pattern()[layer].windowed and config.sliding_window is not None
    has = {
        "window": windowed and (config.sliding_window or 0) < config.seq_length,
        "slopes": config.position_embedding_type == "nape",
        "documents": config.document_boundaries == "mask",
        "dropout": layer in config.attention_dropout_layer_set(),
    }
    te = config.transformer_impl == "transformer_engine"
    cp = config.context_parallel_size
    request = Request(
        features=frozenset(name for name, there in has.items() if there),
        alpha=config.entmax_alpha if config.attention_function == "entmax" else 1.0,
        device=device,
        dtype=torch.bfloat16 if config.bf16 else torch.float32,
        queries=config.seq_length if te or cp == 1 else z.s // 2,  # a part of the row at a time
        keys=config.seq_length,
        channels=config.kv_channels,
        te=te,
        context_parallel=cp > 1,
    )
    packages = frozenset({"triton", "flash_attn"}) if device == "cuda" else available(device)
    return choose(request, packages).backend


def _windowed(z: Sizes, window: int, grouped: bool) -> int:
    """Blocks of queries, each with its own and the previous block's keys and values."""
    block = max(window, MIN_BLOCK)
    blocks = -(-z.s // block)
    # Queries without the first block, pairs of keys and of values, outputs; the first block has
    # no predecessor.
    held = (blocks - 1) + 4 * (blocks - 1) + blocks + (2 if grouped else 0)
    masks = 3 * block * block
    return z.e * (held * z.t // z.s * block * z.q + masks)


def _rotary_width(config: LengenConfig) -> int:
    assert config.kv_channels
    return int(config.kv_channels * config.rotary_percent)


def chunk_memory(config: LengenConfig, chunk: Chunk, step: Step) -> LayerMemory:
    """Layers under the configuration's recomputation, embedding, loss."""
    z = Sizes.of(config, step)
    stream = z.u * z.h * z.e
    table = z.v * z.h * z.e  # a gradient of the embedding or the output layer
    tied = chunk.embeds and chunk.predicts and not config.untie_embeddings_and_output_weights
    held = table if tied else 0  # waits for the other gradient of the same weights
    kept = highest = 0
    for unit in _units(config, chunk, step):
        kept += unit.kept
        highest = max(highest, kept + unit.working + held)
    if chunk.predicts:
        loss = _loss_memory(config, z, step.device)
        kept += 2 * stream + 4 * z.u + loss.kept  # final norm
        highest = max(highest, kept + loss.working)
    if chunk.embeds:
        highest = max(highest, held + table + stream)
    if config.pipeline_model_parallel_size > 1:
        output = 0 if chunk.predicts else stream  # stays until its gradient comes
        kept, highest = kept + output, highest + output + stream  # and a message on its way
    return LayerMemory(kept, highest - kept)


def _units(config: LengenConfig, chunk: Chunk, step: Step) -> Iterator[LayerMemory]:
    """The chunk's layers, or groups of layers that are recomputed together, in order."""
    z = Sizes.of(config, step)
    layers = [layer_memory(config, layer, step) for layer in chunk.layers]
    stream = z.u * z.h * z.e
    if config.recompute_granularity == "full":
        number = config.recompute_num_layers or 1
        sizes = [1] * min(number, len(layers))
        if config.recompute_method == "uniform":
            sizes = [min(number, len(layers) - i) for i in range(0, len(layers), number)]
        for size in sizes:
            group, layers = layers[:size], layers[size:]
            again = sum(layer.kept for layer in group)  # their input is kept; their output is new
            yield LayerMemory(stream, again + group[-1].working)
    yield from layers


def _loss_memory(config: LengenConfig, z: Sizes, device: str) -> LayerMemory:
    """Output projection and loss."""
    if config.cross_entropy_fusion_impl != "linear":
        return LayerMemory(4 * z.t * z.v, _working_from_logits(config, z))
    found = fused_loss_memory(z.t, z.h, z.v, min(z.v, config.vocab_size), z.e, device)
    if not config.sequence_parallel:
        return found
    gathered = z.t * z.h * z.e  # the features of all ranks
    return LayerMemory(gathered + found.kept, max(found.working, z.u * z.h * z.e))


def fused_loss_memory(
    tokens: int, hidden: int, rows: int, vocabulary: int, number: int, device: str
) -> LayerMemory:
    """A loss without whole logits: forward leaves both gradients and three numbers a token.

    Args:
        tokens, hidden: of the features.
        rows, vocabulary: of the weights, and those that are no padding.
        number: bytes of one.
        device: `cuda` or `cpu`, which the chunks depend on.
    """
    table = rows * hidden * number
    at_once = tokens_of_chunk(tokens, rows * number, device)
    logits, sums = at_once * vocabulary * number, table
    if device == "cpu" and number == 4 and onednn_is_faster():  # parts of the sum, as they come
        sums += min(vocabulary, ROWS_AT_A_TIME) * hidden * number
    if number == 2 and at_once < tokens:
        sums = 4 * rows * hidden  # copied at the end, when there are no logits
        logits = max(logits, table)
    return LayerMemory(tokens * (hidden * number + 12) + table, logits + sums - table)


def _working_from_logits(config: LengenConfig, z: Sizes) -> int:
    """Besides the fp32 probabilities [t, v]: 16-bit logits, then the output layer's gradients.

    Hiding padded columns copies the logits' gradient once.
    """
    padded = config.padded_vocab_size > config.vocab_size
    logits, table = z.t * z.v * z.e, z.v * z.h * z.e
    if z.e == 2:
        return max(logits, (2 if padded else 1) * logits - 2 * logits + table + z.t * z.h * z.e)
    return max(logits if padded else 0, table + z.t * z.h * z.e)


def check_computable(config: LengenConfig) -> None:
    """Raise BadInput for settings whose memory is not computed here."""
    require(
        not config.dropout_letters,
        "--dropout-apply-to: memory is computed for one mask at each norm only",
    )
    require(
        config.query_scaling == "none",
        f"--query-scaling: found {config.query_scaling}; memory is computed without it",
    )
    known = {"core_attn", "mlp"}
    selected = set(config.recompute_modules or ())
    require(
        config.recompute_granularity != "selective" or selected <= known,
        f"--recompute-modules: found {' '.join(sorted(selected))}; memory is computed for "
        f"{' '.join(sorted(known))}",
    )
