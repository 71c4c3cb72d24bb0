#!/usr/bin/env python3
"""torchrun, with rules of its own for restarts, signals and exit codes. launch.sh starts it.

The arguments are torchrun's. What differs:

- A failed process starts every process again, on all machines, `--max-restarts` times in a row
  without a newer checkpoint in the script's `--save`. A machine that comes back counts alike, and
  a lost meeting point is looked for again.
- Exit code 2 (bad input) ends the run at once. The code of the process that failed first is passed
  on; killed by signal N counts as 128 + N.
- SIGTERM, SIGINT and SIGUSR1 reach the processes as SIGTERM: they save and leave, however long
  that takes, and nothing starts again.
"""

from __future__ import annotations

import argparse
import copy
import functools
import ipaddress
import logging
import os
import re
import signal
import socket
import sys
import time
from pathlib import Path
from types import FrameType
from typing import Any

from torch.distributed import DistError, run
from torch.distributed.elastic.agent.server import RunResult, WorkerGroup
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing import SignalException
from torch.distributed.elastic.multiprocessing import api as multiprocessing
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure
from torch.distributed.elastic.rendezvous import RendezvousClosedError, RendezvousError
from torch.distributed.elastic.rendezvous.utils import parse_rendezvous_endpoint
from torch.distributed.launcher import api

BAD_INPUT = 2
LEAVE = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)
PAUSE = 5.0  # seconds before the meeting point is looked for again
# torchrun numbers its attempts, and their log folders, by the restarts that are left.
MANY = 1_000_000

Failures = dict[int, ProcessFailure]


class Restarts:
    """Which restarts are allowed: `limit` in a row without a newer checkpoint in `save`."""

    def __init__(self, limit: int, save: str | None) -> None:
        self.limit, self.done = limit, 0
        self.waiting_since: float | None = time.monotonic()  # None while processes run
        self._tracker = Path(save) / "latest_checkpointed_iteration.txt" if save else None
        self._newest = self._read()

    def allowed(self) -> bool:
        """Whether one more may follow now."""
        newest = self._read()
        if newest > self._newest:
            self._newest, self.done = newest, 0
        return self.done < self.limit

    def count(self, reason: str) -> None:
        """One more, and why; the machines have to meet from now on."""
        self.done += 1
        self.waiting_since = time.monotonic()
        say(f"restart {self.done} of {self.limit}: {reason}")

    def _read(self) -> int:
        """The newest checkpoint's iteration; 0 where there is none."""
        try:
            return int(self._tracker.read_text()) if self._tracker else 0
        except (OSError, ValueError):
            return 0


