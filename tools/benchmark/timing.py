"""What the benchmarks share: times in turn, and the report beside the table."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from megatron_lengen.compat import versions


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


def write_report(file: str | None, settings: dict[str, Any], **found: Any) -> None:
    """The settings, what was found and versions as JSON; nothing where no file is named."""
    if file is not None:
        settings = {key: value for key, value in settings.items() if key != "json"}
        report = {"settings": settings, **found, "versions": versions()}
        Path(file).write_text(json.dumps(report, indent=2) + "\n")
