"""Who has left the run: a rank that dies, hangs or fails ends the others, with one line.

Every rank has a thread that signs a counter in the run's key-value store every few seconds and
looks at one other rank: the ring r -> r + 1, so that a rank's work is the same for 2 and for 5000
of them and every death has one witness. Ranks of one machine also form a ring of their own in which
each waits for the end of the next one's process, which the kernel tells at once. The first to see
that somebody is gone, or to fail itself, leaves a note; it alone speaks, and all the others leave
when they read it.

The thread has a connection of its own: the main thread's may be inside a blocking call.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from pathlib import PurePath
from types import TracebackType
from typing import NoReturn, TypeVar

import torch.distributed as dist

from megatron_lengen.errors import EXIT_BAD_INPUT, EXIT_FAULT, BadInput, Fault

T = TypeVar("T")

_TICK = 2.0  # seconds between two signs of life
_RANKS_PER_TICK = 2048  # beyond, signs come less often: the store answers some thousand a second
_SHARE = 0.8  # of the timeout: so that this line comes before the collectives' own errors
_PATIENCE = 5  # ticks without a sign after which, once something is wrong, a rank is suspect
_LEFT = "left"
_NOTHING = "-"
_WAITS = "waits"
_COLLECTIVES = ("torch/distributed", "megatron/core")  # where a rank waits for others


@dataclass(frozen=True)
class _Member:
    """A rank as the others name it; processes with equal `machine` can see each other's pid."""

    rank: int
    node: str
    pid: int
    machine: str

    def __str__(self) -> str:
        return f"rank {self.rank} (node {self.node}, pid {self.pid})"


@dataclass
class _Seen:
    """The last sign of a rank and for how long it has not changed."""

    sign: str = ""
    seconds: float = 0.0

    def __str__(self) -> str:
        iteration = self.sign.split()[1] if len(self.sign.split()) > 1 else "0"
        return f"last heard of at iteration {iteration}, {self.seconds:.0f} s ago"


