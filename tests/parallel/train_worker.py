"""Trains several times in one set of processes: `train_worker.py FOLDER JOB.json`."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from groups import leave_layout

from megatron_lengen.layers.parts import key_of, local_rows
from megatron_lengen.models.build import build_chunks
from megatron_lengen.models.weights import global_name
from megatron_lengen.runtime import distributed
from megatron_lengen.training.arguments import parse_settings
from megatron_lengen.training.loop import Trainer


def main(folder: Path, runs: list[dict[str, Any]]) -> None:
    """Do the runs, each with process groups of its own layout."""
    distributed.start_process_group()
    for run in runs:
        train(folder, run)
        leave_layout()
    dist.destroy_process_group()


def train(folder: Path, run: dict[str, Any]) -> None:
    """One run; nothing of it stays."""
    flags = [flag.replace("FOLDER", str(folder)) for flag in run["flags"]]
    metrics = str(folder / f"{run['name']}.jsonl")
    settings = parse_settings([*flags, "--metrics-jsonl", metrics], "test", run["decoder"])
    distributed.start(settings.model)
    trainer = Trainer(settings, build_chunks)
    trainer.run()
    if run["dump"]:
        file = folder / f"{run['name']}.rank{dist.get_rank()}.pt"
        torch.save(describe(trainer), file)


def describe(trainer: Trainer) -> dict[str, Any]:
    """This rank's parameters, the gradients of the last step, and how they are sharded."""
    found: dict[str, Any] = {"parameters": {}, "gradients": {}, "shards": {}, "masters": {}}
    for chunk in trainer.engine.chunks:
        inner = chunk
        while hasattr(inner, "module"):
            inner = inner.module
        for name, parameter in inner.named_parameters():
            for key, rows, dimension in pieces(global_name(name, inner), parameter):
                found["parameters"][key] = parameter.detach()[rows].clone()
                found["gradients"][key] = parameter.main_grad.detach()[rows].clone()
                found["shards"][key] = dimension
                master = getattr(parameter, "main_param", None)
                found["masters"][key] = None if master is None else str(master.dtype)
    return found


def pieces(name: str, parameter: torch.nn.Parameter) -> Iterator[tuple[str, slice, int | None]]:
    """Name, rows and sharded dimension of a parameter, or of each part of a fused one."""
    sharded = getattr(parameter, "tensor_model_parallel", False)
    if not hasattr(parameter, "parts"):
        yield name, slice(None), parameter.partition_dim if sharded else None
        return
    first = 0
    for part in parameter.parts:
        last = first + local_rows(part)
        yield key_of(name, part), slice(first, last), 0 if part.sharded else None
        first = last


if __name__ == "__main__":
    main(Path(sys.argv[1]), json.loads(Path(sys.argv[2]).read_text()))
