"""The stages of tools/benchmark/gpu_check.py: commands, what is read of reports, targets."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parents[2]
Rows = list[tuple[str, str]]


class Stage(NamedTuple):
    """A benchmark: most seconds, script, its flags, the flags of a tiny run, what is told of it."""

    seconds: float
    script: str
    flags: str
    quick: str
    rows: Callable[[dict[str, Any]], Rows]


# ---- what is told of a report --------------------------------------------------------------------


def test_rows(report: dict[str, Any]) -> Rows:
    """Counts, and every failure."""
    counts = ", ".join(f"{count} {name}" for name, count in report["counts"].items())
    return [("tests", counts), *((f"failed {i + 1}", f) for i, f in enumerate(report["failures"]))]


def norm_rows(report: dict[str, Any]) -> Rows:
    """Each kind: microseconds of ours, its share of the limit, the best peer."""
    found = []
    for row in report["results"]:
        if row["form"] != "ours":
            continue
        text = f"ours {1e6 * row['seconds']:.0f} us"
        if row.get("share_of_copy"):
            text += f", {row['share_of_copy']:.1%} of copy bandwidth"
        found.append((f"norm, {row['norm']}", text + best_peer(report, "norm", row["norm"])))
    return found


def best_peer(report: dict[str, Any], key: str, kind: str) -> str:
    """The quickest form of a kind that is not of this package, as text."""
    peers = [
        row
        for row in report["results"]
        if row[key] == kind
        and row.get("seconds")
        and not row["form"].startswith("ours")
        and row["form"] != "limit"
    ]
    if not peers:
        return ""
    best = min(peers, key=lambda row: row["seconds"])
    return f"; {best['form']} takes {best['ratio']:.2f} times ours"


def cross_entropy_rows(report: dict[str, Any]) -> Rows:
    """Each row with its numbers."""
    found = []
    for row in report["results"]:
        names = [str(value) for value in row.values() if isinstance(value, str)]
        text = []
        if row.get("seconds"):
            text.append(f"{1e3 * row['seconds']:.2f} ms")
        if row.get("ratio"):
            text.append(f"{row['ratio']:.2f} times ours")
        if row.get("bytes"):
            text.append(f"{row['bytes'] / 2**20:.0f} MiB")
        found.append((", ".join(names), ", ".join(text)))
    return found


def attention_rows(report: dict[str, Any]) -> Rows:
    """Each kind and length: rate of ours, the best peer, failures."""
    found = []
    rows = report["results"]
    for kind in dict.fromkeys(row["kind"] for row in rows):
        for length in dict.fromkeys(row["length"] for row in rows):
            here = [r for r in rows if r["kind"] == kind and r["length"] == length]
            mine = next((r for r in here if r["form"] == "ours"), None)
            if mine is None:
                continue
            if "failed" in mine:
                found.append((f"{kind}, {length}", mine["failed"]))
                continue
            text = f"{1e3 * mine['seconds']:.2f} ms, {mine['tflops']:.3g} TFLOP/s, "
            text += f"{mine['of_matmul_rate']:.1%} of a large product's"
            peers = {"results": here}
            found.append((f"{kind}, {length}", text + best_peer(peers, "kind", kind)))
    return found


def step_rows(report: dict[str, Any]) -> Rows:
    """Each form of a step: seconds, tokens a second, TFLOP/s, MFU, memory."""
    settings = report["settings"]
    found = [("size", f"{settings['batch']} rows of {settings['length']}, {settings['dtype']}")]
    for row in report["results"]:
        text = f"{row['seconds']:.4f} s, {row['tokens_per_second']:.0f} tokens/s, "
        text += f"{row['tflops']:.4g} TFLOP/s"
        if row.get("mfu"):
            text += f", MFU {row['mfu']:.1%}"
        if row.get("memory_bytes"):
            text += f", {row['memory_bytes'] / 2**30:.1f} GiB"
        found.append((row["form"], text))
    return found


BENCHMARKS = {
    "tests": Stage(
        75,
        "gpu_tests.py",
        "--seconds {seconds:.0f}",
        "--seconds {seconds:.0f}",
        test_rows,
    ),
    "norm": Stage(
        60,  # its peers are compiled, which takes most of it
        "norm.py",
        "--device {device} --rows 65536 --hidden 2048 --dtype bf16 --repeat 50 --threads 1",
        "--device {device} --rows 64 --hidden 64 --dtype bf16 --repeat 1 --threads 1 --no-compile",
        norm_rows,
    ),
    "cross_entropy": Stage(
        40,
        "cross_entropy.py",
        "--device {device} --dtype bf16 --tokens 8192 --hidden 2048 --vocabulary 128256 "
        "--repeat 10",
        "--device {device} --tokens 64 --hidden 64 --vocabulary 512 --repeat 1",
        cross_entropy_rows,
    ),
    "attention": Stage(
        70,
        "attention.py",
        "--device {device} --parts kinds --heads 16 --groups 4 --channels 128 --no-compile "
        "--kind-lengths 4096 16384 65536 131072 --dense-length 4096 --longest 2 --repeat 5 "
        "--seconds {seconds:.0f}",
        "--device {device} --parts kinds --channels 16 --no-compile --kind-lengths 64 128 "
        "--dense-length 64 --repeat 1",
        attention_rows,
    ),
    "step": Stage(
        110,
        "step.py",
        "--device {device} --preset 3b --dtype bf16 --batch 2 --vpad 0.3 --repeat 5 "
        "--no-peer --apart",
        "--device {device} --preset tiny --dtype bf16 --layers 1 --batch 1 --length 64 --repeat 1 "
        "--threads 1",
        step_rows,
    ),
}


# ---- training runs -------------------------------------------------------------------------------

GPT = (
    "pretrain_gpt.py",
    "--num-layers 12 --hidden-size 1024 --ffn-hidden-size 2816 --num-attention-heads 16 "
    "--num-query-groups 4 --swiglu --disable-bias-linear --seq-length 4096",
    "--num-layers 2 --hidden-size 64 --ffn-hidden-size 128 --num-attention-heads 4 "
    "--num-query-groups 2 --swiglu --disable-bias-linear --seq-length 128",
)
MAMBA = (
    "pretrain_mamba.py",
    "--num-layers 12 --hidden-size 1024 --mamba-num-heads 32 --mamba-state-dim 128 "
    "--seq-length 4096",
    "--num-layers 2 --hidden-size 64 --mamba-num-heads 4 --mamba-head-dim 32 "
    "--mamba-state-dim 16 --seq-length 128",
)
COMMON = (
    "--bf16 --mock-data --tokenizer-type NullTokenizer --num-workers 0 --lr 3e-4 --eval-iters 0 "
    "--lr-decay-style constant --log-interval 1"
)
SIZES = (
    "--vocab-size 32000 --micro-batch-size 4 --global-batch-size 4 --train-iters 2000",
    "--vocab-size 512 --micro-batch-size 2 --global-batch-size 2 --train-iters 6",
)
# Of each variant: what runs it, and the flags that make it.
VARIANTS: dict[str, tuple[tuple[str, str, str], str]] = {
    "none": (GPT, ""),
    "pre_norm": (GPT, "--dropout-variant pre_norm --dropout-rate 0.3"),
    "pre_linear": (GPT, "--dropout-variant pre_linear --dropout-rate 0.3"),
    "vpad": (GPT, "--dropout-variant vpad --dropout-rate 0.3"),
    "window": (GPT, "--sliding-window {window} --window-attn-skip-freq 4"),
    "nape": (GPT, "--position-embedding-type nape"),
    "asentmax": (GPT, "--attention-function entmax --query-scaling learned"),
    "query_scaling": (GPT, "--query-scaling learned"),
    "mamba2": (MAMBA, "--dropout-variant vpad --dropout-rate 0.1"),
}
FIRST_STEPS = 3  # compile and allocate


def training_command(name: str, quick: bool, metrics: Path, cache: Path) -> list[str]:
    """A variant's training run without the interpreter: script and flags."""
    (script, full, tiny), own = VARIANTS[name]
    flags = f"{tiny if quick else full} {COMMON} {SIZES[quick]} "
    flags += own.format(window=32 if quick else 1024)
    files = ["--metrics-jsonl", str(metrics), "--data-cache-path", str(cache / "data")]
    return [str(ROOT / script), *flags.split(), *files]


