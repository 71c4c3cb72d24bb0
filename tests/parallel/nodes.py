"""Machines of a test: launch.sh on loopback, or in a network namespace of its own."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from launcher import PRETRAIN, ROOT, environment
from launching import free_port, kill_family

LAUNCH = ROOT / "examples/common/launch.sh"


class Node:
    """One machine's launch.sh with pretrain_gpt.py; its output goes to LOG.

    Args:
        inside: the command that enters the machine's namespaces; none on loopback.
    """

    def __init__(
        self, log: Path, flags: Sequence[str], variables: dict[str, str], inside: Sequence[str] = ()
    ) -> None:
        self.log = log
        variables = {"LENGEN_NO_SETUP": "1", "PYTHON": sys.executable, **variables}
        with open(log, "ab") as file:
            self.process = subprocess.Popen(
                [*inside, "bash", str(LAUNCH), str(PRETRAIN), *flags],
                env=environment(**variables),
                stdout=file,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def kill(self) -> None:
        """As by a power cut: all of its processes, with no time to say anything."""
        if self.process.poll() is None:
            kill_family(self.process)

    def text(self) -> str:
        """What it said so far."""
        return self.log.read_text(errors="replace")


def wait_until(condition: Callable[[], bool], nodes: Sequence[Node], seconds: float = 180) -> None:
    """Until something holds; fails with the logs where a machine ends before."""
    end = time.monotonic() + seconds
    while not condition():
        ended = [node for node in nodes if node.process.poll() is not None]
        assert not ended and time.monotonic() < end, logs(nodes)
        time.sleep(0.02)


def codes(nodes: Sequence[Node], seconds: float = 240) -> list[int]:
    """Exit codes, once all have ended; fails with the logs where they do not."""
    end = time.monotonic() + seconds
    try:
        while any(node.process.poll() is None for node in nodes):
            assert time.monotonic() < end, logs(nodes)
            time.sleep(0.05)
    finally:
        for node in nodes:
            node.kill()
    return [node.process.returncode for node in nodes]


def logs(nodes: Sequence[Node]) -> str:
    """The end of what each said."""
    return "\n".join(f"--- {node.log.name}\n{node.text()[-3000:]}" for node in nodes)


def on_loopback() -> list[dict[str, str]]:
    """Variables of two machines that share this one."""
    meeting = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    one = {"NNODES": "2", "NPROC_PER_NODE": "1", **meeting}
    return [{**one, "NODE_RANK": str(rank)} for rank in range(2)]


class Network:
    """Two machines in namespaces of their own, node0 and node1, with a cable between them.

    Raises:
        OSError: where the kernel or the tools refuse.
    """

    address = ("10.77.0.1", "10.77.0.2")

    def __init__(self) -> None:
        self._holders: list[subprocess.Popen[bytes]] = []
        try:
            outer = self._hold([], "--user", "--map-root-user", "--net")
            self._pids = [self._hold(_enter(outer), "--net", "--uts") for _ in range(2)]
            _run(
                *(*_enter(outer), "ip", "link", "add", "cable", "netns", str(self._pids[0])),
                *("type", "veth", "peer", "name", "cable", "netns", str(self._pids[1])),
            )
            for rank, pid in enumerate(self._pids):
                inside = _enter(pid)
                _run(*inside, "hostname", f"node{rank}")
                _run(*inside, "ip", "address", "add", f"{self.address[rank]}/24", "dev", "cable")
                _run(*inside, "ip", "link", "set", "cable", "up")
                _run(*inside, "ip", "link", "set", "lo", "up")
        except (OSError, subprocess.SubprocessError) as error:
            self.close()
            detail = getattr(error, "stderr", None) or error
            raise OSError(f"no namespaces: {str(detail).strip()}") from error

    def close(self) -> None:
        """Give everything back."""
        for holder in self._holders:
            holder.kill()
            holder.wait()

    def variables(self, rank: int) -> dict[str, str]:
        """What says to launch.sh which machine this is."""
        return {
            "NNODES": "2",
            "NPROC_PER_NODE": "1",
            "NODE_RANK": str(rank),
            "MASTER_ADDR": self.address[0],
            "GLOO_SOCKET_IFNAME": "cable",
        }

    def inside(self, rank: int, own: Path, read_only: Path) -> list[str]:
        """The command in front of one that runs on a machine, as the first of its processes.

        Args:
            own: an empty folder which each machine has for itself.
            read_only: a folder that cannot be written there.
        """
        mounts = (
            f"mount -t tmpfs none '{own}' && mount --bind '{read_only}' '{read_only}' &&"
            f" mount -o remount,bind,ro '{read_only}' && exec \"$@\""
        )
        alone = ["unshare", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc"]
        return [*_enter(self._pids[rank]), *alone, "bash", "-c", mounts, "bash"]

    def _hold(self, inside: list[str], *namespaces: str) -> int:
        """A process that keeps new namespaces open; returns its id."""
        command = [*inside, "unshare", *namespaces, "sh", "-c", "echo $$; exec sleep infinity"]
        holder = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        self._holders.append(holder)
        assert holder.stdout is not None and holder.stderr is not None
        said = holder.stdout.readline()
        if not said:
            raise OSError(holder.stderr.read().decode())
        return int(said)


def _enter(pid: int) -> list[str]:
    # A uts namespace of one's own comes with the inner ones; entering the outer's is harmless.
    return ["nsenter", "-t", str(pid), "-U", "--preserve-credentials", "-n", "-u"]


def _run(*command: str) -> None:
    variables = {**os.environ, "PATH": f"{os.environ['PATH']}:/usr/sbin:/sbin"}
    subprocess.run(command, check=True, capture_output=True, text=True, env=variables, timeout=30)
