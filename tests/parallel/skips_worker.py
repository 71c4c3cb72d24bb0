"""Runs whose numbers go bad on one rank: `skips_worker.py FOLDER JOB.json`.

A run's name is WHAT,RANK,FORWARD[,...] (see `Trouble`); each rank says in NAME.rankR.txt how it
ended.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch.distributed as dist
from guards_worker import Trouble
from megatron.core import parallel_state

from megatron_lengen.runtime import distributed
from megatron_lengen.training.arguments import parse_settings
from megatron_lengen.training.guards import Stop
from megatron_lengen.training.loop import Trainer


def main(folder: Path, runs: list[dict[str, Any]]) -> None:
    """Do the runs, each with process groups of its own layout."""
    distributed.start_process_group()
    for run in runs:
        what, rank, forward = run["name"].split(",")[:3]
        settings = parse_settings([f.replace("FOLDER", str(folder)) for f in run["flags"]], "test")
        distributed.start(settings.model)
        trouble = Trouble(what, int(rank), int(forward))
        trainer = Trainer(settings, trouble.chunks)
        if what == "norm" and dist.get_rank() == int(rank):
            spoil_norm(trainer)
        said = "nothing"
        try:
            trainer.run()
        except Stop as stop:
            said = f"{stop.code} {stop}"
        (folder / f"{run['name']}.rank{dist.get_rank()}.txt").write_text(said)
        dist.barrier()
        parallel_state.destroy_model_parallel()
    dist.destroy_process_group()


def spoil_norm(trainer: Any) -> None:
    """After two steps, this rank alone finds that the gradient is not finite."""
    optimizer = trainer.engine.optimizer
    norm, calls = optimizer.get_grad_norm, []

    def spoiled() -> float:
        calls.append(norm())
        return calls[-1] if len(calls) < 3 else float("inf")

    optimizer.get_grad_norm = spoiled


if __name__ == "__main__":
    main(Path(sys.argv[1]), json.loads(Path(sys.argv[2]).read_text()))
