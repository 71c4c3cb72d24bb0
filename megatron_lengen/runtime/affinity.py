"""Cores of a machine without GPUs, shared out among its processes.

Ranks that compute on the CPU and wander between cores lose their caches, and on machines with
several sockets their memory. Each gets cores of its own that lie together, unless somebody else
has bound the processes already (a scheduler, an OpenMP setting), or there are fewer cores than
processes. LENGEN_BIND_CORES=0 leaves them free.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

import torch.distributed as dist

_BOUND_BY_OPENMP = ("OMP_PROC_BIND", "OMP_PLACES", "GOMP_CPU_AFFINITY", "KMP_AFFINITY")
_TOPOLOGY = Path("/sys/devices/system/cpu")


def share_cores() -> None:
    """Bind this process to its share; called by all processes, once their group exists."""
    rank = int(os.environ.get("LOCAL_RANK", "0"))
    ranks = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    if dist.get_world_size() == 1 or not hasattr(os, "sched_setaffinity"):
        return
    cores = os.sched_getaffinity(0)
    # Processes of one machine have the same first rank there; bound ones have unlike cores.
    own = (dist.get_rank() - rank, frozenset(cores))
    seen = [own] * dist.get_world_size()
    dist.all_gather_object(seen, own)
    alike = all(other[1] == own[1] for other in seen if other[0] == own[0])
    if alike and 1 < ranks <= len(cores) and _wanted(os.environ):
        bind(shares(cores, ranks, core_places(cores))[rank])


def shares(cores: set[int], ranks: int, places: Mapping[int, tuple[int, int]]) -> list[set[int]]:
    """Equal shares of the cores for each of the ranks; what is left over stays idle.

    Args:
        cores: numbers of processors, as the system counts them.
        places: socket and core of each; threads of one core have the same, and stay together.
    """
    ordered = sorted(cores, key=lambda core: (*places[core], core))
    size = len(ordered) // ranks
    return [set(ordered[rank * size : (rank + 1) * size]) for rank in range(ranks)]


def core_places(cores: set[int]) -> dict[int, tuple[int, int]]:
    """Socket and core of each processor, by the system's account; (0, its number) without one."""
    places = {}
    for core in cores:
        try:
            topology = _TOPOLOGY / f"cpu{core}" / "topology"
            socket, inside = (
                int((topology / name).read_text()) for name in ("physical_package_id", "core_id")
            )
            places[core] = (socket, inside)
        except (OSError, ValueError):
            places[core] = (0, core)
    return places


def bind(cores: set[int]) -> None:
    """Let the threads of this process, also those it has already, run on these cores alone."""
    for thread in os.listdir("/proc/self/task"):
        try:
            os.sched_setaffinity(int(thread), cores)
        except (OSError, ValueError):
            continue  # it has ended, or is not ours to bind


def _wanted(environment: Mapping[str, str]) -> bool:
    off = environment.get("LENGEN_BIND_CORES") == "0"
    return not off and not any(environment.get(name) for name in _BOUND_BY_OPENMP)
