"""One report on the copy task: settings side by side, each over several seeds.

Mean and standard deviation (of a sample: over n - 1) of what `evaluation.copy_task` measured, by
length and score. Scores are repeated, not judged.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from megatron_lengen.errors import require
from megatron_lengen.evaluation.copy_task import SCORES, finish_axes
from megatron_lengen.evaluation.report import (
    LABELS,
    OTHER_STYLES,
    STYLES,
    TableRow,
    final_metrics,
    text_table,
)
from megatron_lengen.evaluation.results import (
    RESULTS_NAME,
    load_pyplot,
    read_results,
    versions,
    write_atomically,
)

# In the table: the strict forced score says what exact match says, but for the end.
_TABULATED = ("exact_match", "token_accuracy", "forced_character_accuracy")
# In the picture: what the paper's Table 4 shows (EMA, CLA).
_DRAWN = {
    "exact_match": "Exact match of greedy answers",
    "forced_character_accuracy": "Character accuracy, teacher-forced",
}


def load_run(folder: Path) -> dict[str, Any]:
    """What is known of one model.

    Args:
        folder: holds `copy_task/results.json`, and `metrics.jsonl` if training wrote it.

    Raises:
        BadInput: if there are no results.
    """
    path = folder / "copy_task" / RESULTS_NAME
    require(path.is_file(), f"--runs: {folder} has no copy_task/{RESULTS_NAME}")
    metrics = folder / "metrics.jsonl"
    training = final_metrics(metrics) if metrics.is_file() else None
    return {"folder": str(folder), "copy_task": read_results(path), "training": training}


def summarize(runs: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Mean and standard deviation over the seeds of one setting.

    Args:
        runs: from `load_run`.

    Returns:
        `seeds`: how many; `training_loss` and `lengths`, whose entries have `length` and the
        scores, each as `mean`, `std` (None for a single seed) and `values` in the order of `runs`.
    """
    lengths = [row["length"] for row in runs[0]["copy_task"]["lengths"]]
    entries = []
    for index, length in enumerate(lengths):
        rows = [run["copy_task"]["lengths"][index] for run in runs]
        entries.append({"length": length, **{s: _spread([r[s] for r in rows]) for s in SCORES}})
    losses = [(run["training"] or {}).get("lm_loss_recent") for run in runs]
    known = [loss for loss in losses if loss is not None]
    return {
        "seeds": len(runs),
        "training_loss": _spread(known) if len(known) == len(runs) else None,
        "lengths": entries,
    }


def _spread(values: Sequence[float]) -> dict[str, Any]:
    return {
        "mean": statistics.fmean(values),
        "std": statistics.stdev(values) if len(values) > 1 else None,
        "values": list(values),
    }


def write_report(folder: Path, runs: Mapping[str, Sequence[Mapping[str, Any]]], title: str) -> str:
    """Write report.json, report.png and report.md; earlier ones are replaced.

    Args:
        folder: is there.
        runs: for each setting (`wd`, `no_wd`, `pl_d`, `vpad` first), its runs from `load_run`.
        title: heading of the report and the picture.

    Returns:
        The table as text.

    Raises:
        BadInput: if runs were measured differently.
    """
    order = [name for name in LABELS if name in runs] + [n for n in runs if n not in LABELS]
    measured = {
        json.dumps([run["copy_task"]["settings"][key] for key in ("lengths", "samples", "seed")])
        for name in order
        for run in runs[name]
    }
    require(
        len(measured) == 1,
        f"--runs: found lengths, samples, seed = {' and '.join(sorted(measured))}; allowed: one "
        "set of examples for all",
    )
    first = runs[order[0]][0]["copy_task"]
    variants = {
        name: {
            "label": LABELS.get(name, name),
            "runs": [run["folder"] for run in runs[name]],
            **summarize(runs[name]),
        }
        for name in order
    }
    rows = table_rows(variants)
    content = {
        "title": title,
        "train_lengths": first["train_lengths"],
        "samples": first["settings"]["samples"],
        "variants": variants,
        "versions": versions(),
    }
    draw(variants, folder / "report.png", title, first["train_lengths"])
    write_atomically(folder / "report.md", markdown(title, variants, rows, content))
    write_atomically(folder / "report.json", json.dumps(content, indent=2, allow_nan=False) + "\n")
    return text_table([variant["label"] for variant in variants.values()], rows)


