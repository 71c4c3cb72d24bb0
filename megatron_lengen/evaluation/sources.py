"""Where a model comes from: a Megatron checkpoint, a Hugging Face folder or a hub id.

Nothing here imports torch, so that a tool can find its finished results in a moment.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_lengen.errors import BadInput, require

_TRACKER = "latest_checkpointed_iteration.txt"
_SAMPLE_BYTES = 1 << 20


@dataclass(frozen=True)
class ModelSource:
    """A model that was found, not loaded."""

    kind: str
    """`megatron`, `huggingface` (a folder) or `hub`."""

    name: str
    """What transformers or the checkpoint reader is given: a folder or a hub id."""

    folder: Path | None = None
    """Folder with the weights and the tokenizer; None for a hub id."""

    iteration: int | str | None = None
    """Iteration of a Megatron checkpoint, or `release`."""

    revision: str | None = None
    """Revision of a hub id."""

    def identity(self) -> dict[str, object]:
        """What tells this model from others, as JSON values: place, iteration, content."""
        return {
            "kind": self.kind,
            "name": self.name,
            "iteration": self.iteration,
            "revision": self.revision,
            "fingerprint": fingerprint(_files_in(self.folder)) if self.folder else None,
        }


def find_model(
    model: str, iteration: int | None = None, revision: str | None = None
) -> ModelSource:
    """The model that `--model` names.

    Args:
        model: a checkpoint (all of a run, or one iteration), a Hugging Face folder, a hub id.
        iteration: which iteration of a checkpoint; the latest if None.
        revision: which revision of a hub id.

    Raises:
        BadInput: if there is none, naming what was looked for.
    """
    path = Path(model)
    if (path / _TRACKER).is_file() or (path / "lengen.json").is_file():
        require(revision is None, "--revision: only for hub ids; a checkpoint has --iteration")
        return _find_checkpoint(path, iteration)
    require(iteration is None, f"--iteration: {model} is not a Megatron checkpoint")
    if (path / "config.json").is_file():
        require(revision is None, "--revision: only for hub ids")
        return ModelSource("huggingface", str(path), path)
    if not path.exists() and re.fullmatch(r"[\w.-]+(/[\w.-]+)?", model):
        return ModelSource("hub", model, revision=revision)
    raise BadInput(
        f"--model: found {model}; allowed: a Hugging Face folder (with config.json), a Megatron "
        f"checkpoint (with {_TRACKER}), or a hub id"
    )


def _find_checkpoint(path: Path, iteration: int | None) -> ModelSource:
    if not (path / _TRACKER).is_file():
        match = re.fullmatch(r"iter_(\d+)|release", path.resolve().name)
        if match is None:
            raise BadInput(f"--model: found {path}; allowed: iter_NNNNNNN or release folders")
        found: int | str = int(match[1]) if match[1] else "release"
        require(
            iteration is None or iteration == found,
            f"--iteration: found {iteration}; {path} holds {found}",
        )
        return ModelSource("megatron", str(path.resolve().parent), path, found)
    if iteration is None:
        text = (path / _TRACKER).read_text(encoding="utf-8").strip()
        require(
            text == "release" or text.isdigit(),
            f"{path / _TRACKER}: found {text!r}; allowed: a number or release",
        )
        latest: int | str = text if text == "release" else int(text)
    else:
        latest = iteration
    name = "release" if latest == "release" else f"iter_{latest:07d}"
    folder = path / name
    if not (folder / "lengen.json").is_file():
        present = sorted(p.parent.name for p in path.glob("*/lengen.json"))
        raise BadInput(f"--model: no {name} in {path}; present: {', '.join(present) or 'none'}")
    return ModelSource("megatron", str(path), folder, latest)


def training_length(source: ModelSource) -> int | None:
    """Tokens in a training row, where the checkpoint says so."""
    return _training_setting(source, "model", "seq_length")


def copy_lengths(source: ModelSource) -> str | None:
    """MIN-MAX of --copy-task, where the checkpoint was trained with it."""
    return _training_setting(source, "training", "copy_task")


def _training_setting(source: ModelSource, group: str, name: str) -> Any:
    if source.kind != "megatron" or source.folder is None:
        return None
    stored = json.loads((source.folder / "lengen.json").read_text(encoding="utf-8"))
    return (stored.get("arguments") or {}).get(group, {}).get(name)


def _files_in(folder: Path) -> list[Path]:
    """Files directly in a model's folder; results may be kept in folders below it."""
    return sorted(path for path in folder.iterdir() if path.is_file())


def fingerprint(paths: Iterable[Path | str]) -> str:
    """A short hash of files' names, sizes and samples of their content.

    Large files are sampled at their beginning, middle and end: enough to tell two trained models
    apart, and quick on any size. Folders are walked.
    """
    digest = hashlib.sha256()
    for path in map(Path, paths):
        files = sorted(p for p in path.rglob("*") if p.is_file()) if path.is_dir() else [path]
        for file in files:
            size = file.stat().st_size
            digest.update(f"{file.relative_to(path) if path.is_dir() else ''}:{size};".encode())
            with open(file, "rb") as handle:
                for start in sorted({0, max(0, size // 2), max(0, size - _SAMPLE_BYTES)}):
                    handle.seek(start)
                    digest.update(handle.read(_SAMPLE_BYTES))
    return digest.hexdigest()[:16]
