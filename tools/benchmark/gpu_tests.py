"""Run the tests of CUDA until a time is over, one of every kind first; counts as JSON.

`tools/benchmark/gpu_check.py` calls it. The parametrizations of every test function take turns, so
that each function has run once before any runs twice; what has not begun when the time is over is
left out and counted.

Example:
    python tools/benchmark/gpu_tests.py --seconds 60 --json tests.json
"""

from __future__ import annotations

import itertools
import json
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import pytest

from megatron_lengen.errors import Parser, require, run_main

ROOT = Path(__file__).resolve().parents[2]
OUT_OF_TIME = "out of time"


def build_parser() -> Parser:
    """The command line."""
    parser = Parser(prog="gpu_tests.py", description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=60, help="time for them (default: 60)")
    parser.add_argument("--json", metavar="FILE", help="also write the counts there")
    return parser


class InTurn:
    """A plugin of pytest: functions take turns, none starts after the deadline; counts outcomes.

    The counts are in the file after every test, so that one that hangs hides none before it.
    """

    def __init__(self, seconds: float, file: str | None = None) -> None:
        self.deadline, self.file = time.monotonic() + seconds, file
        self.counts = {"passed": 0, "failed": 0, "skipped": 0, OUT_OF_TIME: 0}
        self.failures: list[str] = []

    def pytest_collection_modifyitems(self, items: list[Any]) -> None:
        """The first case of every function, then the second of each."""
        by_function: dict[str, list[Any]] = {}
        for item in items:
            by_function.setdefault(item.nodeid.partition("[")[0], []).append(item)
        rounds = itertools.zip_longest(*by_function.values())
        items[:] = [item for one in rounds for item in one if item is not None]

    def pytest_runtest_setup(self, item: Any) -> None:
        """Leave out what would start too late."""
        if time.monotonic() > self.deadline:
            pytest.skip(OUT_OF_TIME)

    def pytest_runtest_logreport(self, report: Any) -> None:
        """Count a test once."""
        if report.skipped:
            late = OUT_OF_TIME in str(report.longrepr)
            self.counts[OUT_OF_TIME if late else "skipped"] += 1
        elif report.failed:
            self.counts["failed"] += 1
            self.failures.append(f"{report.nodeid}: {str(report.longrepr).splitlines()[-1][:200]}")
        elif report.when == "call":
            self.counts["passed"] += 1
        if self.file is not None:
            found = {"counts": self.counts, "failures": self.failures}
            Path(self.file).write_text(json.dumps(found, indent=2) + "\n")


def main() -> int:
    """Run, print, write; exit code 1 where a test failed or none could be collected."""
    args = build_parser().parse_args()
    require(args.seconds > 0, f"--seconds: found {args.seconds}; allowed: above 0")
    turns = InTurn(args.seconds, args.json)
    code = pytest.main(
        ["-q", "-m", "gpu", "-p", "no:cacheprovider", "--rootdir", str(ROOT), "-W", "ignore",
         "--tb=short", str(ROOT / "tests" / "gpu")],
        plugins=[turns],
    )  # fmt: skip
    print(", ".join(f"{count} {name}" for name, count in turns.counts.items()))
    return 0 if code in (pytest.ExitCode.OK, pytest.ExitCode.NO_TESTS_COLLECTED) else 1


if __name__ == "__main__":
    run_main(main)
