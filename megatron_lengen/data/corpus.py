"""A corpus for a tiny run on any machine, with no download: Python's own standard library.

Its modules are real text with long documents; the longest are held out for evaluation and never
trained on. Generated needle documents (`data.needles`) come beside them, so that a small model can
learn to recall; how much of them it sees is the blend's business (--train-data-path).
"""

from __future__ import annotations

import ast
import json
import os
import platform
import random
import re
import sysconfig
from collections.abc import Callable, Sequence, Sized
from dataclasses import dataclass
from pathlib import Path

from megatron_lengen.data.needles import needle_example
from megatron_lengen.errors import BadInput, require

# Tests, third-party packages, character tables, and a file that differs from build to build.
LEFT_OUT_FOLDERS = frozenset(
    ("test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__", "encodings")
)
LEFT_OUT_PREFIX = "_sysconfigdata"
TOPICS = "pydoc_data/topics.py"
SHORTEST_CHARS = 200
HELD_OUT = 40
VALIDATION_SHARE = 0.04
STYLES = ("pairs", "niah", "mixed")
NAMES = ("heldout.jsonl", "valid.jsonl", "needles.jsonl", "train.jsonl")
LICENCE = "PSF-2.0 licence, https://docs.python.org/3/license.html"


@dataclass(frozen=True)
class NeedleSettings:
    """The generated documents.

    Attributes:
        share: their characters beside those of text and needles together, 0 to below 1.
        lengths: of the documents in tokens, drawn with equal chance.
        style: `pairs`, `niah`, or `mixed` (either, where the length allows niah).
        digits: of each number, 1 to 7.
        needles: key-value lines in a `pairs` document, fewer in short ones; all are asked.
        questions: how often a `niah` document asks for its number, fewer in short ones.
    """

    share: float = 0.25
    lengths: tuple[int, ...] = (96, 160, 224)
    style: str = "mixed"
    digits: int = 7
    needles: int = 4
    questions: int = 3

    def check(self) -> None:
        """Raise `BadInput` for a value that cannot be used."""
        require(
            0 <= self.share < 1, f"--needle-share: found {self.share}; allowed: 0 to less than 1"
        )
        require(self.style in STYLES, f"--needle-style: found {self.style}; allowed: {STYLES}")
        require(1 <= self.digits <= 7, f"--needle-digits: found {self.digits}; allowed: 1 to 7")
        require(self.needles >= 1, f"--needles: found {self.needles}; allowed: 1 or more")
        require(
            self.questions >= 1, f"--needle-questions: found {self.questions}; allowed: 1 or more"
        )


@dataclass(frozen=True)
class Corpus:
    """The documents of each split."""

    train: list[str]
    valid: list[str]
    held_out: list[str]
    needles: list[str]

    def summary(self) -> str:
        """A line for each split, and where the text comes from."""
        rows = (
            ("train.jsonl", self.train, ""),
            ("needles.jsonl", self.needles, ", generated"),
            ("valid.jsonl", self.valid, ""),
            ("heldout.jsonl", self.held_out, f", the shortest {_shortest(self.held_out)} kB"),
        )
        lines = [
            f"{name}: {len(texts)} documents, {_chars(texts) / 1e6:.2f} MB{more}"
            for name, texts, more in rows
        ]
        lines.append(
            f"text: the standard library of Python {platform.python_version()} ({LICENCE})"
        )
        return "\n".join(lines)


def _chars(texts: Sequence[str]) -> int:
    return sum(len(text) for text in texts)


def _shortest(texts: Sequence[str]) -> int:
    return min((len(text) for text in texts), default=0) // 1000


def approximate_encode(text: str) -> list[str]:
    """Pieces about as many as a small BPE vocabulary would give: for sizes before there is one."""
    # Read as single bytes: a character beyond ASCII often costs a token for each.
    single = text.encode("utf-8").decode("latin-1")
    return re.findall(r" ?[A-Za-z]{1,5}|\d| +|\s|[^\sA-Za-z\d]", single)


def read_library(root: Path | None = None) -> dict[str, str]:
    """The standard library's sources by their path below `root`, sorted by it.

    The help topics of pydoc, which are prose in one large table, come as their text.
    """
    root = Path(sysconfig.get_path("stdlib")) if root is None else root
    found = {}
    for path in sorted(root.rglob("*.py")):
        relative = path.relative_to(root)
        left_out = LEFT_OUT_FOLDERS.intersection(relative.parts)
        if left_out or path.name.startswith(LEFT_OUT_PREFIX):
            continue
        try:
            text = path.read_text(encoding="utf-8")
        except (UnicodeDecodeError, OSError):
            continue
        if relative.as_posix() == TOPICS:
            text = _topics_text(text)
        if len(text) >= SHORTEST_CHARS:
            found[relative.as_posix()] = text
    return found


