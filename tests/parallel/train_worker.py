"""Trains several times in one set of processes: `train_worker.py FOLDER JOB.json`."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from groups import leave_layout

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
    settings = parse_settings([*flags, "--metrics-jsonl", metrics], "test")
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
            name = global_name(name, inner)
            found["parameters"][name] = parameter.detach().clone()
            found["gradients"][name] = parameter.main_grad.detach().clone()
            sharded = getattr(parameter, "tensor_model_parallel", False)
            found["shards"][name] = parameter.partition_dim if sharded else None
            master = getattr(parameter, "main_param", None)
            found["masters"][name] = None if master is None else str(master.dtype)
    return found


if __name__ == "__main__":
    main(Path(sys.argv[1]), json.loads(Path(sys.argv[2]).read_text()))
