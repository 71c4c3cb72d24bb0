"""Rows of the copy task: what Jelassi et al. define, whatever the layout; and their tokenizer."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

from megatron_lengen.data.copy_task import (
    EVALUATION,
    TRAINING,
    VALIDATION,
    CopyLengths,
    CopyRows,
    CopyTokenizer,
    draw_source,
    evaluation_sources,
    parse_lengths,
    prompts_of,
)
from megatron_lengen.data.datasets import micro_batches
from megatron_lengen.data.tokenizer import build_tokenizer, load_saved
from megatron_lengen.errors import BadInput

LENGTHS = CopyLengths(3, 9)
# Written out by hand, so that nothing here is read from the module under test.
IDS = {character: number for number, character in enumerate("abcdefghijklmnopqrstuvwxyz$|.*")}
TEXT = {number: character for character, number in IDS.items()}


def text_of(ids: torch.Tensor) -> str:
    return "".join(TEXT[number] for number in ids.tolist())


@pytest.mark.parametrize("seq_length", [LENGTHS.row, 31])
def test_a_row_is_one_padded_example_of_which_the_answer_counts(seq_length):
    assert LENGTHS.row == 2 * 9 + 3 - 1  # every token but the last has a label
    rows = CopyRows(7, TRAINING, LENGTHS, seq_length)
    for sample in range(200):
        row = rows[sample]
        assert row["tokens"].shape == row["labels"].shape == row["loss_mask"].shape == (seq_length,)
        assert torch.equal(row["tokens"][1:], row["labels"][:-1])
        whole = text_of(torch.cat((row["tokens"], row["labels"][-1:])))
        found = re.fullmatch(r"\$([a-z]+)\|\1\.(\**)", whole)
        assert found, whole
        source = found[1]
        assert 3 <= len(source) <= 9 and len(whole) == seq_length + 1
        scored = row["loss_mask"].bool()
        assert text_of(row["labels"][scored]) == source + "."
        # What is read where the first scored label is predicted: the separator.
        assert text_of(row["tokens"][scored]) == "|" + source
        assert row["loss_mask"].sum() == len(source) + 1


def chi_squared(counts: torch.Tensor) -> float:
    expected = counts.sum() / len(counts)
    return float(((counts - expected) ** 2 / expected).sum())


def test_lengths_and_letters_are_even():
    sources = [draw_source(1, TRAINING, number, LENGTHS) for number in range(7000)]
    sizes = torch.bincount(torch.tensor([len(s) for s in sources]), minlength=10)
    assert sizes[:3].sum() == 0 and len(sizes) == 10
    # Quantiles of chi squared at 1e-6, for 6 and for 25 degrees of freedom.
    assert chi_squared(sizes[3:].double()) < 38.3
    letters = torch.bincount(torch.cat(sources), minlength=26)
    assert len(letters) == 26 and chi_squared(letters.double()) < 77.2
    # Neighbours say nothing about each other.
    pairs = torch.cat([s[:-1] * 26 + s[1:] for s in sources])
    assert abs(chi_squared(torch.bincount(pairs, minlength=676).double()) - 675) < 5 * 1350**0.5


def test_seeds_streams_and_numbers_are_told_apart_and_come_again():
    def draw(seed=1, stream=TRAINING, number=0):
        return text_of(draw_source(seed, stream, number, CopyLengths(12, 12)))

    different = {draw(), draw(seed=2), draw(stream=VALIDATION), draw(number=1), draw(seed=2**32)}
    assert len(different) == 5
    assert draw() == draw()
    # Neither the longest source of the run nor the row's length changes the letters.
    longer = draw_source(1, TRAINING, 0, CopyLengths(12, 12))
    assert text_of(longer) == draw()
    short, long = (CopyRows(1, TRAINING, LENGTHS, n)[5]["tokens"] for n in (20, 40))
    assert torch.equal(short, long[:20])


def read(rank: int, ranks: int, micro_batch: int, start: int = 0) -> list[torch.Tensor]:
    rows = CopyRows(3, TRAINING, LENGTHS, LENGTHS.row)
    return [b["tokens"] for b in micro_batches(rows, start, 24, micro_batch, rank, ranks)]


def test_order_depends_neither_on_the_layout_nor_on_a_resume():
    whole = torch.cat(read(0, 1, 8))
    halves = zip(read(0, 2, 4), read(1, 2, 4), strict=True)
    assert torch.equal(torch.cat([rows for pair in halves for rows in pair]), whole)
    assert torch.equal(torch.cat(read(0, 1, 2)), whole)
    assert torch.equal(torch.cat(read(0, 1, 4, start=8)), whole[8:])


def test_evaluation_sets_are_fixed_and_do_not_repeat_training():
    ten = evaluation_sources(42, 5, range(10))
    assert ten.shape == (10, 5) and ten.min() >= 0 and ten.max() < 26
    assert torch.equal(evaluation_sources(42, 5, [3, 7]), ten[[3, 7]])
    assert len({text_of(row) for row in ten}) == 10
    assert not torch.equal(evaluation_sources(42, 6, range(10))[:, :5], ten)
    seen = [draw_source(42, TRAINING, n, CopyLengths(5, 5)) for n in range(10)]
    assert not torch.equal(torch.stack(seen), ten)
    assert torch.equal(ten[0], draw_source(42, EVALUATION + 5, 0, CopyLengths(5, 5)))
    assert text_of(prompts_of(torch.tensor([[2, 0, 19]]))[0]) == "$cat|"


@pytest.mark.parametrize("text", ["", "5", "0-3", "5-4", "a-b", "3-4-5", "-3-4", "1-99999999"])
def test_other_lengths_are_refused(text):
    with pytest.raises(BadInput, match="--copy-task: found"):
        parse_lengths(text)


def test_lengths_are_read():
    assert parse_lengths("50-100") == CopyLengths(50, 100)
    assert parse_lengths("7-7").row == 16


def test_the_tokenizer_is_a_hugging_face_one_when_exported(tmp_path: Path):
    from transformers import AutoTokenizer

    ours = build_tokenizer("copy")
    assert (ours.vocab_size, ours.eod, ours.bos) == (30, IDS["."], IDS["$"])
    assert ours.save_for_huggingface(tmp_path)
    theirs = AutoTokenizer.from_pretrained(tmp_path)
    assert len(theirs) == 30
    ends = (theirs.bos_token_id, theirs.eos_token_id, theirs.pad_token_id)
    assert ends == (IDS["$"], IDS["."], IDS["*"])
    for text in ("$cat|cat.***", "".join(IDS), "a", ""):
        ids = [IDS[character] for character in text]
        assert ours.encode(text) == ids == theirs(text)["input_ids"]
        assert ours.decode(ids) == text == theirs.decode(ids)
    again = build_tokenizer(tmp_path)
    assert again.encode("$a|") == ours.encode("$a|") and again.eod == ours.eod
    for unknown in ("A", " ", "a b", "é"):
        with pytest.raises(BadInput, match="allowed: the characters"):
            ours.encode(unknown)
        with pytest.raises(Exception, match="WordLevel"):
            theirs(unknown)


def test_the_tokenizer_travels_with_checkpoints(tmp_path: Path):
    build_tokenizer("copy").save(tmp_path)
    back = load_saved(tmp_path)
    assert isinstance(back, CopyTokenizer) and back.encode("$z|z.*") == [26, 25, 27, 25, 28, 29]
