"""Needle in a haystack: how often a model finds one fact again, by length and depth.

The task is NIAH-1 of RULER (Hsieh et al., 2024): a number is hidden in a long text and asked for at
its end; the score is recall-based accuracy, the share of answers that occur in the output, upper
and lower case being equal. Examples are those of `data.needles`, which training can use too.

Lengths are in tokens and include the answer. No input is ever cut: a sample that does not fit stops
the evaluation. Samples depend on (seed, length, index) only, so models with the same tokenizer get
the same ones, whichever lengths are asked for beside them.
"""

from __future__ import annotations

import json
import random
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from megatron_lengen.errors import require
from megatron_lengen.evaluation.position_loss import mark_train_length, read_documents
from megatron_lengen.evaluation.results import load_pyplot

if TYPE_CHECKING:
    from torch import Tensor

    from megatron_lengen.data.tokenizer import Tokenizer

# Depths are reported in fifths of the text.
_DEPTH_BINS = 5
# Room for a few words around the answer.
_EXTRA_TOKENS = 8


class Answerer(Protocol):
    """What the evaluation asks of a model; `evaluation.model.EvaluationModel` is one."""

    def greedy(self, ids: Tensor, new_tokens: int) -> Tensor:
        """Continuations [b, n] of prompts [b, s]."""
        ...

    def forced_tokens(self, ids: Tensor, last: int) -> Tensor:
        """Likeliest tokens [b, last] at the last positions of [b, s], true ones before them."""
        ...


@dataclass(frozen=True)
class NeedleSample:
    """One question, as tokens."""

    prompt: list[int]
    answer: list[int]
    answer_text: str
    depth: float
    """Where the needle is: 0 at the beginning of the text, 1 at its end."""


@dataclass(frozen=True)
class NeedleTask:
    """What the samples look like; the fields are those of `data.needles.needle_example`."""

    style: str = "niah"
    """`niah` (RULER's sentences) or `pairs` (lines key=value)."""

    haystack: Sequence[str] | None = None
    """Lines of text to hide the needle between; RULER's noise if None."""

    digits: int = 7
    """Digits of the hidden number."""

    needles: int | None = None
    """Statements in a text, one of them asked for; the style's default if None."""

    key_words: int = 1
    """Words in the name of a number (RULER has 2)."""

    seed: int = 42
    """With length and index, decides everything random."""


def make_samples(
    tokenizer: Tokenizer, length: int, count: int, task: NeedleTask
) -> list[NeedleSample]:
    """Samples of one length, their depths spread evenly from beginning to end.

    Prompt and answer are encoded together, as training text is, and divided where the tokens of
    the prompt alone end.

    Args:
        tokenizer: encodes without start or end tokens, as in training.
        length: most tokens of prompt and answer together.
        count: how many.
        task: what they look like.

    Raises:
        BadInput: if a sample does not fit into `length`, or a field of `task` is out of range.
    """
    from megatron_lengen.data.needles import needle_example

    samples = []
    for index in range(count):
        rng = random.Random(f"{task.seed}/{length}/{index}")
        example = needle_example(
            rng,
            tokenizer.encode,
            length,
            _lines_for(task.haystack, length, rng),
            style=task.style,
            digits=task.digits,
            depth=(index + 0.5) / count,
            needles=task.needles,
            key_words=task.key_words,
        )
        tokens = tokenizer.encode(example.prompt_text + example.answer_text)
        require(
            len(tokens) <= length,
            f"--lengths: a sample of {len(tokens)} tokens does not fit into {length}",
        )
        alone = tokenizer.encode(example.prompt_text)
        same = (a == b for a, b in zip(alone, tokens, strict=False))
        # A last token that would merge with the answer belongs to it.
        split = sum(takewhile(bool, same))
        samples.append(NeedleSample(tokens[:split], tokens[split:], example.value, example.depth))
    return samples


def read_lines(path: str) -> list[str]:
    """Lines for a haystack: those of all documents at `path` that are not blank.

    Args:
        path: as `position_loss.read_documents` takes it.

    Raises:
        BadInput: if it cannot be read or has no text.
    """
    lines = [line.rstrip() for text in read_documents([path]) for line in text.splitlines()]
    lines = [line for line in lines if line]
    require(bool(lines), f"--haystack: {path} has no text")
    return lines