def _topics_text(source: str) -> str:
    """The texts of the table `topics = {title: text, ...}`, one after the other by title."""
    tables = [
        node.value
        for node in ast.parse(source).body
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Dict)
    ]
    topics = ast.literal_eval(tables[0]) if tables else {}
    return "\n\n".join(topics[title].strip() for title in sorted(topics))


def make_corpus(
    seed: int,
    needles: NeedleSettings,
    encode: Callable[[str], Sized] = approximate_encode,
    root: Path | None = None,
) -> Corpus:
    """Split the standard library and make needle documents; the same for the same arguments.

    Args:
        encode: text to tokens, by which needle documents are sized.
        root: another folder of Python sources instead of the standard library.
    """
    needles.check()
    texts = read_library(root)
    # A quarter at most, so that small installations have something to train on.
    count = min(HELD_OUT, len(texts) // 4)
    require(count > 0, f"tiny corpus: found {len(texts)} Python sources; allowed: 4 or more")
    by_length = sorted(texts, key=lambda name: (-len(texts[name]), name))
    held_out = [texts[name] for name in by_length[:count]]
    rest = [texts[name] for name in sorted(by_length[count:])]
    rng = random.Random(seed)
    rng.shuffle(rest)
    valid_count = max(1, round(VALIDATION_SHARE * len(rest)))
    valid, train = rest[:valid_count], rest[valid_count:]
    generated = _needle_documents(rng, train, needles, encode)
    return Corpus(train, valid, held_out, generated)


def _needle_documents(
    rng: random.Random,
    texts: Sequence[str],
    settings: NeedleSettings,
    encode: Callable[[str], Sized],
) -> list[str]:
    """Documents of `settings.share` of all characters, with lines of `texts` as their haystacks."""
    wanted = settings.share / (1 - settings.share) * _chars(texts)
    styles = {length: _styles(length, settings, encode) for length in settings.lengths}
    lines = [[line for line in text.splitlines() if line.strip()] for text in texts]
    documents: list[str] = []
    made = 0
    while made < wanted:
        length = rng.choice(settings.lengths)
        style = rng.choice(styles[length])
        document = _needle_document(rng, rng.choice(lines), length, style, settings, encode)
        documents.append(document)
        made += len(document)
    return documents


def _styles(length: int, settings: NeedleSettings, encode: Callable[[str], Sized]) -> list[str]:
    """The styles that `settings` wants and `length` has room for."""
    wanted = ["pairs", "niah"] if settings.style == "mixed" else [settings.style]
    possible = []
    reasons = []
    for style in wanted:
        try:
            for attempt in range(20):
                # Some keys are longer than others; a few draws find the room that is needed.
                _needle_document(random.Random(attempt), ["x"], length, style, settings, encode)
            possible.append(style)
        except BadInput as error:
            reasons.append(str(error))
    if not possible:
        raise BadInput(f"--needle-length: {reasons[0].removeprefix('length: ')}")
    return possible


def _needle_document(
    rng: random.Random,
    lines: Sequence[str],
    length: int,
    style: str,
    settings: NeedleSettings,
    encode: Callable[[str], Sized],
) -> str:
    """One document. Its haystack starts at a random line, and needs at most a line for 4 tokens."""
    haystack: str | Sequence[str] = "noise"
    needles, questions = 1, settings.questions
    if style == "pairs":
        start = rng.randrange(len(lines))
        haystack = lines[start : start + length // 4 + 1]
        # A statement and its question take about 12 tokens each with the longest numbers.
        needles = questions = max(1, min(settings.needles, length // 48))
    while True:
        try:
            return needle_example(
                rng,
                encode,
                length,
                haystack,
                style=style,
                digits=settings.digits,
                needles=needles,
                questions=questions,
            ).text
        except BadInput:
            if questions == 1:
                raise
            questions -= 1  # short documents have room for fewer
            needles = min(needles, questions)


def write_corpus(corpus: Corpus, output: str | Path, force: bool = False) -> None:
    """Write the four files to the folder `output`, train.jsonl last."""
    folder = Path(output)
    for name in NAMES:
        require(
            force or not (folder / name).exists(),
            f"--output: found that {folder / name} exists; --force replaces it",
        )
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise BadInput(f"--output: cannot make the folder {folder} ({error.strerror})") from error
    splits = (corpus.held_out, corpus.valid, corpus.needles, corpus.train)
    for name, texts in zip(NAMES, splits, strict=True):
        temporary = folder / f"{name}.tmp{os.getpid()}"
        with temporary.open("w", encoding="utf-8", newline="\n") as stream:
            stream.writelines(json.dumps({"text": text}) + "\n" for text in texts)
        temporary.replace(folder / name)
