"""One report that sets models side by side: loss by position, needle recall, training losses.

It repeats numbers from results files and draws them; it does not judge them. Where models were
measured under different settings, it says which settings differ.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from megatron_lengen.errors import BadInput, require
from megatron_lengen.evaluation.results import (
    RESULTS_NAME,
    load_pyplot,
    read_results,
    versions,
    write_atomically,
)

LABELS = {"wd": "WD", "no_wd": "no-WD", "pl_d": "PL-D", "vpad": "VPAD"}

# Okabe and Ito's colours, told apart by colour-blind readers too; lines differ in style as well.
STYLES = {
    "wd": ("#D55E00", "--", "s"),
    "no_wd": ("#0072B2", "-.", "^"),
    "pl_d": ("#CC79A7", "--", "D"),
    "vpad": ("#009E73", "-", "o"),
}
OTHER_STYLES = (
    ("#E69F00", "--", "v"),
    ("#56B4E9", "-.", "P"),
    ("#000000", ":", "X"),
)
# Iterations that the training loss is averaged over: a single one is noisy.
_RECENT = 20


class TableRow(NamedTuple):
    """A line of the table: what was measured, and a text for each model."""

    name: str
    cells: list[str]


def final_metrics(path: Path) -> dict[str, Any]:
    """The end of a training run, from its metrics file.

    Args:
        path: JSON lines with `iteration` and `lm_loss`; validation rows have `validation: true`.
            Where an iteration occurs again after a resume, its last row counts.

    Returns:
        `iteration`, `consumed_tokens`, `lm_loss` (the last), `lm_loss_recent` (mean of the last
        iterations), `recent_iterations` (how many), `validation_loss`; None where there is none.
    """
    training: dict[int, dict[str, Any]] = {}
    validation: dict[int, dict[str, Any]] = {}
    lines = path.read_text(encoding="utf-8").splitlines()
    for number, line in enumerate(lines, 1):
        try:
            row = json.loads(line)
            (validation if row.get("validation") else training)[row["iteration"]] = row
        except (ValueError, KeyError, AttributeError) as error:
            # A run that was killed while writing leaves half a line at the end.
            if number < len(lines):
                raise BadInput(f"{path}:{number}: found {line[:40]!r}; allowed: metrics") from error
    last = training[max(training)] if training else {}
    recent = [training[i]["lm_loss"] for i in sorted(training) if "lm_loss" in training[i]]
    recent = [loss for loss in recent[-_RECENT:] if loss is not None]
    return {
        "iteration": last.get("iteration"),
        "consumed_tokens": last.get("consumed_tokens"),
        "lm_loss": last.get("lm_loss"),
        "lm_loss_recent": sum(recent) / len(recent) if recent else None,
        "recent_iterations": len(recent),
        "validation_loss": validation[max(validation)].get("lm_loss") if validation else None,
    }


def load_run(folder: Path) -> dict[str, Any]:
    """What is known of one model.

    Args:
        folder: holds `position_loss/results.json`, `needle/results.json`, `metrics.jsonl`, or
            some of them.

    Returns:
        `position_loss`, `needle`, `training`: their contents, None for what is absent.

    Raises:
        BadInput: if none is there.
    """
    run: dict[str, Any] = {}
    for task in ("position_loss", "needle"):
        path = folder / task / RESULTS_NAME
        run[task] = read_results(path) if path.is_file() else None
    metrics = folder / "metrics.jsonl"
    run["training"] = final_metrics(metrics) if metrics.is_file() else None
    require(
        any(run.values()),
        f"--runs: {folder} has none of position_loss/{RESULTS_NAME}, needle/{RESULTS_NAME}, "
        "metrics.jsonl",
    )
    return run


def write_report(
    folder: str | Path,
    models: Mapping[str, Mapping[str, Any]],
    title: str = "Length generalization",
    train_length: int | None = None,
) -> str:
    """Write report.json, report.png and report.md.

    Args:
        folder: made if need be; earlier reports in it are replaced.
        models: for each name (`wd`, `no_wd`, `vpad` first), what `load_run` gives.
        title: heading of the report and the picture.
        train_length: dotted in the picture; taken from the results if None.

    Returns:
        The table as text.

    Raises:
        BadInput: if no model is given, or the training lengths contradict each other.
    """
    require(bool(models), "--runs: found none; allowed: NAME=DIR, at least one")
    order = [name for name in LABELS if name in models]
    order += [name for name in models if name not in LABELS]
    models = {name: models[name] for name in order}
    train_length = _train_length(models, train_length)
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    rows, notes = table_rows(models), settings_notes(models)
    content = {
        "title": title,
        "train_length": train_length,
        "models": {name: {"label": _label(name), **run} for name, run in models.items()},
        "notes": notes,
        "versions": versions(),
    }
    draw(models, folder / "report.png", title, train_length)
    write_atomically(folder / "report.md", markdown(title, models, rows, notes))
    write_atomically(folder / "report.json", json.dumps(content, indent=2, allow_nan=False) + "\n")
    return text_table([_label(name) for name in models], rows)


def table_rows(models: Mapping[str, Mapping[str, Any]]) -> list[TableRow]:
    """The measurements of all models, line by line; `-` where a model has none."""

    def collect(name: str, digits: int, value: Callable[[Mapping[str, Any]], Any]) -> None:
        values = [value(run) for run in models.values()]
        if any(v is not None for v in values):
            cells = ["-" if v is None else f"{v:.{digits}f}" for v in values]
            rows.append(TableRow(name, cells))

    rows: list[TableRow] = []
    collect("iterations", 0, lambda run: (run["training"] or {}).get("iteration"))
    recent = {
        run["training"]["recent_iterations"]
        for run in models.values()
        if run["training"] and run["training"]["recent_iterations"]
    }
    name = f"training loss, last {max(recent)} iterations" if recent else "training loss"
    collect(name, 4, lambda run: (run["training"] or {}).get("lm_loss_recent"))
    collect("validation loss", 4, lambda run: (run["training"] or {}).get("validation_loss"))
    for start, end in _keys(models, "position_loss", "spans", ("start", "end")):
        name = f"loss at positions {start}-{end - 1}"
        collect(name, 4, _finder("position_loss", "spans", "mean", start=start, end=end))
    for (length,) in _keys(models, "needle", "lengths", ("length",)):
        name = f"needle recall at {length} (%)"
        collect(name, 1, _finder("needle", "lengths", "recall", length=length))
    for (length,) in _keys(models, "needle", "lengths", ("length",)):
        name = f"needle token accuracy at {length} (%)"
        collect(name, 1, _finder("needle", "lengths", "token_accuracy", length=length))
    return rows


def _keys(
    models: Mapping[str, Mapping[str, Any]], task: str, part: str, names: Sequence[str]
) -> list[tuple[int, ...]]:
    """All values of `names` in a part of the models' results, in order."""
    found = set()
    for run in models.values():
        for entry in (run[task] or {}).get(part) or []:
            found.add(tuple(entry[name] for name in names))
    return sorted(found)


