"""Writing a state's tensors as Megatron's torch_dist: at once, or in the background.

Megatron-Core plans who writes what. Its writer starts an interpreter for a queue and a process for
every file, in synchronous saves too: seconds each time, and processes that outlive a killed run.
Here a rank writes its one file itself, or in one forked process while training goes on.
"""

from __future__ import annotations

import errno
import os
import pickle
import queue
import shutil
import tempfile
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.dist_checkpointing.core import CheckpointingConfig, save_config
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import (
    ShardedTensor,
    ShardedTensorFactory,
    is_main_replica,
)
from megatron.core.dist_checkpointing.state_dict_utils import save_preprocess
from megatron.core.dist_checkpointing.strategies import filesystem_async
from megatron.core.dist_checkpointing.strategies.async_utils import AsyncRequest
from megatron.core.dist_checkpointing.strategies.common import COMMON_STATE_FNAME
from megatron.core.dist_checkpointing.strategies.filesystem_async import FileSystemWriterAsync
from megatron.core.dist_checkpointing.strategies.torch import TorchDistSaveShardedStrategy
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.storage import WriteResult

from megatron_lengen import checkpoint_folder
from megatron_lengen.compat import megatrons_async_strategy
from megatron_lengen.runtime import host
from megatron_lengen.runtime.agreement import first_rank_does, reason_of

FORMAT = CheckpointingConfig("torch_dist", 1)
_OF_EACH_TENSOR = 2048  # bytes around a tensor in a file, and its entry in the index
_OF_EACH_CHECKPOINT = 2**16


def start_folder(root: Path, iteration: int) -> Path:
    """An empty, hidden folder to write an iteration into, the same on every rank."""
    made: list[Path | None] = [None]

    def make() -> None:
        made[0] = checkpoint_folder.start_partial(root, iteration)

    first_rank_does(make)
    dist.broadcast_object_list(made, src=0)
    (folder,) = made
    assert folder is not None
    return folder


def prepare(state: dict[str, Any], folder: Path, metadata: dict[str, Any]) -> AsyncRequest:
    """Plan the writing of a state and write what is not a tensor; called by every rank.

    Args:
        state: of ShardedTensors and plain values, which must be equal on all ranks.
        folder: an empty one that all ranks see.
        metadata: how the state is laid out, for those who load it.

    Returns:
        What writes the tensors, in a process of its own (`AsyncCallsQueue`) or here
        (`execute_sync`), and completes the folder once every rank has written.

    Raises:
        Fault: on every rank, if the disk has no room or a file cannot be written.
    """
    needed = _size(state)
    first_rank_does(partial(_require_space, folder, needed))
    tensors, plain = save_preprocess({**state, "content_metadata": metadata})
    first_rank_does(partial(torch.save, plain, folder / COMMON_STATE_FNAME))
    return _Strategy(needed).async_save(tensors, folder, *megatrons_async_strategy())


def _size(state: dict[str, Any]) -> int:
    """Bytes on disk that all ranks will write."""
    tensors = (
        v for v in nested_values(state) if isinstance(v, ShardedTensor | ShardedTensorFactory)
    )
    written = (t.data for t in tensors if is_main_replica(t.replica_id) and t.data is not None)
    own = sum(data.nbytes + _OF_EACH_TENSOR for data in written)
    total = torch.tensor(own, dtype=torch.int64, device=host.device())
    dist.all_reduce(total)
    return int(total) + _OF_EACH_CHECKPOINT


def _require_space(folder: Path, needed: int) -> None:
    if shutil.disk_usage(folder).free < needed:
        raise OSError(f"{os.strerror(errno.ENOSPC)} ({_room(folder, needed)})")


def _room(folder: Path, needed: int) -> str:
    free = shutil.disk_usage(folder).free
    return f"{_as_text(needed)} needed, {_as_text(free)} free in {folder.parent}"


def _as_text(size: int) -> str:
    """A number of bytes for people."""
    for limit, unit in ((1e12, "TB"), (1e9, "GB"), (1e6, "MB")):
        if size >= limit:
            return f"{size / limit:.3g} {unit}"
    return f"{size / 1e3:.3g} kB"


class _Strategy(TorchDistSaveShardedStrategy):
    """Megatron-Core's plan of the writing; `_write` does it."""

    def __init__(self, needed: int) -> None:
        super().__init__(FORMAT.sharded_backend, FORMAT.sharded_backend_version, thread_count=1)
        self._needed = needed

    def async_save(
        self, sharded_state_dict: Any, checkpoint_dir: Path, *strategy: str
    ) -> AsyncRequest:
        """Plan; called by every rank."""
        if filesystem_async._results_queue is None:
            # With any queue there, Megatron starts no interpreter to hold one.
            filesystem_async._results_queue = queue.SimpleQueue()
        return super().async_save(sharded_state_dict, checkpoint_dir, *strategy)

    def _get_save_and_finalize_callbacks(
        self, writer: FileSystemWriterAsync, save_state_dict_ret: tuple[Any, ...], *strategy: str
    ) -> AsyncRequest:
        _, metadata, ranks = save_state_dict_ret
        results = _Results()

        def complete() -> None:
            found = results.get() if writer.write_buckets else []
            everyones = ranks.gather_object(found)
            first_rank_does(partial(_complete, writer, metadata, everyones, self._needed))

        if not writer.write_buckets:  # every tensor of this rank is another one's replica
            return AsyncRequest(None, (), [complete])
        _, preload, _ = writer.get_save_function_and_args()
        return AsyncRequest(
            partial(_write, writer.transforms),
            (dist.get_rank(), writer.write_buckets, results),
            [complete],
            preload_fn=preload,
        )


class _Results:
    """What a writer has to say, from this process or from a forked one."""

    def __init__(self) -> None:
        # In memory where possible: it must also carry the news that a disk is full.
        if hasattr(os, "memfd_create"):
            self._file: Any = os.fdopen(os.memfd_create("results"), "w+b")
        else:
            self._file = tempfile.TemporaryFile()  # noqa: SIM115  (open until `get`)

    def put(self, results: list[WriteResult] | str) -> None:
        """Leave what was written, or what went wrong."""
        pickle.dump(results, self._file)
        self._file.flush()

    def get(self) -> list[WriteResult] | str:
        """What the writer left; once."""
        with self._file:
            self._file.seek(0)
            found = self._file.read()
        return pickle.loads(found) if found else "the process that wrote has ended before its end"


def _write(transforms: Any, rank: int, buckets: list[Any], results: _Results) -> None:
    """Write this rank's file; AsyncRequest prescribes the last three arguments."""
    done: queue.SimpleQueue[Any] = queue.SimpleQueue()
    running: queue.Queue[int] = queue.Queue()
    running.put(rank)
    (bucket,) = buckets
    FileSystemWriterAsync.write_preloaded_data(
        [transforms], rank, bucket, done, running, use_fsync=True
    )
    _, found = done.get()
    results.put(reason_of(found) if isinstance(found, Exception) else found)


def _complete(
    writer: FileSystemWriterAsync,
    metadata: Metadata,
    everyones: list[list[WriteResult] | str],
    needed: int,
) -> None:
    """Write the index, which makes a checkpoint of the files."""
    for rank, found in enumerate(everyones):
        if isinstance(found, str):
            raise OSError(f"{found} (rank {rank}; {_room(writer.checkpoint_dir, needed)})")
    writer.finish(metadata, everyones)
    save_config(FORMAT, str(writer.checkpoint_dir))