class Watch:
    """Watches over a run of several processes while its `with` block lasts; made on every rank.

    An exception in the block ends all ranks: the first to raise prints its traceback (nothing but
    the line for `BadInput` and `Fault`) and gives its exit code to all. A single process is left
    alone.

    Args:
        timeout_minutes: for how long a rank may be silent.

    Attributes:
        iteration: where the run is; the loop sets it.
    """

    def __init__(self, timeout_minutes: float) -> None:
        self.iteration = 0
        self._limit = _SHARE * 60 * timeout_minutes
        self._alone = dist.get_world_size() == 1
        self._main = threading.get_ident()
        self._quit = threading.Event()
        self._count = 0

    def __enter__(self) -> Watch:
        if self._alone:
            return self
        rank, world = dist.get_rank(), dist.get_world_size()
        self._tick = min(_TICK * max(1.0, world / _RANKS_PER_TICK), self._limit / _PATIENCE)
        self._store = _own_store(self._limit)
        self._hosts_store = rank == 0 and not _launcher_has_the_store()
        if rank == 0:
            self._store.set("note", _NOTHING)
        self._sign()
        me = _Member(rank, socket.gethostname(), os.getpid(), _machine())
        self._members: list[_Member] = [me] * world
        dist.all_gather_object(self._members, me)  # after this, every sign and the note exist
        self._me = me
        self._next = (rank + 1) % world
        self._seen = {self._next: _Seen()}
        self._processes = self._open_processes()
        self._look(0.0)
        self._thread = threading.Thread(target=self._run, name="watch", daemon=True)
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._alone:
            return
        if isinstance(error, KeyboardInterrupt):
            self._speak("interrupted")
        if error is not None:
            self._fail(error)
        self._quit.set()
        self._thread.join()
        _within(self._limit, lambda: self._store.set(f"sign/{self._me.rank}", _LEFT))
        # Nobody watches any more when rank 0, which may keep the store, is free to go.
        dist.barrier()

    # ---- the thread ------------------------------------------------------------------------------

    def _run(self) -> None:
        last = time.monotonic()
        while not self._quit.wait(min(self._tick, 0.25)):
            for rank in [r for r, process in self._processes.items() if _has_ended(process)]:
                self._process_ended(self._members[rank])
            if time.monotonic() - last >= self._tick:
                elapsed, last = time.monotonic() - last, time.monotonic()
                # A process that was stopped itself has not seen what happened meanwhile.
                self._look(min(elapsed, 2 * self._tick))
                seen = self._seen[self._next]
                if seen.sign != _LEFT and seen.seconds > self._limit:
                    self._speak(f"{self._members[self._next]} gives no sign of life; {seen}")

    def _look(self, elapsed: float) -> None:
        """Sign, read the neighbours' signs, and leave if there is a note."""
        ranks = list(self._seen)
        keys = ["note", *(f"sign/{rank}" for rank in ranks)]
        started = time.monotonic()
        found = _within(self._limit, lambda: self._exchange(keys))
        if found is None:
            for seen in self._seen.values():
                seen.seconds += time.monotonic() - started
            self._store_lost(hangs=time.monotonic() - started >= self._limit)
        note, *signs = (value.decode() for value in found)
        self._follow(note)
        for rank, sign in zip(ranks, signs, strict=True):
            seen = self._seen[rank]
            seen.seconds = seen.seconds + elapsed if sign == seen.sign else 0.0
            seen.sign = sign

    def _exchange(self, keys: list[str]) -> list[bytes]:
        self._sign()
        return self._store.multi_get(keys)

    def _sign(self) -> None:
        self._count += 1
        text = f"{self._count} {self.iteration} {_place(self._main)}"
        self._store.set(f"sign/{dist.get_rank()}", text)

    def _open_processes(self) -> dict[int, int]:
        """Handles, by rank, of the next process on this machine and of the one with the store."""
        local = [member for member in self._members if member.machine == self._me.machine]
        if not self._me.machine or not hasattr(os, "pidfd_open"):
            return {}
        watched = [local[(local.index(self._me) + 1) % len(local)]]
        if not _launcher_has_the_store():
            watched += local[:1] if local[0].rank == 0 else []
        processes = {}
        for member in watched:
            if member is not self._me:
                self._seen.setdefault(member.rank, _Seen())
                with contextlib.suppress(ProcessLookupError):  # its signs will be missed
                    processes[member.rank] = os.pidfd_open(member.pid)
        return processes

    def _process_ended(self, member: _Member) -> None:
        del self._processes[member.rank]
        if member.rank == 0 and not _launcher_has_the_store():
            self._store_lost(hangs=False)
        self._look(0.0)
        if self._seen[member.rank].sign != _LEFT:
            self._speak(f"{member} died; {self._seen[member.rank]}")

    # ---- leaving ---------------------------------------------------------------------------------

    def _fail(self, error: BaseException) -> NoReturn:
        """Leave because of an exception of this rank, or of what made another one raise it."""
        if isinstance(error, BadInput):
            self._speak(str(error), EXIT_BAD_INPUT)
        if isinstance(error, Fault):
            self._speak(str(error), error.code)
        if _is_lost_connection(error):
            self._await_cause()
        trace = "".join(traceback.format_exception(error))
        text = f"{self._me} failed at iteration {self.iteration}: {_first_line(error)}"
        self._speak(text, EXIT_FAULT, trace)

    def _await_cause(self) -> None:
        """Give whoever is really gone the time to be missed; the thread may end this process."""
        time.sleep(1.0)  # the end of a process of this machine is known by then
        before = self._signs()
        seconds = (_PATIENCE + 1) * self._tick
        time.sleep(seconds)
        after = self._signs()
        others = [
            member
            for member in self._members
            if member is not self._me and after[member.rank] != _LEFT
        ]
        for member in others:
            if before[member.rank] == after[member.rank]:
                seen = _Seen(after[member.rank], seconds)
                self._speak(f"{member} gives no sign of life; {seen}")
        for member in others:
            _, iteration, place = after[member.rank].split()
            if place != _WAITS:
                self._speak(
                    f"{member} hangs at {place}, iteration {iteration}: {self._me} waited in vain"
                )

    def _signs(self) -> list[str]:
        keys = [f"sign/{member.rank}" for member in self._members]
        found = _within(self._limit, lambda: self._store.multi_get(keys))
        if found is None:
            self._store_lost(hangs=False)
        return [value.decode() for value in found]

    def _store_lost(self, hangs: bool) -> NoReturn:
        """Where rank 0 keeps the store, its end is the store's; nothing is left to agree through.

        Rank 0 is watched by the last rank, which speaks; under a launcher, rank 0 does.
        """
        rank, world = self._me.rank, len(self._members)
        if _launcher_has_the_store():
            text, speaks = f"the launcher's store at {_address()} is gone", rank == 0
        else:
            fate = "gives no sign of life" if hangs else "died"
            seen = self._seen.get(0, _Seen())
            text, speaks = f"{self._members[0]} {fate}; {seen}", rank == world - 1
        if speaks:
            _say(f"error: {text}")
        self._leave(EXIT_FAULT)

    def _speak(self, text: str, code: int = EXIT_FAULT, trace: str = "") -> NoReturn:
        """Leave a note and print it, unless somebody was first."""
        note = json.dumps({"rank": self._me.rank, "text": text, "code": code})
        found = _within(self._limit, lambda: [self._store.compare_set("note", _NOTHING, note)])
        if found is None:
            self._store_lost(hangs=False)
        (first,) = found
        if first.decode() == note:
            _say(f"{trace}error: {text}")
        self._leave(int(json.loads(first)["code"]))

    def _follow(self, note: str) -> None:
        """Leave if another rank has left a note; who left one here is on its way, and may print."""
        if note != _NOTHING and json.loads(note)["rank"] != self._me.rank:
            self._leave(int(json.loads(note)["code"]))

    def _leave(self, code: int) -> NoReturn:
        """End this process, whatever its threads wait for in a collective."""
        if self._hosts_store:
            time.sleep(3 * self._tick)  # the others still have to read the note
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(Exception):
                stream.flush()
        os._exit(code)


