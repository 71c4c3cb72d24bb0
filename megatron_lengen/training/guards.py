"""Steps whose loss or gradient is not finite: where it happened, when to stop, whose fault it is.

Such a step changes nothing (see step.py). Megatron-Core's rerun state machine can compute it once
more instead, at once and then on another machine, to tell the machine's fault from the run's. Masks
are functions of coordinates, so a rerun is the same computation, dropout included.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state, rerun_state_machine
from megatron.core.rerun_state_machine import (
    EXIT_CODE_RESUME_TO_DISAMBIGUATE,
    Call,
    Caller,
    RerunDataIterator,
    RerunMode,
    RerunState,
    RerunStateMachine,
    get_rerun_state_machine,
)
from torch import Tensor

from megatron_lengen.errors import EXIT_FAULT, Fault, require
from megatron_lengen.runtime import host

if TYPE_CHECKING:
    from megatron_lengen.training.arguments import Settings
    from megatron_lengen.training.step import StepResult

_LISTED = 4  # places named in the line


def not_finite_in(reports: list[Tensor], settings: Settings) -> list[tuple[int, int]]:
    """(data-parallel rank, micro-batch) of losses that are not finite; called by every rank.

    Args:
        reports: (sum of losses, tokens) of each micro-batch of this rank, on the last stage.
    """
    shape = (settings.data_parallel_size, settings.micro_batches)
    flags = torch.zeros(shape, device=host.device())
    for index, report in enumerate(reports):
        flags[parallel_state.get_data_parallel_rank(), index] = not math.isfinite(report[0])
    dist.all_reduce(flags, op=dist.ReduceOp.MAX)
    return [(rank, index) for rank, index in flags.nonzero().tolist()]


class Stop(Fault):
    """Why the loop ends a run that it could go on computing.

    Args:
        save: whether the state before the step at hand is to be saved.
    """

    def __init__(self, message: str, code: int = EXIT_FAULT, save: bool = False) -> None:
        super().__init__(message, code)
        self.save = save
        # Only then does the checkpoint hold more than one of the same iteration (`rerun_state`).
        self.save_again = save and code == EXIT_CODE_RESUME_TO_DISAMBIGUATE


class SkipGuard:
    """Counts skipped steps in a row.

    Args:
        settings: --max-skipped-steps among them; 0 never stops a run.
    """

    def __init__(self, settings: Settings) -> None:
        self._settings, self._in_a_row = settings, 0

    def note(self, iteration: int, last_sample: int, result: StepResult) -> None:
        """Take note of a step.

        Args:
            iteration: its number.
            last_sample: the number of the last sample of its batch.

        Raises:
            Stop: with the steps and samples, when there are too many.
        """
        self._in_a_row = self._in_a_row + 1 if result.skipped else 0
        limit = self._settings.training.max_skipped_steps
        if limit == 0 or self._in_a_row < limit:
            return
        batch = self._settings.training.global_batch_size or 0
        first = last_sample - self._in_a_row * batch + 1
        raise Stop(
            f"loss or gradient not finite in {limit} steps in a row (--max-skipped-steps), "
            f"iterations {iteration - limit + 1} to {iteration}, samples {first} to {last_sample}; "
            f"in the last of them {self._describe(last_sample - batch + 1, result)}; no update was "
            "made and nothing saved in these steps"
        )

    def _describe(self, first_sample: int, result: StepResult) -> str:
        if math.isfinite(result.loss) and not result.not_finite_in:
            return f"the loss was {result.loss:.4g} and the gradient's norm {result.grad_norm}"
        rows, ranks = self._settings.training.micro_batch_size, self._settings.data_parallel_size
        places = []
        for rank, micro_batch in result.not_finite_in[:_LISTED]:
            start = first_sample + (micro_batch * ranks + rank) * rows
            places.append(f"{start} to {start + rows - 1} (data-parallel rank {rank})")
        more = len(result.not_finite_in) - len(places)
        found = f"{', '.join(places)}{f' and {more} more micro-batches' if more > 0 else ''}"
        return f"the loss was {result.loss}, in samples {found or 'unknown'}"


# ---- reruns --------------------------------------------------------------------------------------


class Reruns:
    """Megatron-Core's rerun state machine around a step, or nothing.

    Args:
        mode: --rerun-mode.
    """

    def __init__(self, mode: str) -> None:
        rerun_state_machine.destroy_rerun_state_machine()
        self._machine: RerunStateMachine | None = None
        if RerunMode(mode) != RerunMode.DISABLED:
            rerun_state_machine.initialize_rerun_state_machine(mode=RerunMode(mode))
            self._machine = get_rerun_state_machine()
            self._machine.current_iteration = 0

    def attempts(self, data: Any) -> Iterator[None]:
        """One turn for each time that forward and backward are to run on `data`.

        Raises:
            Stop: on every rank, after the last one, if a rerun was needed.
        """
        if self._machine is None:
            yield
            return
        while self._machine.should_run_forward_backward(data):
            yield
        state, iteration = self._machine.state, self._machine.current_iteration
        save, leave, code = self._machine.should_checkpoint_and_exit()
        if leave:
            raise Stop(f"iteration {iteration}: {_MEANING[state]}", code, save)

    def check(self, loss: Tensor) -> None:
        """Look at a micro-batch's sum of losses during a forward pass of training."""
        if self._machine is not None:
            self._machine.validate_result(
                result=loss,
                rejection_func=lambda value: not math.isfinite(value),
                message="the loss of a micro-batch is not finite",
            )


