"""Folders that appear whole or not at all.

Everything is written beside the target under a hidden name and renamed at the end, so that a run
that dies half-way leaves nothing at the name that others read.
"""

from __future__ import annotations

import errno
import fcntl
import glob
import os
import shutil
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from megatron_lengen.convert.stream import sync
from megatron_lengen.errors import BadInput, Fault, require

_PARTIAL, _PREVIOUS = ".partial", ".previous"


def check_target(target: Path, force: bool, marker: str) -> None:
    """Refuse a target that exists, or, with `force`, one that is not what we would write.

    Args:
        marker: a file that folders of this kind contain; `force` replaces only such folders.

    Raises:
        BadInput: naming the folder and what to do.
    """
    if not target.exists():
        return
    require(target.is_dir(), f"--save: {target} is a file; allowed: a new folder")
    if not any(target.iterdir()):
        return
    require(force, f"--save: {target} exists already; allowed: a new folder, or --force")
    require(
        (target / marker).exists(),
        f"--force: {target} holds other files (no {marker}); it is not replaced",
    )


@contextmanager
def staged_folder(target: Path, force: bool, marker: str, needed: int = 0) -> Iterator[Path]:
    """A hidden folder beside `target` that takes its name when the block ends well.

    On an exception the hidden folder is removed and `target` stays as it was. What a killed run
    left behind is removed by the next one for the same target.

    Args:
        target, force, marker: as in `check_target`.
        needed: bytes that will be written, if known.

    Raises:
        BadInput: as `check_target`, or when the place cannot be written.
        Fault: when the disk is full, or has less room than is needed.
    """
    target = Path(os.path.abspath(target))
    _tidy(target)
    check_target(target, force, marker)
    new_parents = [parent for parent in target.parents if not parent.exists()]
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        staging = target.parent / f".{target.name}.{uuid.uuid4().hex[:8]}{_PARTIAL}"
        staging.mkdir()
    except OSError as error:
        raise BadInput(f"--save: cannot write {target}: {error.strerror}") from error
    try:
        with _locked(staging):
            room = shutil.disk_usage(staging).free
            if room < needed:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            yield staging
            _publish(staging, target)
    except BaseException as error:
        shutil.rmtree(staging, ignore_errors=True)
        for parent in new_parents:
            with suppress(OSError):
                parent.rmdir()
        if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
            wanted = f"{needed / 1e9:.3g} GB needed, " if needed else ""
            raise Fault(
                f"--save: {target}: {error.strerror} ({wanted}{room / 1e9:.3g} GB were free); "
                "nothing was written"
            ) from error
        raise


@contextmanager
def _locked(staging: Path) -> Iterator[None]:
    """Hold the lock that says that a process works in the folder; it ends with the process."""
    descriptor = os.open(staging, os.O_RDONLY)
    try:
        with suppress(OSError):  # a file system without locks
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def _tidy(target: Path) -> None:
    """Remove what killed runs left beside the target, and give it back what one had moved away."""
    for path in target.parent.glob(f".{glob.escape(target.name)}.*{_PARTIAL}"):
        if _is_left_over(path):
            shutil.rmtree(path, ignore_errors=True)
    for path in target.parent.glob(f".{glob.escape(target.name)}.*{_PREVIOUS}"):
        if not target.exists():
            os.rename(path, target)
        else:
            shutil.rmtree(path, ignore_errors=True)


def _is_left_over(staging: Path) -> bool:
    """Whether no process holds the folder's lock; where that cannot be known, one may."""
    try:
        descriptor = os.open(staging, os.O_RDONLY)
    except OSError:
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return True
    except OSError:
        return False
    finally:
        os.close(descriptor)


def _publish(staging: Path, target: Path) -> None:
    for folder, _, files in os.walk(staging):
        for name in files:
            sync(Path(folder) / name)
        sync(Path(folder))
    if not target.exists():
        os.rename(staging, target)
    else:
        # Two renames: readers see the old folder, a moment of nothing, then the new one.
        previous = staging.with_suffix(_PREVIOUS)
        os.rename(target, previous)
        os.rename(staging, target)
        shutil.rmtree(previous)
    sync(target.parent)
