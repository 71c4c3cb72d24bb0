"""The tokenizer of a converted model, and the ids that a Hugging Face configuration names."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from megatron_lengen.convert.loading import quiet_transformers
from megatron_lengen.data.tokenizer import (
    SAVED_NAME,
    TOKENIZER_FILES,
    TOKENIZER_PATTERNS,
    build_tokenizer,
    load_saved,
)
from megatron_lengen.errors import BadInput

GENERATION_CONFIG = "generation_config.json"
ID_KEYS = ("bos_token_id", "eos_token_id", "pad_token_id")


def export_tokenizer(saved: Path | None, folder: Path) -> dict[str, int | None]:
    """Write what `AutoTokenizer` needs into a Hugging Face folder that has its `config.json`.

    Args:
        saved: the checkpoint's `tokenizer/`, or None.
        folder: the Hugging Face folder.

    Returns:
        The ids under `ID_KEYS`; None where the tokenizer has none.

    Raises:
        BadInput: if the files no longer give the tokenizer that was saved.
    """
    ids: dict[str, int | None] = dict.fromkeys(ID_KEYS)
    if saved is None or not (saved / SAVED_NAME).exists():
        return ids
    if not load_saved(saved).save_for_huggingface(folder):
        note = json.loads((saved / SAVED_NAME).read_text(encoding="utf-8"))
        return {**ids, "eos_token_id": note["eod"]}
    from transformers import AutoTokenizer

    with quiet_transformers():
        # Said aloud, since otherwise transformers asks a person whether to run the model's code.
        tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
    return {key: getattr(tokenizer, key) for key in ID_KEYS}


def importer(folder: Path) -> Callable[[Path], None] | None:
    """A function that saves a Hugging Face folder's tokenizer, or None if it has none."""
    names = (*TOKENIZER_FILES, *TOKENIZER_PATTERNS)
    if not any(path.is_file() for name in names for path in folder.glob(name)):
        return None
    return build_tokenizer(folder).save


def stored_generation_config(folder: Path) -> dict[str, Any] | None:
    """What a Hugging Face folder says about generation, if it does.

    Raises:
        BadInput: for a file that is damaged.
    """
    path = folder / GENERATION_CONFIG
    if not path.exists():
        return None
    try:
        return dict(json.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError) as error:
        raise BadInput(f"{path}: damaged ({error})") from error


def generation_config(
    stored: Mapping[str, Any] | None, hf: Mapping[str, Any], settings: Mapping[str, Any]
) -> dict[str, Any]:
    """What an exported folder says about generation.

    Args:
        stored: of the model that training began with; kept as it is.
        hf: the exported configuration, whose ids are added where none are stored.
        settings: the user's; its ids count before the stored ones.
    """
    out = dict(stored or {})
    ids = {**hf, **out, **{key: settings[key] for key in ID_KEYS if key in settings}}
    for key, value in within_vocabulary(ids, hf["vocab_size"]).items():
        if value is not None:
            out[key] = value
        elif out.get(key) is not None:
            del out[key]
    return out


def within_vocabulary(ids: Mapping[str, Any], vocab_size: int) -> dict[str, Any]:
    """The ids under `ID_KEYS`, with None in place of those that the model cannot emit.

    `eos_token_id` may be a list, as Hugging Face allows.
    """
    out: dict[str, Any] = {}
    for key in ID_KEYS:
        value = ids.get(key)
        if isinstance(value, list):
            out[key] = [i for i in value if 0 <= i < vocab_size] or None
        else:
            out[key] = value if value is not None and 0 <= value < vocab_size else None
    return out
