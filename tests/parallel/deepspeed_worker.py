"""Trains with both engines in one set of processes: `deepspeed_worker.py FOLDER JOB.json`.

What comes before the first dash of a run's name says what is done: `rows`, a step on rows of
unequal length; `skips`, steps that go wrong; anything else, the whole run.
"""

from __future__ import annotations

import contextlib
import json
import math
import sys
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from mask_worker import rows_of_rank
from megatron.core import parallel_state
from megatron.core.utils import unwrap_model
from torch import Tensor, nn

from megatron_lengen.models.build import build_chunks
from megatron_lengen.runtime import distributed
from megatron_lengen.training import deepspeed_state
from megatron_lengen.training.arguments import parse_settings
from megatron_lengen.training.loop import Trainer


def main(folder: Path, runs: list[dict[str, Any]]) -> None:
    """One run after the other, each with process groups of its own layout."""
    distributed.start_process_group()
    for run in runs:
        flags = [flag.replace("FOLDER", str(folder)) for flag in run["flags"]]
        metrics = str(folder / f"{run['name']}.jsonl")
        settings = parse_settings([*flags, "--metrics-jsonl", metrics], "test")
        distributed.start(settings.model)
        trainer = Trainer(settings, build_chunks)
        kind = run["name"].split("-")[0]
        if kind in ("rows", "skips"):
            found = rows(trainer) if kind == "rows" else skips(trainer)
            torch.save(found, folder / f"{run['name']}.rank{dist.get_rank()}.pt")
        else:
            trainer.run()
        dist.barrier()
        parallel_state.destroy_model_parallel()
    dist.destroy_process_group()


def rows(trainer: Trainer) -> dict[str, Any]:
    """A step on four rows of which few tokens count."""
    result = trainer.engine.train(rows_of_rank(trainer.settings), 0)
    return {"loss": result.loss, "tokens": result.tokens, "grad_norm": result.grad_norm}


def skips(trainer: Trainer) -> dict[str, Any]:
    """Steps: a good one, one without a finite loss, one without a finite gradient, a good one."""
    engine, data = trainer.engine, trainer._train_data()
    (chunk,) = trainer.engine.chunks
    (model,) = unwrap_model([chunk])
    results, weights = [], []
    for spoiled in (None, "loss", "gradient", None):
        with spoiling(model, spoiled):
            results.append(engine.train(data, trainer.settings.training.global_batch_size or 0))
        weights.append(whole(trainer, chunk))
    moved = [any((a != b).any() for a, b in zip(*two, strict=True)) for two in pairwise(weights)]
    return {
        "skipped": [result.skipped for result in results],
        "places": [result.not_finite_in for result in results],
        "rates": [result.learning_rate for result in results],
        "norms": [result.grad_norm for result in results],
        "losses": [result.loss for result in results],
        "moved": moved,
    }


def whole(trainer: Trainer, chunk: nn.Module) -> list[Tensor]:
    """Copies of this rank's parameters, gathered where they are partitioned."""
    if trainer.settings.deepspeed is None:
        return [p.detach().clone() for p in chunk.parameters()]
    with deepspeed_state.whole_weights(trainer.settings, chunk):
        return [p.detach().clone() for p in chunk.parameters()]


@contextlib.contextmanager
def spoiling(model: nn.Module, what: str | None) -> Iterator[None]:
    """Make the loss, or the gradient of the last norm alone, nan on the last rank."""
    handle = None
    if dist.get_rank() == dist.get_world_size() - 1:
        if what == "loss":
            handle = model.output_layer.register_forward_hook(
                lambda module, inputs, output: (output[0] * math.nan, output[1])
            )
        elif what == "gradient":
            handle = model.decoder.final_layernorm.weight.register_hook(lambda g: g * math.nan)
    yield
    if handle is not None:
        handle.remove()


if __name__ == "__main__":
    main(Path(sys.argv[1]), json.loads(Path(sys.argv[2]).read_text()))