def table_rows(variants: Mapping[str, Mapping[str, Any]]) -> list[TableRow]:
    """A line for each score of `_TABULATED` and each length, a cell `mean ± std` for a setting."""
    all_of = list(variants.values())
    rows = [TableRow("seeds", [str(variant["seeds"]) for variant in all_of])]
    losses = [variant["training_loss"] for variant in all_of]
    if None not in losses:
        rows.append(TableRow("training loss", [_cell(loss, 3) for loss in losses]))
    for score in _TABULATED:
        for index, entry in enumerate(all_of[0]["lengths"]):
            cells = [_cell(variant["lengths"][index][score], 1) for variant in all_of]
            rows.append(TableRow(f"{score.replace('_', ' ')} at {entry['length']} (%)", cells))
    return rows


def _cell(spread: Mapping[str, Any], digits: int) -> str:
    mean = f"{spread['mean']:.{digits}f}"
    return mean if spread["std"] is None else f"{mean} ± {spread['std']:.{digits}f}"


def markdown(
    title: str,
    variants: Mapping[str, Mapping[str, Any]],
    rows: Sequence[TableRow],
    content: Mapping[str, Any],
) -> str:
    """The report as Markdown, with the picture beside it."""
    lines = [f"# {title}", "", "![copy accuracy by length](report.png)", ""]
    lines.append("| | " + " | ".join(variant["label"] for variant in variants.values()) + " |")
    lines.append("|---" + "|---:" * len(variants) + "|")
    lines += [f"| {row.name} | " + " | ".join(row.cells) + " |" for row in rows]
    low, high = content["train_lengths"] or ("?", "?")
    lines += [
        "",
        f"- sources of {low} to {high} letters in training; {content['samples']} examples of each "
        "length",
        "- mean ± standard deviation over seeds",
        "- exact match: the whole greedy answer, its end included; forced: predictions along the "
        "true answer, its end not scored",
    ]
    return "\n".join(lines) + "\n"


def draw(
    variants: Mapping[str, Mapping[str, Any]],
    path: Path,
    title: str,
    trained: Sequence[int] | None,
) -> None:
    """A panel for each score of `_DRAWN`, a line for each setting, error bars over seeds."""
    plt = load_pyplot()
    figure, panels = plt.subplots(1, len(_DRAWN), figsize=(11.0, 4.6), layout="constrained")
    for axes, (score, heading) in zip(panels, _DRAWN.items(), strict=True):
        spare = iter(OTHER_STYLES * len(variants))
        longest = max(entry["length"] for v in variants.values() for entry in v["lengths"])
        for index, (name, variant) in enumerate(variants.items()):
            color, style, marker = STYLES[name] if name in STYLES else next(spare)
            # A little apart, so that error bars do not hide each other.
            shift = (index - (len(variants) - 1) / 2) * longest / 120
            axes.errorbar(
                [entry["length"] + shift for entry in variant["lengths"]],
                [entry[score]["mean"] for entry in variant["lengths"]],
                yerr=[entry[score]["std"] or 0.0 for entry in variant["lengths"]],
                color=color,
                linestyle=style,
                marker=marker,
                label=variant["label"],
                capsize=3,
            )
        lengths = [entry["length"] for entry in next(iter(variants.values()))["lengths"]]
        finish_axes(axes, lengths, trained)
        axes.set_ylabel("right (%)")
        axes.set_title(heading)
    panels[0].legend(frameon=False)
    figure.suptitle(title)
    figure.savefig(path, dpi=150)
    plt.close(figure)
