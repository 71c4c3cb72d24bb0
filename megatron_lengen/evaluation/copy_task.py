"""How well a model copies sources of given lengths: greedy answers, and predictions one by one.

The task is that of `data.copy_task`. After `$ s |` a model answers on its own (greedy), and gives
its likeliest token at each place of the true answer (forced: one pass over `$ s | s`, as Jelassi et
al., 2024, and Buitrago & Gu, 2025, score). In percent:

| score                     | share of                                                           |
|---------------------------|--------------------------------------------------------------------|
| exact_match               | greedy answers that are `s .` and so end where they should         |
| token_accuracy            | letters of greedy answers that are right at their place            |
| forced_string_accuracy    | examples whose letters are all predicted, the end not scored       |
| forced_character_accuracy | letters predicted, the end not scored                              |

An example is forced right in all letters exactly where the greedy answer has all letters right, so
the two strict scores differ by the end alone.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from megatron_lengen.data.copy_task import CHARACTERS, END, evaluation_sources, prompts_of
from megatron_lengen.errors import require
from megatron_lengen.evaluation.results import load_pyplot

if TYPE_CHECKING:
    from megatron_lengen.data.copy_task import CopyLengths
    from megatron_lengen.data.tokenizer import Tokenizer
    from megatron_lengen.evaluation.needle import Answerer

SCORES = ("exact_match", "token_accuracy", "forced_string_accuracy", "forced_character_accuracy")
SEED = 42  # of the fixed sets, unless another is asked for
BATCH_TOKENS = 32768


def check_tokenizer(tokenizer: Tokenizer) -> None:
    """Raise BadInput for a model whose ids are not the task's."""
    expected = list(range(len(CHARACTERS)))
    require(
        tokenizer.vocab_size == len(expected) and tokenizer.encode(CHARACTERS) == expected,
        "--model: found a tokenizer that is not the copy task's; allowed: models trained with "
        "--copy-task",
    )


def count_right(
    model: Answerer,
    length: int,
    numbers: Sequence[int],
    seed: int = SEED,
    batch_tokens: int = BATCH_TOKENS,
) -> dict[str, float]:
    """For each of `SCORES`, the sum over examples of the share that is right.

    Args:
        model: see `needle.Answerer`.
        length: of the sources.
        numbers: which examples of the length's fixed set.
        seed: of the set.
        batch_tokens: tokens computed at a time (one example at least).
    """
    right = dict.fromkeys(SCORES, 0)
    size = max(1, batch_tokens // (2 * length + 3))
    for start in range(0, len(numbers), size):
        sources = evaluation_sources(seed, length, numbers[start : start + size])
        prompts = prompts_of(sources)
        greedy = model.greedy(prompts, length + 1)
        forced = model.forced_tokens(torch.cat((prompts, sources), dim=1), length)
        answered, predicted = greedy[:, :-1] == sources, forced == sources
        ended = answered.all(dim=1) & (greedy[:, -1] == END)
        right["exact_match"] += int(ended.sum())
        right["token_accuracy"] += int(answered.sum())
        right["forced_string_accuracy"] += int(predicted.all(dim=1).sum())
        right["forced_character_accuracy"] += int(predicted.sum())
    letters = ("token_accuracy", "forced_character_accuracy")
    return {name: n / length if name in letters else float(n) for name, n in right.items()}


def evaluate_copy(
    model: Answerer,
    lengths: Sequence[int],
    samples: int,
    seed: int = SEED,
    batch_tokens: int = BATCH_TOKENS,
    trained: CopyLengths | None = None,
) -> dict[str, Any]:
    """The scores at several lengths, in percent, as the results file holds them.

    Args:
        model: see `needle.Answerer`.
        lengths: of the sources.
        samples: examples of each length, the first of its fixed set.
        seed: of the sets.
        batch_tokens: tokens computed at a time.
        trained: lengths of the sources in training, kept for pictures.
    """
    from tqdm import tqdm

    rows = []
    for length in tqdm(lengths, disable=None):
        totals = count_right(model, length, range(samples), seed, batch_tokens)
        scores = {name: 100 * total / samples for name, total in totals.items()}
        rows.append({"length": length, "samples": samples, **scores})
    return {"train_lengths": trained and [trained.low, trained.high], "lengths": rows}


def table(results: Mapping[str, Any]) -> str:
    """What the tool prints."""
    titles = ("exact match %", "token acc. %", "forced string %", "forced char. %")
    lines = [f"{'length':>8} {'samples':>8}" + "".join(f"{title:>17}" for title in titles)]
    for row in results["lengths"]:
        scores = "".join(f"{row[name]:>17.1f}" for name in SCORES)
        lines.append(f"{row['length']:>8} {row['samples']:>8}" + scores)
    return "\n".join(lines)


def draw(results: Mapping[str, Any], path: Path) -> None:
    """The scores by length."""
    plt = load_pyplot()
    figure, axes = plt.subplots(figsize=(6.4, 4.0), layout="constrained")
    rows = results["lengths"]
    looks = (
        ("#D55E00", "-", "o"),
        ("#0072B2", "-", "s"),
        ("#E69F00", "--", "^"),
        ("#009E73", "--", "D"),
    )
    for name, (color, style, marker) in zip(SCORES, looks, strict=True):
        axes.plot(
            [row["length"] for row in rows],
            [row[name] for row in rows],
            color=color,
            linestyle=style,
            marker=marker,
            label=name.replace("_", " "),
        )
    finish_axes(axes, [row["length"] for row in rows], results["train_lengths"])
    axes.set_ylabel("right (%)")
    axes.legend(frameon=False)
    figure.savefig(path, dpi=150)
    plt.close(figure)


def finish_axes(axes: Any, lengths: Sequence[int], trained: Sequence[int] | None) -> None:
    """Lengths below, percent at the side, the lengths of training shaded."""
    axes.set_xticks(list(lengths))
    axes.set_ylim(-4, 104)
    axes.set_xlabel("length of the source (letters)")
    axes.grid(alpha=0.25)
    if trained:
        axes.axvspan(trained[0], trained[1], color="0.85", label="training", zorder=0)
