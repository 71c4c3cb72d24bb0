"""Which rows of the run the micro-batch at hand holds.

The sample numbers sit as a named tensor among the states of Megatron's RNG tracker. Megatron's
activation recomputation saves and restores those states around the recomputed forward, so a
recomputed layer finds the numbers of its own micro-batch, even when other micro-batches have run
in between (1F1B).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from megatron.core import parallel_state
from megatron.core.tensor_parallel.random import get_cuda_rng_tracker
from torch import Tensor

from megatron_lengen.layers.context_parallel import positions_of_rank
from megatron_lengen.runtime import host

_STATE = "lengen-samples"


def set_samples(samples: Tensor | Sequence[int]) -> None:
    """Announce the rows of the next forward.

    Args:
        samples: [b], number of each row in training order over the whole run.
    """
    tracker = get_cuda_rng_tracker()
    states = tracker.get_states()
    states[_STATE] = torch.as_tensor(samples, dtype=torch.int64, device=host.device())
    tracker.set_states(states)


def current_samples() -> Tensor:
    """[b] int64, as announced by `set_samples` for this forward.

    Raises:
        RuntimeError: if no rows were announced.
    """
    samples = get_cuda_rng_tracker().get_states().get(_STATE)
    if samples is None:
        raise RuntimeError(
            "dropout needs the sample numbers of the batch: call "
            "megatron_lengen.layers.coordinates.set_samples(samples) before the forward"
        )
    return samples


def local_positions(length: int, sequence_sharded: bool) -> Tensor:
    """[length] int64, positions in the row of a rank's tokens.

    Args:
        length: tokens on this rank.
        sequence_sharded: whether tensor-parallel ranks hold consecutive parts (SP) of what
            context parallelism left of the row.
    """
    if not sequence_sharded or parallel_state.get_tensor_model_parallel_world_size() == 1:
        return positions_of_rank(length)
    ranks = parallel_state.get_tensor_model_parallel_world_size()
    part = parallel_state.get_tensor_model_parallel_rank()
    return positions_of_rank(length * ranks)[part * length : (part + 1) * length]
