"""What a person did wrong, said in one line.

`BadInput` carries that line. Entry scripts run their `main` through `run_main`, which prints it on
rank 0 only and leaves with exit code 2, so that a bad flag never floods the terminal with the
tracebacks of every rank.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable
from typing import NoReturn

EXIT_BAD_INPUT = 2


class BadInput(ValueError):
    """A flag, file or setting that cannot work; the message names it and what is allowed."""


def require(condition: bool, message: str) -> None:
    """Raise `BadInput(message)` unless `condition` holds."""
    if not condition:
        raise BadInput(message)


def missing_package(package: str, purpose: str, install: str | None = None) -> BadInput:
    """The error for an optional package that is needed now: names the install command."""
    return BadInput(f"{purpose} needs {package}: pip install {install or package}")


def is_first_rank() -> bool:
    """Whether this process speaks for the run (launcher's RANK, or a single process)."""
    return int(os.environ.get("RANK", "0")) == 0


def run_main(main: Callable[[], int | None]) -> None:
    """Run an entry point and turn its result into an exit code.

    `BadInput` becomes one line on stderr of rank 0 and exit code 2; `main` may return another code.
    """
    try:
        code = main() or 0
    except BadInput as error:
        if is_first_rank():
            print(f"error: {error}", file=sys.stderr, flush=True)
        code = EXIT_BAD_INPUT
    sys.exit(code)


class Parser(argparse.ArgumentParser):
    """An argument parser whose errors are `BadInput`."""

    def error(self, message: str) -> NoReturn:
        """Raise what is wrong as one line."""
        raise BadInput(f"{message.removeprefix('argument ')} (see {self.prog} --help)")
