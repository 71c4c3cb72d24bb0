"""Checkpoint -> Hugging Face folder, or -> a transformers model in memory."""

from __future__ import annotations

import shutil
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatron_lengen.config import LengenConfig, config_from_architecture
from megatron_lengen.convert.card import model_card
from megatron_lengen.convert.families import family_for
from megatron_lengen.convert.family import Family
from megatron_lengen.convert.hf_folder import (
    CONFIG,
    DEFAULT_SHARD_BYTES,
    HFFolder,
    write_json,
)
from megatron_lengen.convert.loading import load_hf_fp32, load_state_dict_as_hf
from megatron_lengen.convert.mapping import Rule, pad_vocabulary
from megatron_lengen.convert.reader import Checkpoint, open_checkpoint
from megatron_lengen.convert.safetensors_files import ShardWriter
from megatron_lengen.convert.staging import check_target, staged_folder
from megatron_lengen.convert.stream import Job, Pace
from megatron_lengen.convert.tokens import (
    GENERATION_CONFIG,
    ID_KEYS,
    export_tokenizer,
    generation_config,
    within_vocabulary,
)
from megatron_lengen.convert.verify import Theirs, Verified, verify_models
from megatron_lengen.errors import require

DTYPES: dict[str, torch.dtype | None] = {
    "keep": None,
    "bf16": torch.bfloat16,
    "fp32": torch.float32,
}
VOCABULARY_TABLES = ("embedding.word_embeddings.weight", "output_layer.weight")


def checkpoint_to_hf(
    load: str | Path,
    save: str | Path,
    iteration: int | str | None = None,
    *,
    dtype: str = "keep",
    settings: Mapping[str, Any] | None = None,
    verify: bool = True,
    force: bool = False,
    family: str | None = None,
    max_shard_bytes: int = DEFAULT_SHARD_BYTES,
    pace: Pace | None = None,
    report: Callable[[str], None] = print,
) -> Verified | None:
    """Write a checkpoint as a Hugging Face folder that `AutoModelForCausalLM` loads.

    Args:
        load: checkpoint folder or iteration folder.
        save: the new folder; it appears when everything in it is written and verified.
        iteration: number or `release`; the latest if None.
        dtype: `keep`, `bf16` or `fp32`.
        settings: configuration keys of Hugging Face to change on the way.
        verify: compare logits with our model before publishing.
        force: replace an existing model folder.
        family: target family; found from the configuration if None.
        max_shard_bytes: size at which a new weight file begins.
        pace: threads and progress bar; one and none by default.
        report: receives lines for the user.

    Returns:
        What the verification measured, None if it was off.

    Raises:
        BadInput: for anything that cannot be read, written or represented.
        VerificationError: if the two models differ; nothing is published then.
    """
    save = Path(save)
    check_target(save, force, CONFIG)
    source = _Source(open_checkpoint(load, iteration), dtype, settings, family)
    metas = source.their_metas()
    needed = sum(meta.nbytes for meta in metas.values())
    with staged_folder(save, force, CONFIG, needed) as folder:
        write_json(folder / CONFIG, source.hf_config)
        ids = export_tokenizer(source.checkpoint.tokenizer_folder, folder)
        hf = _with_ids(source, ids, settings or {}, report)
        write_json(folder / CONFIG, hf)
        stored = source.checkpoint.info.get("source", {}).get("generation_config")
        generation = generation_config(stored, hf, settings or {})
        write_json(folder / GENERATION_CONFIG, generation)
        with ShardWriter(folder, metas, max_shard_bytes) as writer:
            (pace or Pace()).run(source.jobs(writer), "tensors")
        if source.family.code is not None:
            shutil.copyfile(source.family.code, folder / source.family.code.name)
        card = model_card(save.name, source.checkpoint.info, hf)
        (folder / "README.md").write_text(card, encoding="utf-8")
        result = None
        if verify:
            result = verify_models(
                source.config,
                source.family,
                source.our_tensor,
                _written(folder, source.family.model_class(folder)),
                sum(meta.numel() for meta in metas.values()),
            )
            report(f"verified: {result}")
    report(f"{source.checkpoint.folder} -> {save} ({source.family.name}, {source.dtypes(metas)})")
    return result


def load_checkpoint_as_hf(
    path: str | Path, iteration: int | str | None = None, *, dtype: str = "keep"
) -> Any:
    """The checkpoint as a transformers model in memory, in evaluation mode on the CPU.

    Args:
        path: checkpoint folder or iteration folder.
        iteration: number or `release`; the latest if None.
        dtype: `keep`, `bf16` or `fp32`.

    Raises:
        BadInput: if it cannot be read or no Hugging Face family represents it.
    """
    source = _Source(open_checkpoint(path, iteration), dtype, None, None)
    model, loading = load_state_dict_as_hf(
        source.hf_config, dict(source.their_tensors()), source.family.model_class()
    )
    lost = sorted(loading["missing_keys"]) + sorted(loading["unexpected_keys"])
    require(not lost, f"{source.checkpoint.folder}: not matched: {', '.join(lost[:5])}")
    return model.eval()


def _written(folder: Path, model_class: Any) -> Theirs:
    """The model in an exported folder."""
    stored = HFFolder(folder)

    def build() -> Any:
        return model_class(model_class.config_class.from_pretrained(folder))

    return Theirs(lambda: load_hf_fp32(folder, model_class), build, stored.names, stored.read)


