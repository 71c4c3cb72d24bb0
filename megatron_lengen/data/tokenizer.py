"""One face for all kinds of tokenizer: Hugging Face, SentencePiece, bytes, characters, and none.

`build_tokenizer` chooses by what it is given; `Tokenizer.save` and `load_saved` carry a tokenizer
inside a checkpoint with its files unchanged; `Tokenizer.save_for_huggingface` writes what
`AutoTokenizer` needs. Encoding never adds a start or end token: a document's end is `eod`, which
`data.preprocess` writes, and training rows have no start token.
"""

from __future__ import annotations

import json
import shutil
from abc import ABC, abstractmethod
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from megatron_lengen.data.fast_tokenizers import (
    END_OF_TEXT,
    PROBES,
    fast_from_bytes,
    fast_from_sentencepiece,
    write_fast_tokenizer,
)
from megatron_lengen.data.hub import check_on_hub
from megatron_lengen.data.sentencepiece_tools import import_sentencepiece
from megatron_lengen.errors import BadInput, missing_package, require

SAVED_NAME = "lengen_tokenizer.json"
KINDS = ("huggingface", "sentencepiece", "byte", "copy", "null")
# Megatron-LM's --tokenizer-type, lower case, without "tokenizer" at its end.
KIND_OF_MEGATRON = {
    "huggingface": "huggingface",
    "sentencepiece": "sentencepiece",
    "gptsentencepiece": "sentencepiece",
    "llama2": "sentencepiece",
    "bytelevel": "byte",
    "byte": "byte",
    "copy": "copy",
    "null": "null",
}
TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "vocab.txt",
    "tokenizer.model",
    "spiece.model",
    "sentencepiece.bpe.model",
    "tekken.json",
    "chat_template.jinja",
    "chat_template.json",
)
TOKENIZER_PATTERNS = ("*.tiktoken", "tokenization_*.py", "additional_chat_templates/*")


class Tokenizer(ABC):
    """Text to ids and back.

    `vocab_size` is the true size, `eod` the id that ends a document, `bos` an id or None.
    """

    kind: str
    vocab_size: int
    eod: int
    bos: int | None = None

    @abstractmethod
    def encode(self, text: str) -> list[int]:
        """The ids of `text`, with nothing added at either end."""

    @abstractmethod
    def decode(self, ids: Sequence[int]) -> str:
        """The text of `ids`."""

    def save(self, folder: str | Path) -> None:
        """Write the tokenizer's files, unchanged, and the note that `load_saved` reads."""
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        self._copy_files(folder)
        note = {"type": self.kind, "vocab_size": self.vocab_size, "eod": self.eod}
        (folder / SAVED_NAME).write_text(json.dumps(note, indent=2) + "\n", encoding="utf-8")

    def save_for_huggingface(self, folder: str | Path) -> bool:
        """Write the files from which `AutoTokenizer` gives equal ids; False if there are none."""
        return False

    def _copy_files(self, folder: Path) -> None:  # noqa: B027  (optional)
        """Copy the files behind this tokenizer to `folder`; kinds without files copy nothing."""


class HuggingFaceTokenizer(Tokenizer):
    """Whatever `transformers.AutoTokenizer` opens: a folder or a hub id (with its revision)."""

    kind = "huggingface"

    def __init__(self, name: str | Path, revision: str | None = None) -> None:
        self.name, self.revision = str(name), revision
        self._tokenizer = _auto_tokenizer(self.name, revision)
        eod = self._tokenizer.eos_token_id
        if eod is None:
            raise BadInput(
                f"--tokenizer: found {self.name}, which has no end-of-sequence token; allowed: a "
                "tokenizer with eos_token set in its tokenizer_config.json"
            )
        self.eod = int(eod)
        self.bos = self._tokenizer.bos_token_id
        self.vocab_size = len(self._tokenizer)

    def encode(self, text: str) -> list[int]:
        # verbose=False: documents longer than the model's maximum are the normal case here.
        return self._tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]

    def decode(self, ids: Sequence[int]) -> str:
        return self._tokenizer.decode(list(ids), clean_up_tokenization_spaces=False)

    def save_for_huggingface(self, folder: str | Path) -> bool:
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        files = self._files()
        if not files:
            self._tokenizer.save_pretrained(folder)
        for source, relative in files:
            target = folder / relative
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(source, target)
        return True

    def _copy_files(self, folder: Path) -> None:
        self.save_for_huggingface(folder)
        # Without a tokenizer class in its own configuration, AutoTokenizer asks the model's.
        own, model = folder / "tokenizer_config.json", self._folder()
        named = own.is_file() and "tokenizer_class" in json.loads(own.read_text(encoding="utf-8"))
        if model is not None and (model / "config.json").is_file() and not named:
            shutil.copyfile(model / "config.json", folder / "config.json")

    def _folder(self) -> Path | None:
        """Where the tokenizer's files lie: the folder given, or the hub cache's snapshot."""
        if Path(self.name).is_dir():
            return Path(self.name)
        from huggingface_hub import try_to_load_from_cache

        for name in TOKENIZER_FILES:
            cached = try_to_load_from_cache(self.name, name, revision=self.revision)
            if isinstance(cached, str):
                return Path(cached).parent
        return None

    def _files(self) -> list[tuple[Path, Path]]:
        """(file, its path relative to the tokenizer's folder), in a fixed order."""
        folder = self._folder()
        if folder is None:
            return []
        found = {folder / name for name in TOKENIZER_FILES}
        for pattern in TOKENIZER_PATTERNS:
            found.update(folder.glob(pattern))
        return [(path, path.relative_to(folder)) for path in sorted(found) if path.is_file()]


