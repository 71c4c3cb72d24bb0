"""The mean of a run's newest checkpoints, written beside them each time one is published.

Checkpoints are the snapshots: nothing is kept in memory, a resumed run on any layout goes on with
the same ones, and the result is what tools/checkpoint/average.py would write.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import torch.distributed as dist
from torch import Tensor

from megatron_lengen import checkpoint_folder
from megatron_lengen.checkpoint_folder import AVERAGED, iteration_folder, iterations
from megatron_lengen.convert.averaging import Mean
from megatron_lengen.convert.stored import open_model
from megatron_lengen.errors import BadInput, Fault, is_first_rank
from megatron_lengen.runtime.agreement import first_problem, first_rank_does
from megatron_lengen.training import checkpoint, tensor_writer
from megatron_lengen.training.arguments import Settings
from megatron_lengen.training.checkpoint import Progress

logger = logging.getLogger(__name__)


class Averager:
    """Writes `SAVE/averaged/iter_...` for a run with `--average-last`.

    Args:
        root: the run's folder of checkpoints.
    """

    def __init__(self, settings: Settings, root: Path) -> None:
        self._settings, self._root = settings, root
        training = settings.training
        assert training.average_last is not None and training.save_interval is not None
        self._count = training.average_last
        self._interval = training.average_interval or training.save_interval

    def window(self, newest: int) -> list[int]:
        """The iterations that a mean at `newest` is of: as many as there are, at the beginning."""
        present = [n for n in iterations(self._root) if n <= newest and self._counts(n)]
        return present[-self._count :]

    def follow(self, progress: Progress) -> None:
        """Write the mean once an iteration is published; called by every rank.

        Where it cannot be written the run goes on, with a warning.
        """
        if not self._counts(progress.iteration):
            return
        chosen = [self.window(progress.iteration)]
        dist.broadcast_object_list(chosen, src=0)
        try:
            self._write(chosen[0], progress)
        except Fault as fault:
            if is_first_rank():
                with contextlib.suppress(OSError):
                    checkpoint_folder.clean(self._root / AVERAGED)
                logger.warning(
                    "--average-last: no mean at iteration %d: %s", progress.iteration, fault
                )

    def _counts(self, iteration: int) -> bool:
        """Whether a checkpoint is one of those that are averaged."""
        last = iteration == self._settings.training.train_iters
        return last or iteration % self._interval == 0

    def _write(self, window: Sequence[int], progress: Progress) -> None:
        """Compute, write and publish the mean."""
        own: dict[str, Tensor] = {}
        problem = None
        try:
            models = [open_model(iteration_folder(self._root, n)) for n in window]
            mean = Mean(models, [1.0] * len(models))
            own = {name: mean.read(name) for name in _share(mean)}
        except (BadInput, OSError) as error:
            problem = str(error).removeprefix("--load: ")
        problem = first_problem(problem)
        if problem:
            raise Fault(problem)
        root, iteration = self._root / AVERAGED, progress.iteration
        folder = tensor_writer.start_folder(root, iteration)
        details = {AVERAGED: mean.described()}
        checkpoint.save_weights(self._settings, own, progress, folder, details)
        first_rank_does(partial(self._publish, root, iteration, folder))

    def _publish(self, root: Path, iteration: int, folder: Path) -> None:
        training = self._settings.training
        checkpoint_folder.publish(root, iteration, folder)
        if training.keep_last is not None:
            checkpoint_folder.prune(root, iteration, training.keep_last, training.keep_every)
        print(f"averaged {iteration_folder(root, iteration)}", flush=True)


def _share(mean: Mean) -> list[str]:
    """The tensors that this rank computes: about as many bytes as every other."""
    bytes_of = [0] * dist.get_world_size()
    own = []
    for name in sorted(mean.names, key=lambda name: -mean.meta(name).nbytes):
        rank = bytes_of.index(min(bytes_of))
        bytes_of[rank] += mean.meta(name).nbytes
        if rank == dist.get_rank():
            own.append(name)
    return own
