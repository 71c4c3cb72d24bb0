"""When checkpoints are written, published, averaged and removed.

A checkpoint is published (given its name, then the tracker) once every rank's data is on disk: at
the end of a synchronous save, or at a later step of an asynchronous one.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path

from megatron.core.dist_checkpointing.strategies.async_utils import AsyncCallsQueue

from megatron_lengen import checkpoint_folder
from megatron_lengen.errors import Fault, is_first_rank
from megatron_lengen.runtime.agreement import first_rank_does, reason_of
from megatron_lengen.training import tensor_writer
from megatron_lengen.training.arguments import Settings
from megatron_lengen.training.averaging import Averager
from megatron_lengen.training.checkpoint import Progress
from megatron_lengen.training.engine import Engine

logger = logging.getLogger(__name__)


class Saver:
    """Saves an engine's state; every method is called by every rank, at the same step.

    Args:
        progress: where the run starts; what it was loaded from needs no saving again.
    """

    def __init__(self, settings: Settings, engine: Engine, progress: Progress) -> None:
        self._settings, self._engine = settings, engine
        self._root = Path(settings.training.save) if settings.training.save else None
        self._saved_at = progress.iteration if settings.training.saves_here else -1
        self._newest = self._saved_at if settings.load_from and self._saved_at >= 0 else None
        self._averager: Averager | None = None
        if self._root is not None and settings.training.average_last is not None:
            self._averager = Averager(settings, self._root)
        # Megatron's persistent writer counts CUDA devices, and there may be none.
        self._pending = AsyncCallsQueue(persistent=False)

    def save(self, progress: Progress, again: bool = False) -> None:
        """Save, unless this iteration is saved already; waits for a save that is still pending.

        Args:
            again: save even so, in the place of what is there.

        Raises:
            Fault: if it cannot be written; what was there before is left as it was.
        """
        iteration, root = progress.iteration, self._root
        if root is None or (iteration == self._saved_at and not again):
            return
        self.finish()
        self._saved_at = iteration
        with self._explained():
            folder = tensor_writer.start_folder(root, iteration)
            then = replace(progress)
            request = self._engine.save(then, folder)
            request.add_finalize_fn(lambda: self._publish(root, then, folder))
            if self._settings.training.async_save:
                self._pending.schedule_async_request(request)
            else:
                request.execute_sync()

    def poll(self) -> None:
        """Publish the pending checkpoint if every rank has written it.

        Raises:
            Fault: if one of them could not.
        """
        with self._explained():
            self._pending.maybe_finalize_async_calls(blocking=False)

    def finish(self) -> None:
        """Wait for the pending save and publish it; raises as `poll` does."""
        with self._explained():
            self._pending.maybe_finalize_async_calls(blocking=True)

    def _publish(self, root: Path, progress: Progress, folder: Path) -> None:
        iteration = progress.iteration

        def publish() -> None:
            checkpoint_folder.publish(root, iteration, folder)
            print(f"saved {checkpoint_folder.iteration_folder(root, iteration)}", flush=True)

        first_rank_does(publish)
        self._newest = iteration
        if self._averager is not None:
            self._averager.follow(progress)
        if self._settings.training.keep_last is not None:
            first_rank_does(partial(self._prune, root, iteration))

    def _prune(self, root: Path, iteration: int) -> None:
        training = self._settings.training
        assert training.keep_last is not None
        needed = self._averager.window(iteration) if self._averager is not None else ()
        try:
            checkpoint_folder.prune(
                root, iteration, training.keep_last, training.keep_every, needed
            )
        except OSError as error:
            logger.warning("--keep-last: older checkpoints stay: %s", reason_of(error))

    @contextlib.contextmanager
    def _explained(self) -> Iterator[None]:
        """Say of a failure what it means for the run, and give the space back."""
        try:
            yield
        except Fault as fault:
            root, newest = self._root, self._newest
            assert root is not None
            if is_first_rank():
                with contextlib.suppress(OSError):
                    checkpoint_folder.clean(root)
            complete = "none" if newest is None else f"iteration {newest}"
            raise Fault(
                f"--save: iteration {self._saved_at} could not be saved: {fault}; the newest "
                f"complete checkpoint: {complete}"
            ) from fault
