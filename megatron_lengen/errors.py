"""What a person did wrong, said in one line.

`BadInput` carries that line. Entry scripts run their `main` through `run_main`, which prints it on
rank 0 only and leaves with exit code 2, so that a bad flag never floods the terminal with the
tracebacks of every rank. `Fault` is the same for what is nobody's mistake, with another code.
"""

from __future__ import annotations

import argparse
import difflib
import os
import re
import sys
import time
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import NoReturn

EXIT_BAD_INPUT = 2
EXIT_FAULT = 1
# Seconds that rank 0 has to say what all ranks found, before another one says it.
PATIENCE = 20.0


class BadInput(ValueError):
    """A flag, file or setting that cannot work; the message names it and what is allowed."""


class Fault(RuntimeError):
    """Why a run cannot go on, in one line, where no traceback would say more.

    Args:
        message: the line.
        code: exit code of the process.
    """

    def __init__(self, message: str, code: int = EXIT_FAULT) -> None:
        super().__init__(message)
        self.code = code


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

    `BadInput` becomes one line on stderr of rank 0 and exit code 2, `Fault` the same with its own
    code; `main` may return another code. Another rank speaks where torchrun started it and rank 0
    does not leave.
    """
    try:
        code = main() or 0
    except (BadInput, Fault) as error:
        if is_first_rank():
            print(f"error: {error}", file=sys.stderr, flush=True)
        elif "TORCHELASTIC_RUN_ID" in os.environ:
            _wait_for_the_first()
            print(f"error: rank {os.environ['RANK']}: {error}", file=sys.stderr, flush=True)
        code = error.code if isinstance(error, Fault) else EXIT_BAD_INPUT
    sys.exit(code)


def _wait_for_the_first() -> None:
    """Give rank 0 time to speak: torchrun ends all of a machine's ranks as soon as one leaves.

    Where rank 0 does not leave, the first of a machine's ranks to return ends the others.
    """
    time.sleep(PATIENCE * (1 + int(os.environ["LOCAL_RANK"]) / 4))


class Parser(argparse.ArgumentParser):
    """An argument parser whose errors are `BadInput`.

    `elsewhere` names the script that has a flag which this one has not.
    """

    elsewhere: Mapping[str, str] = MappingProxyType({})

    def error(self, message: str) -> NoReturn:
        """Raise what is wrong as one line, in the words of the other checks."""
        message = message.removeprefix("argument ")
        unknown = message.removeprefix("unrecognized arguments: ")
        if unknown != message:
            message = self._unrecognized(unknown.split())
        choice = re.fullmatch(r"(.+): invalid choice: (.*) \(choose from (.*)\)", message)
        if choice:
            allowed = choice[3].replace("'", "")
            message = f"{choice[1]}: found {choice[2].strip(chr(39))}; allowed: {allowed}"
        if message.endswith("expected one argument"):
            flag = message.split(":")[0]
            message = f"{flag}: found no value (one that starts with - is given as {flag}=-1)"
        raise BadInput(f"{message} (see {self.prog} --help)")

    def _unrecognized(self, words: list[str]) -> str:
        """Each unknown flag with the nearest there is."""
        known = [name for action in self._actions for name in action.option_strings]
        said = []
        for word in (word.split("=")[0] for word in words if word.startswith("-")):
            near = difflib.get_close_matches(word, known, n=1)
            hint = f"; did you mean {near[0]}?" if near else ""
            if word in self.elsewhere:
                hint = f"; it is a flag of {self.elsewhere[word]}"
            said.append(f"{word}: unrecognized{hint}")
        return ", ".join(said) or f"{words[0]}: found where a flag was expected"