class SentencePieceTokenizer(Tokenizer):
    """A SentencePiece `.model` file; its end-of-sentence piece ends documents."""

    kind = "sentencepiece"

    def __init__(self, path: str | Path) -> None:
        spm = import_sentencepiece()
        self.path = Path(path)
        require(self.path.is_file(), f"--tokenizer: found no file {self.path}")
        self._data = self.path.read_bytes()
        try:
            self._model = spm.SentencePieceProcessor(model_proto=self._data)
        except RuntimeError as error:
            raise BadInput(
                f"--tokenizer: found {self.path}, which is no SentencePiece model"
            ) from error
        self.vocab_size = self._model.get_piece_size()
        self.eod = self._model.eos_id()
        bos = self._model.bos_id()
        self.bos = bos if bos >= 0 else None
        if self.eod < 0:
            raise BadInput(
                f"--tokenizer: found {self.path}, which has no end-of-sentence piece; allowed: a "
                "model trained with eos_id >= 0"
            )

    def encode(self, text: str) -> list[int]:
        return self._model.encode(text)

    def decode(self, ids: Sequence[int]) -> str:
        return self._model.decode([int(i) for i in ids])

    def save_for_huggingface(self, folder: str | Path) -> bool:
        folder = Path(folder)
        fast = fast_from_sentencepiece(self._data)
        fast.encode_special_tokens = True
        for text in PROBES:
            if fast.encode(text, add_special_tokens=False).ids != self.encode(text):
                raise BadInput(
                    f"--tokenizer: found {self.path}, whose ids a Hugging Face tokenizer does not "
                    f"repeat (first difference on {text!r})"
                )
        special = {
            name: self._model.id_to_piece(i)
            for name, i in (
                ("unk_token", self._model.unk_id()),
                ("bos_token", self._model.bos_id()),
                ("eos_token", self.eod),
                ("pad_token", self._model.pad_id()),
            )
            if i >= 0
        }
        write_fast_tokenizer(fast, special, folder)
        self._copy_files(folder)
        return True

    def _copy_files(self, folder: Path) -> None:
        (folder / "tokenizer.model").write_bytes(self._data)


class ByteTokenizer(Tokenizer):
    """UTF-8 bytes as ids 0 to 255; 256 ends a document."""

    kind = "byte"
    vocab_size = 257
    eod = 256

    def encode(self, text: str) -> list[int]:
        return list(text.encode("utf-8"))

    def decode(self, ids: Sequence[int]) -> str:
        return bytes(i for i in ids if i < 256).decode("utf-8", errors="replace")

    def save_for_huggingface(self, folder: str | Path) -> bool:
        write_fast_tokenizer(fast_from_bytes(), {"eos_token": END_OF_TEXT}, Path(folder))
        return True


class NullTokenizer(Tokenizer):
    """Ids written as numbers, for mock data: the last id of the vocabulary ends a document."""

    kind = "null"

    def __init__(self, vocab_size: int | None) -> None:
        if vocab_size is None or vocab_size < 2:
            raise BadInput(
                f"--vocab-size: found {vocab_size}; allowed: 2 or more (NullTokenizer needs it)"
            )
        self.vocab_size = vocab_size
        self.eod = vocab_size - 1

    def encode(self, text: str) -> list[int]:
        try:
            ids = [int(word) for word in text.split()]
        except ValueError as error:
            raise BadInput(
                f"--tokenizer-type: found NullTokenizer with the text {text[:40]!r}; allowed: ids "
                "separated by spaces"
            ) from error
        require(
            all(0 <= i < self.vocab_size for i in ids),
            f"--vocab-size: found {self.vocab_size} and ids outside of 0 to {self.vocab_size - 1}",
        )
        return ids

    def decode(self, ids: Sequence[int]) -> str:
        return " ".join(str(int(i)) for i in ids)


