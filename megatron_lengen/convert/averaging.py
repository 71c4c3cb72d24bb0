"""The mean of several checkpoints' weights (the paper's appendix D.3), one tensor at a time.

Sums are float64 and rounded once, so the mean of equal models is that model bit for bit. Memory
holds one tensor of one model and its sum.
"""

from __future__ import annotations

import math
import shutil
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatron_lengen import checkpoint_folder
from megatron_lengen.convert.hf_folder import CONFIG, DEFAULT_SHARD_BYTES, write_json
from megatron_lengen.convert.mamba2 import OF_HEADS
from megatron_lengen.convert.safetensors_files import ShardWriter
from megatron_lengen.convert.staging import check_target, staged_folder
from megatron_lengen.convert.stored import (
    StoredCheckpoint,
    StoredFolder,
    StoredModel,
    is_checkpoint,
    open_model,
    revisions_of,
)
from megatron_lengen.convert.stream import Job, Pace
from megatron_lengen.convert.to_hf import GENERATION_CONFIG, chosen_dtype
from megatron_lengen.convert.writer import write_release
from megatron_lengen.data.tokenizer import TOKENIZER_FILES, TOKENIZER_PATTERNS
from megatron_lengen.errors import BadInput, require

_PIECE = 2**18  # elements that are summed at a time: few enough to stay in a cache
_STAYS = tuple(f"mixer.{name}" for name in OF_HEADS)
_TRAVELS = (CONFIG, GENERATION_CONFIG, "*.py", "LICENSE*", "NOTICE*")


def average(
    loads: Sequence[str],
    save: str | Path,
    *,
    last: int | None = None,
    iterations: Sequence[int] | None = None,
    weights: Sequence[float] | None = None,
    decay: float | None = None,
    dtype: str = "keep",
    force: bool = False,
    report: Callable[[str], None] = print,
) -> Path:
    """Write the mean of several models of one architecture.

    Args:
        loads: a run with `last` or `iterations`, or several models: iterations, Hugging Face
            folders, hub ids with revisions (`ID@R1,R2`); the oldest first.
        save: of checkpoints, a folder that gets a `release/`; else a new Hugging Face folder.
        last: so many of the newest iterations.
        iterations: these iterations.
        weights: one for each model; they are divided by their sum, which must be above 0.
        decay: weights D^age instead, the last model's being 1.
        dtype: `keep`, `bf16` or `fp32`, of the tensors that are written.
        force: replace what an earlier run wrote.
        report: receives lines for the user.

    Returns:
        The folder with the mean.

    Raises:
        BadInput: in one line; nothing is written then.
    """
    chosen = chosen_dtype(dtype)
    places = _places(loads, last, iterations)
    shares = shares_of(len(places), weights, decay)
    save = Path(save)
    of_checkpoints = is_checkpoint(places[0][0])
    _check_save(save, places, of_checkpoints, force)
    mean = Mean([open_model(*place) for place in places], shares, chosen)
    if of_checkpoints:
        folder = _write_checkpoint(mean, save, force)
    else:
        folder = _write_folder(mean, save, force)
    for entry in mean.described():
        report(f"{entry['share']:.4f} {entry['name']}")
    report(f"mean of {len(places)} models -> {folder}")
    return folder


class Mean:
    """The weighted mean of models, one tensor at a time.

    Args:
        models: of one architecture.
        shares: how much each counts, adding up to something above 0.
        dtype: of what is given out; each tensor's own if None.

    Raises:
        BadInput: if two of the models differ in more than their numbers.
    """

    def __init__(
        self,
        models: Sequence[StoredModel],
        shares: Sequence[float],
        dtype: torch.dtype | None = None,
    ) -> None:
        self.models, self._shares, self._dtype = models, shares, dtype
        for other in models[1:]:
            _require_same(models[0], other)
        self.names = models[-1].names

    def meta(self, name: str) -> Tensor:
        """Shape and dtype of a tensor of the mean, on the meta device."""
        meta = self.models[-1].meta(name)
        if not meta.is_floating_point() or self._dtype is None or name.endswith(_STAYS):
            return meta
        return meta.to(self._dtype)

    def read(self, name: str) -> Tensor:
        """The mean of a tensor on the CPU; of whole numbers the last model's.

        Raises:
            BadInput: if one of the models' is damaged or not finite, or the mean is too large.
        """
        meta = self.meta(name)
        if not meta.is_floating_point():
            return self.models[-1].read(name)
        # Adding to -0.0 leaves every number as it is, zeros of either sign too.
        total = torch.full((meta.numel(),), -0.0, dtype=torch.float64)
        for model, share in zip(self.models, self._shares, strict=True):
            _add(total, model.read(name).reshape(-1), share)
        mean = total.div_(math.fsum(self._shares)).to(meta.dtype)
        if not _is_finite(mean):
            for model in self.models:
                finite = _is_finite(model.read(name).reshape(-1))
                require(finite, f"--load: {model.label}: {name} has numbers that are not finite")
            raise BadInput(f"--weights: the mean of {name} does not fit into {meta.dtype}")
        return mean.view(meta.shape)

    def described(self) -> list[dict[str, Any]]:
        """What the mean is made of, for people and files."""
        total = math.fsum(self._shares)
        pairs = zip(self.models, self._shares, strict=True)
        return [{"name": model.name, "share": share / total} for model, share in pairs]

    @property
    def dtype_name(self) -> str | None:
        """What a `config.json` has to say of the dtype that was asked for, if one was.

        It is what loaders make of every tensor, so fp32 where some must stay it.
        """
        if self._dtype is None:
            return None
        stays = any(name.endswith(_STAYS) for name in self.names)
        return "float32" if stays else str(self._dtype).removeprefix("torch.")


