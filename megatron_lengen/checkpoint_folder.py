"""The layout of checkpoint folders: finding one, describing one, publishing one.

SAVE/latest_checkpointed_iteration.txt     the newest complete iteration, or `release`
SAVE/iter_0000010/                         Megatron's files, lengen.json, tokenizer/
"""

from __future__ import annotations

import contextlib
import io
import json
import logging
import os
import re
import secrets
import shutil
import zipfile
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, TensorStorageMetadata

from megatron_lengen.errors import BadInput, is_first_rank, require

TRACKER = "latest_checkpointed_iteration.txt"
DESCRIPTION = "lengen.json"
TOKENIZER = "tokenizer"
RELEASE = "release"
AVERAGED = "averaged"  # in lengen.json: what the weights are the mean of; also a folder of such
FORMAT = 1
_COMMON = "common.pt"
_BACKEND = "metadata.json"
_HIDDEN = re.compile(r"\.(?P<kind>partial|removed|retired)_(?P<name>iter_\d+).*")

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Found:
    """A checkpoint that can be loaded.

    Args:
        folder: the iteration's own folder.
        iteration: its iteration; 0 for a converted model.
        release: whether it holds weights only, from a conversion or an average.
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
    require(os.access(root, os.R_OK | os.X_OK), f"--load: {root} cannot be read")
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
    tracker, text = root / TRACKER, _tracked(root)
    if text is None and (root / "config.json").exists():
        there = "it is a Hugging Face folder: tools/checkpoint/convert.py to-megatron first"
    require(text is not None, f"--load: {root} has no {TRACKER} that can be read; {there}")
    assert text is not None
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
    single = os.path.exists(root / DESCRIPTION)
    readable = not root.is_dir() or os.access(root, os.R_OK | os.X_OK)
    if readable and iteration is None and not (single or _has_checkpoints(root)):
        return None
    try:
        folder = locate(root, iteration, flag="--ckpt-step")
        _check(folder)
        return _found(folder)
    except BadInput as error:
        if iteration is not None or single:
            raise
        text = _tracked(root) or ""
        for folder in _fallbacks(root, int(text) if text.isdecimal() else None):
            with contextlib.suppress(BadInput):
                _check(folder)
                if is_first_rank():
                    logger.warning("%s; loading %s instead", error, folder)
                return _found(folder)
        raise


def _has_checkpoints(root: Path) -> bool:
    return (root / TRACKER).is_file() or bool(iterations(root))


def _tracked(root: Path) -> str | None:
    """What the tracker file says; None where there is none that can be read."""
    try:
        return (root / TRACKER).read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return None


def _fallbacks(root: Path, tracked: int | None) -> Iterator[Path]:
    """Folders to try, best first, where the newest checkpoint cannot be read."""
    if tracked is not None:
        yield _retired(iteration_folder(root, tracked))
    for number in reversed(iterations(root)):
        if tracked is None or number < tracked:
            yield iteration_folder(root, number)


def _check(folder: Path) -> None:
    """Whether training can load a folder, as far as can be told without reading its tensors.

    Raises:
        BadInput: one line naming the file that is missing, damaged or cut short.
    """
    read_metadata(folder)
    try:
        with zipfile.ZipFile(folder / _COMMON) as plain:
            broken = plain.testzip()
    except (OSError, zipfile.BadZipFile) as error:
        raise BadInput(f"{folder / _COMMON}: missing or damaged ({error})") from error
    require(broken is None, f"{folder / _COMMON}: damaged ({broken})")
    try:
        json.loads((folder / _BACKEND).read_text())["sharded_backend"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise BadInput(f"{folder / _BACKEND}: missing or damaged ({error})") from error


def _is_complete(folder: Path) -> bool:
    try:
        _check(folder)
    except BadInput:
        return False
    return True


def _found(folder: Path) -> Found:
    description = read_description(folder)
    release = folder.resolve().name == RELEASE or AVERAGED in description
    return Found(folder, int(description.get("iteration", 0)), release, description)


# ---- reading -------------------------------------------------------------------------------------


def read_description(folder: Path) -> dict[str, Any]:
    """The content of `lengen.json` in an iteration's folder.

    Raises:
        BadInput: if it is missing, damaged or of another format.
    """
    path = folder / DESCRIPTION
    try:
        description = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise BadInput(f"{path}: missing; not a checkpoint of megatron_lengen") from error
    except (OSError, ValueError) as error:
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
        needed = _lengths(metadata)
    except Exception as error:  # changed bytes can unpickle into anything
        raise BadInput(f"{folder / '.metadata'}: missing or damaged; not a checkpoint") from error
    for name, size in sorted(needed.items()):
        path = folder / name
        require(path.exists(), f"{path}: missing; the checkpoint is incomplete")
        try:
            with open(path, "rb") as file:
                found = os.fstat(file.fileno()).st_size
        except OSError as error:
            raise BadInput(f"{path}: cannot be read ({error.strerror})") from error
        require(found >= size, f"{path}: cut short ({found} of {size} bytes)")
    return metadata


def _lengths(metadata: Metadata) -> dict[str, int]:
    """How long each file must be; an error of any kind where a tensor has no shape or place."""
    places = metadata.storage_data or {}
    for key, entry in metadata.state_dict_metadata.items():
        if isinstance(entry, TensorStorageMetadata):
            torch.empty(entry.size, dtype=entry.properties.dtype, device="meta")
            for chunk in entry.chunks:
                chunk.sizes.numel()
                assert MetadataIndex(key, chunk.offsets) in places
    needed: dict[str, int] = {}
    for place in places.values():
        end = place.offset + place.length
        needed[place.relative_path] = max(end, needed.get(place.relative_path, 0))
    return needed


def find_damage(folder: Path, part: int = 0, parts: int = 1) -> str | None:
    """Read the tensors of a folder and compare them with the checksums that were written.

    Args:
        part, parts: look at the part-th of so many, so that ranks can share the reading.

    Returns:
        The first file and tensor whose bytes have changed; None where all are as written.
    """
    stored = read_metadata(folder).storage_data or {}
    entries = sorted(stored.items(), key=lambda item: (item[1].relative_path, item[1].offset))
    for index, entry in entries[part::parts]:
        path = folder / entry.relative_path
        try:
            with open(path, "rb") as file:
                file.seek(entry.offset)
                broken = zipfile.ZipFile(io.BytesIO(file.read(entry.length))).testzip()
        except (OSError, zipfile.BadZipFile) as error:
            broken = str(error)
        if broken:
            return f"{path}: damaged at {index.fqn}"
    return None


# ---- writing -------------------------------------------------------------------------------------
# A folder gets a name that counts as a checkpoint only when it is complete, and loses it before
# anything in it is deleted.


def write_description(folder: Path, description: dict[str, Any]) -> None:
    """Write `lengen.json`; the format's number is added."""
    text = json.dumps({"format": FORMAT, **description}, indent=2)
    (folder / DESCRIPTION).write_text(text + "\n", encoding="utf-8")


