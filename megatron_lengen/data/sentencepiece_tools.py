"""SentencePiece models: training one, and reading what a model file says.

`train_sentencepiece` chooses options under which encoding loses nothing (no normalisation, no added
or removed spaces, unknown characters as bytes) and which a `tokenizers` model can repeat exactly
(`data.fast_tokenizers`). `read_model` decodes a file's protobuf directly, so that the protobuf
package is not needed.

Formats: https://github.com/google/sentencepiece/blob/master/src/sentencepiece_model.proto
"""

from __future__ import annotations

import io
import os
import struct
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_lengen.errors import BadInput, missing_package, require

# Types of a piece, and types of a model, by their numbers in the file.
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = 1, 2, 3, 4, 5, 6
UNIGRAM, BPE = 1, 2
# The trainer keeps a training sentence whole up to this many characters; longer texts are cut.
SENTENCE_CHARS = 4000
MAX_TRAINING_CHARS = 20_000_000


def import_sentencepiece() -> Any:
    """The sentencepiece module, or a `BadInput` that names the install command."""
    try:
        import sentencepiece
    except ImportError as error:
        raise missing_package("sentencepiece", "a SentencePiece tokenizer") from error
    return sentencepiece


def check_model_path(path: str | Path, force: bool = False) -> Path:
    """The path of a model to be written: ends in .model, and is new unless `force`."""
    path = Path(path)
    require(path.suffix == ".model", f"--output: found {path}; allowed: a file name.model")
    require(force or not path.exists(), f"--output: found that {path} exists; --force replaces it")
    return path


def train_sentencepiece(texts: Iterable[str], vocab_size: int, output: str | Path) -> int:
    """Train a lossless BPE model on `texts` and write it to `output` (a `.model` file).

    Ids: 0 unknown, 1 start (never added by us), 2 end of document, then 256 bytes, then the pieces.
    Digits stay single, so that numbers are learnt digit by digit. Returns the vocabulary's size.
    """
    require(vocab_size >= 300, f"--vocab-size: found {vocab_size}; allowed: 300 or more")
    spm = import_sentencepiece()
    sentences = iter(_sentences(texts))
    first = next(sentences, None)
    if first is None:
        raise BadInput("--input: found no text to train a tokenizer on")
    model = io.BytesIO()
    try:
        spm.SentencePieceTrainer.train(
            sentence_iterator=_chain_first(first, sentences),
            model_writer=model,
            model_type="bpe",
            vocab_size=vocab_size,
            byte_fallback=True,
            normalization_rule_name="identity",
            add_dummy_prefix=False,
            remove_extra_whitespaces=False,
            allow_whitespace_only_pieces=True,
            split_digits=True,
            character_coverage=0.9999,
            max_sentence_length=8 * SENTENCE_CHARS,
            unk_id=0,
            bos_id=1,
            eos_id=2,
            pad_id=-1,
            num_threads=1,
            minloglevel=2,
        )
    except RuntimeError as error:
        reason = str(error).strip().splitlines()[-1]
        raise BadInput(
            f"--vocab-size: found {vocab_size}, which this text cannot fill ({reason}); "
            "allowed: a smaller size, or more text"
        ) from error
    output = Path(output)
    output.parent.mkdir(parents=True, exist_ok=True)
    temporary = output.with_name(f"{output.name}.tmp{os.getpid()}")
    temporary.write_bytes(model.getvalue())
    temporary.replace(output)
    return spm.SentencePieceProcessor(model_proto=model.getvalue()).get_piece_size()


def _sentences(texts: Iterable[str]) -> Iterator[str]:
    """Cut texts to the trainer's length; stop after `MAX_TRAINING_CHARS`, a fair sample."""
    seen = 0
    for text in texts:
        for start in range(0, len(text), SENTENCE_CHARS):
            # A NUL ends a string for the trainer, and bytes cover it anyway.
            yield text[start : start + SENTENCE_CHARS].replace("\0", " ")
        seen += len(text)
        if seen >= MAX_TRAINING_CHARS:
            return


def _chain_first(first: str, rest: Iterator[str]) -> Iterator[str]:
    yield first
    yield from rest


@dataclass(frozen=True)
class SentencePieceModel:
    """What a `.model` file says: pieces as (text, score, type) and the settings of its encoder."""

    pieces: list[tuple[str, float, int]]
    model_type: int = UNIGRAM
    byte_fallback: bool = False
    whitespace_as_suffix: bool = False
    charsmap: bytes = b""
    add_dummy_prefix: bool = True
    remove_extra_whitespaces: bool = True


def read_model(data: bytes) -> SentencePieceModel:
    """Parse a serialized SentencePiece model (`ModelProto`)."""
    pieces: list[tuple[str, float, int]] = []
    trainer: dict[int, Any] = {}
    normalizer: dict[int, Any] = {}
    for number, value in _fields(data):
        if number == 1:
            piece = dict(_fields(value))
            score = struct.unpack("<f", piece.get(2, b"\0\0\0\0"))[0]
            pieces.append((piece.get(1, b"").decode("utf-8"), score, piece.get(3, NORMAL)))
        elif number == 2:
            trainer = dict(_fields(value))
        elif number == 3:
            normalizer = dict(_fields(value))
    return SentencePieceModel(
        pieces=pieces,
        model_type=trainer.get(3, UNIGRAM),
        byte_fallback=bool(trainer.get(35, 0)),
        whitespace_as_suffix=bool(trainer.get(24, 0)),
        charsmap=normalizer.get(2, b""),
        add_dummy_prefix=bool(normalizer.get(3, 1)),
        remove_extra_whitespaces=bool(normalizer.get(4, 1)),
    )


def _fields(data: bytes) -> Iterator[tuple[int, Any]]:
    """The (field number, value) pairs of a protobuf message; bytes stay bytes, varints are ints."""
    position = 0
    while position < len(data):
        key, position = _varint(data, position)
        number, wire = key >> 3, key & 7
        if wire == 0:
            value, position = _varint(data, position)
            yield number, value
            continue
        if wire == 2:
            length, position = _varint(data, position)
        else:
            length = {1: 8, 5: 4}[wire]
        yield number, data[position : position + length]
        position += length


def _varint(data: bytes, position: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte = data[position]
        position += 1
        value |= (byte & 0x7F) << shift
        shift += 7
        if byte < 0x80:
            return value, position
