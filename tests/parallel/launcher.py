"""Starts the processes of a test: real ones, over gloo, each with a log of its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from launching import free_port
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from megatron_lengen import checkpoint_folder

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
PRETRAIN = ROOT / "pretrain_gpt.py"

MODEL = """
    --num-layers 4 --hidden-size 32 --ffn-hidden-size 48 --num-attention-heads 4
    --num-query-groups 2 --swiglu --disable-bias-linear --seq-length 24 --sliding-window 8
    --window-attn-skip-freq 4 --no-rope-freq 4 --init-method-std 0.1 --vocab-size 101
    --make-vocab-size-divisible-by 16 --tokenizer-type NullTokenizer --num-workers 0
"""
MAMBA = """
    --num-layers 4 --hidden-size 32 --mamba-head-dim 8 --mamba-state-dim 12 --seq-length 24
    --init-method-std 0.1 --vocab-size 101 --make-vocab-size-divisible-by 16
    --tokenizer-type NullTokenizer --num-workers 0
"""
SCHEDULE = """
    --global-batch-size 8 --micro-batch-size 2 --lr 5e-3 --lr-warmup-iters 2
    --eval-iters 0
"""


@dataclass(frozen=True)
class Run:
    """One training run of a worker.

    Args:
        name: its metrics are NAME.jsonl.
        flags: what comes after MODEL (or MAMBA) and SCHEDULE.
        dump: whether each rank writes its parameters and gradients to NAME.rankR.pt at the end.
        decoder: `transformer`, or `mamba2`, whose flags come after MAMBA.
    """

    name: str
    flags: str
    dump: bool = False
    decoder: str = "transformer"


def environment(**changes: str) -> dict[str, str]:
    """This process's environment without a launcher's traces, and the package importable."""
    launched = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    kept = {key: value for key, value in os.environ.items() if key not in launched}
    paths = [str(ROOT), kept.get("PYTHONPATH", "")]
    kept.update(OMP_NUM_THREADS="1", PYTHONWARNINGS="ignore", PYTHONPATH=os.pathsep.join(paths))
    return {**kept, **changes}


def start(
    command: Sequence[str | Path], processes: int, logs: Path
) -> list[subprocess.Popen[bytes]]:
    """Start `processes` ranks of a Python command; rank R writes to logs/rankR.log."""
    logs.mkdir(parents=True, exist_ok=True)
    port = str(free_port())
    started = []
    for rank in range(processes):
        variables = environment()
        if processes > 1:
            variables |= {
                "RANK": str(rank),
                "LOCAL_RANK": str(rank),
                "WORLD_SIZE": str(processes),
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": port,
            }
        with open(logs / f"rank{rank}.log", "wb") as log:
            started.append(
                subprocess.Popen(
                    [sys.executable, *map(str, command)],
                    env=variables,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                )
            )
    return started


def wait(started: list[subprocess.Popen[bytes]], timeout: float) -> list[int]:
    """Exit codes; all are killed when one fails or time is up."""
    end = time.monotonic() + timeout
    try:
        while time.monotonic() < end:
            codes = [process.poll() for process in started]
            if None not in codes or any(code not in (None, 0) for code in codes):
                time.sleep(0.5 if None in codes else 0)
                break
            time.sleep(0.05)
    finally:
        for process in started:
            if process.poll() is None:
                process.kill()
    return [process.wait() for process in started]


def train(folder: Path, processes: int, runs: list[Run], timeout: float = 600) -> None:
    """Do runs one after the other in one set of processes; fails with the log of a failed rank."""
    work("train_worker.py", folder, processes, runs, timeout)


def work(worker: str, folder: Path, processes: int, runs: list[Run], timeout: float = 600) -> None:
    """Start a worker script of this folder as `WORKER FOLDER JOB.json`, the runs being the job."""
    job = folder / f"job{processes}.json"
    described = [{**vars(run), "flags": argv(run.flags, run.decoder)} for run in runs]
    job.write_text(json.dumps(described))
    logs = folder / f"logs{processes}"
    codes = wait(start([HERE / worker, folder, job], processes, logs), timeout)
    for rank, code in enumerate(codes):
        if code not in (0, -9):
            raise AssertionError(f"rank {rank} left with {code}:\n{tail(logs, rank)}")
    assert not any(codes), f"time is up: {codes}\n{tail(logs, 0)}"


def argv(flags: str, decoder: str = "transformer") -> list[str]:
    """Flags of a tiny run, those given last."""
    data = "" if "--data-path" in flags or "--copy-task" in flags else "--mock-data"
    model = MAMBA if decoder == "mamba2" else MODEL
    return f"{model} {data} {SCHEDULE} {flags}".split()


def tail(logs: Path, rank: int, characters: int = 4000) -> str:
    """The end of a rank's log."""
    return (logs / f"rank{rank}.log").read_text(errors="replace")[-characters:]


def rows(file: Path, validation: bool = False) -> list[dict[str, Any]]:
    """The training (or validation) rows of a metrics file."""
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    return [row for row in lines if bool(row.get("validation")) == validation]


def curve(file: Path, key: str = "lm_loss") -> torch.Tensor:
    """[iterations] fp64, one value of each training row."""
    return torch.tensor([row[key] for row in rows(file)], dtype=torch.float64)


def dumps(folder: Path, name: str, ranks: int) -> list[dict[str, Any]]:
    """What each rank of a run with `dump` wrote."""
    return [torch.load(folder / f"{name}.rank{rank}.pt") for rank in range(ranks)]


def stored(root: Path, iteration: int, prefix: str) -> dict[str, torch.Tensor]:
    """Tensors of a checkpoint by what follows a prefix."""
    where = checkpoint_folder.iteration_folder(root, iteration)
    metadata = checkpoint_folder.read_metadata(where)
    found = {
        key: torch.empty(entry.size, dtype=entry.properties.dtype)
        for key, entry in metadata.state_dict_metadata.items()
        if key.startswith(prefix) and isinstance(entry, TensorStorageMetadata)
    }
    assert found, sorted(metadata.state_dict_metadata)
    dcp.load(found, checkpoint_id=str(where), no_dist=True)
    return {key.removeprefix(prefix): value for key, value in found.items()}
