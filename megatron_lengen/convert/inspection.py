"""What a checkpoint or a Hugging Face folder holds, as plain values and as text."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from megatron_lengen import checkpoint_folder
from megatron_lengen.checkpoint_folder import AVERAGED, RELEASE, TRACKER
from megatron_lengen.convert.reader import Checkpoint
from megatron_lengen.convert.stored import StoredCheckpoint, StoredFolder, StoredModel
from megatron_lengen.convert.to_hf import VOCABULARY_TABLES
from megatron_lengen.data.tokenizer import SAVED_NAME, TOKENIZER_FILES
from megatron_lengen.errors import BadInput

PIECE = 2**18  # elements that are looked at together
# The first that a name contains says what a tensor belongs to.
_PARTS = (
    ("norms", ("norm",)),
    ("embedding", ("embed",)),
    ("output layer", ("output_layer.", "lm_head.")),
    ("query scaling", ("query_scaling.", "attention_scaling.")),
    ("attention", ("self_attention.", "self_attn.")),
    ("mlp", ("mlp.",)),
    ("mixer", ("mixer.",)),
)
# Of a run's flags, by group: how it was laid out, and what it did.
_LAYOUT = {
    "model": (
        "tensor_model_parallel_size",
        "pipeline_model_parallel_size",
        "virtual_pipeline_model_parallel_size",
        "context_parallel_size",
        "sequence_parallel",
    ),
    "optimizer": ("use_distributed_optimizer",),
    "training": ("engine",),
}
_TRAINING = {
    "model": ("dropout_variant", "dropout_rate", "bf16", "seed", "seq_length"),
    "optimizer": ("lr", "min_lr", "weight_decay"),
    "training": ("global_batch_size", "train_iters", "lr_decay_style"),
}


def describe(model: StoredModel, check: bool = False) -> dict[str, Any]:
    """All that can be said of a model without looking at its numbers.

    Args:
        check: read everything and compare it with its checksums (checkpoints alone have them).
    """
    dtypes: Counter[str] = Counter()
    parts: Counter[str] = Counter()
    for name in model.names:
        count = parameters_of(model, name)
        dtypes[str(model.meta(name).dtype).removeprefix("torch.")] += count
        parts[part_of(name)] += count
    found: dict[str, Any] = {"model": model.label, "kind": model.kind}
    found |= _checkpoint(model, check) if isinstance(model, StoredCheckpoint) else _folder(model)
    return found | {
        "parameters": sum(parts.values()),
        "parts": dict(parts.most_common()),
        "dtypes": dict(dtypes.most_common()),
        "tensors": len(model.names),
        "bytes": sum(p.stat().st_size for p in model.folder.rglob("*") if p.is_file()),
    }


def parameters_of(model: StoredModel, name: str) -> int:
    """Elements of a tensor, without the rows that pad a vocabulary."""
    meta = model.meta(name)
    if isinstance(model, StoredCheckpoint) and name in VOCABULARY_TABLES:
        return meta.numel() // meta.shape[0] * model.config.vocab_size
    return meta.numel()


def part_of(name: str) -> str:
    """What a tensor belongs to, by its name in either kind of model."""
    return next((part for part, marks in _PARTS if any(m in name for m in marks)), "other")


def tensors_of(model: StoredModel, statistics: bool = False) -> Iterator[dict[str, Any]]:
    """Name, shape and dtype of every tensor; with `statistics` each one is read."""
    for name in model.names:
        meta = model.meta(name)
        row = {"name": name, "shape": list(meta.shape), "dtype": str(meta.dtype)[6:]}
        yield row | (moments(model.read(name)) if statistics else {})


def moments(tensor: Tensor) -> dict[str, Any]:
    """Mean, standard deviation and largest size of a tensor's finite elements, and how many are
    not finite; computed in float64, some elements at a time."""
    count, mean, squares, largest, bad = 0, 0.0, 0.0, 0.0, 0
    for piece in tensor.reshape(-1).split(PIECE):
        values = piece.double()
        values = values[values.isfinite()]
        bad += piece.numel() - values.numel()
        if values.numel() == 0:
            continue
        own = float(values.mean())
        shift, before = own - mean, count
        count += values.numel()
        mean += shift * values.numel() / count
        squares += float((values - own).square().sum())
        squares += shift**2 * before * values.numel() / count
        largest = max(largest, float(values.abs().max()))
    std = math.sqrt(squares / count) if count else 0.0
    return {"mean": mean, "std": std, "max": largest, "not_finite": bad}


# ---- the two kinds -------------------------------------------------------------------------------


def _checkpoint(model: StoredCheckpoint, check: bool) -> dict[str, Any]:
    checkpoint, info = model.checkpoint, model.checkpoint.info
    arguments = info.get("arguments") or {}
    training = _of(arguments, _TRAINING)
    samples = info.get("consumed_samples")
    if samples is not None and "seq_length" in training:
        training = {"samples": samples, "tokens": samples * training["seq_length"], **training}
    damage = checkpoint_folder.find_damage(model.folder) if check else None
    return {
        "iteration": info.get("iteration"),
        "iterations": iterations_in(model.folder),
        "weights only": "optimizer" not in _other_tensors(checkpoint),
        "besides the model": _other_tensors(checkpoint),
        "layout": _of(arguments, _LAYOUT),
        "training": training,
        "source": (info.get("source") or {}).get("name"),
        "averaged": [entry["name"] for entry in info.get(AVERAGED, [])],
        "tokenizer": _saved_tokenizer(checkpoint),
        "versions": {k: v for k, v in (info.get("versions") or {}).items() if v},
        "damage": damage or ("none" if check else "not looked for"),
        "settings": model.settings(),
    }


def _folder(model: StoredModel) -> dict[str, Any]:
    assert isinstance(model, StoredFolder)
    present = [name for name in TOKENIZER_FILES if (model.folder / name).is_file()]
    return {
        "model_type": model.raw_config.get("model_type"),
        "tokenizer": ", ".join(present) or None,
        "code": sorted(path.name for path in model.folder.glob("*.py")),
        "settings": model.settings(),
    }


def iterations_in(folder: Path) -> dict[str, str]:
    """The iterations beside a folder, by name: complete or what is wrong, and the newest."""
    root = folder.resolve().parent
    numbers = checkpoint_folder.iterations(root)
    folders = [checkpoint_folder.iteration_folder(root, number) for number in numbers]
    folders += [root / RELEASE] if (root / RELEASE).is_dir() else []
    tracker = root / TRACKER
    text = tracker.read_text(errors="replace").strip() if tracker.is_file() else ""
    newest = checkpoint_folder.iteration_folder(root, text).name if text.isdecimal() else text
    found = {}
    for path in folders:
        try:
            checkpoint_folder.read_metadata(path)
            found[path.name] = "the newest" if path.name == newest else "complete"
        except BadInput as error:
            found[path.name] = str(error).removeprefix(f"{path}/")
    return found


def _other_tensors(checkpoint: Checkpoint) -> dict[str, int]:
    """Bytes of what is not the model, by the first part of its name."""
    sizes: Counter[str] = Counter()
    own = set(checkpoint.model_keys)
    for key, entry in checkpoint.metadata.state_dict_metadata.items():
        if key not in own and isinstance(entry, TensorStorageMetadata):
            width = torch.empty((), dtype=entry.properties.dtype).element_size()
            sizes[key.split(".")[0]] += math.prod(entry.size) * width
    if (checkpoint.folder / "deepspeed").is_dir():
        files = (checkpoint.folder / "deepspeed").iterdir()
        sizes["optimizer"] += sum(path.stat().st_size for path in files)
    return dict(sizes)


def _saved_tokenizer(checkpoint: Checkpoint) -> str | None:
    folder = checkpoint.tokenizer_folder
    if folder is None or not (folder / SAVED_NAME).is_file():
        return None
    note = json.loads((folder / SAVED_NAME).read_text(encoding="utf-8"))
    return f"{note['type']}, {note['vocab_size']} ids"


def _of(arguments: Mapping[str, Any], wanted: Mapping[str, tuple[str, ...]]) -> dict[str, Any]:
    """Some of a run's flags, where the checkpoint has them."""
    return {
        name: arguments[group][name]
        for group, names in wanted.items()
        for name in names
        if name in (arguments.get(group) or {})
    }


