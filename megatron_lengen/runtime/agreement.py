"""What one rank does for all, and how the others learn whether it worked.

A rank that raises alone leaves the others waiting in their next collective.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable

import torch
import torch.distributed as dist

from megatron_lengen.errors import Fault
from megatron_lengen.runtime import host

logger = logging.getLogger(__name__)


def finite_on_all(value: float) -> float:
    """`value` if it is finite on every rank; else nan or infinity, the same on every rank."""
    bad = torch.tensor(0.0 if math.isfinite(value) else value, device=host.device())
    dist.all_reduce(bad)
    return value if bad == 0 else float(bad)


def first_problem(own: str | None) -> str | None:
    """What is wrong on the lowest rank that has a problem, if any has; called by every rank."""
    everyones: list[str | None] = [None] * dist.get_world_size()
    dist.all_gather_object(everyones, own)
    return next((problem for problem in everyones if problem), None)


def first_rank_does(action: Callable[[], object]) -> None:
    """Do something on rank 0 while the others wait; called by every rank.

    Raises:
        Fault: on every rank, with the reason in one line, if rank 0 could not do it.
    """
    problem = None
    if dist.get_rank() == 0:
        try:
            action()
        except Exception as error:
            problem = reason_of(error)
    problem = first_problem(problem)
    if problem:
        raise Fault(problem)


def reason_of(error: Exception) -> str:
    """One line on why a file could not be written or read; anything else is logged in full.

    PyTorch's own exception about a file hides the operating system's.
    """
    cause: BaseException | None = error
    while cause is not None and not isinstance(cause, OSError):
        cause = cause.__cause__ or cause.__context__
    if isinstance(cause, OSError):
        text = cause.strerror or str(cause)
        return f"{text}: {cause.filename}" if cause.filename else text
    logger.error("%s", error, exc_info=error)
    return f"{type(error).__name__}: {error}".splitlines()[0]
