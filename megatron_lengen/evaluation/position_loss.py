"""Cross-entropy by position on long documents: how loss goes on beyond the training length.

Position i is the zero-based place of the token that predicts its successor, so it has i + 1 tokens
of context, and a model trained on rows of T tokens has seen positions 0 to T - 1. A document is
read from its beginning, with no token put before it. Every document counts in every position: only
those with at least `max_length` tokens are used, cut to that length.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron_lengen.errors import BadInput, require
from megatron_lengen.evaluation.results import load_pyplot

if TYPE_CHECKING:
    import torch

    from megatron_lengen.data.tokenizer import Tokenizer
    from megatron_lengen.evaluation.model import EvaluationModel
    from megatron_lengen.evaluation.native import NativeModel


@dataclass
class LongDocuments:
    """Token rows of equal length, and the counts of what became of the documents read."""

    rows: list[list[int]] = field(default_factory=list)
    read: int = 0
    too_short: int = 0
    cut: int = 0
    longest: int = 0

    def counts(self) -> dict[str, int]:
        """The counts as JSON values: read, used, too short, cut at the end, longest (tokens)."""
        return {
            "read": self.read,
            "used": len(self.rows),
            "too_short": self.too_short,
            "cut_to_max_length": self.cut,
            "longest_tokens": self.longest,
        }


def read_documents(paths: Iterable[str], text_key: str = "text") -> Iterator[str]:
    """Texts of documents, in the order of the files.

    Args:
        paths: .jsonl files (one object with `text_key` a line), text files (one document each), or
            folders of them, walked in the order of names; gzipped files and parquet too.
        text_key: the field of a JSON line that holds the text.

    Raises:
        BadInput: for a missing path, or a line that is not such an object, by its number.
    """
    from megatron_lengen.data.texts import decode_batch, find_files, read_batches

    for batch in read_batches(find_files(list(paths))[0], text_key):
        decoded = decode_batch(batch, text_key)
        require(not decoded.broken, f"--data: {next(iter(decoded.broken), '')}")
        require(
            not decoded.skipped["without the key"],
            f"--data: {batch.path} has lines without {text_key!r}; name theirs with --text-key",
        )
        for _, text in decoded.texts:
            yield text


def long_documents(
    texts: Iterable[str], tokenizer: Tokenizer, max_length: int, limit: int | None = None
) -> LongDocuments:
    """The first `limit` documents of at least `max_length` tokens, cut to that length.

    Raises:
        BadInput: if there is none, saying how long the longest is.
    """
    found = LongDocuments()
    for text in texts:
        ids = tokenizer.encode(text)
        found.read += 1
        found.longest = max(found.longest, len(ids))
        if len(ids) < max_length:
            found.too_short += 1
            continue
        found.cut += len(ids) > max_length
        found.rows.append(ids[:max_length])
        if len(found.rows) == limit:
            break
    if not found.rows:
        raise BadInput(
            f"--data: none of {found.read} documents has --max-length ({max_length}) tokens; "
            f"the longest has {found.longest}"
        )
    return found


def position_losses(model: EvaluationModel | NativeModel, rows: list[list[int]]) -> torch.Tensor:
    """Loss at every position of every document.

    Args:
        model: from `evaluation.model.load_model`.
        rows: K token rows of length s.

    Returns:
        [K, s - 1] fp32 on the CPU.
    """
    import torch
    from tqdm import tqdm

    # One row at a time: at the lengths that matter a row fills the device.
    losses = [model.token_losses(torch.tensor([row]))[0] for row in tqdm(rows, disable=None)]
    return torch.stack(losses)


def windows(length: int, bucket: int) -> list[tuple[int, int]]:
    """Ranges of `bucket` positions that cover 0 to length - 1; the last one may be shorter."""
    return [(start, min(start + bucket, length)) for start in range(0, length, bucket)]


def doubling_spans(length: int, train_length: int) -> list[tuple[int, int]]:
    """Ranges of positions 0 to T, T to 2T, 2T to 4T and so on, the last one cut at `length`."""
    spans, start, end = [], 0, train_length
    while start < length:
        spans.append((start, min(end, length)))
        start, end = end, 2 * end
    return spans


def summarize(losses: torch.Tensor, ranges: list[tuple[int, int]]) -> list[dict[str, Any]]:
    """Mean loss in ranges of positions, with the standard error over documents.

    Args:
        losses: [K, s - 1] fp32.
        ranges: (start, end) of each range, the end excluded.

    Returns:
        For each range: start, end, mean, stderr (None for a single document), documents.
    """
    documents = losses.shape[0]
    rows = []
    for start, end in ranges:
        means = losses[:, start:end].double().mean(dim=1)
        error = means.std().item() / documents**0.5 if documents > 1 else None
        rows.append(
            {
                "start": start,
                "end": end,
                "mean": means.mean().item(),
                "stderr": error,
                "documents": documents,
            }
        )
    return rows


def evaluate_position_loss(
    model: EvaluationModel | NativeModel,
    documents: LongDocuments,
    bucket: int | None = None,
    train_length: int | None = None,
) -> dict[str, Any]:
    """Loss by position, as the results file holds it.

    Args:
        model: from `evaluation.model.load_model`.
        documents: from `long_documents`.
        bucket: positions in a window; 1/32 of the length, at most 512, if None.
        train_length: T, for means within the training length and beyond it.

    Raises:
        BadInput: if a loss is not finite.
    """
    losses = position_losses(model, documents.rows)
    bad = int((~losses.isfinite()).any(dim=1).sum())
    require(bad == 0, f"--model: {bad} of {len(losses)} documents have losses that are not finite")
    length = losses.shape[1]
    bucket = bucket or max(1, min(512, (length + 1) // 32))
    results: dict[str, Any] = {
        "length": length + 1,
        "bucket": bucket,
        "train_length": train_length,
        "mean": losses.double().mean().item(),
        "windows": summarize(losses, windows(length, bucket)),
        "documents": documents.counts(),
        "bos": "none",
    }
    if train_length is not None:
        results["spans"] = summarize(losses, doubling_spans(length, train_length))
    return results


def table(results: dict[str, Any]) -> str:
    """What the tool prints: the means by span, or by window where no training length is known."""
    counts = results["documents"]
    lines = [
        f"documents: {counts['used']} used, {counts['too_short']} too short, "
        f"{counts['read']} read; {results['length']} tokens each",
        f"{'positions':>15} {'loss':>9} {'stderr':>9}",
    ]
    for row in results.get("spans") or results["windows"]:
        error = "" if row["stderr"] is None else f"{row['stderr']:9.4f}"
        place = f"{row['start']}-{row['end'] - 1}"
        lines.append(f"{place:>15} {row['mean']:9.4f} {error:>9}")
    return "\n".join(lines)


def draw(results: dict[str, Any], path: Path) -> None:
    """Loss by position, with the standard error as a band and the training length dotted."""
    plt = load_pyplot()
    figure, axes = plt.subplots(figsize=(6.4, 4.0), layout="constrained")
    draw_curve(axes, results, color="#0072B2", label=None)
    finish_axes(axes, results["train_length"])
    if results["train_length"]:
        axes.legend(frameon=False)
    figure.savefig(path, dpi=150)
    plt.close(figure)


def draw_curve(axes: Any, results: dict[str, Any], color: str, label: str | None, **line: Any):
    """One model's curve on matplotlib axes."""
    rows = results["windows"]
    middles = [(row["start"] + row["end"]) / 2 for row in rows]
    means = [row["mean"] for row in rows]
    axes.plot(middles, means, color=color, label=label, linewidth=1.8, **line)
    if rows[0]["stderr"] is not None:
        low = [row["mean"] - row["stderr"] for row in rows]
        high = [row["mean"] + row["stderr"] for row in rows]
        axes.fill_between(middles, low, high, color=color, alpha=0.15, linewidth=0)


def finish_axes(axes: Any, train_length: int | None) -> None:
    """Labels and the training length."""
    axes.set_xlabel("position in the document (tokens)")
    axes.set_ylabel("cross-entropy (nats per token)")
    axes.grid(alpha=0.25)
    mark_train_length(axes, train_length)


def mark_train_length(axes: Any, train_length: int | None) -> None:
    """The training length as a dotted line, named for the legend."""
    if train_length:
        label = f"training length ({train_length})"
        axes.axvline(train_length, color="#444444", linestyle=":", linewidth=1.3, label=label)
