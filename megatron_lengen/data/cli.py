"""The argument parser of the data tools: an error is one line."""

from __future__ import annotations

import argparse
from typing import NoReturn

from megatron_lengen.errors import BadInput


class Parser(argparse.ArgumentParser):
    """An argument parser whose errors are `BadInput`."""

    def error(self, message: str) -> NoReturn:
        raise BadInput(f"{message} (see {self.prog} --help)")