def build_tokenizer(
    path_or_id_or_kind: str | Path,
    kind: str | None = None,
    vocab_size: int | None = None,
    revision: str | None = None,
) -> Tokenizer:
    """Open a tokenizer.

    Args:
        path_or_id_or_kind: a folder of a Hugging Face tokenizer, a hub id, a SentencePiece `.model`
            file, a folder written by `Tokenizer.save`, or the word `byte`, `copy` or `null`.
        kind: one of `KINDS` or Megatron-LM's --tokenizer-type; found from the first if None.
        vocab_size: only for the null tokenizer.
        revision: a branch, tag or commit on the hub.
    Raises:
        BadInput: nothing there, an unknown kind, or no end-of-document token.
    """
    name = str(path_or_id_or_kind)
    chosen = kind_named(kind) if kind is not None else _kind_found(name)
    if chosen == "byte":
        return ByteTokenizer()
    if chosen == "copy":
        from megatron_lengen.data.copy_task import CopyTokenizer

        return CopyTokenizer()
    if chosen == "null":
        return NullTokenizer(vocab_size)
    if chosen == "saved":
        return load_saved(name)
    if chosen == "sentencepiece":
        path = Path(name)
        return SentencePieceTokenizer(_only_model(path) or path if path.is_dir() else path)
    path = Path(name)
    return HuggingFaceTokenizer(path.parent if path.is_file() else name, revision)


def load_saved(folder: str | Path) -> Tokenizer:
    """Rebuild the tokenizer that `Tokenizer.save` wrote to `folder`."""
    folder = Path(folder)
    note_path = folder / SAVED_NAME
    require(note_path.is_file(), f"tokenizer: found no {SAVED_NAME} in {folder}")
    note = json.loads(note_path.read_text(encoding="utf-8"))
    if note["type"] == "sentencepiece":
        tokenizer: Tokenizer = SentencePieceTokenizer(folder / "tokenizer.model")
    elif note["type"] == "huggingface":
        tokenizer = HuggingFaceTokenizer(folder)
    else:
        tokenizer = build_tokenizer(note["type"], kind=note["type"], vocab_size=note["vocab_size"])
    found = (tokenizer.vocab_size, tokenizer.eod)
    noted = (note["vocab_size"], note["eod"])
    require(
        found == noted,
        f"tokenizer: found (vocabulary, end of document) = {found} in {folder}; "
        f"the tokenizer saved there had {noted}",
    )
    return tokenizer


def kind_named(kind: str) -> str:
    """One of `KINDS` from its own name or Megatron-LM's --tokenizer-type."""
    known = KIND_OF_MEGATRON.get(kind.lower().removesuffix("tokenizer"))
    if known is None:
        raise BadInput(
            f"--tokenizer-type: found {kind}; allowed: HuggingFaceTokenizer, "
            "SentencePieceTokenizer, ByteLevelTokenizer, NullTokenizer"
        )
    return known


def _kind_found(name: str) -> str:
    """The kind from what lies at `name`: one of `KINDS`, or `saved` for a folder of `save`."""
    path = Path(name)
    if path.is_dir():
        if (path / SAVED_NAME).is_file():
            return "saved"
        is_hf = (path / "tokenizer.json").is_file() or (path / "tokenizer_config.json").is_file()
        return "sentencepiece" if not is_hf and _only_model(path) else "huggingface"
    if name.lower().removesuffix("tokenizer") in ("byte", "bytelevel", "copy", "null"):
        return kind_named(name)
    if path.suffix == ".model":
        return "sentencepiece"
    looks_local = name.startswith(("/", ".", "~")) or name.count("/") > 1
    require(
        path.is_file() or not looks_local,
        f"--tokenizer: found no file or folder {name}; allowed: a tokenizer's folder, a hub id, a "
        "SentencePiece .model file, or byte",
    )
    return "huggingface"


def _only_model(folder: Path) -> Path | None:
    models = sorted(folder.glob("*.model"))
    return models[0] if len(models) == 1 else None


def _auto_tokenizer(name: str, revision: str | None) -> Any:
    try:
        from transformers import AutoTokenizer
    except ImportError as error:
        raise missing_package("transformers", "a Hugging Face tokenizer") from error
    options: dict[str, Any] = {} if revision is None else {"revision": revision}
    # Said aloud, since otherwise a folder whose model brings code makes transformers ask a person.
    options["trust_remote_code"] = False
    if not Path(name).exists():
        check_on_hub(name, "--tokenizer")
    try:
        return AutoTokenizer.from_pretrained(name, **options)
    except (OSError, ValueError, KeyError) as error:
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise BadInput(
            f"--tokenizer: found {name}, which AutoTokenizer cannot open ({reason}); allowed: a "
            "tokenizer's folder, a reachable hub id, a SentencePiece .model file, or byte"
        ) from error
