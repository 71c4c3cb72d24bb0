"""The file of metrics: one JSON object a row, every iteration once, whatever happens to the run."""

from __future__ import annotations

import errno
import json
import logging
import math
import os
from pathlib import Path
from typing import Any

from megatron_lengen.errors import Fault

logger = logging.getLogger(__name__)


class JsonLines:
    """Rows appended to a file, numbers in full precision.

    Args:
        path: the file; folders above it are made.
        start: the iteration that the run goes on from; rows of later ones move to FILE.redone,
            since they come again. None for a new run, which appends to whatever is there.

    Raises:
        Fault: if the file cannot be read or written at the start.
    """

    def __init__(self, path: str, start: int | None = None) -> None:
        self._path = Path(path)
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            if self._path.is_file():
                self._tidy(start)
            # Unbuffered: a row is in the file, whole, or not at all.
            self._file = open(path, "ab", buffering=0)  # noqa: SIM115  (open for the whole run)
        except OSError as error:
            raise Fault(f"--metrics-jsonl: {error.filename}: {error.strerror}") from error
        self._waiting = b""
        self._warned = False

    def write(self, row: dict[str, Any]) -> None:
        """Append a row; numbers that JSON cannot say become null.

        Where the disk is full, rows wait in memory for room.
        """
        clean = {
            key: None if isinstance(value, float) and not math.isfinite(value) else value
            for key, value in row.items()
        }
        self._waiting += json.dumps(clean).encode() + b"\n"
        try:
            self._append()
        except OSError as error:
            if not self._warned:
                logger.warning("%s: %s; rows wait for room", self._path, error.strerror)
            self._warned = True

    def close(self) -> None:
        """Close the file."""
        if self._waiting:
            rows = self._waiting.count(b"\n")
            logger.error("%s: the last %d rows could not be written", self._path, rows)
        self._file.close()

    def _append(self) -> None:
        size = os.fstat(self._file.fileno()).st_size
        try:
            if self._file.write(self._waiting) < len(self._waiting):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        except OSError:
            self._file.truncate(size)
            raise
        self._waiting = b""

    def _tidy(self, start: int | None) -> None:
        """Drop a last row that a kill cut short, and move away rows that come again."""
        lines = self._path.read_bytes().splitlines(keepends=True)
        whole = [line for line in lines if line.endswith(b"\n")]
        again = [] if start is None else [line for line in whole if _iteration(line) > start]
        if whole and start is None:
            logger.warning("--metrics-jsonl: %s has rows already; more follow", self._path)
        if again:
            aside = self._path.with_name(f"{self._path.name}.redone")
            with open(aside, "ab") as file:
                file.writelines(again)
            text = "--metrics-jsonl: %d rows after iteration %s come again; the old ones are in %s"
            logger.warning(text, len(again), start, aside)
        kept = [line for line in whole if start is None or _iteration(line) <= start]
        if kept != lines:
            rewritten = self._path.with_name(f"{self._path.name}.tmp")
            rewritten.write_bytes(b"".join(kept))
            os.replace(rewritten, self._path)


def _iteration(line: bytes) -> float:
    """The iteration of a row; beyond any where it is none."""
    try:
        return float(json.loads(line)["iteration"])
    except (ValueError, TypeError, KeyError):
        return math.inf