def chosen_dtype(name: str) -> torch.dtype | None:
    """The dtype behind `--dtype`; None keeps each tensor's own.

    Raises:
        BadInput: for another word.
    """
    require(name in DTYPES, f"--dtype: found {name}; allowed: {', '.join(DTYPES)}")
    return DTYPES[name]


class _Source:
    """A checkpoint seen as a model of a family."""

    def __init__(
        self,
        checkpoint: Checkpoint,
        dtype: str,
        settings: Mapping[str, Any] | None,
        family: str | None,
    ) -> None:
        self.checkpoint = checkpoint
        self._dtype = chosen_dtype(dtype)
        config = checkpoint.config()
        source = checkpoint.info.get("source", {}).get("family")
        self.family: Family = family_for(config, family, source)
        hf = self.family.hf_config(config)
        if settings:
            hf = self.family.apply(hf, dict(settings))
            config = config_from_architecture(self.family.architecture(hf))
        self.config: LengenConfig = config
        self._rules = self.family.tensor_rules(self._stored_config(checkpoint.config(), config))
        self._rule_of = {key: rule for rule in self._rules for key in rule.ours}
        self._check_keys()
        name = self._main_dtype()
        self.hf_config = {**hf, "dtype": name, "torch_dtype": name}

    def their_tensors(self) -> Iterator[tuple[str, Tensor]]:
        """(Hugging Face name, tensor) in the chosen dtype, a rule's tensors in memory at a time."""
        for rule in self._rules:
            yield from self._converted(rule, self.checkpoint.read).items()

    def their_metas(self) -> dict[str, Tensor]:
        """Shape and dtype of every tensor of theirs."""
        out: dict[str, Tensor] = {}
        for rule in self._rules:
            out.update(self._converted(rule, self.checkpoint.meta))
        return out

    def jobs(self, writer: ShardWriter) -> list[Job]:
        """What there is to do: to write what becomes of each tensor of ours."""

        def work(rule: Rule) -> None:
            for name, part in self._converted(rule, self.checkpoint.read).items():
                writer.add(name, part)

        jobs = []
        for rule in self._rules:
            stored = [self.checkpoint.meta(name) for name in rule.ours]
            made = self._converted(rule, self.checkpoint.meta).values()
            size = max(sum(t.nbytes for t in stored), sum(t.nbytes for t in made))
            # A tensor, and what it is cast or split to.
            jobs.append(Job(partial(work, rule), size, 2 * size))
        return jobs

    def our_tensor(self, key: str) -> Tensor:
        """Our full tensor in the chosen dtype, padded for one process."""
        tensor = self._rule_of[key].cast(self.checkpoint.read(key), self._dtype)
        return pad_vocabulary(tensor, self.config) if key in VOCABULARY_TABLES else tensor

    def _stored_config(self, stored: LengenConfig, wanted: LengenConfig) -> LengenConfig:
        """The configuration whose tensors the checkpoint holds; tying cannot change on export."""
        same = (
            stored.untie_embeddings_and_output_weights == wanted.untie_embeddings_and_output_weights
        )
        require(same, "--set tie_word_embeddings: the checkpoint's own cannot be changed on export")
        return stored

    def _check_keys(self) -> None:
        extra = sorted(set(self.checkpoint.model_keys) - set(self._rule_of))
        require(
            not extra,
            f"to-hf: {self.family.name} has no place for {', '.join(extra[:5])}",
        )
        for key in self._rule_of:
            self.checkpoint.meta(key)

    def _converted(self, rule: Rule, read: Callable[[str], Tensor]) -> dict[str, Tensor]:
        tensors = [rule.cast(read(key), self._dtype) for key in rule.ours]
        return rule.to_theirs(tensors, self.config)

    def dtypes(self, metas: Mapping[str, Tensor]) -> str:
        """The types of the tensors that are written, the most frequent first."""
        sizes: Counter[str] = Counter()
        for meta in metas.values():
            sizes[str(meta.dtype).removeprefix("torch.")] += meta.numel()
        return " and ".join(name for name, _ in sizes.most_common())

    def _main_dtype(self) -> str:
        """What `dtype="auto"` loads every weight in: the most frequent, or fp32 where some must."""
        if any(rule.fp32 for rule in self._rules):
            return "float32"
        if self._dtype is not None:
            return str(self._dtype).removeprefix("torch.")
        sizes: Counter[torch.dtype] = Counter()
        for key in self._rule_of:
            meta = self.checkpoint.meta(key)
            sizes[meta.dtype] += meta.numel()
        return str(sizes.most_common(1)[0][0]).removeprefix("torch.")


def _with_ids(
    source: _Source,
    ids: Mapping[str, Any],
    settings: Mapping[str, Any],
    report: Callable[[str], None],
) -> dict[str, Any]:
    """The configuration with token ids: the user's, the imported model's, or the tokenizer's."""
    stored = source.checkpoint.info.get("source", {}).get("token_ids", {})
    wanted = {**ids, **stored}
    wanted.update({key: settings[key] for key in ID_KEYS if key in settings})
    kept = within_vocabulary(wanted, source.config.vocab_size)
    for key in ID_KEYS:
        if wanted.get(key) != kept[key]:
            report(f"{key} {wanted[key]} is outside of the vocabulary: written as {kept[key]}")
    return {**source.hf_config, **kept}
