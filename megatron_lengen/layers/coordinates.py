"""Which rows of the run the micro-batch at hand holds, and where their documents end.

Sample numbers and documents sit as named tensors among the states of Megatron's RNG tracker.
Megatron's activation recomputation saves and restores those states around the recomputed forward,
so a recomputed layer finds the numbers of its own micro-batch, even when other micro-batches have
run in between (1F1B).
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from megatron.core import parallel_state
from megatron.core.tensor_parallel.random import get_cuda_rng_tracker
from torch import Tensor

from megatron_lengen.layers.context_parallel import positions_of_rank, tokens_of_rank
from megatron_lengen.runtime import host

_SAMPLES, _DOCUMENTS, _FIRST = "lengen-samples", "lengen-documents", "lengen-first-position"


def set_samples(samples: Tensor | Sequence[int]) -> None:
    """Announce the rows of the next forward.

    Args:
        samples: [b], number of each row in training order over the whole run.
    """
    _set(_SAMPLES, torch.as_tensor(samples, dtype=torch.int64, device=host.device()))


def set_documents(documents: Tensor | None) -> None:
    """Announce where documents end in the rows of the next forward.

    Args:
        documents: [b, s] int64, number of each token's document in its row, never falling, over
            the whole row also under context and sequence parallelism; in cached decoding over all
            keys so far. None: no boundaries.
    """
    _set(_DOCUMENTS, documents)


def set_first_position(first: int) -> None:
    """Announce how many tokens of the rows came before the next forward (cached decoding)."""
    _set(_FIRST, torch.tensor(first) if first else None)


def current_documents() -> Tensor | None:
    """[b, s] int64, as announced by `set_documents`, or None."""
    return get_cuda_rng_tracker().get_states().get(_DOCUMENTS)


def current_samples() -> Tensor:
    """[b] int64, as announced by `set_samples` for this forward.

    Raises:
        RuntimeError: if no rows were announced.
    """
    samples = get_cuda_rng_tracker().get_states().get(_SAMPLES)
    if samples is None:
        raise RuntimeError(
            "dropout needs the sample numbers of the batch: call "
            "megatron_lengen.layers.coordinates.set_samples(samples) before the forward"
        )
    return samples


def local_positions(length: int, sequence_sharded: bool) -> Tensor:
    """[length] int64 on the device, positions in the row of a rank's tokens; not to be changed.

    Args:
        length: tokens on this rank.
        sequence_sharded: whether tensor-parallel ranks hold consecutive parts (SP) of what
            context parallelism left of the row.
    """
    parts, part = 1, 0
    if sequence_sharded:
        parts = parallel_state.get_tensor_model_parallel_world_size()
        part = parallel_state.get_tensor_model_parallel_rank()
    ranks = parallel_state.get_context_parallel_world_size()
    rank = parallel_state.get_context_parallel_rank() if ranks > 1 else 0
    return _positions(length, parts, part, (ranks, rank), host.device())


@functools.lru_cache(maxsize=32)
def _positions(
    length: int, parts: int, part: int, context: tuple[int, int], device: torch.device
) -> Tensor:
    """Part `part` of this rank's positions; kept, so that no mask waits for a copy to the device.

    `context` (ranks, rank) is what `positions_of_rank` depends on.
    """
    return positions_of_rank(length * parts)[part * length :][:length].to(device)


def query_positions(length: int) -> Tensor:
    """Positions of a rank's queries, 0 at the start of each document: [length, b or 1] int64.

    Args:
        length: tokens on this rank, before sequence parallelism divides them. With documents and
            without context parallelism, the last `length` tokens of the row.
    """
    documents = current_documents()
    if documents is None:
        first = get_cuda_rng_tracker().get_states().get(_FIRST)
        positions = local_positions(length, sequence_sharded=False)[:, None]
        return positions if first is None else positions + first
    positions = torch.arange(documents.shape[1], device=documents.device)
    begins = F.pad(documents[:, 1:] != documents[:, :-1], (1, 0), value=True)
    starts = torch.where(begins, positions, 0).cummax(dim=1).values
    return tokens_of_rank(positions - starts)[:, -length:].T


def _set(name: str, value: Tensor | None) -> None:
    tracker = get_cuda_rng_tracker()
    states = tracker.get_states()
    states.pop(name, None)
    if value is not None:
        states[name] = value
    tracker.set_states(states)