def training_rows(steps: list[dict[str, Any]]) -> tuple[Rows, str, dict[str, Any]]:
    """What is told of a run's rows of metrics, what is wrong with them, and the figures."""
    if not steps:
        return [], "no step was made", {}
    losses = [step["lm_loss"] for step in steps]
    settled = [step["tokens_per_second"] for step in steps[FIRST_STEPS:]]
    speed = statistics.median(settled) if settled else None
    unsound = [s["iteration"] for s in steps if s["lm_loss"] is None or not _finite(s)]
    skipped = sum(step.get("skipped") or 0 for step in steps)
    figures = {
        "steps": len(steps),
        "first_loss": losses[0],
        "last_loss": losses[-1],
        "tokens_per_second": speed,
        "skipped": skipped,
    }
    fault = f"loss or gradient not finite at iteration {unsound[0]}" if unsound else ""
    if skipped and not fault:
        fault = f"{skipped} updates skipped"
    if unsound:
        return [("steps", str(len(steps)))], fault, figures
    said = f"{len(steps)} steps, loss {losses[0]:.3f} to {losses[-1]:.3f}"
    said += f", {speed:.0f} tokens/s" if speed else ", too few steps for a speed"
    return [("training", said)], fault, figures


def _finite(step: dict[str, Any]) -> bool:
    norm = step.get("grad_norm")
    return math.isfinite(step["lm_loss"]) and norm is not None and math.isfinite(norm)