class Agent(LocalElasticAgent):
    """torchrun's agent, which starts and watches the processes of this machine."""

    def __init__(self, restarts: Restarts, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.restarts = restarts
        self.reason = ""  # of the failure that the next restart follows
        self.leaving = False

    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
        for number in LEAVE:
            signal.signal(number, self._leave)
        pids = super()._start_workers(worker_group)
        self.restarts.waiting_since = None
        if self.leaving:
            self._tell_workers()
        return pids

    def _leave(self, number: int, frame: FrameType | None) -> None:
        self.leaving = True
        self._tell_workers()

    def _tell_workers(self) -> None:
        if self._pcontext is not None:
            for worker in self._pcontext.subprocess_handlers.values():  # type: ignore[attr-defined]
                worker.proc.send_signal(signal.SIGTERM)

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        result = super()._monitor_workers(worker_group)
        if result.is_failed():
            self.reason = reason_of(result.failures)
            bad = any(failure.exitcode == BAD_INPUT for failure in result.failures.values())
            if bad or self.leaving or not self.restarts.allowed():
                self._remaining_restarts = 0
        return result

    def _restart_workers(self, worker_group: WorkerGroup) -> None:
        if not self.reason:
            # Another machine waits to join, which torchrun would not count.
            if not self.restarts.allowed():
                raise RendezvousClosedError
            self._remaining_restarts -= 1
        self.restarts.count(self.reason or "another machine starts again")
        self.reason = ""
        self._stop_workers(worker_group)
        # Nothing runs until the machines have met again: a signal ends the wait at once.
        for number in LEAVE:
            signal.signal(number, signal.SIG_DFL)
        if self.leaving:
            raise SignalException("told to leave", signal.SIGTERM)
        super()._restart_workers(worker_group)


def main(arguments: list[str]) -> int:
    """Run torchrun with these arguments; returns the exit code."""
    if "LOGLEVEL" not in os.environ:  # what torchrun logs of a failure is said here, in a line
        logging.getLogger(multiprocessing.__name__).setLevel(logging.CRITICAL)
    args = run.parse_args(["--signals-to-handle", "SIGHUP,SIGQUIT", *arguments])
    save, load = folders_of(args.training_script_args)
    restarts = Restarts(args.max_restarts, save)
    if restarts.limit:
        # Each attempt with a store of its own: the shared one keeps what the last one wrote.
        os.environ["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
        if (save is None or load != save) and "is_host=0" not in args.rdzv_conf:
            say("warning: MAX_RESTARTS without --load equal to --save: a restart begins anew")
    args.max_restarts = MANY
    api.LocalElasticAgent = functools.partial(Agent, restarts)  # type: ignore[misc, assignment]
    while True:
        try:
            run.run(with_addresses(args))
            return 0
        except ChildFailedError as error:
            return report(error.failures, restarts)
        except SignalException as error:
            return 128 + error.sigval
        except RendezvousClosedError:
            say("error: the run has ended on another machine")
            return 1
        except (RendezvousError, DistError) as error:
            if not look_again(error, restarts, args):
                return 1
            time.sleep(PAUSE)


def look_again(error: Exception, restarts: Restarts, args: argparse.Namespace) -> bool:
    """Whether to look for the meeting point once more: it is late, or it was lost."""
    reason = str(error.__cause__ or error).partition("\n")[0]
    reason = f"no connection to the other machines at {args.rdzv_endpoint}: {reason}"
    since = restarts.waiting_since
    if since is None and restarts.allowed():
        restarts.count(reason)
        return True
    if since is not None and time.monotonic() - since < patience(args):
        return True
    say(f"error: {reason}")
    return False


def patience(args: argparse.Namespace) -> float:
    """Seconds that the machines have to meet."""
    found = re.search(r"join_timeout=(\d+)", args.rdzv_conf)
    return float(found[1]) if found else 0.0


def report(failures: Failures, restarts: Restarts) -> int:
    """Say why the run ends; returns its exit code."""
    if any(failure.exitcode == BAD_INPUT for failure in failures.values()):
        if 0 not in failures:  # the first process has said what is wrong
            say(f"error: {reason_of(failures)} (bad input)")
        return BAD_INPUT
    tried = f", after {restarts.done} of {restarts.limit} restarts" if restarts.limit else ""
    say(f"error: {reason_of(failures)}{tried}")
    _, failure = first(failures)
    return failure.exitcode if failure.exitcode > 0 else 128 - failure.exitcode


def reason_of(failures: Failures) -> str:
    """Which process failed first, and how."""
    rank, failure = first(failures)
    how = f"left with exit code {failure.exitcode}"
    if failure.exitcode < 0:
        how = f"was killed by {failure.signal_name()}"
    return f"rank {rank} on {socket.gethostname()} {how}"


def first(failures: Failures) -> tuple[int, ProcessFailure]:
    """The rank that failed first, and its failure."""
    return min(failures.items(), key=lambda item: item[1].timestamp)


def folders_of(script_arguments: list[str]) -> tuple[str | None, str | None]:
    """The script's --save and --load."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--save")
    parser.add_argument("--load")
    found, _ = parser.parse_known_args(script_arguments)
    return found.save, found.load


def with_addresses(args: argparse.Namespace) -> argparse.Namespace:
    """The arguments with what torchrun would guess from this machine's host name.

    That name often resolves to loopback, or not at all. The way to the meeting point tells better:
    which address this machine has for the others, and whether the meeting point is this machine.
    """
    args = copy.copy(args)
    host, _ = parse_rendezvous_endpoint(args.rdzv_endpoint, default_port=29400)
    if args.rdzv_backend == "static" or args.nnodes == "1" or is_loopback(host):
        return args
    own, target = address_towards(host)
    here = own is not None and (own == target or is_loopback(own))
    if "is_host=" not in args.rdzv_conf:
        args.rdzv_conf = ",".join(filter(None, [args.rdzv_conf, f"is_host={int(here)}"]))
    if args.local_addr is None:
        args.local_addr = host if here else own
    return args


def address_towards(host: str) -> tuple[str | None, str | None]:
    """This machine's address on the way to a host, and the host's; nothing is sent."""
    try:
        family, kind, _, _, target = socket.getaddrinfo(host, 1, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind) as probe:
            probe.connect(target)
            return str(probe.getsockname()[0]), str(target[0])
    except OSError:
        return None, None


def is_loopback(host: str) -> bool:
    """Whether a name or address stays on this machine."""
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def say(text: str) -> None:
    """One line on stderr."""
    print(text, file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
