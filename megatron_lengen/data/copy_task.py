"""The synthetic copy task of Jelassi et al. (2024, arXiv 2402.01032): its rows and its tokenizer.

An example is `$ s | s .`: a source of letters drawn evenly, whose length is drawn evenly too. A
model is trained on the answer, the second `s` and the end `.`, one example in a padded row. All is
a pure function of (seed, stream, number), so there is nothing on disk, and every layout and every
resumed run sees the same rows.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from megatron_lengen.data.fast_tokenizers import fast_from_characters, write_fast_tokenizer
from megatron_lengen.data.tokenizer import Tokenizer
from megatron_lengen.errors import BadInput, require

CHARACTERS = "abcdefghijklmnopqrstuvwxyz$|.*"  # in the order of their ids
LETTERS = 26
START, SEPARATOR, END, PADDING = range(LETTERS, LETTERS + 4)
TRAINING, VALIDATION, EVALUATION = 0, 1, 2  # streams; evaluation has one for each length
MAX_SOURCE = 2**24


@dataclass(frozen=True)
class CopyLengths:
    """The shortest and the longest source of a training set, both included."""

    low: int
    high: int

    @property
    def row(self) -> int:
        """Tokens of the longest example that a model reads; each has the next one as its label."""
        return 2 * self.high + 2


def parse_lengths(text: str, flag: str = "--copy-task") -> CopyLengths:
    """Lengths from `50-100`.

    Raises:
        BadInput: for anything else.
    """
    match = re.fullmatch(r"(\d{1,9})-(\d{1,9})", text.strip())
    low, high = (int(match[1]), int(match[2])) if match else (0, 0)
    if not 1 <= low <= high <= MAX_SOURCE:
        raise BadInput(f"{flag}: found {text}; allowed: MIN-MAX as in 50-100, from 1 on")
    return CopyLengths(low, high)


def draw_source(seed: int, stream: int, number: int, lengths: CopyLengths) -> Tensor:
    """The source of an example: [length] int64, letters as ids.

    Args:
        seed: 0 to 2**64 - 1.
        stream: which set the example is of.
        number: which one in the set.
        lengths: the length is even between them, both included.
    """
    # A stream of bits that belongs to this example alone; the lowest word counts within it.
    generator = np.random.Philox(key=[seed, stream], counter=[0, number, 0, 0])
    bits = generator.random_raw(1 + lengths.high) >> np.uint64(32)
    choices = lengths.high - lengths.low + 1
    length = lengths.low + int(bits[0] * np.uint64(choices) >> np.uint64(32))
    letters = bits[1 : 1 + length] * np.uint64(LETTERS) >> np.uint64(32)
    return torch.from_numpy(letters.astype(np.int64))


class CopyRows(Dataset):
    """One example in each row, padded with `*`; only the answer is scored.

    Args:
        seed: of the run.
        stream: `TRAINING` or `VALIDATION`.
        lengths: of the sources.
        seq_length: tokens of a row, `lengths.row` or more.
    """

    def __init__(self, seed: int, stream: int, lengths: CopyLengths, seq_length: int) -> None:
        self.seed, self.stream = seed, stream
        self.lengths, self.seq_length = lengths, seq_length

    def __getitem__(self, sample: int) -> dict[str, Tensor]:
        """`tokens`, `labels` [seq_length] int64 and `loss_mask` [seq_length] fp32."""
        source = draw_source(self.seed, self.stream, sample, self.lengths)
        size = len(source)
        text = torch.full((self.seq_length + 1,), PADDING)
        text[: 2 * size + 3] = torch.cat((prompts_of(source), source, torch.tensor([END])))
        mask = torch.zeros(self.seq_length)
        # The label of the separator, at size + 1, is the answer's first letter.
        mask[size + 1 : 2 * size + 2] = 1
        return {"tokens": text[:-1], "labels": text[1:], "loss_mask": mask}


def prompts_of(sources: Tensor) -> Tensor:
    """What an answer follows, `$ s |`: [..., length] -> [..., length + 2]."""
    start, separator = (sources.new_full((*sources.shape[:-1], 1), i) for i in (START, SEPARATOR))
    return torch.cat((start, sources, separator), dim=-1)


def evaluation_sources(seed: int, length: int, numbers: Sequence[int]) -> Tensor:
    """Sources of one length from its fixed set: [numbers, length] int64.

    Args:
        seed: of the set, whatever the model was trained with.
        numbers: which of the set's examples.
    """
    lengths = CopyLengths(length, length)
    return torch.stack([draw_source(seed, EVALUATION + length, n, lengths) for n in numbers])


class CopyTokenizer(Tokenizer):
    """Jelassi et al.'s thirty characters: letters 0 to 25, `$` 26, `|` 27, `.` 28, `*` 29."""

    kind = "copy"
    vocab_size = len(CHARACTERS)
    eod = END
    bos = START

    def encode(self, text: str) -> list[int]:
        ids = [CHARACTERS.find(character) for character in text]
        require(
            min(ids, default=0) >= 0,
            f"tokenizer copy: found {text[:40]!r}; allowed: the characters {CHARACTERS}",
        )
        return ids

    def decode(self, ids: Sequence[int]) -> str:
        return "".join(CHARACTERS[int(i)] for i in ids)

    def save_for_huggingface(self, folder: str | Path) -> bool:
        special = {"bos_token": START, "eos_token": END, "pad_token": PADDING}
        named = {name: CHARACTERS[i] for name, i in special.items()}
        write_fast_tokenizer(fast_from_characters(CHARACTERS), named, Path(folder))
        return True
