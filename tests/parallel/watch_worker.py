"""A run that only adds up numbers: `watch_worker.py WHAT RANK MINUTES`.

At its sixth iteration the given rank does WHAT; without trouble the ranks leave one after another.
"""

from __future__ import annotations

import datetime
import os
import signal
import sys
import time

import torch
import torch.distributed as dist

from megatron_lengen.errors import BadInput, Fault, run_main
from megatron_lengen.runtime.watch import Watch


def trouble(what: str) -> None:
    """What happens to this rank."""
    if what == "dies":
        os.kill(os.getpid(), signal.SIGKILL)
    if what == "stops":
        os.kill(os.getpid(), signal.SIGSTOP)
    if what == "sleeps":
        time.sleep(1000)
    if what == "raises":
        raise ZeroDivisionError("divided\nby nothing")
    if what == "bad input":
        raise BadInput("--flag: found 1; allowed: 2")
    if what == "fault":
        raise Fault("a fault that has a code", code=16)


def main() -> None:
    """Add up."""
    what, rank, minutes = sys.argv[1], int(sys.argv[2]), float(sys.argv[3])
    patience = 10 if what == "nothing" else minutes
    dist.init_process_group("gloo", timeout=datetime.timedelta(minutes=patience))
    signal.signal(
        signal.SIGTERM, lambda number, frame: None
    )  # as the training loop, which notes it
    with Watch(minutes) as watch:
        for iteration in range(1, 11):
            watch.iteration = iteration
            if iteration == 6:
                time.sleep(0.6)  # one sign of this iteration, at the pace of a short timeout
                if rank in (-1, dist.get_rank()):
                    trouble(what)
            dist.all_reduce(torch.ones(1))
        # Late: the others have been silent for longer than allowed, but they said that they left.
        time.sleep(60 * minutes if what == "nothing" and dist.get_rank() == 1 else 0)
    dist.destroy_process_group()


if __name__ == "__main__":
    run_main(main)
