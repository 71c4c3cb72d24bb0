"""The compiled CPU kernels of native*.cpp: built once per machine, found again afterwards.

One C++ compiler call of a few seconds, without PyTorch's headers; the library goes to
LENGEN_CACHE, or the user's cache folder, under a name that covers source, compiler and processor.
Where there is no compiler the caller gets None and uses PyTorch operations instead.
"""

from __future__ import annotations

import ctypes
import functools
import glob
import hashlib
import logging
import os
import shutil
import subprocess
import tempfile
from pathlib import Path

import torch
from torch import Tensor

logger = logging.getLogger(__name__)

_FOLDER = Path(__file__).parent
_FLAGS = (
    "-O3", "-march=native", "-fopenmp", "-fno-math-errno", "-fno-trapping-math", "-std=c++17",
    "-fPIC", "-shared",
)  # fmt: skip
_POINTER, _I64, _I32 = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int32


class Call(ctypes.Structure):
    """The arguments of the norm's kernels; mirrors `struct Call` in native.cpp."""

    _fields_ = (
        *((name, _I64) for name in ("rows", "d", "batch", "first_channel", "blocks")),
        ("key", ctypes.c_uint64),
        ("stream", ctypes.c_uint32),
        ("threshold", ctypes.c_uint32),
        ("normalize", _I32),
        ("threads", _I32),
        ("eps", ctypes.c_float),
        *(
            (name, _POINTER)
            for name in (
                "positions", "samples", "x", "dz", "gain", "out", "rstd", "mean", "variance",
                "alpha", "beta", "mean_grad", "variance_grad", "gain_grad", "alpha_grad",
                "beta_grad", "residual", "total_grad",
            )
        ),
    )  # fmt: skip


@functools.cache
def load_library() -> ctypes.CDLL | None:
    """The kernels, built if need be; None where that is not possible (said once)."""
    compiler = os.environ.get("CXX") or shutil.which("c++") or shutil.which("g++")
    if not compiler:
        logger.warning("no C++ compiler found: slower PyTorch operations are used on the CPU")
        return None
    try:
        return ctypes.CDLL(str(_build(compiler)))
    except (OSError, subprocess.SubprocessError) as error:
        detail = getattr(error, "stderr", None) or str(error)
        logger.warning(
            "the CPU kernels could not be built with %s (%s): slower PyTorch operations are used",
            compiler,
            detail.strip().splitlines()[-1] if detail.strip() else error,
        )
        return None


def has_kernels(x: Tensor) -> bool:
    """Whether there are kernels for such a tensor: on the CPU, in fp32 or bf16."""
    fits = x.device.type == "cpu" and x.dtype in (torch.float32, torch.bfloat16)
    return fits and load_library() is not None


def serves(x: Tensor) -> bool:
    """Whether kernels shall take the place of a few operations on a tensor with elements.

    PyTorch's compiler fuses such operations by itself, and does not see through the kernels.
    """
    return not torch.compiler.is_compiling() and x.numel() > 0 and has_kernels(x)


def run(name: str, dtype: torch.dtype, call: ctypes.Structure) -> None:
    """Call the kernel `name` of a dtype; the tensors behind the pointers must stay alive."""
    suffix = "f32" if dtype == torch.float32 else "bf16"
    getattr(load_library(), f"lengen_{name}_{suffix}")(ctypes.byref(call))


def _build(compiler: str) -> Path:
    key = hashlib.sha256()
    sources = sorted(_FOLDER.glob("native*.cpp"))
    for source in (*sources, *sorted(_FOLDER.glob("native*.h"))):
        key.update(source.read_bytes())
    for part in (compiler.encode(), " ".join(_FLAGS).encode(), _cpu_flags()):
        key.update(part)
    folder = _cache_folder()
    target = folder / f"lengen_native_{key.hexdigest()[:16]}.so"
    if target.exists():
        return target
    handle, partial = tempfile.mkstemp(suffix=".so", dir=folder)
    os.close(handle)
    try:
        command = [compiler, *_FLAGS, *map(str, sources), "-o", partial, *_openmp_runtime()]
        subprocess.run(command, check=True, capture_output=True, text=True, timeout=300)
        # Atomic, so that ranks that build at the same time never load half a file.
        os.replace(partial, target)
    finally:
        if os.path.exists(partial):
            os.unlink(partial)
    return target


def _openmp_runtime() -> list[str]:
    """Link against PyTorch's own OpenMP runtime: a second one would fight it for the cores."""
    return sorted(glob.glob(os.path.join(os.path.dirname(torch.__file__), "lib", "libgomp*")))[:1]


def _cpu_flags() -> bytes:
    """What -march=native depends on: a cache on a shared home serves unlike machines."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return b""
    return "".join(sorted({line for line in lines if line.startswith(("flags", "Features"))}))[
        :20000
    ].encode()


def _cache_folder() -> Path:
    wanted = os.environ.get("LENGEN_CACHE") or os.path.join(
        os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache"), "megatron_lengen"
    )
    folder = Path(wanted)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if os.access(folder, os.W_OK):
            return folder
    except OSError:
        pass
    fallback = Path(tempfile.gettempdir()) / f"megatron_lengen_{os.getuid()}"
    fallback.mkdir(parents=True, exist_ok=True)
    return fallback