def _add(total: Tensor, values: Tensor, share: float) -> None:
    """total += share * values, in place; products and sums are float64."""
    for part, piece in zip(total.split(_PIECE), values.split(_PIECE), strict=True):
        part.add_(piece.double(), alpha=share)


def _is_finite(values: Tensor) -> bool:
    # As float64, since not every type of 8 bits can be asked.
    return all(bool(piece.double().isfinite().all()) for piece in values.split(_PIECE))


def shares_of(
    count: int, weights: Sequence[float] | None = None, decay: float | None = None
) -> list[float]:
    """How much each of so many models counts, not yet divided by their sum.

    Raises:
        BadInput: for weights or a decay that cannot be.
    """
    require(weights is None or decay is None, "--weights and --exponential: found both")
    if decay is not None:
        require(0 < decay <= 1, f"--exponential: found {decay:g}; allowed: above 0 to 1")
        return [decay**age for age in reversed(range(count))]
    if weights is None:
        return [1.0] * count
    listed = ",".join(f"{weight:g}" for weight in weights)
    require(len(weights) == count, f"--weights: found {listed}; allowed: one for each of {count}")
    largest = max(map(abs, weights), default=0.0)
    good = math.isfinite(largest) and largest > 0
    # In parts of the largest: neither their sum nor a product leaves the range of numbers.
    shares = [weight / largest for weight in weights] if good else []
    good = good and math.fsum(shares) > 0
    require(good, f"--weights: found {listed}; allowed: numbers whose sum is above 0")
    return shares


# ---- which models --------------------------------------------------------------------------------


def _places(
    loads: Sequence[str], last: int | None, iterations: Sequence[int] | None
) -> list[tuple[str, int | None]]:
    """(what to open, iteration or None) for each model; nothing is downloaded."""
    require(last is None or iterations is None, "--last and --iterations: found both")
    if last is not None or iterations is not None:
        flag = "--last" if iterations is None else "--iterations"
        require(len(loads) == 1, f"{flag}: needs one --load; found {len(loads)}")
        (root,) = loads
        require(is_checkpoint(root), f"{flag}: needs a checkpoint; --load is {root}")
        chosen = newest(root, last or 0) if iterations is None else sorted(iterations)
        require(bool(chosen), "--iterations: found none; allowed: numbers as in 100,200")
        once = len(set(chosen)) == len(chosen)
        require(once, f"{flag}: found {','.join(map(str, chosen))}; allowed: each of them once")
        return [(root, number) for number in chosen]
    places: list[tuple[str, int | None]] = []
    for load in loads:
        name, *revisions = revisions_of(load)
        places += [(f"{name}@{revision}", None) for revision in revisions] or [(name, None)]
    require(
        len(places) > 1,
        f"--load: found {loads[0]} alone; allowed: a checkpoint with --last K or --iterations "
        "A,B,C, or several models",
    )
    kinds = [is_checkpoint(place) for place, _ in places]
    if len(set(kinds)) > 1:
        first, other = places[0][0], places[kinds.index(not kinds[0])][0]
        raise BadInput(f"--load: found {first} and {other}; allowed: models of one kind")
    return places


def newest(root: str | Path, count: int) -> list[int]:
    """So many of a run's newest iterations, none after the one that its tracker names.

    Raises:
        BadInput: if there are fewer, saying which.
    """
    require(count >= 1, f"--last: found {count}; allowed: 1 or more")
    tracked = checkpoint_folder.locate(root).name
    present = checkpoint_folder.iterations(root)
    if tracked != checkpoint_folder.RELEASE:
        present = [n for n in present if n <= int(tracked.removeprefix("iter_"))]
    listed = ", ".join(checkpoint_folder.iteration_folder(root, n).name for n in present)
    require(
        len(present) >= count,
        f"--last: found {count}; {root}: there: {listed or 'no iterations'}",
    )
    return present[-count:]


