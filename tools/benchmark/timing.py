"""What the benchmarks share: times in turn, a device's limits, and the report beside the table."""

from __future__ import annotations

import argparse
import json
import os
import platform
import shlex
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from megatron_lengen.compat import versions
from megatron_lengen.errors import require
from megatron_lengen.ops.products import product
from megatron_lengen.runtime.cores import available_cores

ROOT = Path(__file__).resolve().parents[2]
DEVICES = ("cpu", "cuda")
WAIT_OF_A_CALL = 3_000_000  # clocks of a GPU: more than it takes Python to start a few kernels
MATRIX = {"cpu": 1024, "cuda": 8192}  # rows and columns that bring a device to its rate
COPIED = {"cpu": 1 << 28, "cuda": 1 << 31}  # bytes, far more than a cache holds
PLACES = ("--json", "--output", "--folder")  # where files go, which changes no result
Form = Callable[[], object]


# ---- times ---------------------------------------------------------------------------------------


def check_device(device: str) -> None:
    """Raise BadInput for a device that is unknown or not there."""
    require(device in DEVICES, f"--device: found {device}; allowed: {', '.join(DEVICES)}")
    require(
        device == "cpu" or torch.cuda.is_available(),
        "--device: found cuda, but there is no CUDA device; allowed: cpu",
    )


def times(forms: Sequence[Form], repeat: int, device: str = "cpu") -> list[float]:
    """Seconds of each form: the shortest of rounds on a CPU, the median of rounds on CUDA."""
    if device == "cuda":
        return median([[form] for form in forms], repeat)
    return shortest(forms, repeat)


def shortest(forms: Sequence[Form], repeat: int) -> list[float]:
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


def median(forms: Sequence[Sequence[Form]], repeat: int) -> list[float]:
    """Seconds of a call of each form on a GPU, the median of rounds in turn.

    A form is a few calls that differ in their inputs, timed together by CUDA events. The GPU is
    kept waiting until all of them are in its queue, so that only its own time counts.
    """
    for calls in forms:  # compile, build, touch the memory
        for call in (*calls, calls[0]):
            call()
    found: list[list[float]] = [[] for _ in forms]
    for _ in range(repeat):
        for seconds, calls in zip(found, forms, strict=True):
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            torch.cuda.synchronize()
            torch.cuda._sleep(WAIT_OF_A_CALL * len(calls))
            begin.record()
            for call in calls:
                call()
            end.record()
            torch.cuda.synchronize()
            seconds.append(begin.elapsed_time(end) / 1e3 / len(calls))
    return [statistics.median(seconds) for seconds in found]


# ---- limits of a device --------------------------------------------------------------------------


def copy_bandwidth(device: str = "cpu", repeat: int = 10) -> float:
    """Bytes a second of a copy within the device's memory, those read and those written."""
    source = torch.ones(COPIED[device] // 4, dtype=torch.float32, device=device)
    target = torch.empty_like(source)
    return 2 * COPIED[device] / times([lambda: target.copy_(source)], repeat, device)[0]


def matmul_rate(device: str, dtype: torch.dtype, repeat: int = 10) -> float:
    """Floating-point operations a second of the product of two large random matrices.

    By PyTorch, on a CPU by the faster of its libraries (`ops.products`).
    """
    size = MATRIX[device]
    a, b = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))
    forms = [lambda: a @ b] + [lambda: product(a, b)] * (device == "cpu")
    return 2 * size**3 / min(times(forms, repeat, device))


# ---- reports -------------------------------------------------------------------------------------


def report_file(text: str) -> str:
    """The value of --json: a file in a folder that is there, before minutes go into its content."""
    folder = Path(text).resolve().parent
    if not folder.is_dir() or Path(text).is_dir():
        raise argparse.ArgumentTypeError(f"found {text}; allowed: a file in a folder that exists")
    return text


def machine() -> dict[str, Any]:
    """The processor and its cores, memory in GiB, the CUDA device if there is one."""
    found: dict[str, Any] = {
        "cpu": _cpu_model(),
        "cores": available_cores(),
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30),
        "gpu": None,
    }
    if torch.cuda.is_available():
        properties = torch.cuda.get_device_properties(0)
        found |= {
            "gpu": properties.name,
            "gpu_memory_gib": round(properties.total_memory / 2**30),
            "cuda": torch.version.cuda,
        }
    return found


def _cpu_model() -> str:
    """As the kernel names it."""
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()


def command_line() -> str:
    """The command of this process as one would type it in the repository, places left out."""
    script, *words = sys.argv
    path = Path(script).resolve()
    name = str(path.relative_to(ROOT)) if path.is_relative_to(ROOT) else path.name
    kept: list[str] = []
    for word in words:
        if kept and kept[-1] in PLACES:
            kept.pop()
        elif word.partition("=")[0] not in PLACES or word in PLACES:
            kept.append(word)
    return shlex.join(["python", name, *kept])


def write_report(file: str | None, settings: dict[str, Any], **found: Any) -> None:
    """The settings, what was found, the machine and versions as JSON; nothing without a file."""
    if file is not None:
        settings = {key: value for key, value in settings.items() if key != "json"}
        report = {
            "command": command_line(),
            "settings": settings,
            **found,
            "machine": machine(),
            "versions": versions(),
        }
        Path(file).write_text(json.dumps(report, indent=2) + "\n")
