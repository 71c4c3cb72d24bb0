"""The tiny corpus: splits that share nothing, long held-out texts, its share of needles."""

from __future__ import annotations

import json
import random
import re
from pathlib import Path

import pytest

from megatron_lengen.data.corpus import (
    NeedleSettings,
    approximate_encode,
    make_corpus,
    read_library,
    write_corpus,
)
from megatron_lengen.data.tokenizer import build_tokenizer
from megatron_lengen.errors import BadInput


@pytest.fixture
def library(tmp_path: Path) -> Path:
    """A small stand-in for a standard library: 24 modules, each line of which is unique."""
    root = tmp_path / "lib"
    for i in range(24):
        path = root / ("package" if i % 2 else ".") / f"module{i}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("".join(f"value_{i}_{j} = {j}  # text\n" for j in range(40 + 20 * i)))
    for left_out in (
        "test/test_x.py",
        "package/tests/t.py",
        "site-packages/m.py",
        "_sysconfigdata.py",
    ):
        path = root / left_out
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("left_out = True\n" * 5000)
    (root / "latin.py").write_bytes(b"# caf\xe9\n" * 100)
    (root / "empty.py").write_text("")
    topics = {"zebra": "Stripes. " * 50, "apple": "Fruit. " * 50}
    (root / "pydoc_data").mkdir()
    (root / "pydoc_data" / "topics.py").write_text(f"# made\ntopics = {topics!r}\n")
    return root


def is_needle(text: str) -> bool:
    """By the end of the text: a question with its answer."""
    return bool(re.search(r"(provided text is \d{7}|\n[a-z]+=\d{7})$", text))


def test_library_is_read_without_tests_and_packages(library: Path) -> None:
    texts = read_library(library)
    assert list(texts) == sorted(texts) and len(texts) == 25
    assert not any("left_out" in text or "caf" in text for text in texts.values())
    assert texts["pydoc_data/topics.py"].startswith("Fruit.")
    assert texts["pydoc_data/topics.py"].endswith("Stripes.")


def test_splits_share_nothing_and_the_longest_are_held_out(library: Path) -> None:
    corpus = make_corpus(0, NeedleSettings(share=0), root=library)
    everything = set(read_library(library).values())
    splits = [set(corpus.train), set(corpus.valid), set(corpus.held_out)]
    assert sum(map(len, splits)) == len(everything) and set.union(*splits) == everything
    assert len(corpus.held_out) == 6 and len(corpus.valid) == 1
    assert min(map(len, corpus.held_out)) >= max(map(len, corpus.train + corpus.valid))


@pytest.mark.parametrize("share", [0.1, 0.5])
def test_share_and_lengths_of_needles(share: float, library: Path) -> None:
    settings = NeedleSettings(share=share, lengths=(120, 200))
    corpus = make_corpus(0, settings, root=library)
    needles = corpus.needles
    assert needles and all(map(is_needle, needles))
    assert not any(map(is_needle, corpus.train + corpus.valid + corpus.held_out))
    generated, text = (sum(map(len, texts)) for texts in (needles, corpus.train))
    part = generated / (generated + text)
    assert abs(part - share) < 0.03
    sizes = [len(approximate_encode(text)) for text in needles]
    assert all(108 <= size <= 120 or 180 <= size <= 200 for size in sizes)


def test_needles_are_sized_by_the_tokenizer_that_is_given(library: Path) -> None:
    encode = build_tokenizer("byte").encode
    settings = NeedleSettings(lengths=(500,), style="niah")
    corpus = make_corpus(0, settings, encode, root=library)
    needles = corpus.needles
    assert len(needles) > 5 and all(450 <= len(encode(text)) <= 500 for text in needles)


def test_haystacks_come_from_training_text_only(library: Path) -> None:
    corpus = make_corpus(0, NeedleSettings(style="pairs"), root=library)
    needles = corpus.needles
    used = set(re.findall(r"value_\d+_\d+ =", "\n".join(needles)))
    trained = "\n".join(corpus.train)
    held = "\n".join(corpus.held_out + corpus.valid)
    assert len(used) > 50
    assert all(name in trained and name not in held for name in used)


def test_same_seed_same_corpus(library: Path) -> None:
    first, again, other = (make_corpus(seed, NeedleSettings(), root=library) for seed in (4, 4, 5))
    assert first == again
    assert first.train != other.train and first.held_out == other.held_out


