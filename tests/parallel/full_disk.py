"""Trains on a disk that is too small for two checkpoints: `full_disk.py FOLDER`.

The disk is a tmpfs, mounted in a namespace of its own: run under `unshare -m`, or `unshare -rm` by
anyone but root.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

from kills import fork, wait
from launcher import rows

from megatron_lengen import checkpoint_folder
from megatron_lengen.training import tensor_writer

RUN = "--train-iters 6 --save-interval 2 --keep-last 1"
# (name, flags, processes, whether the check of the room is left out, so that writing itself fails)
CASES = (
    ("at-once", "", 1, False),
    ("background", "--async-save", 1, False),
    ("at-once-2", "", 2, True),
    ("background-2", "--async-save", 2, True),
)


def resize(disk: Path, kilobytes: int) -> None:
    """Give the disk so much room."""
    remount = "remount," if os.path.ismount(disk) else ""
    options = f"{remount}size={kilobytes}k"
    subprocess.run(["mount", "-t", "tmpfs", "-o", options, "tmpfs", disk], check=True)


def leave_out_the_check() -> None:
    """Somebody else fills the disk between the look at it and the writing."""
    tensor_writer._require_space = lambda folder, needed: None


def case(disk: Path, name: str, flags: str, processes: int, blind: bool) -> None:
    """The run stops when the disk is full, loses nothing, and goes on when there is room."""
    folder = disk.parent / name
    folder.mkdir()
    root, metrics, log = disk / name, folder / "metrics.jsonl", folder / "log"
    flags = f"{RUN} {flags} --save {root} --load {root} --metrics-jsonl {metrics}"
    resize(disk, 1000)
    first = leave_out_the_check if blind else lambda: None
    codes = wait(fork(flags, processes, log, first), 60)
    assert codes == [1] * processes, codes
    text = log.read_text()
    errors = [line for line in text.splitlines() if line.startswith("error: ")]
    assert len(errors) == 1 and "Traceback" not in text, text
    for part in (
        "error: --save: no checkpoint of iteration 4: No space left on device",
        "kB needed, ",
        f"free in {root}); the newest is 2",
    ):
        assert part in errors[0], errors[0]
    assert [path.name for path in sorted(root.iterdir())] == [
        "iter_0000002",
        checkpoint_folder.TRACKER,
    ]
    resize(disk, 4000)
    assert wait(fork(flags, processes, log), 60) == [0] * processes, log.read_text()
    assert checkpoint_folder.iterations(root) == [6]
    whole = folder / "whole.jsonl"
    alone = f"{RUN} --save {folder / 'whole'} --metrics-jsonl {whole}"
    assert wait(fork(alone, processes, log), 60) == [0] * processes, log.read_text()
    seen, expected = rows(metrics), rows(whole)
    assert [row["iteration"] for row in seen] == [1, 2, 3, 4, 5, 6]
    assert [row["lm_loss"] for row in seen] == [row["lm_loss"] for row in expected]
    shutil.rmtree(root)


def main() -> None:
    """All cases."""
    folder = Path(sys.argv[1])
    disk = folder / "disk"
    disk.mkdir(parents=True)
    for name, flags, processes, blind in CASES:
        case(disk, name, flags, processes, blind)
        print(f"{name}: stopped and went on", flush=True)


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    main()
