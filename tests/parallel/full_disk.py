"""Trains on a disk that is too small for two checkpoints: `full_disk.py FOLDER`.

The disk is a tmpfs, mounted in a namespace of its own: run under `unshare -m`, or `unshare -rm` by
anyone but root.
"""

from __future__ import annotations

import os
import resource
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kills import fork, wait
from launcher import rows

from megatron_lengen import checkpoint_folder
from megatron_lengen.training import tensor_writer

SHARDED = "--async-save --tensor-model-parallel-size 2 --sequence-parallel"
RUN = "--train-iters 6 --save-interval 2 --keep-last 1"


def leave_out_the_check() -> None:
    """Somebody else fills the disk between the look at it and the writing."""
    tensor_writer._require_space = lambda folder, needed: None


def limit_rank_1() -> None:
    """A rank of its own may not write as much as it must, from iteration 4 on."""
    write = tensor_writer._write

    def limited(transforms: Any, rank: int, buckets: list[Any], results: Any) -> None:
        before = resource.getrlimit(resource.RLIMIT_FSIZE)
        if rank == 1 and "iter_0000004" in str(buckets[0][0]):
            resource.setrlimit(resource.RLIMIT_FSIZE, (10000, before[1]))
        write(transforms, rank, buckets, results)
        resource.setrlimit(resource.RLIMIT_FSIZE, before)

    tensor_writer._write = limited
    leave_out_the_check()


def nothing() -> None:
    """The run as it is."""


@dataclass(frozen=True)
class Case:
    """A run that fails at its second save.

    Args:
        first: what each rank does before it starts.
        room: size of the disk in kB.
        reason: what the operating system says.
    """

    name: str
    flags: str = ""
    processes: int = 1
    first: Callable[[], None] = nothing
    room: int = 1000
    reason: str = "No space left on device"


CASES = (
    Case("at-once"),
    Case("background", "--async-save"),
    Case("at-once-2", "", 2, leave_out_the_check),
    Case("background-2", "--async-save", 2, leave_out_the_check),
    Case("background-rank-1", SHARDED, 2, limit_rank_1, 4000, "File too large (rank 1; "),
)


def resize(disk: Path, kilobytes: int) -> None:
    """Give the disk so much room."""
    remount = "remount," if os.path.ismount(disk) else ""
    options = f"{remount}size={kilobytes}k"
    subprocess.run(["mount", "-t", "tmpfs", "-o", options, "tmpfs", disk], check=True)


def run(disk: Path, case: Case) -> None:
    """The run stops when it cannot save, loses nothing, and goes on when it can."""
    folder = disk.parent / case.name
    folder.mkdir()
    root, metrics, log = disk / case.name, folder / "metrics.jsonl", folder / "log"
    processes, flags = case.processes, f"{RUN} {case.flags}"
    here = f"{flags} --save {root} --load {root} --metrics-jsonl {metrics}"
    resize(disk, case.room)
    codes = wait(fork(here, processes, log, case.first), 120)
    assert codes == [1] * processes, codes
    text = log.read_text()
    errors = [line for line in text.splitlines() if line.startswith("error: ")]
    assert len(errors) == 1 and "Traceback" not in text, text
    for part in (
        f"error: --save: iteration 4 could not be saved: {case.reason}",
        "kB needed, ",
        f"free in {root}); the newest complete checkpoint: iteration 2",
    ):
        assert part in errors[0], errors[0]
    assert [path.name for path in sorted(root.iterdir())] == [
        "iter_0000002",
        checkpoint_folder.TRACKER,
    ]
    resize(disk, 4000)
    assert wait(fork(here, processes, log), 120) == [0] * processes, log.read_text()
    assert checkpoint_folder.iterations(root) == [6]
    whole = folder / "whole.jsonl"
    unbroken = f"{flags} --save {folder / 'whole'} --metrics-jsonl {whole}"
    assert wait(fork(unbroken, processes, log), 120) == [0] * processes, log.read_text()
    seen, expected = rows(metrics), rows(whole)
    assert [row["iteration"] for row in seen] == [1, 2, 3, 4, 5, 6]
    assert [row["lm_loss"] for row in seen] == [row["lm_loss"] for row in expected]
    shutil.rmtree(root)


def main() -> None:
    """All cases."""
    folder = Path(sys.argv[1])
    disk = folder / "disk"
    disk.mkdir(parents=True)
    for case in CASES:
        run(disk, case)
        print(f"{case.name}: stopped and went on", flush=True)


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    main()
