"""Folders that appear whole or not at all.

Everything is written beside the target under a hidden name and renamed at the end, so that a run
that dies half-way leaves nothing at the name that others read.
"""

from __future__ import annotations

import os
import shutil
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from megatron_lengen.errors import BadInput, require


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
def staged_folder(target: Path, force: bool, marker: str) -> Iterator[Path]:
    """A hidden folder beside `target` that takes its name when the block ends well.

    On an exception the hidden folder is removed and `target` stays as it was.

    Raises:
        BadInput: as `check_target`, or when the place cannot be written.
    """
    target = Path(os.path.abspath(target))
    check_target(target, force, marker)
    staging = target.parent / f".{target.name}.{uuid.uuid4().hex[:8]}.partial"
    new_parents = [parent for parent in target.parents if not parent.exists()]
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        staging.mkdir()
    except OSError as error:
        raise BadInput(f"--save: cannot write {target}: {error.strerror}") from error
    try:
        yield staging
        _publish(staging, target)
    except BaseException:
        shutil.rmtree(staging, ignore_errors=True)
        for parent in new_parents:
            with suppress(OSError):
                parent.rmdir()
        raise


def _publish(staging: Path, target: Path) -> None:
    if not target.exists():
        os.rename(staging, target)
        return
    # Two renames: readers see the old folder, a moment of nothing, then the new one.
    previous = staging.with_suffix(".previous")
    os.rename(target, previous)
    os.rename(staging, target)
    shutil.rmtree(previous)
