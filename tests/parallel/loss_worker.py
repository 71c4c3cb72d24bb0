"""A vocabulary divided over all ranks: `loss_worker.py FOLDER JOB.json`.

Writes losses and gradients of each way to call the operator, and a model's logits gathered.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from groups import leave_layout
from torch import Tensor

from megatron_lengen.layers.coordinates import set_samples
from megatron_lengen.models.build import InferenceModel, build_chunks
from megatron_lengen.ops.linear_cross_entropy import CHUNK_BYTES, linear_cross_entropy
from megatron_lengen.runtime import distributed
from megatron_lengen.training.arguments import parse_settings

TOKENS, HIDDEN, ROWS = 13, 8, 16  # rows of the weight on each rank
# Rows that are tokens: all of them, some on the last rank, none on it.
VOCABULARIES = (32, 29, 11)


def inputs(vocabulary: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """hidden, the whole weight with padding, labels, a mask."""
    generator = torch.Generator().manual_seed(vocabulary)
    hidden = torch.randn(TOKENS, HIDDEN, generator=generator)
    weight = torch.randn(2 * ROWS, HIDDEN, generator=generator)
    labels = torch.randint(0, vocabulary, (TOKENS,), generator=generator)
    labels[0], labels[1] = vocabulary - 1, 0
    return hidden, weight, labels, torch.rand(TOKENS, generator=generator)


def operator(vocabulary: int, masked: bool, total: str) -> dict[str, Tensor]:
    """Losses, the whole gradient of `hidden`, this rank's of the weight."""
    rank = dist.get_rank()
    hidden, weight, labels, mask = inputs(vocabulary)
    hidden.requires_grad_()
    part = weight[rank * ROWS : (rank + 1) * ROWS].clone().requires_grad_()
    here = {
        "factors": mask if masked else None,
        "vocabulary": max(0, min(ROWS, vocabulary - rank * ROWS)),
        "group": dist.group.WORLD,
    }
    losses = linear_cross_entropy(hidden, part, labels, **here)
    (losses.sum() if total == "sum" else losses.square().sum()).backward()
    assert hidden.grad is not None and part.grad is not None
    dist.all_reduce(hidden.grad)
    with torch.no_grad():
        again = linear_cross_entropy(hidden, part, labels, **here, chunk=5)
    return {
        "losses": losses.detach(),
        "again": again,
        "hidden": hidden.grad,
        "weight": part.grad,
    }


def gathered_logits(flags: list[str]) -> Tensor:
    """Of the true vocabulary, on every rank."""
    settings = parse_settings(flags, "test")
    distributed.start(settings.model)
    (model,) = build_chunks(settings.model)
    set_samples([0, 1])
    tokens = torch.arange(2 * settings.model.seq_length).view(2, -1) % settings.model.vocab_size
    return InferenceModel(model.eval(), settings.model)(tokens)


def main(folder: Path, runs: list[dict[str, Any]]) -> None:
    """Everything on this rank."""
    distributed.start_process_group()
    rank = dist.get_rank()
    for run in runs:
        torch.save(gathered_logits(run["flags"]), folder / f"{run['name']}.rank{rank}.pt")
        leave_layout()
    if dist.get_world_size() == 2:
        # A few tokens at a time, however many rows are padding.
        CHUNK_BYTES["cpu"] = 4 * ROWS * 4
        found = {
            f"{vocabulary} {masked} {total}": operator(vocabulary, masked, total)
            for vocabulary in VOCABULARIES
            for masked in (True, False)
            for total in ("sum", "squares")
        }
        torch.save(found, folder / f"operator.rank{rank}.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), json.loads(Path(sys.argv[2]).read_text()))