def test_mixed_uses_both_styles_where_there_is_room(library: Path) -> None:
    for lengths, both in (((220,), True), ((80,), False)):
        corpus = make_corpus(0, NeedleSettings(lengths=lengths), root=library)
        needles = corpus.needles
        styles = {"provided text" in text for text in needles}
        assert styles == ({True, False} if both else {False})


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"share": 1.0}, "--needle-share: found 1.0"),
        ({"share": -0.1}, "--needle-share"),
        ({"style": "niah", "lengths": (60,)}, r"--needle-length: found 60; allowed: \d+ tokens"),
        ({"lengths": (0,)}, "--needle-length: found 0"),
        ({"digits": 9}, "--needle-digits: found 9"),
        ({"needles": 0}, "--needles: found 0"),
        ({"questions": 0}, "--needle-questions: found 0"),
        ({"style": "essay"}, "--needle-style: found essay"),
    ],
)
def test_bad_settings_are_named(settings: dict, message: str, library: Path) -> None:
    with pytest.raises(BadInput, match=message):
        make_corpus(0, NeedleSettings(**settings), root=library)


def test_files_are_json_lines_and_are_kept_without_force(library: Path, tmp_path: Path) -> None:
    corpus = make_corpus(0, NeedleSettings(), root=library)
    write_corpus(corpus, tmp_path / "out")
    for name, texts in (
        ("train", corpus.train),
        ("valid", corpus.valid),
        ("heldout", corpus.held_out),
        ("needles", corpus.needles),
    ):
        lines = (tmp_path / "out" / f"{name}.jsonl").read_text().splitlines()
        assert [json.loads(line) for line in lines] == [{"text": text} for text in texts]
    assert len(list((tmp_path / "out").iterdir())) == 4
    with pytest.raises(BadInput, match="--force"):
        write_corpus(corpus, tmp_path / "out")
    write_corpus(corpus, tmp_path / "out", force=True)


def test_from_the_real_library_to_a_dataset(tool_runner, tmp_path: Path) -> None:
    """The way of a tiny run: corpus, tokenizer, dataset, from this Python's own sources."""
    from megatron_lengen.data.indexed import check_dataset

    folder = tmp_path / "tiny"
    done = tool_runner("tiny_corpus", "--output", folder, "--needle-share", 0.02)
    assert done.code == 0 and "PSF-2.0" in done.out
    texts = {
        name: [json.loads(line)["text"] for line in (folder / f"{name}.jsonl").open()]
        for name in ("train", "valid", "heldout")
    }
    assert sum(map(len, texts["train"])) > 4_000_000
    assert len(texts["heldout"]) == 40 and min(map(len, texts["heldout"])) > 40_000
    model = folder / "tokenizer.model"
    done = tool_runner(
        "train_tokenizer",
        "--input",
        folder / "train.jsonl",
        "--vocab-size",
        1024,
        "--output",
        model,
    )
    assert done.code == 0 and "1024 pieces" in done.out
    done = tool_runner(
        "preprocess", "--input", folder / "valid.jsonl", "--tokenizer", model,
        "--output-prefix", folder / "valid",
    )  # fmt: skip
    assert done.code == 0
    dataset, tokenizer = check_dataset(folder / "valid"), build_tokenizer(model)
    for i in random.Random(0).sample(range(len(texts["valid"])), 5):
        assert tokenizer.decode(dataset[i][:-1].tolist()) == texts["valid"][i]
        assert dataset[i][-1] == tokenizer.eod == 2


def test_tokenizer_tool_says_what_cannot_work(tool_runner, tmp_path: Path) -> None:
    (tmp_path / "in.txt").write_text("short text\n")
    (tmp_path / "old.model").write_bytes(b"")
    (tmp_path / "broken.jsonl").write_text("{\n")
    cases = [
        (["--vocab-size", 299, "--output", tmp_path / "t.model"], "--vocab-size: found 299"),
        (["--vocab-size", 5000, "--output", tmp_path / "t.model"], "--vocab-size: found 5000"),
        (["--vocab-size", 300, "--output", tmp_path / "t.json"], "--output: found"),
        (["--vocab-size", 300, "--output", tmp_path / "old.model"], "--force"),
    ]
    for arguments, message in cases:
        done = tool_runner("train_tokenizer", "--input", tmp_path / "in.txt", *arguments)
        assert done.code == 2 and message in done.err and done.err.count("\n") == 1
    done = tool_runner(
        "train_tokenizer", "--input", tmp_path / "broken.jsonl", "--vocab-size", 300,
        "--output", tmp_path / "t.model",
    )  # fmt: skip
    assert done.code == 2 and "broken.jsonl:1: " in done.err
    assert not (tmp_path / "t.model").exists()
