"""Runs the data tools inside the test process."""

from __future__ import annotations

import importlib.util
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from megatron_lengen.errors import run_main

TOOLS = Path(__file__).parents[3] / "tools" / "data"


@dataclass
class Done:
    """How a tool ended: its exit code and what it printed."""

    code: int
    out: str
    err: str


@pytest.fixture
def tool_runner(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    """A function (tool's name, arguments...) -> `Done`, which runs tools/data/NAME.py's main."""

    def run(name: str, *arguments: object) -> Done:
        spec = importlib.util.spec_from_file_location(f"tool_{name}", TOOLS / f"{name}.py")
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        monkeypatch.setattr(sys, "argv", [f"{name}.py", *map(str, arguments)])
        capsys.readouterr()
        with pytest.raises(SystemExit) as caught:
            run_main(module.main)
        captured = capsys.readouterr()
        return Done(caught.value.code, captured.out, captured.err)

    return run
