"""Kills a training run at random moments and starts it again: `kills.py FOLDER --kills 40`.

After every kill the run must go on from the newest published checkpoint, with no more steps lost
than were not saved; at the end each loss must be bitwise that of a run nobody killed. `make kills`
does this with saves at once and in the background, with one process and with two.

Runs are forked from this process, which has imported everything: that saves seconds a start.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import random
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

sys.path.extend(map(str, Path(__file__).parents[1:3]))
from launcher import argv, rows
from launching import free_port

import pretrain_gpt
from megatron_lengen import checkpoint_folder
from megatron_lengen.errors import run_main
from megatron_lengen.models import build  # noqa: F401  (imported before the forks)
from megatron_lengen.training import loop  # noqa: F401

INTERVAL, KEPT = 2, 2
RUN = """
    --train-iters 100000 --lr-decay-style constant --dropout-variant vpad --dropout-rate 0.2
"""
PATIENCE = 120.0


@dataclass(frozen=True)
class Campaign:
    """What is trained and who is killed.

    Args:
        lag: checkpoints that may be pending when the next step is reported.
        one: whether one rank is killed, after which the others must leave by themselves.
    """

    name: str
    saving: str = ""
    processes: int = 1
    layout: str = ""
    lag: int = 0
    one: bool = False


CAMPAIGNS = (
    Campaign("at-once"),
    Campaign("background", "--async-save", lag=1),
    Campaign("at-once-2", processes=2, layout="--use-distributed-optimizer"),
    Campaign("background-2-one", "--async-save", processes=2, lag=1, one=True),
)


@dataclass
class Tally:
    """What was seen."""

    kills: int = 0
    in_a_save: int = 0
    redone: int = 0
    last: int = 0
    problems: list[str] = field(default_factory=list)


def fork(
    flags: str, processes: int, log: Path, first: Callable[[], object] = lambda: None
) -> list[int]:
    """Start the ranks of a run, each with a call of `first`; a file gets their output."""
    port = str(free_port())
    started = []
    for rank in range(processes):
        sys.stdout.flush()
        pid = os.fork()
        if pid:
            started.append(pid)
            continue
        code = 1
        try:
            output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
            os.dup2(output, 1)
            os.dup2(output, 2)
            if processes > 1:
                os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), MASTER_PORT=port)
                os.environ.update(WORLD_SIZE=str(processes), MASTER_ADDR="127.0.0.1")
            first()
            sys.argv = ["pretrain_gpt.py", *argv(flags)]
            run_main(pretrain_gpt.main)
        except SystemExit as left:
            code = int(left.code or 0)
        except BaseException:
            sys.excepthook(*sys.exc_info())
        finally:
            sys.stdout.flush()
            os._exit(code)
    return started


def wait(pids: list[int], seconds: float) -> list[int]:
    """Exit codes, minus the signal for those that were killed; raises if time is up."""
    codes: dict[int, int] = {}
    end = time.monotonic() + seconds
    while len(codes) < len(pids):
        for pid in set(pids) - set(codes):
            found, status = os.waitpid(pid, os.WNOHANG)
            if found:
                codes[pid] = os.waitstatus_to_exitcode(status)
        if time.monotonic() > end:
            kill(set(pids) - set(codes))
            raise AssertionError(f"still running after {seconds:.0f} s: {set(pids) - set(codes)}")
        time.sleep(0.002)
    return [codes[pid] for pid in pids]


def kill(pids: set[int] | list[int]) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def saving(root: Path) -> set[Path]:
    """The folders that are being written."""
    return set(root.glob(".partial_*"))


def moment(plan: Campaign, chance: random.Random, root: Path, metrics: Path, pid: int) -> None:
    """Wait: any time from the start on, from the first step on, or until the middle of a save."""
    kind = chance.choice(("start", "step", "save", "save"))
    if kind == "start" and not plan.one:  # before the ranks have met, only a launcher ends all
        time.sleep(chance.uniform(0.0, 2.0))
        return
    before, earlier = done(metrics), saving(root)
    wait_until(lambda: done(metrics) > before, pid)
    if kind != "save":
        time.sleep(chance.uniform(0.0, 0.5))
        return
    wait_until(lambda: bool(saving(root) - earlier), pid)
    time.sleep(chance.uniform(0.0, 0.02))


def wait_until(happened: Callable[[], bool], pid: int) -> None:
    """Look every millisecond while a process lives."""
    ended = os.WEXITED | os.WNOHANG | os.WNOWAIT
    while not happened() and os.waitid(os.P_PID, pid, ended) is None:
        time.sleep(0.001)


def campaign(plan: Campaign, folder: Path, kills: int, seed: int) -> Tally:
    """Kill so many times, then let the run end, and compare."""
    chance, tally = random.Random(f"{seed} {plan.name}"), Tally()
    root, metrics, log = folder / "ck", folder / "killed.jsonl", folder / "killed.log"
    folder.mkdir(parents=True)
    flags = f"{RUN} {plan.layout} --metrics-jsonl {metrics}"
    flags += f" --save {root} --load {root} --save-interval {INTERVAL} --keep-last {KEPT}"
    flags += f" {plan.saving}"
    for _ in range(kills):
        pids = fork(flags, plan.processes, log)
        moment(plan, chance, root, metrics, pids[0])
        tally.in_a_save += bool(saving(root))
        kill([chance.choice(pids)] if plan.one else pids)
        codes = wait(pids, PATIENCE)
        tally.kills += 1
        if -signal.SIGKILL not in codes:
            tally.problems.append(f"left by itself with {codes}")
        check(plan, root, metrics, tally)
    tally.last += 1 + INTERVAL
    end = f"--exit-interval {tally.last}"
    codes = wait(fork(f"{flags} {end}", plan.processes, log), PATIENCE)
    unbroken = folder / "unbroken.jsonl"
    whole = f"{RUN} {plan.layout} --metrics-jsonl {unbroken} {end}"
    codes += wait(fork(whole, plan.processes, log), PATIENCE + tally.last)
    if any(codes):
        tally.problems.append(f"the last runs left with {codes}")
    compare(metrics, unbroken, root, tally)
    return tally


def done(metrics: Path) -> int:
    """Iterations that the file reports; a row may be cut short by the kill."""
    return metrics.read_bytes().count(b"\n") if metrics.exists() else 0


def check(plan: Campaign, root: Path, metrics: Path, tally: Tally) -> None:
    """What a kill has left: the newest checkpoint holds all but the steps that were not saved."""
    reported = done(metrics)
    found = checkpoint_folder.find(root) if root.exists() else None
    iteration = found.iteration if found else 0
    # When the step after a save is reported, the save is complete, or, in the background, the one
    # before it is.
    saved = max(0, (reported - 1) // INTERVAL - plan.lag) * INTERVAL
    if iteration < saved:
        tally.problems.append(f"{reported} steps done, but the newest checkpoint is {iteration}")
    tally.redone += max(0, reported - iteration)
    tally.last = max(tally.last, reported)


def compare(metrics: Path, unbroken: Path, root: Path, tally: Tally) -> None:
    """Every iteration once, every number that of the run nobody killed."""
    seen, expected = rows(metrics), rows(unbroken)
    if [row["iteration"] for row in seen] != list(range(1, tally.last + 1)):
        tally.problems.append(f"iterations {[row['iteration'] for row in seen]}")
    for key in ("lm_loss", "grad_norm", "learning_rate", "consumed_samples"):
        different = [
            a["iteration"] for a, b in zip(seen, expected, strict=True) if a[key] != b[key]
        ]
        if different:
            tally.problems.append(f"{key} differs at iterations {different}")
    if len(checkpoint_folder.iterations(root)) != KEPT:
        tally.problems.append(f"not as many stay as asked: {checkpoint_folder.iterations(root)}")
    left = [path.name for path in root.iterdir() if path.name.startswith(".")]
    if left:
        tally.problems.append(f"left behind: {left}")


def main() -> int:
    """Do the campaigns; 1 if anything was wrong."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path, nargs="?", help="default: a temporary one")
    parser.add_argument("--kills", type=int, default=40, help="in each campaign")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", choices=[plan.name for plan in CAMPAIGNS])
    given = parser.parse_args()
    folder = given.folder or Path(tempfile.mkdtemp(prefix="kills"))
    wrong = False
    for plan in CAMPAIGNS:
        if given.only in (None, plan.name):
            started = time.monotonic()
            tally = campaign(plan, folder / plan.name, given.kills, given.seed)
            wrong |= bool(tally.problems)
            print(
                f"{plan.name}: {tally.kills} kills, {tally.in_a_save} in a save, {tally.last} "
                f"iterations, {tally.redone} done again, {time.monotonic() - started:.0f} s: "
                f"{'; '.join(tally.problems) or 'the unbroken run'}",
                flush=True,
            )
    return int(wrong)


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    sys.exit(main())
