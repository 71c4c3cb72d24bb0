"""What the benchmarks share: times in turn, and the report beside the table."""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from megatron_lengen.compat import versions

_WAIT_OF_A_CALL = 3_000_000  # clocks of a GPU: more than it takes Python to start a few kernels


def shortest(forms: Sequence[Callable[[], object]], repeat: int) -> list[float]:
    """Seconds of each, the shortest of rounds in turn: other work on the machine hits all alike."""
    best = [float("inf")] * len(forms)
    for form in forms:  # compile, build, touch the memory
        form()
    for _ in range(repeat):
        for i, form in enumerate(forms):
            start = time.perf_counter()
            form()
            best[i] = min(best[i], time.perf_counter() - start)
    return best


def median(forms: Sequence[Sequence[Callable[[], object]]], repeat: int) -> list[float]:
    """Seconds of a call of each form on a GPU, the median of rounds in turn.

    A form is a few calls that differ in their inputs, timed together by CUDA events. The GPU is
    kept waiting until all of them are in its queue, so that only its own time counts.
    """
    import torch

    for calls in forms:  # compile, build, touch the memory
        for call in (*calls, calls[0]):
            call()
    found: list[list[float]] = [[] for _ in forms]
    for _ in range(repeat):
        for seconds, calls in zip(found, forms, strict=True):
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            torch.cuda.synchronize()
            torch.cuda._sleep(_WAIT_OF_A_CALL * len(calls))
            begin.record()
            for call in calls:
                call()
            end.record()
            torch.cuda.synchronize()
            seconds.append(begin.elapsed_time(end) / 1e3 / len(calls))
    return [statistics.median(seconds) for seconds in found]


def write_report(file: str | None, settings: dict[str, Any], **found: Any) -> None:
    """The settings, what was found and versions as JSON; nothing where no file is named."""
    if file is not None:
        settings = {key: value for key, value in settings.items() if key != "json"}
        report = {"settings": settings, **found, "versions": versions()}
        Path(file).write_text(json.dumps(report, indent=2) + "\n")
