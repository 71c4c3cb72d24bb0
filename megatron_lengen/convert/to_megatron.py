"""Hugging Face folder or hub id -> `SAVE/release/`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatron_lengen.config import LengenConfig, config_from_architecture
from megatron_lengen.convert.families import family_named, family_of
from megatron_lengen.convert.family import Family
from megatron_lengen.convert.hf_folder import HFFolder, fetch_folder
from megatron_lengen.convert.lengen import is_foreign
from megatron_lengen.convert.loading import (
    load_hf_fp32,
    load_state_dict_as_hf,
    quiet_transformers,
)
from megatron_lengen.convert.mapping import Rule, pad_vocabulary
from megatron_lengen.convert.reader import open_checkpoint
from megatron_lengen.convert.stream import Pace
from megatron_lengen.convert.to_hf import VOCABULARY_TABLES, chosen_dtype
from megatron_lengen.convert.tokens import ID_KEYS, importer, stored_generation_config
from megatron_lengen.convert.verify import Theirs, Verified, verify_models
from megatron_lengen.convert.writer import write_release
from megatron_lengen.errors import BadInput, require


def hf_to_checkpoint(
    load: str | Path,
    save: str | Path,
    *,
    revision: str | None = None,
    dtype: str = "keep",
    settings: Mapping[str, Any] | None = None,
    verify: bool = True,
    force: bool = False,
    family: str | None = None,
    renames: Mapping[str, str] | None = None,
    trust_remote_code: bool = False,
    pace: Pace | None = None,
    report: Callable[[str], None] = print,
) -> Verified | None:
    """Write a Hugging Face model as a checkpoint from which training starts at iteration 0.

    Args:
        load: folder or hub id.
        save: checkpoint folder; `release/` and the tracker file are written into it.
        revision: branch, tag or commit of a hub id.
        dtype: `keep`, `bf16` or `fp32`.
        settings: configuration keys of Hugging Face to change on the way.
        verify: compare logits with Hugging Face's model before publishing.
        force: replace an existing `release/`.
        family: source family; the configuration's `model_type` if None.
        renames: text to replace in names of tensors, for checkpoints whose names differ.
        trust_remote_code: run the code that a model of somebody else's brings, to compare with it.
        pace: threads and progress bar; one and none by default.
        report: receives lines for the user.

    Returns:
        What the verification measured, None if it was off.

    Raises:
        BadInput: for anything that cannot be read, written or represented.
        VerificationError: if the two models differ; nothing is published then.
    """
    folder = HFFolder(fetch_folder(load, revision), renames)
    source = _Source(folder, dtype, dict(settings or {}), family)
    require(
        trust_remote_code or not verify or not source.foreign,
        f"to-megatron: only the code in {load} can say whether the conversion is right; allowed: "
        "--trust-remote-code to run it, or --no-verify",
    )
    results: list[Verified] = []
    metas = source.metas()

    def check(folder: Path) -> None:
        written = open_checkpoint(folder)

        def tensor(key: str) -> Tensor:
            stored = written.read(key)
            return pad_vocabulary(stored, source.config) if key in VOCABULARY_TABLES else stored

        results.append(
            verify_models(
                source.config,
                source.family,
                tensor,
                source.theirs(),
                sum(meta.numel() for meta in metas.values()),
                foreign=source.foreign,
            )
        )

    details = {
        "source": {
            "name": _public_name(load, revision),
            "family": source.family.name,
            "token_ids": source.token_ids,
            "generation_config": source.generation_config(dict(settings or {})),
        }
    }
    written = write_release(
        save,
        source.config,
        metas,
        source.tensor,
        write_tokenizer=importer(source.folder.folder),
        check=check if verify else None,
        details=details,
        force=force,
        pace=pace,
    )
    if results:
        report(f"verified: {results[0]}")
    report(f"{load} -> {written} ({source.family.name})")
    return results[0] if results else None


def read_as_ours(load: str | Path) -> tuple[dict[str, Any], Callable[[str], Tensor]]:
    """A Hugging Face model as one of ours, without writing it.

    Returns:
        Its architecture (`config.config_from_architecture`), and the full tensor for a checkpoint
        key.

    Raises:
        BadInput: for anything that cannot be read or represented.
    """
    source = _Source(HFFolder(fetch_folder(load)), "keep", {}, None)
    return source.config.architecture(), source.tensor


class _Source:
    """A Hugging Face folder seen as one of our models."""

    def __init__(
        self, folder: HFFolder, dtype: str, settings: dict[str, Any], family: str | None
    ) -> None:
        self.folder = folder
        self._dtype = chosen_dtype(dtype)
        raw = folder.raw_config
        self.family: Family = family_named(family) if family else family_of(raw)
        self.family.check_source(raw, settings)
        self.foreign = is_foreign(raw)
        folder.rename(self.family.renames(raw))
        self._stock = self.family.in_their_terms(raw) is None
        effective = understood_config(folder.folder, self.family, raw)
        self._was_tied = bool(effective["tie_word_embeddings"])
        self._hf = self.family.apply(effective, settings)
        self._changes = {k: v for k, v in self._hf.items() if v != effective.get(k)}
        self.config: LengenConfig = config_from_architecture(self.family.architecture(self._hf))
        reason = self.family.objection(self.config)
        require(reason is None, f"to-megatron: {self.family.name} does not have {reason}")
        rules = self.family.tensor_rules(self.config)
        self._rules: dict[str, Rule] = {key: rule for rule in rules for key in rule.ours}
        self._rule_of: dict[str, Rule] = {name: rule for rule in rules for name in rule.theirs}
        self._check_names()
        self._check_dtypes()
        self.token_ids = {key: self._hf.get(key) for key in ID_KEYS}

    def metas(self) -> dict[str, Tensor]:
        """Shape and dtype of every tensor of ours."""
        out: dict[str, Tensor] = {}
        for key, rule in self._rules.items():
            if key not in out:
                out.update(self._converted(rule, self.folder.meta))
        return out

    def tensor(self, key: str) -> Tensor:
        """Our full tensor for a checkpoint key."""
        rule = self._rules[key]
        rows = rule.rows_of(key, self.config)
        if rows is None:
            return self._converted(rule, self.folder.read)[key]
        return rule.cast(self.folder.read_rows(self._stored(rule.theirs[0]), *rows), self._dtype)

    def generation_config(self, settings: dict[str, Any]) -> dict[str, Any] | None:
        """The folder's, with the ids of the user."""
        stored = stored_generation_config(self.folder.folder)
        chosen = {key: settings[key] for key in ID_KEYS if key in settings}
        return None if stored is None else {**stored, **chosen}

    def theirs(self) -> Theirs:
        """Hugging Face's own reading of the folder, with the settings and dtype of the user."""
        if self.foreign:
            return Theirs(self._load_with_its_code, None, (), self._their_tensor)
        names = set(self._rule_of)

        def build() -> Any:
            model_class = self.family.model_class()
            return model_class(model_class.config_class.from_dict(dict(self._hf)))

        return Theirs(self._load, build, names, self._their_tensor)

    def _load(self) -> tuple[Any, dict[str, Any]]:
        model_class = self.family.model_class()
        if self._dtype is None and not self._changes and self._stock:
            return load_hf_fp32(self.folder.folder, model_class)
        names = list(self._rule_of)
        tensors = {name: self._their_tensor(name).float() for name in names}
        architectures = self._hf.get("architectures") or self.folder.raw_config["architectures"]
        hf = {**self._hf, "architectures": architectures, "dtype": "float32"}
        return load_state_dict_as_hf(hf, tensors, model_class)

    def _their_tensor(self, name: str) -> Tensor:
        tensor = self.folder.read(self._stored(name))
        return self._rule_of[name].cast(tensor, self._dtype)

    def _converted(self, rule: Rule, read: Callable[[str], Tensor]) -> dict[str, Tensor]:
        tensors = [rule.cast(read(self._stored(name)), self._dtype) for name in rule.theirs]
        return rule.to_ours(tensors, self.config)

    def _load_with_its_code(self) -> tuple[Any, dict[str, Any]]:
        from transformers import AutoConfig, AutoModelForCausalLM

        with quiet_transformers():
            config = AutoConfig.from_pretrained(self.folder.folder, trust_remote_code=True)
            for name, value in self._changes.items():
                setattr(config, name, value)
            return AutoModelForCausalLM.from_pretrained(
                self.folder.folder,
                config=config,
                dtype=torch.float32,
                trust_remote_code=True,
                output_loading_info=True,
            )

    def _stored(self, name: str) -> str:
        """Where a tensor lies; the head of a tied model that gets untied is its embedding."""
        return self.family.embedding if name == self.family.head and self._was_tied else name

    def _check_names(self) -> None:
        wanted = {self._stored(name) for name in self._rule_of}
        present = set(self.folder.names)
        missing, extra = sorted(wanted - present), sorted(present - wanted)
        unknown = f"; it has {', '.join(extra[:5])}, see --rename" if extra else ""
        require(not missing, f"{self.folder.folder}: no tensor {', '.join(missing[:5])}{unknown}")
        head, embedding = self.family.head, self.family.embedding
        if head in extra:
            same = torch.equal(self.folder.read(head), self.folder.read(embedding))
            require(
                same,
                f"{self.folder.folder}: tie_word_embeddings is true, but {head} and {embedding} "
                "differ; allowed: equal ones",
            )
            extra.remove(head)
        # Frequencies that older versions stored are computed from the configuration here.
        extra = [name for name in extra if not name.endswith("rotary_emb.inv_freq")]
        require(
            not extra,
            f"{self.folder.folder}: {self.family.name} has no place for {', '.join(extra[:5])}",
        )

    def _check_dtypes(self) -> None:
        if self._dtype is not None:
            return
        for name in self.folder.names:
            dtype = self.folder.meta(name).dtype
            if dtype not in (torch.bfloat16, torch.float32):
                raise BadInput(
                    f"--dtype keep: {name} is {dtype}; allowed: bfloat16, float32, or give "
                    "--dtype bf16 or fp32"
                )


def understood_config(folder: Path, family: Family, raw: dict[str, Any]) -> dict[str, Any]:
    """The whole configuration in Hugging Face's terms, also of a form of somebody else's.

    Args:
        raw: what `config.json` says.

    Raises:
        BadInput: if transformers refuses it, or for settings that our models do not have.
    """
    return family.in_their_terms(raw) or effective_config(folder, family)


def effective_config(folder: Path, family: Family) -> dict[str, Any]:
    """The configuration as transformers understands it, defaults of its class filled in.

    Raises:
        BadInput: if transformers refuses it.
    """
    try:
        with quiet_transformers():
            config = family.config_class().from_pretrained(folder)
    except Exception as error:
        reason = " ".join(str(error).split())[:200]
        raise BadInput(f"{folder / 'config.json'}: refused by transformers: {reason}") from error
    return config.to_dict()


def _public_name(load: str | Path, revision: str | None) -> str:
    """How the source is called in the checkpoint: a hub id, or a folder's last name."""
    name = Path(load).resolve().name if Path(load).is_dir() else str(load)
    return f"{name}@{revision}" if revision else name
