"""How many processor cores there are for this process."""

from __future__ import annotations

import os


def available_cores() -> int:
    """Cores that this process may use; all of the machine's where the system binds none (macOS)."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