def _finder(
    task: str, part: str, value: str, **where: int
) -> Callable[[Mapping[str, Any]], float | None]:
    """A function that takes one number out of a run's results."""

    def find(run: Mapping[str, Any]) -> float | None:
        for entry in (run[task] or {}).get(part) or []:
            if all(entry[key] == wanted for key, wanted in where.items()):
                return entry[value]
        return None

    return find


def settings_notes(models: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """How much was measured, and which settings are not the same for all models."""
    notes = []
    for task, unit in (("position_loss", "documents"), ("needle", "samples at each length")):
        runs = {name: run[task] for name, run in models.items() if run[task]}
        if not runs:
            continue
        if task == "needle":
            amounts = {_label(n): r["settings"].get("samples") for n, r in runs.items()}
        else:
            amounts = {_label(n): r["documents"]["used"] for n, r in runs.items()}
        if len(set(amounts.values())) == 1:
            notes.append(f"{task}: {next(iter(amounts.values()))} {unit}")
        else:
            each = ", ".join(f"{name} {amount}" for name, amount in amounts.items())
            notes.append(f"{task}: {unit}: {each}")
        settings = [r.get("settings", {}) for r in runs.values()]
        names = sorted({key for s in settings for key in s} - {"model"})
        differ = [key for key in names if any(s.get(key) != settings[0].get(key) for s in settings)]
        if differ:
            notes.append(f"{task}: these settings differ between models: {', '.join(differ)}")
    return notes


def text_table(labels: Sequence[str], rows: Sequence[TableRow]) -> str:
    """The table for a terminal."""
    first = max([len(row.name) for row in rows], default=0)
    cells = [cell for row in rows for cell in row.cells]
    width = max([10, *(len(text) + 2 for text in (*labels, *cells))])
    lines = [" " * first + "".join(f"{label:>{width}}" for label in labels)]
    for row in rows:
        lines.append(f"{row.name:<{first}}" + "".join(f"{cell:>{width}}" for cell in row.cells))
    return "\n".join(lines)


def markdown(
    title: str,
    models: Mapping[str, Mapping[str, Any]],
    rows: Sequence[TableRow],
    notes: Sequence[str],
) -> str:
    """The report as Markdown, with the picture beside it."""
    lines = [f"# {title}", "", "![loss by position and needle recall](report.png)", ""]
    lines.append("| | " + " | ".join(_label(name) for name in models) + " |")
    lines.append("|---" + "|---:" * len(models) + "|")
    lines += [f"| {row.name} | " + " | ".join(row.cells) + " |" for row in rows]
    if notes:
        lines += ["", *(f"- {note}" for note in notes)]
    return "\n".join(lines) + "\n"


def draw(
    models: Mapping[str, Mapping[str, Any]], path: Path, title: str, train_length: int | None
) -> None:
    """Two panels, a line for each model: loss by position, needle recall by length."""
    from megatron_lengen.evaluation import needle, position_loss

    plt = load_pyplot()
    figure, (left, right) = plt.subplots(1, 2, figsize=(11.0, 4.6), layout="constrained")
    spare = iter(OTHER_STYLES * len(models))
    for name, run in models.items():
        color, style, marker = STYLES[name] if name in STYLES else next(spare)
        if run["position_loss"]:
            position_loss.draw_curve(
                left, run["position_loss"], color, _label(name), linestyle=style
            )
        if run["needle"]:
            look = {"linestyle": style, "marker": marker}
            needle.draw_recall(right, run["needle"], color, _label(name), **look)
    lengths = [length for (length,) in _keys(models, "needle", "lengths", ("length",))]
    position_loss.finish_axes(left, train_length)
    needle.finish_axes(right, lengths, train_length)
    left.set_title("Loss by position")
    right.set_title("Needle recall by length")
    entries: dict[str, Any] = {}
    for axes in (left, right):
        handles, labels = axes.get_legend_handles_labels()
        # The last ones win: markers and error bars of the right panel, where there are any.
        entries.update(zip(labels, handles, strict=True))
        if not set(labels) & {_label(name) for name in models}:
            axes.text(0.5, 0.5, "no results", transform=axes.transAxes, ha="center")
    figure.legend(
        entries.values(),
        entries.keys(),
        loc="outside lower center",
        ncols=len(entries) or 1,
        frameon=False,
        handlelength=3.2,
    )
    figure.get_layout_engine().set(wspace=0.05)
    figure.suptitle(title)
    figure.savefig(path, dpi=150)
    plt.close(figure)


def _label(name: str) -> str:
    return LABELS.get(name, name)


def _train_length(models: Mapping[str, Mapping[str, Any]], given: int | None) -> int | None:
    lengths = {
        run[task]["train_length"]
        for run in models.values()
        for task in ("position_loss", "needle")
        if run[task] and run[task].get("train_length")
    }
    if given is not None:
        lengths.add(given)
    require(
        len(lengths) <= 1,
        f"--train-length: found {', '.join(map(str, sorted(lengths)))} in the results of these "
        "models; allowed: one and the same",
    )
    return lengths.pop() if lengths else None