def _own_store(seconds: float) -> dist.Store:
    """A connection to the store through which the processes found each other."""
    client = dist.TCPStore(
        os.environ["MASTER_ADDR"],
        int(os.environ["MASTER_PORT"]),
        is_master=False,
        timeout=timedelta(seconds=seconds),
    )
    # A launcher that keeps its store when it starts the ranks again keeps old notes in it. With a
    # new store each time the count must not matter: a machine that came back counts from 0.
    kept = _launcher_has_the_store()
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") if kept else "0"
    return dist.PrefixStore(f"watch/{attempt}", client)


def _launcher_has_the_store() -> bool:
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


def _address() -> str:
    return f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"


def _machine() -> str:
    """Names a set of processes that can see each other's pid; empty where none can."""
    try:
        return f"{socket.gethostname()} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return ""


def _has_ended(process: int) -> bool:
    poll = select.poll()
    poll.register(process, select.POLLIN)
    return bool(poll.poll(0))


def _within(seconds: float, call: Callable[[], T]) -> T | None:
    """What `call` returns; None where it raises or takes longer (a store that never answers)."""
    results: list[T] = []

    def run() -> None:
        with contextlib.suppress(Exception):
            results.append(call())

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(seconds)
    return results[0] if results else None


def _place(thread: int) -> str:
    """Where a thread is: folder/file:line, or that it may be waiting for other ranks."""
    frame = sys._current_frames().get(thread)
    if frame is None:
        return _WAITS
    path = PurePath(frame.f_code.co_filename)
    folder = path.parent.as_posix()
    if path.name == PurePath(__file__).name or any(part in folder for part in _COLLECTIVES):
        return _WAITS
    return f"{path.parent.name}/{path.name}:{frame.f_lineno}".replace(" ", "_")


def _is_lost_connection(error: BaseException) -> bool:
    """Whether an exception says no more than that another rank did not answer."""
    text = str(error).lower()
    words = ("gloo", "nccl", "closed by peer", "connection reset", "timed out waiting")
    return isinstance(error, dist.DistError) or (
        isinstance(error, RuntimeError) and any(word in text for word in words)
    )


def _first_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
