"""What layers keep from forward to backward on one rank, computed.

Counted tensor by tensor, as autograd holds them for Megatron-Core's modules with this package's
norm and attention; `tools/benchmark/memory.py --check` compares the sums with runs.

Symbols, all of one rank: e bytes of a number; s tokens of a row (its length over CP); t = s times
the micro-batch; u = t, or t over TP with sequence parallelism; h hidden size; f, q, k, v the widths
of the MLP, of queries and of keys (or values), and the vocabulary, each over TP.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import NamedTuple

from megatron_lengen.config import LengenConfig
from megatron_lengen.errors import require
from megatron_lengen.ops.attention import MIN_BLOCK, QUERY_CHUNK
from megatron_lengen.ops.tiles import QUERY_TILE, TILE_SCORES
from megatron_lengen.ops.variants import get_variant


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
    def of(cls, config: LengenConfig, micro_batch_size: int) -> Sizes:
        """The sizes of a configuration's layout."""
        tp = config.tensor_model_parallel_size
        row = config.seq_length // config.context_parallel_size
        tokens = row * micro_batch_size
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


def layer_memory(config: LengenConfig, layer: int, micro_batch_size: int) -> LayerMemory:
    """What a layer holds without full recomputation (whole layers: `chunk_memory`)."""
    z = Sizes.of(config, micro_batch_size)
    norms = _norms(config, z)
    attention = _attention(config, z, layer)
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
    """fc1's output and fc2's input; without the fused activation also both factors of the gate."""
    widths = 2
    if config.gated_linear_unit:
        widths = 3 if config.bias_activation_fusion else 5
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


def _attention(config: LengenConfig, z: Sizes, layer: int) -> _Attention:
    """Values stay a view of the fused projection's output, which is kept whole for them.

    Grouped keys and values are repeated for every query head, which frees what they came from.
    """
    kind = config.layer_pattern()[layer]
    grouped = z.q > z.k
    output = z.t * z.q * z.e
    queries = output if kind.rope or grouped else 0
    keys_values = z.e * z.t * (z.q + 2 * z.k + (z.k if kind.rope else 0))
    angles = 4 * z.s * _rotary_width(config) * z.e if kind.rope else 0
    given = queries + keys_values + angles
    sums = 4 * z.t * (z.q // config.kv_channels)
    window = config.sliding_window if kind.windowed else None
    if not _plain(config, layer):
        return _tiled(config, z, given, queries + angles)
    if config.transformer_impl == "transformer_engine":
        return _Attention(given, given, sums, 4 * output)
    if config.context_parallel_size > 1:
        row = 2 * z.t // z.s * config.seq_length * z.e  # keys and values of whole rows, a channel
        seen, masks = _chunked_keys(config, z, window)
        repeated = 2 * z.t // z.s * seen * z.q * z.e if grouped else row * z.k
        made = repeated + masks * z.e + output + sums
        gradients = output + row * (z.q if grouped else z.k)
        return _Attention(given, queries + angles, made, gradients)
    shared = queries + angles + (0 if grouped else keys_values)
    if window is not None and window < z.s:
        made = _windowed(z, window, grouped)
        return _Attention(given, shared, made + sums, made)
    return _Attention(given, shared, sums + (2 * output if grouped else 0), 4 * output)


def _plain(config: LengenConfig, layer: int) -> bool:
    """Whether a layer's attention is softmax over a causal window and nothing else."""
    return (
        config.position_embedding_type != "nape"
        and config.attention_function == "softmax"
        and config.document_boundaries == "ignore"
        and layer not in config.attention_dropout_layer_set()
    )


def _tiled(config: LengenConfig, z: Sizes, given: int, queries: int) -> _Attention:
    """Attention of `ops.tiles`: what it is given and two numbers a query; weights come in tiles."""
    cp = config.context_parallel_size
    heads = z.q // (config.kv_channels or 1)
    row = 2 * z.t * cp * z.k * z.e  # keys and values of whole rows
    at_once = heads if config.attention_function == "softmax" else 1
    scores = min(TILE_SCORES, z.t // z.s * at_once * QUERY_TILE * config.seq_length)
    return _Attention(
        given,
        shared=given if cp == 1 else queries,
        made=8 * z.t * heads + (row if cp > 1 else 0),
        gradients=2 * z.t * z.q * z.e + 2 * row + 2 * 4 * scores,
    )


def _windowed(z: Sizes, window: int, grouped: bool) -> int:
    """Blocks of queries, each with its own and the previous block's keys and values."""
    block = max(window, MIN_BLOCK)
    blocks = -(-z.s // block)
    # Queries without the first block, pairs of keys and of values, outputs; the first block has
    # no predecessor.
    held = (blocks - 1) + 4 * (blocks - 1) + blocks + (2 if grouped else 0)
    masks = 3 * block * block
    return z.e * (held * z.t // z.s * block * z.q + masks)


def _chunked_keys(config: LengenConfig, z: Sizes, window: int | None) -> tuple[int, int]:
    """Keys that groups of queries see, and elements of their masks, summed over the groups.

    For a context-parallel rank from the middle, whose two parts of the row lie side by side.
    """
    part, cp = z.s // 2, config.context_parallel_size
    seen = masks = 0
    for index in (cp - 1, cp):
        for start in range(0, part, QUERY_CHUNK):
            queries = min(QUERY_CHUNK, part - start)
            keys = index * part + start + queries
            if window is not None:
                keys = min(keys, queries + window - 1)
            seen += keys
            masks += queries * keys
    return seen, masks


def _rotary_width(config: LengenConfig) -> int:
    assert config.kv_channels
    return int(config.kv_channels * config.rotary_percent)


def chunk_memory(config: LengenConfig, chunk: Chunk, micro_batch_size: int) -> LayerMemory:
    """Layers under the configuration's recomputation, embedding, loss."""
    z = Sizes.of(config, micro_batch_size)
    stream = z.u * z.h * z.e
    table = z.v * z.h * z.e  # a gradient of the embedding or the output layer
    tied = chunk.embeds and chunk.predicts and not config.untie_embeddings_and_output_weights
    held = table if tied else 0  # waits for the other gradient of the same weights
    kept = highest = 0
    for unit in _units(config, chunk, micro_batch_size):
        kept += unit.kept
        highest = max(highest, kept + unit.working + held)
    if chunk.predicts:
        kept += 2 * stream + 4 * z.u + 4 * z.t * z.v  # final norm, probabilities
        highest = max(highest, kept + _loss_working(config, z, table))
    if chunk.embeds:
        highest = max(highest, held + table + stream)
    if config.pipeline_model_parallel_size > 1:
        message = stream if chunk.predicts else 2 * stream  # the output, until its gradient comes
        kept, highest = kept + message - stream, highest + message
    return LayerMemory(kept, highest - kept)


def _units(config: LengenConfig, chunk: Chunk, micro_batch_size: int) -> Iterator[LayerMemory]:
    """The chunk's layers, or groups of layers that are recomputed together, in order."""
    z = Sizes.of(config, micro_batch_size)
    layers = [layer_memory(config, layer, micro_batch_size) for layer in chunk.layers]
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


def _loss_working(config: LengenConfig, z: Sizes, table: int) -> int:
    """Besides the fp32 probabilities [t, v]: 16-bit logits, then the output layer's gradients.

    Hiding padded columns copies the logits' gradient once.
    """
    padded = config.padded_vocab_size > config.vocab_size
    logits = z.t * z.v * z.e
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