def start_partial(root: str | Path, iteration: int) -> Path:
    """Make the empty folder to write an iteration into; leftovers of killed runs are removed.

    Its name is used once: a process that outlived its run may still write into an older one.
    """
    clean(root)
    name = f".partial_{iteration_folder(root, iteration).name}_{secrets.token_hex(4)}"
    partial = Path(root) / name
    partial.mkdir(parents=True)
    return partial


def publish(root: str | Path, iteration: int, partial: Path) -> None:
    """Give a complete folder its name, then point the tracker at it: both atomic, in this order."""
    target = iteration_folder(root, iteration)
    if target.exists():
        # The same iteration saved again, after a resume from an older one.
        _delete(_retired(target))
        os.replace(target, _retired(target))
    os.replace(partial, target)
    write_tracker(root, str(iteration))
    _delete(_retired(target))


def prune(
    root: str | Path,
    newest: int,
    keep_last: int,
    keep_every: int | None = None,
    needed: Collection[int] = (),
) -> None:
    """Remove old iterations, once a newer one is published.

    Args:
        newest: the iteration that was published; later ones, of an abandoned branch, stay.
        keep_last: how many stay that can be read, the newest included.
        keep_every: multiples of this stay too.
        needed: iterations that stay, whatever the rest says.
    """
    kept = 0
    for number in reversed(iterations(root)):
        folder = iteration_folder(root, number)
        if number > newest or not folder.exists():
            continue
        if kept < keep_last:
            kept += _is_complete(folder)
        elif number not in needed and not (keep_every and number % keep_every == 0):
            removed = folder.with_name(f".removed_{folder.name}")
            _delete(removed)
            os.replace(folder, removed)
            _delete(removed)


def clean(root: str | Path) -> None:
    """Remove what killed runs left behind, but nothing that still is a checkpoint."""
    for path in Path(root).glob(".*_iter_*"):
        match = _HIDDEN.fullmatch(path.name)
        if match and match["kind"] == "retired" and not (path.parent / match["name"]).exists():
            os.replace(path, path.parent / match["name"])  # killed before its successor had a name
        elif match:
            _delete(path)


def _retired(folder: Path) -> Path:
    """Where a folder waits while its successor takes its place."""
    return folder.with_name(f".retired_{folder.name}")


def _delete(folder: Path) -> None:
    """Delete as much as can be deleted; the next save tries again."""
    if folder.is_symlink():
        folder.unlink()
    shutil.rmtree(folder, ignore_errors=True)


def write_tracker(root: str | Path, text: str) -> None:
    """Replace the tracker file atomically."""
    tracker = Path(root) / TRACKER
    temporary = tracker.with_suffix(".tmp")
    with open(temporary, "w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, tracker)