# ---- text ----------------------------------------------------------------------------------------


def as_text(found: Mapping[str, Any]) -> str:
    """A description for people: what has no value is left out, and so are the settings."""
    lines = []
    for key, value in found.items():
        if value in (None, [], {}, "") or key == "settings":
            continue
        if key in ("bytes", "parameters"):
            value = f"{value:,}"
        elif key in ("parts", "dtypes", "besides the model"):
            unit = " bytes" if key == "besides the model" else ""
            value = ", ".join(f"{name} {number:,}{unit}" for name, number in value.items())
        elif isinstance(value, Mapping):
            value = ", ".join(f"{k} {v}" for k, v in value.items() if v is not None)
        elif isinstance(value, list):
            value = ", ".join(map(str, value))
        lines.append(f"{key + ':':<19}{value}")
    return "\n".join(lines)


def table(rows: list[dict[str, Any]]) -> str:
    """Rows with the same keys as columns of text."""
    if not rows:
        return ""
    cells = [list(rows[0]), *([_cell(value) for value in row.values()] for row in rows)]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    lines = ("  ".join(map(str.ljust, row, widths)).rstrip() for row in cells)
    return "\n".join(lines)


def _cell(value: Any) -> str:
    if isinstance(value, list):
        return "x".join(map(str, value)) or "-"
    return f"{value:.4g}" if isinstance(value, float) else str(value)