# ---- targets -------------------------------------------------------------------------------------


def targets(found: dict[str, Any]) -> list[dict[str, Any]]:
    """What is aimed at on an H200: wanted, found, and met or missed, or not measured.

    Args:
        found: reports by the stage's name.
    """
    share = slower = mfu = cost = None
    if "norm" in found:
        ours = {row["norm"]: row for row in found["norm"]["results"] if row["form"] == "ours"}
        if {"vpad", "plain"} <= set(ours):
            share = ours["vpad"].get("share_of_copy")
            slower = ours["vpad"]["seconds"] / ours["plain"]["seconds"] - 1
    if "step" in found:
        rows = {row["form"]: row for row in found["step"]["results"]}
        if {"ours", "ours, vpad"} <= set(rows):
            both = [rows["ours"], rows["ours, vpad"]]
            cost = both[1]["seconds"] / both[0]["seconds"] - 1
            if all(row.get("mfu") for row in both):
                mfu = min(row["mfu"] for row in both)
    return [
        _target("norm with VPAD, of copy bandwidth", ">=", 0.85, share),
        _target("norm with VPAD, slower than plain", "<=", 0.05, slower),
        _target("MFU of a step of SmolLM3-3B, 4096 tokens", ">=", 0.45, mfu),
        _target("a step with VPAD, slower than without", "<", 0.02, cost),
    ]


def _target(what: str, sense: str, wanted: float, found: float | None) -> dict[str, Any]:
    if found is None:
        outcome = "not measured"
    else:
        met = found >= wanted if sense == ">=" else found <= wanted
        if sense == "<":
            met = found < wanted
        outcome = "met" if met else "missed"
    return {"what": what, "sense": sense, "wanted": wanted, "found": found, "outcome": outcome}
