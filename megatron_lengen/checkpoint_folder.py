"""The layout of checkpoint folders: finding one, describing one, publishing one.

SAVE/latest_checkpointed_iteration.txt     the newest complete iteration, or `release`
SAVE/iter_0000010/                         Megatron's files, lengen.json, tokenizer/
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import re
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata

from megatron_lengen.errors import BadInput, is_first_rank, require

TRACKER = "latest_checkpointed_iteration.txt"
DESCRIPTION = "lengen.json"
TOKENIZER = "tokenizer"
RELEASE = "release"
FORMAT = 1

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Found:
    """A checkpoint that can be loaded.

    Args:
        folder: the iteration's own folder.
        iteration: its iteration; 0 for a converted model.
        release: whether it holds weights only, from a conversion.
        description: the contents of lengen.json.
    """

    folder: Path
    iteration: int
    release: bool
    description: dict[str, Any]


# ---- finding -------------------------------------------------------------------------------------


def iteration_folder(root: str | Path, iteration: int | str) -> Path:
    """The folder of an iteration, given as a number or `release`."""
    root = Path(root)
    return root / RELEASE if iteration == RELEASE else root / f"iter_{int(iteration):07d}"


def iterations(root: str | Path) -> list[int]:
    """The iterations that have a folder, in order, complete or not."""
    matches = (re.fullmatch(r"iter_(\d+)", path.name) for path in Path(root).glob("iter_*"))
    return sorted(int(match[1]) for match in matches if match)


def locate(root: str | Path, iteration: int | str | None = None, flag: str = "--iteration") -> Path:
    """The folder that `--load` and `flag` name.

    Args:
        root: a folder with a tracker file, or an iteration's own folder.
        iteration: a number or `release`; what the tracker says if None.

    Raises:
        BadInput: if there is none, saying which iterations there are.
    """
    root = Path(root)
    require(root.is_dir(), f"--load: {root} is not a folder")
    if (root / ".metadata").exists() or (root / DESCRIPTION).exists():
        own = root.resolve()
        named = iteration is None or own == iteration_folder(own.parent, iteration)
        require(named, f"{flag}: found {iteration}; --load is the iteration {root.name}")
        return root
    present = [iteration_folder(root, number).name for number in iterations(root)]
    present += [RELEASE] if (root / RELEASE).is_dir() else []
    there = f"there: {', '.join(present) or 'no iterations'}"
    if iteration is not None:
        chosen = iteration_folder(root, iteration)
        require(chosen.is_dir(), f"{flag}: found {iteration}; {root}: {there}")
        return chosen
    tracker = root / TRACKER
    require(tracker.exists(), f"--load: {root} has no {TRACKER}; {there}")
    text = tracker.read_text(encoding="utf-8", errors="replace").strip()
    known = text == RELEASE or text.isdecimal()
    require(known, f"{tracker}: found {text!r}; give {flag} N; {there}")
    chosen = iteration_folder(root, text)
    require(chosen.is_dir(), f"{tracker}: names {chosen.name}, which is missing; {there}")
    return chosen


def find(root: str | Path, iteration: int | None = None) -> Found | None:
    """The checkpoint to resume from: the newest complete one, or that of a given iteration.

    Where the newest cannot be read (its save was killed, a file is damaged), the newest complete
    one before it is taken, with a warning.

    Returns:
        None where there is no checkpoint at all.

    Raises:
        BadInput: if the iteration that was asked for, or every one there is, cannot be read.
    """
    root = Path(root)
    tracked = root / TRACKER
    single = (root / DESCRIPTION).exists()
    if iteration is None and not (single or tracked.is_file() or iterations(root)):
        return None
    try:
        folder = locate(root, iteration, flag="--ckpt-step")
        read_metadata(folder)
        return _found(folder)
    except BadInput as error:
        if iteration is not None or single:
            raise
        text = tracked.read_text(errors="replace").strip() if tracked.is_file() else ""
        for folder in _fallbacks(root, int(text) if text.isdecimal() else None):
            with contextlib.suppress(BadInput):
                read_metadata(folder)
                if is_first_rank():
                    logger.warning("%s; loading %s instead", error, folder)
                return _found(folder)
        raise


def _fallbacks(root: Path, tracked: int | None) -> Iterator[Path]:
    """Folders to try, best first, where the newest checkpoint cannot be read."""
    if tracked is not None:
        yield _retired(iteration_folder(root, tracked))
    for number in reversed(iterations(root)):
        if tracked is None or number < tracked:
            yield iteration_folder(root, number)


def _found(folder: Path) -> Found:
    description = read_description(folder)
    release = folder.resolve().name == RELEASE
    return Found(folder, int(description.get("iteration", 0)), release, description)


# ---- reading -------------------------------------------------------------------------------------


def read_description(folder: Path) -> dict[str, Any]:
    """The content of `lengen.json` in an iteration's folder.

    Raises:
        BadInput: if it is missing, damaged or of another format.
    """
    path = folder / DESCRIPTION
    require(path.exists(), f"{path}: missing; not a checkpoint of megatron_lengen")
    try:
        description = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise BadInput(f"{path}: damaged ({error})") from error
    found = description.get("format") if isinstance(description, dict) else None
    require(found == FORMAT, f"{path}: format {found}; allowed: {FORMAT}")
    require(isinstance(description.get("model"), dict), f"{path}: no model settings inside")
    return description


def read_metadata(folder: Path) -> Metadata:
    """What tensors an iteration's folder holds, its files checked to be as long as they must be.

    Raises:
        BadInput: one line naming the file that is missing, damaged or cut short.
    """
    read_description(folder)
    try:
        metadata = FileSystemReader(folder).read_metadata()
    except Exception as error:
        raise BadInput(f"{folder / '.metadata'}: missing or damaged; not a checkpoint") from error
    needed: dict[str, int] = {}
    for entry in (metadata.storage_data or {}).values():
        end = entry.offset + entry.length
        needed[entry.relative_path] = max(end, needed.get(entry.relative_path, 0))
    for name, size in sorted(needed.items()):
        path = folder / name
        require(path.exists(), f"{path}: missing; the checkpoint is incomplete")
        found = path.stat().st_size
        require(found >= size, f"{path}: cut short ({found} of {size} bytes)")
    return metadata


# ---- writing -------------------------------------------------------------------------------------


def partial_folder(root: str | Path, iteration: int) -> Path:
    """Where an iteration is written until it is complete."""
    return Path(root) / f".partial_{iteration_folder(root, iteration).name}"


def write_description(folder: Path, description: dict[str, Any]) -> None:
    """Write `lengen.json`; the format's number is added."""
    text = json.dumps({"format": FORMAT, **description}, indent=2)
    (folder / DESCRIPTION).write_text(text + "\n", encoding="utf-8")


def start_partial(root: str | Path, iteration: int) -> None:
    """Make the empty folder to write into; leftovers of a killed save are removed."""
    partial = partial_folder(root, iteration)
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)


def publish(root: str | Path, iteration: int) -> None:
    """Give a complete folder its name, then point the tracker at it: both atomic, in this order."""
    partial, target = partial_folder(root, iteration), iteration_folder(root, iteration)
    if target.exists():
        # The same iteration saved again, after a resume from an older one.
        shutil.rmtree(_retired(target), ignore_errors=True)
        os.replace(target, _retired(target))
    os.replace(partial, target)
    write_tracker(root, str(iteration))
    shutil.rmtree(_retired(target), ignore_errors=True)


def _retired(folder: Path) -> Path:
    """Where a folder waits while its successor takes its place."""
    return folder.with_name(f".retired_{folder.name}")


def write_tracker(root: str | Path, text: str) -> None:
    """Replace the tracker file atomically."""
    tracker = Path(root) / TRACKER
    temporary = tracker.with_suffix(".tmp")
    with open(temporary, "w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, tracker)
