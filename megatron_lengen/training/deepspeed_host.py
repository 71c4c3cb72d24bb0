"""DeepSpeed on this machine: its device, its messages, and the extension it may have to build."""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import torch
from torch.utils import cpp_extension

from megatron_lengen.compat import is_installed
from megatron_lengen.errors import BadInput, is_first_rank, missing_package, require
from megatron_lengen.runtime import host

_EXTENSION = "cpu_adam"  # DeepSpeed's Adam for optimizers that live on the CPU


@functools.cache
def import_deepspeed() -> ModuleType:
    """The package, told which device to use; warnings of the first process reach the console.

    Raises:
        BadInput: where it is not installed, or does not import.
    """
    if not is_installed("deepspeed"):
        raise missing_package("deepspeed", "--engine deepspeed")
    os.environ["DS_ACCELERATOR"] = "cuda" if host.has_cuda() else "cpu"
    os.environ.setdefault("LOCAL_RANK", "0")  # it asks for one without a launcher, too
    try:
        import deepspeed
    except Exception as error:  # it looks for compilers and devices, and may not like what it finds
        reason = str(error).strip().splitlines() or [type(error).__name__]
        raise BadInput(f"--engine deepspeed: the package does not import ({reason[0]})") from error
    logging.getLogger("DeepSpeed").setLevel(logging.WARNING if is_first_rank() else logging.ERROR)
    # On a CPU host it would compile a collective of its own, for half a minute, before anything
    # else. With no operator named as usable it takes PyTorch's.
    deepspeed.ops.__compatible_ops__ = {}
    return deepspeed


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Drop what DeepSpeed prints past its own log levels."""
    with open(os.devnull, "w") as nowhere, contextlib.redirect_stdout(nowhere):
        yield


def check_build(flag: str) -> None:
    """Whether the extension for optimizers on the CPU is there or can be built.

    Args:
        flag: what asks for it.

    Raises:
        BadInput: without a compiler, or with the lock of a build that was cut off, on which
            every later build waits for ever.
    """
    deepspeed = import_deepspeed()
    if deepspeed.git_version_info.installed_ops.get(_EXTENSION, False):
        return
    compiler = cpp_extension.get_cxx_compiler()
    require(
        shutil.which(compiler) is not None,
        f"{flag}: offload_optimizer: no C++ compiler ({compiler}), with which DeepSpeed builds its "
        'Adam for the CPU; allowed: one that CXX names, or PyTorch\'s AdamW: {"optimizer": '
        '{"params": {"torch_adam": true}}}',
    )
    lock = build_folder() / "lock"
    if lock.exists() and not _is_open(lock):
        raise BadInput(
            f"{flag}: offload_optimizer: {lock} is left from a build that was cut off, and every "
            "later one waits for it; remove the file (unless another machine builds right now)"
        )


def build_folder() -> Path:
    """Where PyTorch builds the extension."""
    root = os.environ.get("TORCH_EXTENSIONS_DIR")
    if root is None:
        version = torch.version.cuda
        device = "cpu" if version is None else "cu" + version.replace(".", "")
        python = f"py{sys.version_info.major}{sys.version_info.minor}{sys.abiflags}"
        root = str(Path(cpp_extension.get_default_build_root()) / f"{python}_{device}")
    return Path(root) / _EXTENSION


def _is_open(lock: Path) -> bool:
    """Whether a process of this machine has the file open, as one that builds does."""
    for handle in Path("/proc").glob("[0-9]*/fd/*"):
        try:
            if os.path.samefile(handle, lock):
                return True
        except OSError:  # another user's process, or one that has just ended
            continue
    return False
