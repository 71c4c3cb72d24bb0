"""Cores of a machine, shared out among its processes."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from megatron_lengen.runtime import affinity
from megatron_lengen.runtime.affinity import core_places, shares

# Two sockets of two cores of two threads, numbered as Linux does on most servers.
TWO_SOCKETS = {n: (n // 2 % 2, n % 2) for n in range(8)}


def test_threads_of_a_core_and_cores_of_a_socket_stay_together():
    assert shares(set(range(8)), 2, TWO_SOCKETS) == [{0, 1, 4, 5}, {2, 3, 6, 7}]
    assert shares(set(range(8)), 4, TWO_SOCKETS) == [{0, 4}, {1, 5}, {2, 6}, {3, 7}]


def test_shares_are_equal_and_of_the_cores_that_are_allowed():
    assert shares({0, 1, 2, 4, 6}, 2, TWO_SOCKETS) == [{0, 4}, {1, 2}]
    assert shares({3}, 1, TWO_SOCKETS) == [{3}]


def test_a_system_that_tells_no_topology(monkeypatch, tmp_path):
    monkeypatch.setattr(affinity, "_TOPOLOGY", tmp_path)
    assert core_places({2, 5}) == {2: (0, 2), 5: (0, 5)}


def test_topology_is_read(monkeypatch, tmp_path):
    folder = tmp_path / "cpu3" / "topology"
    folder.mkdir(parents=True)
    (folder / "physical_package_id").write_text("1\n")
    (folder / "core_id").write_text("7\n")
    monkeypatch.setattr(affinity, "_TOPOLOGY", tmp_path)
    assert core_places({3}) == {3: (1, 7)}


WORKER = """
import os, sys
import torch
torch.ones(64, 64) @ torch.ones(64, 64)
if os.environ["RANK"] == sys.argv[1]:
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
from megatron_lengen.runtime import distributed
distributed.start_process_group()
print(sorted(os.sched_getaffinity(0)), flush=True)
distributed.stop()
"""


def cores_of_processes(tmp_path: Path, bound: str = "none", **settings: str) -> list[list[int]]:
    """Where two processes may run, one of them (`bound`) bound by somebody else before."""
    tmp_path.mkdir()
    shared = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "localhost"}
    # A file as the meeting point: no port to fight for.
    code = WORKER.replace(
        "distributed.start_process_group()",
        "import functools, torch.distributed as dist; dist.init_process_group = functools.partial("
        f"dist.init_process_group, init_method='file://{tmp_path}/meet', world_size=2, "
        "rank=int(os.environ['RANK'])); distributed.start_process_group()",
    )
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", code, bound],
            env={**os.environ, **shared, **settings, "RANK": rank, "LOCAL_RANK": rank},
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in ("0", "1")
    ]
    said = [process.communicate(timeout=120)[0] for process in processes]
    assert [process.returncode for process in processes] == [0, 0]
    return [eval(text.strip().splitlines()[-1]) for text in said]


@pytest.mark.skipif(not hasattr(os, "sched_getaffinity"), reason="the system binds no processes")
def test_processes_are_bound_unless_somebody_did_so(tmp_path):
    allowed = sorted(os.sched_getaffinity(0))
    if len(allowed) < 2:
        pytest.skip("one core cannot be shared out")
    first, second = cores_of_processes(tmp_path / "a", OMP_PROC_BIND="")
    assert len(first) == len(second) == len(allowed) // 2 and not set(first) & set(second)
    assert cores_of_processes(tmp_path / "b", LENGEN_BIND_CORES="0") == [allowed, allowed]
    assert cores_of_processes(tmp_path / "c", bound="1") == [allowed, allowed[:1]]
