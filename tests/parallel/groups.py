"""Leaves the process groups of one layout, so that a worker can train in the next."""

from __future__ import annotations

import gc

import torch.distributed as dist
from megatron.core import parallel_state


def leave_layout() -> None:
    """Destroy all groups but the first: each holds threads, which add up over many layouts."""
    dist.barrier()
    gc.collect()  # what refers to a group keeps its threads
    parallel_state.destroy_model_parallel()
    everyone = dist.group.WORLD
    for group in list(dist.distributed_c10d._world.pg_map):
        if group is not everyone:
            dist.destroy_process_group(group)