def _lines_for(lines: Sequence[str] | None, length: int, rng: random.Random) -> str | list[str]:
    """A haystack for one sample: enough lines from a random place on, the first following the last.

    A token of ordinary text has about four characters; twice that always suffices, and if not the
    lines repeat.
    """
    if lines is None:
        return "noise"
    start, size = rng.randrange(len(lines)), 0
    taken: list[str] = []
    while size < 8 * length and len(taken) < len(lines):
        taken.append(lines[(start + len(taken)) % len(lines)])
        size += len(taken[-1])
    return taken


def is_found(answer: str, output: str) -> bool:
    """RULER's string match for one answer: it occurs in the output, whatever the case."""
    return answer.lower() in output.lower()


def evaluate_samples(
    model: Answerer, tokenizer: Tokenizer, samples: Sequence[NeedleSample], batch_tokens: int
) -> list[dict[str, Any]]:
    """Answers to all samples, in batches of equal lengths.

    Args:
        model: see `Answerer`.
        tokenizer: decodes outputs; what follows its end-of-document token does not count.
        samples: from `make_samples`.
        batch_tokens: tokens in a batch (one sample at least).

    Returns:
        For each sample, in order: depth, tokens (prompt and answer), answer, output, found,
        token_accuracy (share of the answer's tokens predicted right after the true ones).
    """
    import torch

    rows: list[dict[str, Any] | None] = [None] * len(samples)
    for batch in _batches(samples, batch_tokens):
        prompts = torch.tensor([samples[i].prompt for i in batch])
        answers = torch.tensor([samples[i].answer for i in batch])
        size = answers.shape[1]
        outputs = model.greedy(prompts, size + _EXTRA_TOKENS)
        forced = model.forced_tokens(torch.cat((prompts, answers), dim=1), size)
        right = (forced == answers).double().mean(dim=1)
        for i, output, accuracy in zip(batch, outputs.tolist(), right.tolist(), strict=True):
            end = output.index(tokenizer.eod) if tokenizer.eod in output else len(output)
            text = tokenizer.decode(output[:end])
            rows[i] = {
                "depth": samples[i].depth,
                "tokens": prompts.shape[1] + size,
                "answer": samples[i].answer_text,
                "output": text,
                "found": is_found(samples[i].answer_text, text),
                "token_accuracy": accuracy,
            }
    return [row for row in rows if row is not None]


