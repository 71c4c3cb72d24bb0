"""Tokenizers of ours in Hugging Face's file format: from SentencePiece, bytes and characters.

`fast_from_sentencepiece` builds a `tokenizers` model that repeats the ids of a BPE or unigram
SentencePiece file; the caller checks it on `PROBES`. `write_fast_tokenizer` writes what
`AutoTokenizer` opens.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from megatron_lengen.data.sentencepiece_tools import (
    BPE,
    CONTROL,
    NORMAL,
    UNIGRAM,
    UNKNOWN,
    USER_DEFINED,
    SentencePieceModel,
    read_model,
)
from megatron_lengen.errors import BadInput

SPACE = "\u2581"
END_OF_TEXT = "<|endoftext|>"
# Spaces, code, accents, scripts without spaces, emoji, control characters, text like our specials.
PROBES = (
    "",
    " ",
    "Hello world",
    "  two leading spaces, a\ttab and trailing ones  ",
    "def f(x):\n    if x > 10_234:\n\t\treturn {'a': [1, 2]}  # ok\n\n\n",
    "caf\u00e9 na\u00efve \u2014 \u201cquoted\u201d \u0394x \u2248 3.14159",
    "\u6f22\u5b57\u304b\u306a \ud55c\uad6d\uc5b4 \u0627\u0644\u0639\u0631\u0628\u064a\u0629",
    "\U0001f389\U0001f469\u200d\U0001f4bb \x01\x7f",
    "==== ----- aaaaaaaaaaa " + " " * 37 + "x",
    "<s> </s> <unk> <0x0A>",
    "line one\r\nline two\n\n   \n",
)


def fast_from_sentencepiece(data: bytes) -> Any:
    """A `tokenizers.Tokenizer` that gives the ids of a SentencePiece BPE or unigram model.

    Equal for BPE on all text. For unigram, two segmentations of equal score ("==" + "=" or the
    other way round) may be told apart differently, since both libraries then go by rounding.
    """
    from tokenizers import AddedToken, Tokenizer, models

    model = read_model(data)
    if model.model_type not in (BPE, UNIGRAM) or model.whitespace_as_suffix:
        raise BadInput(
            "tokenizer: this SentencePiece model cannot be written for Hugging Face; "
            "allowed: types bpe and unigram with whitespace as a prefix"
        )
    unknown = next(i for i, (_, _, kind) in enumerate(model.pieces) if kind == UNKNOWN)
    if model.model_type == UNIGRAM:
        core: Any = models.Unigram(
            _unigram_scores(model), unk_id=unknown, byte_fallback=model.byte_fallback
        )
    else:
        core = models.BPE(
            {piece: i for i, (piece, _, _) in enumerate(model.pieces)},
            _merges(model),
            unk_token=model.pieces[unknown][0],
            fuse_unk=True,
            byte_fallback=model.byte_fallback,
        )
    fast = Tokenizer(core)
    fast.normalizer = _normalizer(model)
    fast.decoder = _decoder(model)
    fast.add_special_tokens(
        [
            AddedToken(piece, special=True, normalized=False)
            for piece, _, kind in model.pieces
            if kind in (UNKNOWN, CONTROL)
        ]
    )
    own = [piece for piece, _, kind in model.pieces if kind == USER_DEFINED]
    fast.add_tokens([AddedToken(piece.replace(SPACE, " "), normalized=False) for piece in own])
    return fast


def _merges(model: SentencePieceModel) -> list[tuple[str, str]]:
    """Every split of a piece into two pieces, in the order in which SentencePiece would join them.

    SentencePiece joins the neighbours whose union has the highest score; `tokenizers` joins the
    pair that comes first in this list.
    """
    scores = {piece: score for piece, score, kind in model.pieces if kind == NORMAL}
    ids = {piece: i for i, (piece, _, _) in enumerate(model.pieces)}
    ranked = []
    for piece, score in scores.items():
        for cut in range(1, len(piece)):
            left, right = piece[:cut], piece[cut:]
            if left in scores and right in scores:
                ranked.append((-score, ids[left], ids[right], left, right))
    return [(left, right) for *_, left, right in sorted(ranked)]


def _unigram_scores(model: SentencePieceModel) -> list[tuple[str, float]]:
    """The pieces with their scores; control and byte pieces get one that no text can prefer.

    SentencePiece never reads these from text, while `tokenizers` has no such kind of piece.
    """
    lowest = min(score for _, score, _ in model.pieces)
    return [
        (piece, score if kind in (NORMAL, USER_DEFINED) else 100 * lowest - 1000)
        for piece, score, kind in model.pieces
    ]


def _normalizer(model: SentencePieceModel) -> Any:
    from tokenizers import Regex, normalizers

    steps: list[Any] = []
    if model.charsmap:
        steps.append(normalizers.Precompiled(model.charsmap))
    if model.remove_extra_whitespaces:
        # Spaces only: SentencePiece leaves tabs and newlines to its character map.
        steps.append(normalizers.Replace(Regex(r"\A +| +\z"), ""))
        steps.append(normalizers.Replace(Regex(" {2,}"), " "))
    if model.add_dummy_prefix:
        steps.append(normalizers.Prepend(SPACE))
    steps.append(normalizers.Replace(" ", SPACE))
    return normalizers.Sequence(steps)


def _decoder(model: SentencePieceModel) -> Any:
    from tokenizers import decoders

    steps: list[Any] = [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    if model.add_dummy_prefix:
        steps.append(decoders.Strip(" ", 1, 0))
    return decoders.Sequence(steps)


def fast_from_bytes() -> Any:
    """A `tokenizers.Tokenizer` with the bytes as ids 0 to 255 and `END_OF_TEXT` as 256."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    vocab = {character: byte for byte, character in enumerate(_byte_characters())}
    fast = Tokenizer(models.BPE({**vocab, END_OF_TEXT: 256}, []))
    fast.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    fast.decoder = decoders.ByteLevel()
    fast.add_special_tokens([AddedToken(END_OF_TEXT, special=True, normalized=False)])
    return fast


def fast_from_characters(characters: str) -> Any:
    """A `tokenizers.Tokenizer` with one token for each of some characters, in their order."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers

    vocabulary = {character: i for i, character in enumerate(characters)}
    # WordLevel wants a name for what it does not know; without one in the vocabulary it says so.
    fast = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    fast.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    fast.decoder = decoders.Fuse()
    return fast


def write_fast_tokenizer(fast: Any, special: dict[str, str], folder: Path) -> None:
    """Write tokenizer.json and tokenizer_config.json, in the form that all versions read."""
    folder.mkdir(parents=True, exist_ok=True)
    fast.save(str(folder / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
        # Text that spells a special token is text: the ids are then those of training.
        "split_special_tokens": True,
        "model_max_length": int(1e30),
        **special,
    }
    text = json.dumps(config, indent=2, ensure_ascii=False) + "\n"
    (folder / "tokenizer_config.json").write_text(text, encoding="utf-8")


def _byte_characters() -> list[str]:
    """The printable character that stands for each byte in byte-level vocabularies (GPT-2's table):
    printable bytes stand for themselves, the others take 256, 257, ... in order."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = iter(range(256, 512))
    return [chr(byte if byte in printable else next(others)) for byte in range(256)]
