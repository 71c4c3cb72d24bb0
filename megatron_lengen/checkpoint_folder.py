"""The layout of checkpoint folders: finding one, describing one, publishing one.

    SAVE/latest_checkpointed_iteration.txt     the newest complete iteration, or `release`
    SAVE/iter_0000010/                         Megatron's files, lengen.json, tokenizer/
"""

from __future__ import annotations

import json
import os
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_lengen.errors import BadInput, require

TRACKER = "latest_checkpointed_iteration.txt"
DESCRIPTION = "lengen.json"
TOKENIZER = "tokenizer"
RELEASE = "release"
FORMAT = 1


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


def iteration_folder(root: str | Path, iteration: int) -> Path:
    """The folder of an iteration."""
    return Path(root) / f"iter_{iteration:07d}"


def find(root: str | Path, iteration: int | None = None) -> Found | None:
    """The newest complete checkpoint under `root`, or the one of a given iteration.

    Returns:
        None where there is no tracker file and no iteration was asked for.

    Raises:
        BadInput: for a tracker or a folder that cannot be read.
    """
    root = Path(root)
    if iteration is None:
        tracker = root / TRACKER
        if not tracker.is_file():
            return None
        text = tracker.read_text().strip()
        if text == RELEASE:
            return _open(root / RELEASE, 0, release=True)
        require(
            text.isdigit(), f"{tracker}: found {text!r}; allowed: an iteration, or {RELEASE}"
        )
        iteration = int(text)
    return _open(iteration_folder(root, iteration), iteration, release=False)


def _open(folder: Path, iteration: int, release: bool) -> Found:
    description = folder / DESCRIPTION
    require(folder.is_dir(), f"checkpoint: {folder} does not exist")
    require(description.is_file(), f"checkpoint: {description} is missing")
    try:
        contents = json.loads(description.read_text())
    except json.JSONDecodeError as error:
        raise BadInput(f"checkpoint: {description} is not valid JSON ({error})") from error
    require(
        contents.get("format") == FORMAT,
        f"checkpoint: {description} has format {contents.get('format')}; allowed: {FORMAT}",
    )
    return Found(folder, iteration, release, contents)


def partial_folder(root: str | Path, iteration: int) -> Path:
    """Where an iteration is written until it is complete."""
    return Path(root) / f".partial_{iteration_folder(root, iteration).name}"


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
        retired = target.with_name(f".retired_{target.name}")
        shutil.rmtree(retired, ignore_errors=True)
        os.replace(target, retired)
        os.replace(partial, target)
        shutil.rmtree(retired, ignore_errors=True)
    else:
        os.replace(partial, target)
    write_tracker(root, str(iteration))


def write_tracker(root: str | Path, text: str) -> None:
    """Replace the tracker file atomically."""
    tracker = Path(root) / TRACKER
    temporary = tracker.with_suffix(".tmp")
    with open(temporary, "w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, tracker)
