"""Tensors of a conversion, one after the other or a few at once, with a bound on their memory."""

from __future__ import annotations

import ctypes
import os
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import torch
from torch import Tensor

from megatron_lengen.errors import BadInput
from megatron_lengen.runtime.cores import available_cores

_MOST_WORKERS = 4
_M_MMAP_THRESHOLD = -3  # of glibc's malloc.h


@dataclass(frozen=True)
class Job:
    """What happens to one tensor.

    Args:
        work: reads, converts and writes it.
        size: its bytes, for the progress bar.
        held: bytes of tensors that are in memory meanwhile, at most.
    """

    work: Callable[[], None]
    size: int
    held: int


@dataclass(frozen=True)
class Pace:
    """How a conversion goes about its jobs.

    Args:
        workers: threads; copies and writes of tensors hold no lock of Python's.
        progress: whether to show a bar on stderr; on a terminal alone if None.
    """

    workers: int = 1
    progress: bool | None = None

    def run(self, jobs: Sequence[Job], title: str) -> None:
        """Do all jobs; as many at once as there are workers and room for.

        The room is what the largest job needs: two tensors, where a job reads one and writes
        another, so memory does not grow with the number of workers.

        Raises:
            Whatever a job raised first; no further job is begun then.
        """
        room = _Room(max((job.held for job in jobs), default=0))
        shown = sys.stderr.isatty() if self.progress is None else self.progress
        failed = threading.Event()
        # Copies by PyTorch's own threads as well would make the workers wait for one another.
        own_threads = torch.get_num_threads()
        torch.set_num_threads(1)
        with _bar(sum(job.size for job in jobs), title, shown) as advance:

            def do(job: Job) -> None:
                with room.taken(job.held):
                    if failed.is_set():
                        return
                    try:
                        job.work()
                    except BaseException:
                        failed.set()
                        raise
                advance(job.size)

            with ThreadPoolExecutor(max_workers=self.workers) as pool:
                futures = [pool.submit(do, job) for job in jobs]
                try:
                    done, _ = wait(futures, return_when=FIRST_EXCEPTION)
                    for future in done:
                        future.result()
                finally:
                    failed.set()  # also where the user has interrupted
                    pool.shutdown(cancel_futures=True)
                    torch.set_num_threads(own_threads)


def default_workers() -> int:
    """Threads that a disk can keep up with."""
    return min(_MOST_WORKERS, available_cores())


def free_at_once() -> None:
    """Let this process return a tensor's memory when it is freed, not keep it for each thread."""
    with suppress(AttributeError, OSError):  # another C library than glibc
        ctypes.CDLL(None).mallopt(_M_MMAP_THRESHOLD, 1 << 20)


class _Room:
    """Bytes that jobs may hold together."""

    def __init__(self, size: int) -> None:
        self._free = size
        self._changed = threading.Condition()
        self._entrance = threading.Lock()

    @contextmanager
    def taken(self, size: int) -> Iterator[None]:
        """Wait for so many bytes; they are free again after the block."""
        # One waits at a time, so that smaller jobs cannot overtake a large one for ever.
        with self._entrance, self._changed:
            self._changed.wait_for(lambda: self._free >= size)
            self._free -= size
        try:
            yield
        finally:
            with self._changed:
                self._free += size
                self._changed.notify_all()


@contextmanager
def _bar(total: int, title: str, shown: bool) -> Iterator[Callable[[int], None]]:
    """What the bar is told of every job's bytes."""
    if not shown:
        yield lambda size: None
        return
    from tqdm import tqdm

    lock = threading.Lock()
    with tqdm(total=total, desc=title, unit="B", unit_scale=True, file=sys.stderr) as bar:

        def advance(size: int) -> None:
            with lock:
                bar.update(size)

        yield advance


# ---- bytes ---------------------------------------------------------------------------------------
# Files are read, not mapped: pages of a mapped file count as memory of the process.


def bytes_of(tensor: Tensor) -> memoryview:
    """The memory of a contiguous tensor on the CPU."""
    return tensor.reshape(-1).view(torch.uint8).numpy().data


def read_into(file: BinaryIO, offset: int, tensor: Tensor) -> None:
    """Fill a contiguous tensor with the bytes of an unbuffered file from `offset` on.

    Raises:
        BadInput: if the file ends before.
    """
    left = bytes_of(tensor)
    file.seek(offset)
    while left:
        got = file.readinto(left)  # type: ignore[attr-defined]
        if not got:
            raise BadInput(f"{getattr(file, 'name', 'file')}: cut short")
        left = left[got:]


def write_at(descriptor: int, offset: int, tensor: Tensor) -> None:
    """Write a contiguous tensor's bytes to a place of a file; several threads may do so at once."""
    left = bytes_of(tensor)
    while left:
        wrote = os.pwrite(descriptor, left, offset)
        left, offset = left[wrote:], offset + wrote


def sync(path: Path) -> None:
    """Wait until a file, or the names in a folder, are on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
