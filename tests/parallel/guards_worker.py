"""A run in which something goes wrong: `guards_worker.py WHAT RANK FORWARD FLAGS...`.

From the forward pass of that number on, the given rank (-1: every rank) does WHAT.
"""

from __future__ import annotations

import os
import sys
import time
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn

from megatron_lengen.config import LengenConfig
from megatron_lengen.errors import BadInput, run_main
from megatron_lengen.models.build import build_chunks
from megatron_lengen.training.arguments import parse_settings
from megatron_lengen.training.loop import train


class Trouble:
    """Counts forward passes of the first chunk and makes trouble."""

    def __init__(self, what: str, rank: int, forward: int) -> None:
        self.what, self.rank, self.left = what, rank, forward

    def chunks(self, config: LengenConfig) -> list[nn.Module]:
        """The model, with trouble in it where this rank is the one (-1: on every rank)."""
        chunks = build_chunks(config)
        if "elsewhere" in self.what:  # Megatron-Core knows a machine by the name of its host
            os.uname = lambda: ("Linux", "another", "", "", "")  # type: ignore[assignment]
        if self.rank in (-1, dist.get_rank()):
            if self.what == "bad input while building":
                raise BadInput("--load: found a crack; allowed: none")
            chunks[-1].register_forward_hook(self.act)
        return chunks

    def act(self, module: nn.Module, inputs: Any, output: Tensor) -> Tensor | None:
        """What happens in a forward pass."""
        self.left -= 1
        if self.left > 0:
            return None
        if self.what == "raise":
            raise ZeroDivisionError("the trouble that was asked for")
        if self.what == "bad input":
            raise BadInput("--load: found a crack; allowed: none")
        if self.what == "sleep":
            time.sleep(1000)
        if self.what in ("nan", "nan elsewhere") or (self.what == "nan once" and self.left == 0):
            return output * float("nan")
        return None


def main() -> None:
    """Parse and train."""
    what, rank, forward, *flags = sys.argv[1:]
    trouble = Trouble(what.replace("-", " "), int(rank), int(forward))
    train(parse_settings(flags, "test"), trouble.chunks)


if __name__ == "__main__":
    run_main(main)
