"""Flags of layouts, and what has to be the same on all of them, for every kind of decoder."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch
from launcher import Run, curve, dumps, train

STEPS = "--train-iters 20"
FEWER = 6  # enough where nothing is rounded
LOSS, NORM = 1e-5, 1e-4  # relative

TP = "--tensor-model-parallel-size 2"
SP = f"{TP} --sequence-parallel"
PP = "--pipeline-model-parallel-size 2"
VPP = f"{PP} --num-virtual-stages-per-pipeline-rank 2"
CP = "--context-parallel-size 2"
FULL = "--recompute-granularity full"
SELECTIVE = "--recompute-granularity selective"
DISTRIBUTED = "--use-distributed-optimizer"
OVERLAP = "--overlap-grad-reduce --overlap-param-gather"
SINGLE_STEP = "--train-iters 1 --lr-warmup-iters 0 --clip-grad 0"


def train_all(folder: Path, runs: Callable[[int], list[Run]]) -> Path:
    """The folder, with metrics and dumps of the runs for one, two and four processes."""
    for processes in (1, 2, 4):
        train(folder, processes, runs(processes))
    return folder


def check_curves(folder: Path, layout: str, kind: str) -> None:
    """Losses and gradient norms of twenty steps are those of one process."""
    expected, found = folder / f"single-{kind}.jsonl", folder / f"{layout}-{kind}.jsonl"
    assert len(curve(found)) == 20
    torch.testing.assert_close(curve(found), curve(expected), rtol=LOSS, atol=0)
    norms = curve(found, "grad_norm"), curve(expected, "grad_norm")
    torch.testing.assert_close(*norms, rtol=NORM, atol=0)


def check_kinds_differ(folder: Path, kinds: list[str]) -> None:
    """Kinds differ far beyond the tolerance, so equal curves say something."""
    curves = [curve(folder / f"single-{kind}.jsonl") for kind in kinds]
    for other in curves[1:]:
        assert ((curves[0] - other).abs() / other).max() > 100 * LOSS


def check_recomputed(folder: Path, plain: str, recomputed: str) -> None:
    """The first steps of two runs are the same to the bit."""
    for key in ("lm_loss", "grad_norm"):
        expected = curve(folder / f"{plain}.jsonl", key)[:FEWER]
        assert torch.equal(expected, curve(folder / f"{recomputed}.jsonl", key))


def check_gradients(folder: Path, kind: str, layout: str) -> None:
    """Every parameter's gradient of one step is that of one process."""
    (single,) = dumps(folder, f"step-{kind}single", 1)
    found = assembled(folder, f"step-{kind}{layout}", "gradients")
    assert found.keys() == single["gradients"].keys()
    for name, expected in single["gradients"].items():
        rows = min(len(expected), len(found[name]))  # padding of the vocabulary differs
        scale = expected.abs().max().item()
        assert scale > 0, name
        torch.testing.assert_close(
            found[name][:rows], expected[:rows], rtol=0, atol=5e-6 * scale, msg=name
        )


def assembled(folder: Path, name: str, what: str) -> dict[str, torch.Tensor]:
    """Full tensors from the two ranks' dumps."""
    ranks = dumps(folder, name, 2)
    full = {}
    for rank in ranks:
        for key, dimension in rank["shards"].items():
            parts = [r[what][key] for r in ranks if key in r[what]]
            if len(parts) == 2 and dimension is not None and not name.endswith(("pp", "cp")):
                if ".linear_fc1." in key:  # gate and up rows of each rank
                    halves = [part.chunk(2) for part in parts]
                    full[key] = torch.cat([half[i] for i in (0, 1) for half in halves])
                else:
                    full[key] = torch.cat(parts, dimension)
            else:
                full[key] = parts[0]
    return full