def _require_same(one: StoredModel, other: StoredModel) -> None:
    """Refuse two models that differ in more than their numbers, naming the first difference."""

    def refuse(what: str, found: Any, there: Any) -> None:
        raise BadInput(
            f"--load: {one.label} and {other.label} differ in {what}: {found} and {there}"
        )

    mine, theirs = one.settings(), other.settings()
    for key in sorted({*mine, *theirs}, key=lambda key: (key != "decoder", key)):
        if mine.get(key) != theirs.get(key):
            refuse(key, mine.get(key), theirs.get(key))
    for name in sorted({*one.names} ^ {*other.names}):
        there = ("there", "missing")
        refuse(name, *(there if name in one.names else reversed(there)))
    for name in one.names:
        a, b = one.meta(name), other.meta(name)
        if (a.shape, a.dtype) != (b.shape, b.dtype):
            refuse(name, *(f"{list(t.shape)} {t.dtype}".replace("torch.", "") for t in (a, b)))


# ---- writing -------------------------------------------------------------------------------------


def _check_save(
    save: Path, places: Sequence[tuple[str, int | None]], of_checkpoints: bool, force: bool
) -> None:
    """Refuse a target before anything is downloaded or read."""
    if not of_checkpoints:
        check_target(save, force, CONFIG)
        taken = [place for place, _ in places if save.resolve() == Path(place).resolve()]
        require(not taken, f"--save: {save} is one of --load; allowed: another folder")
        return
    check_target(save, force, checkpoint_folder.TRACKER)
    require(
        not (save.is_dir() and checkpoint_folder.iterations(save)),
        f"--save: {save} holds the iterations of a run; allowed: another folder",
    )


def _write_checkpoint(mean: Mean, save: Path, force: bool) -> Path:
    """`SAVE/release/`, with tokenizer, settings and origin of the last model."""
    last = mean.models[-1]
    assert isinstance(last, StoredCheckpoint)
    info, tokenizer = last.checkpoint.info, last.checkpoint.tokenizer_folder

    def copy_tokenizer(folder: Path) -> None:
        if tokenizer is not None:
            shutil.copytree(tokenizer, folder, dirs_exist_ok=True)

    details: dict[str, Any] = {k: info[k] for k in ("source", "arguments") if k in info}
    details[checkpoint_folder.AVERAGED] = mean.described()
    metas = {name: mean.meta(name) for name in mean.names}
    _require_room(save, metas)
    return write_release(
        save,
        last.config,
        metas,
        mean.read,
        write_tokenizer=copy_tokenizer,
        details=details,
        force=force,
    )


def _write_folder(mean: Mean, save: Path, force: bool) -> Path:
    """A Hugging Face folder: the last model's files, the mean's weights, a card of its own."""
    last = mean.models[-1]
    assert isinstance(last, StoredFolder)
    metas = {name: mean.meta(name) for name in mean.names}
    _require_room(save, metas)
    with staged_folder(save, force, CONFIG) as folder:
        for pattern in (*_TRAVELS, *TOKENIZER_FILES, *TOKENIZER_PATTERNS):
            for path in last.folder.glob(pattern):
                if path.is_file():
                    target = folder / path.relative_to(last.folder)
                    target.parent.mkdir(exist_ok=True)
                    shutil.copyfile(path, target)
        with ShardWriter(folder, metas, DEFAULT_SHARD_BYTES) as writer:

            def job(name: str) -> Job:
                size = metas[name].nbytes
                return Job(lambda: writer.add(name, mean.read(name)), size, size)

            Pace().run([job(name) for name in mean.names], "tensors")
        if mean.dtype_name is not None:
            keys = [key for key in ("dtype", "torch_dtype") if key in last.raw_config]
            chosen = dict.fromkeys(keys or ["dtype"], mean.dtype_name)
            write_json(folder / CONFIG, {**last.raw_config, **chosen})
        (folder / "README.md").write_text(_card(save.name, mean), encoding="utf-8")
    return save


def _require_room(save: Path, metas: Mapping[str, Tensor]) -> None:
    """Refuse a disk that cannot hold the tensors."""
    place = next(parent for parent in save.absolute().parents if parent.exists())
    free, needed = shutil.disk_usage(place).free, sum(meta.nbytes for meta in metas.values())
    require(free > needed, f"--save: {needed / 1e9:.3g} GB needed, {free / 1e9:.3g} GB free")


def _card(title: str, mean: Mean) -> str:
    """The README.md of an averaged folder."""
    rows = [f"| `{entry['name']}` | {entry['share']:.6g} |" for entry in mean.described()]
    return "\n".join(
        [
            "---",
            "library_name: transformers",
            "pipeline_tag: text-generation",
            "tags: [megatron_lengen, checkpoint-averaging]",
            "---",
            "",
            f"# {title}",
            "",
            f"The mean of {len(rows)} models' weights, without training. Configuration and "
            "tokenizer are those of the last.",
            "",
            "| model | share |",
            "|---|---|",
            *rows,
            "",
        ]
    )
