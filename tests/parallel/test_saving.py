"""What a run loses when it is killed or its disk is full: nothing that was saved."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from launcher import HERE, environment


def script(command: list[str | Path], timeout: float) -> str:
    """Output of a Python script of this folder, which must succeed."""
    done = subprocess.run(
        list(map(str, command)), env=environment(), capture_output=True, text=True, timeout=timeout
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_killed_at_random_moments_a_run_goes_on_as_if_it_had_not_been(tmp_path):
    """Report 16 of the field; `make kills` does more of it."""
    command = [sys.executable, HERE / "kills.py", tmp_path / "kills", "--kills", "3", "--seed", "1"]
    output = script(command, timeout=400)
    assert output.count("the unbroken run") == 4, output


def namespace() -> list[str] | None:
    """A command that runs another one where file systems can be mounted, if there is one."""
    command = ["unshare", "-m" if os.geteuid() == 0 else "-rm"]
    try:
        mount = [*command, "mount", "-t", "tmpfs", "tmpfs", "/mnt"]
        return command if subprocess.run(mount, capture_output=True).returncode == 0 else None
    except OSError:
        return None


def test_a_full_disk_stops_a_run_in_one_line_and_costs_nothing(tmp_path):
    command = namespace()
    if command is None:
        pytest.skip("file systems cannot be mounted here")
    output = script([*command, sys.executable, HERE / "full_disk.py", tmp_path / "run"], 400)
    assert output.count("stopped and went on") == 5, output