def _batches(samples: Sequence[NeedleSample], batch_tokens: int) -> Iterator[list[int]]:
    """Indices of samples with equal numbers of prompt and answer tokens, a batch at a time."""
    groups = defaultdict(list)
    for index, sample in enumerate(samples):
        groups[len(sample.prompt), len(sample.answer)].append(index)
    for (prompt, answer), indices in groups.items():
        size = max(1, batch_tokens // (prompt + answer))
        for start in range(0, len(indices), size):
            yield indices[start : start + size]


def summarize(length: int, rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The scores of one length, in percent, and how long its samples really are.

    Args:
        length: the length asked for.
        rows: from `evaluate_samples`.
    """
    depths = []
    for part in range(_DEPTH_BINS):
        inside = [r for r in rows if min(int(r["depth"] * _DEPTH_BINS), _DEPTH_BINS - 1) == part]
        depths.append(
            {
                "from": part / _DEPTH_BINS,
                "to": (part + 1) / _DEPTH_BINS,
                "samples": len(inside),
                "recall": _percent([r["found"] for r in inside]) if inside else None,
            }
        )
    recall = _percent([r["found"] for r in rows])
    return {
        "length": length,
        "samples": len(rows),
        "recall": recall,
        # Of a share of len(rows) yes-or-no answers.
        "stderr": (recall * (100 - recall) / len(rows)) ** 0.5,
        "token_accuracy": _percent([r["token_accuracy"] for r in rows]),
        "tokens_min": min(r["tokens"] for r in rows),
        "tokens_max": max(r["tokens"] for r in rows),
        "truncated": sum(r["tokens"] > length for r in rows),
        "depths": depths,
    }


def _percent(values: Sequence[float]) -> float:
    return 100 * sum(values) / len(values)


def evaluate_needle(
    model: Answerer,
    tokenizer: Tokenizer,
    samples: Mapping[int, Sequence[NeedleSample]],
    batch_tokens: int = 16384,
    train_length: int | None = None,
) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Needle recall at several lengths.

    Args:
        model: see `Answerer`.
        tokenizer: the model's.
        samples: for each length, what `make_samples` gave.
        batch_tokens: see `evaluate_samples`.
        train_length: kept with the results, for pictures.

    Returns:
        The results as the file holds them, and the rows of `evaluate_samples` with their length.
    """
    from tqdm import tqdm

    results, outputs = [], []
    for length in tqdm(sorted(samples), disable=None):
        rows = evaluate_samples(model, tokenizer, samples[length], batch_tokens)
        results.append(summarize(length, rows))
        outputs += [{"length": length, **row} for row in rows]
    summary = {
        "train_length": train_length,
        "lengths": results,
        "truncated": sum(r["truncated"] for r in results),
        "bos": "none",
    }
    return summary, outputs


def table(results: dict[str, Any]) -> str:
    """What the tool prints."""
    lines = [f"{'length':>8} {'samples':>8} {'recall %':>9} {'stderr':>7} {'token acc. %':>13}"]
    for row in results["lengths"]:
        lines.append(
            f"{row['length']:>8} {row['samples']:>8} {row['recall']:>9.1f} {row['stderr']:>7.1f} "
            f"{row['token_accuracy']:>13.1f}"
        )
    return "\n".join(lines)


def write_outputs(path: Path, rows: Sequence[dict[str, Any]]) -> None:
    """What the model answered to every sample, a JSON object a line, for reading."""
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def draw(results: dict[str, Any], path: Path) -> None:
    """Two panels: recall by length, and recall by length and depth."""
    plt = load_pyplot()
    figure, (left, right) = plt.subplots(1, 2, figsize=(10.0, 4.0), layout="constrained")
    draw_recall(left, results, color="#0072B2", label=None, marker="o")
    lengths = [row["length"] for row in results["lengths"]]
    finish_axes(left, lengths, results["train_length"])
    if results["train_length"]:
        left.legend(frameon=False)
    cells = [[row["depths"][d]["recall"] for row in results["lengths"]] for d in range(_DEPTH_BINS)]
    values = [[float("nan") if cell is None else cell for cell in row] for row in cells]
    image = right.imshow(values, vmin=0, vmax=100, cmap="cividis", aspect="auto")
    for y, row in enumerate(cells):
        for x, cell in enumerate(row):
            if cell is not None:
                color = "black" if cell > 55 else "white"
                right.text(x, y, f"{cell:.0f}", ha="center", va="center", color=color, fontsize=8)
    right.set_xticks(range(len(lengths)), [str(n) for n in lengths])
    step = 100 // _DEPTH_BINS
    right.set_yticks(
        range(_DEPTH_BINS), [f"{d * step}-{(d + 1) * step}" for d in range(_DEPTH_BINS)]
    )
    right.set_xlabel("length (tokens)")
    right.set_ylabel("depth of the needle (% of the text)")
    figure.get_layout_engine().set(wspace=0.06)
    figure.colorbar(image, ax=right, label="recall (%)")
    figure.savefig(path, dpi=150)
    plt.close(figure)


def draw_recall(
    axes: Any, results: dict[str, Any], color: str, label: str | None, **line: Any
) -> None:
    """One model's recall by length on matplotlib axes, with standard errors."""
    rows = results["lengths"]
    axes.errorbar(
        [row["length"] for row in rows],
        [row["recall"] for row in rows],
        yerr=[row["stderr"] for row in rows],
        color=color,
        label=label,
        linewidth=1.8,
        markersize=5,
        capsize=2,
        elinewidth=0.8,
        **line,
    )


def finish_axes(axes: Any, lengths: Sequence[int], train_length: int | None) -> None:
    """A logarithmic axis of lengths, percent, and the training length."""
    axes.set_xscale("log", base=2)
    axes.set_xticks(list(lengths), [str(n) for n in lengths])
    axes.minorticks_off()
    axes.set_ylim(-4, 104)
    axes.set_xlabel("length (tokens)")
    axes.set_ylabel("needle recall (%)")
    axes.grid(alpha=0.25)
    mark_train_length(axes, train_length)