_MEANING = {
    RerunState.RERUNNING_IN_PLACE: (
        "what was not finite came out otherwise when computed again: a transient fault of the "
        "machine named above; --load continues before this iteration"
    ),
    RerunState.WILL_RERUN_FROM_CHECKPOINT: (
        "what was not finite came out the same when computed again: a fault of the machine named "
        "above, or of the run; --load on another machine finds out which"
    ),
    RerunState.RERUNNING_FROM_CHECKPOINT: (
        "computed again on another machine, with the result above; --load continues with "
        "--rerun-mode disabled"
    ),
    RerunState.RERUNNING_AGAIN_FROM_CHECKPOINT: (
        "this is the same machine as before, which shows nothing; --load on another one finds "
        "out, or continues with --rerun-mode disabled"
    ),
}


def replayable(data: Any, mode: str) -> Any:
    """Iterators whose micro-batches of a step can be had again, where reruns need them."""
    if RerunMode(mode) == RerunMode.DISABLED or data is None:
        return data
    if isinstance(data, list):
        return [replayable(part, mode) for part in data]
    return RerunDataIterator(data)


def rerun_state(mode: str) -> dict[str, Any] | None:
    """What a checkpoint keeps of a step to be computed again elsewhere; called by every rank.

    Data is not kept: it follows from the number of consumed samples.
    """
    if RerunMode(mode) == RerunMode.DISABLED:
        return None
    machine = get_rerun_state_machine()
    if machine.state != RerunState.WILL_RERUN_FROM_CHECKPOINT:
        return None
    own = None
    if machine.failed_validation_call is not None:
        (message, rank), sequence = machine.failed_validation_call
        # As text, since ranks compare what they save and nan is not nan.
        result, device = str(float(machine.initial_result)), machine.suspicious_device
        own = (message, rank, sequence, result, machine.suspicious_node, device)
    ranks: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(ranks, own)
    return {"iteration": machine.current_iteration, "ranks": ranks}


def restore_reruns(mode: str, iteration: int, state: dict[str, Any] | None) -> None:
    """Put the machine where a run goes on.

    Args:
        iteration: the last one that is done.
        state: of `rerun_state`, from the checkpoint.

    Raises:
        BadInput: if the step cannot be computed again by these processes.
    """
    if RerunMode(mode) == RerunMode.DISABLED:
        return
    machine = get_rerun_state_machine()
    machine.current_iteration = iteration
    if state is None:
        return
    world = dist.get_world_size()
    require(
        len(state["ranks"]) == world,
        f"--rerun-mode: found {world} processes; allowed: the {len(state['ranks'])} that computed "
        "the checkpoint's next iteration, or --rerun-mode disabled",
    )
    own = state["ranks"][dist.get_rank()]
    if own is not None:
        message, rank, sequence, result, node, device = own
        machine.failed_validation_call = Call(Caller(message, rank), sequence)
        machine.initial_result = torch.tensor(float(result))
        machine.suspicious_node, machine.suspicious_device = node, device
    machine.state = RerunState.WILL_RERUN_FROM_CHECKPOINT
    machine.current_iteration = state["iteration"]
