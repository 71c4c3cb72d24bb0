"""A copy of the launcher with a small script to launch, where GPUs and Slurm are hidden."""

from __future__ import annotations

import contextlib
import random
import shlex
import shutil
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil

ROOT = Path(__file__).parents[1]
# Programs that launch.sh may find on any machine; a PATH of these alone hides GPUs and Slurm.
PLAIN = "bash cat cksum dirname env find grep head mkdir nproc sed sleep tee tr uname"
# What stands in for a training script: it reports, and obeys its first argument.
SCRIPT = """
import os, signal, sys, time
from pathlib import Path
rank, size = os.environ.get("RANK"), os.environ.get("WORLD_SIZE")
if "--dry-run" in sys.argv:
    print("resolved configuration", rank, size)
    if "--bad" in sys.argv:
        if rank == "0":
            print("error: --bad: found it", file=sys.stderr)
        sys.exit(2)
    sys.exit(5 if "--fault" in sys.argv else 0)
starts = Path(f"starts{rank or 0}")
with starts.open("a") as file:
    file.write(".")
start = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")) + 1
if "--wait" in sys.argv or "--wait-without-saving" in sys.argv:
    def leave(*_):
        Path(f"stopped{rank or 0}").touch()
        sys.exit(0)
    if "--wait" in sys.argv:
        for name in ("SIGTERM", "SIGINT", "SIGUSR1"):
            signal.signal(getattr(signal, name), leave)
    Path(f"started{rank or 0}").touch()
    time.sleep(60)
sys.stdout.write(f"rank {rank} of {size}: {sys.argv[1:]}\\n")
sys.stdout.flush()
# --codes 3,0: leave with 3 at first, with 0 after a restart; --saves 4,7: the checkpoints of each
option = dict(zip(sys.argv[1:], sys.argv[2:]))
saves = option.get("--saves", "").split(",")
if saves[0] and start <= len(saves):
    folder = Path(option["--save"])
    folder.mkdir(exist_ok=True)
    (folder / "latest_checkpointed_iteration.txt").write_text(saves[start - 1])
codes = option.get("--codes", "0").split(",")
code = int(codes[min(start, len(codes)) - 1])
if code < 0:
    os.kill(os.getpid(), -code)
sys.exit(code)
"""


class Home:
    """What launch.sh needs, in a folder whose name holds a space."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder / "my project"
        self.launcher = self.folder / "examples/common/launch.sh"
        shutil.copytree(ROOT / "examples/common", self.launcher.parent)
        (self.folder / "bin").mkdir()
        for name in PLAIN.split():
            program = shutil.which(name)
            assert program, name
            (self.folder / "bin" / name).symlink_to(program)
        (self.folder / "my script.py").write_text(SCRIPT)

    def add_program(self, name: str, body: str) -> None:
        """A stand-in for a program of a cluster."""
        program = self.folder / "bin" / name
        program.write_text(f"#!/bin/bash\n{body}\n")
        program.chmod(0o755)

    def environment(self, **variables: object) -> dict[str, str]:
        """Only these variables, and what starts Python."""
        plain = {"PATH": str(self.folder / "bin"), "LENGEN_NO_SETUP": "1", "PYTHON": sys.executable}
        return {**plain, **{name: str(value) for name, value in variables.items()}}

    def start(self, *arguments: str, **variables: object) -> subprocess.Popen[str]:
        """launch.sh with the script, in a process group of its own."""
        return subprocess.Popen(
            ["bash", "examples/common/launch.sh", "my script.py", *arguments],
            cwd=self.folder,
            env=self.environment(**variables),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )

    def launch(self, *arguments: str, **variables: object) -> subprocess.CompletedProcess[str]:
        """launch.sh with the script, to its end."""
        running = self.start(*arguments, **variables)
        try:
            output, errors = running.communicate(timeout=120)
        finally:
            running.kill()
        return subprocess.CompletedProcess(running.args, running.returncode, output, errors)

    def command(self, *arguments: str, **variables: object) -> list[str]:
        """The words of the command that a dry run prints."""
        done = self.launch(*arguments, DRY_RUN=1, **variables)
        assert (done.returncode, done.stderr) == (0, "")
        (line,) = done.stdout.splitlines()
        return shlex.split(line)

    def flags(self, *arguments: str, **variables: object) -> dict[str, str]:
        """torchrun's flags in the command of a dry run."""
        words = self.command(*arguments, **variables)
        at = words.index(f"{self.launcher.parent}/torchrun.py")
        assert words[at - 1] == sys.executable
        end = words.index("my script.py")
        return {words[i][2:]: words[i + 1] for i in range(at + 1, end, 2)}


def settings(words: list[str]) -> dict[str, str]:
    """The variables that a command sets by env."""
    assert words[0] == "env"
    pairs = (word.partition("=") for word in words[1:] if "=" in word and word[0].isupper())
    return {name: value for name, _, value in pairs}


def free_port() -> int:
    """A port that nobody listens on, and that the system gives to nobody of its own accord.

    A process takes seconds to start before it listens; meanwhile others of the same test open
    connections, and each gets a port from the system's own range.
    """
    while True:
        port = random.SystemRandom().randrange(10_000, 30_000)  # the system's range: from 32,768
        with socket.socket() as listener, contextlib.suppress(OSError):
            listener.bind(("", port))
            return port


def kill_family(process: subprocess.Popen[Any]) -> None:
    """As by a power cut: a process and all below it, with no time to say anything."""
    family = [psutil.Process(process.pid)]
    family += family[0].children(recursive=True)
    for member in family:
        member.kill()
    process.wait()
