"""launch.sh with a small script: exit codes, restarts, signals, logs."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from launching import ROOT, Home, free_port, kill_family


@pytest.fixture
def home(tmp_path: Path) -> Home:
    return Home(tmp_path)


def starts(home: Home, rank: int = 0) -> int:
    """How often a rank of the script was started."""
    return (home.folder / f"starts{rank}").stat().st_size


def restarts(errors: str) -> list[str]:
    """The lines that tell of restarts, without the machine's name."""
    lines = [line for line in errors.splitlines() if line.startswith("restart ")]
    return [re.sub(r" on \S+", "", line) for line in lines]


@pytest.mark.parametrize("code", [0, 3])
def test_one_process_passes_its_code_on(home, code):
    done = home.launch("--codes", str(code), WORLD_SIZE=1, RANK=0, MASTER_ADDR="pod-0")
    assert done.returncode == code
    assert done.stdout == f"rank None of None: ['--codes', '{code}']\n"


def test_a_killed_process_counts_as_128_and_its_signal(home):
    done = home.launch("--codes", "-9", NPROC_PER_NODE=2)
    assert done.returncode == 128 + signal.SIGKILL
    assert re.fullmatch(r"error: rank [01] on \S+ was killed by SIGKILL\n", done.stderr)


def test_bad_arguments_leave_with_2_before_torchrun_starts(home):
    done = home.launch("--bad", NPROC_PER_NODE=2, MAX_RESTARTS=3)
    assert (done.returncode, done.stdout, done.stderr) == (2, "", "error: --bad: found it\n")
    machine = {"NPROC_PER_NODE": 2, "NNODES": 2, "NODE_RANK": 1, "MASTER_ADDR": "none.invalid"}
    other = home.launch("--bad", **machine)
    assert (other.returncode, other.stdout) == (2, "")
    assert re.fullmatch(r"error: --bad: found it \(on \S+\)\n", other.stderr)
    assert home.launch("--fault", NPROC_PER_NODE=2).returncode == 5


def test_bad_input_found_by_the_processes_leaves_with_2_and_never_restarts(home):
    done = home.launch("--codes", "2", NPROC_PER_NODE=2, MAX_RESTARTS=3)
    assert (done.returncode, restarts(done.stderr)) == (2, [])
    assert starts(home) == 1


def test_a_dry_run_of_the_script_speaks_once_for_all_processes(home):
    machine = {"NPROC_PER_NODE": 4, "NNODES": 2, "NODE_RANK": 0, "MASTER_ADDR": "x"}
    done = home.launch("--dry-run", **machine)
    assert (done.returncode, done.stdout) == (0, "resolved configuration 0 8\n")


def test_a_process_that_is_started_already_stays_one(home):
    done = home.launch(RANK=5, LOCAL_RANK=1, WORLD_SIZE=8, NPROC_PER_NODE=4)
    assert (done.returncode, done.stdout) == (0, "rank 5 of 8: []\n")


@pytest.mark.parametrize("processes", [1, 2])
def test_a_failed_run_starts_again_and_keeps_every_log(home, processes):
    flags = ["--codes", "3,-9,0", "--save", "ck", "--load", "ck"]
    done = home.launch(*flags, NPROC_PER_NODE=processes, MAX_RESTARTS=2, LOG_DIR="my logs")
    assert done.returncode == 0, done.stderr
    assert [re.sub(r"rank \d", "rank", line) for line in restarts(done.stderr)] == [
        "restart 1 of 2: rank left with exit code 3",
        "restart 2 of 2: rank was killed by SIGKILL",
    ]
    assert "warning" not in done.stderr
    for rank in range(processes):
        logs = sorted(home.folder.glob(f"my logs/*/attempt_*/{rank}/stdout.log"))
        assert [log.parts[-3] for log in logs] == ["attempt_0", "attempt_1", "attempt_2"]
        assert f"rank {rank} of {processes}" in logs[-1].read_text()


def test_restarts_are_counted_anew_after_a_newer_checkpoint(home):
    """Starts save iterations 4, 7, 7 and 4: N restarts after the last one that got further."""
    flags = ["--codes", "5", "--save", "ck", "--load", "ck", "--saves", "4,7,7,4"]
    done = home.launch(*flags, MAX_RESTARTS=2)
    assert done.returncode == 5
    counts = [line.split()[1] for line in restarts(done.stderr)]
    assert counts == ["1", "1", "2"] and starts(home) == 4
    assert "after 2 of 2 restarts" in done.stderr.splitlines()[-1]


def test_a_restart_that_would_begin_anew_is_said_once(home):
    done = home.launch("--save", "a", "--load", "b", MAX_RESTARTS=1, NPROC_PER_NODE=2)
    assert done.returncode == 0
    assert done.stderr.count("warning: MAX_RESTARTS without --load equal to --save") == 1


def test_logs_of_one_process(home):
    done = home.launch(LOG_DIR="my logs")
    assert done.returncode == 0 and done.stdout == "rank None of None: []\n"
    assert (home.folder / "my logs/stdout.log").read_text() == done.stdout


def test_two_processes_and_their_logs(home):
    done = home.launch("a b", NPROC_PER_NODE=2, LOG_DIR="my logs")
    assert done.returncode == 0, done.stderr
    logs = sorted(path.read_text() for path in home.folder.glob("my logs/*/*/*/stdout.log"))
    assert logs == [f"rank {rank} of 2: ['a b']\n" for rank in (0, 1)]
    assert sorted(done.stdout.splitlines()) == [
        f"[rank {rank}]: rank {rank} of 2: ['a b']" for rank in (0, 1)
    ]


def wait_until(condition: Callable[[], bool], running: list[subprocess.Popen[str]]) -> None:
    """Until something holds, while all are running."""
    end = time.monotonic() + 100
    while not condition():
        assert all(process.poll() is None for process in running) and time.monotonic() < end
        time.sleep(0.1)


def wait_for(home: Home, running: subprocess.Popen[str], processes: int) -> None:
    """Until every process of a script with --wait is there."""
    files = [home.folder / f"started{rank}" for rank in range(processes)]
    wait_until(lambda: all(file.exists() for file in files), [running])


@pytest.mark.parametrize(
    "processes, number, whole_group, extra",
    [
        (1, signal.SIGTERM, False, {}),
        (1, signal.SIGTERM, True, {"LOG_DIR": "logs"}),
        (2, signal.SIGUSR1, False, {"MAX_RESTARTS": 1}),
        (2, signal.SIGINT, True, {"LOG_DIR": "logs"}),
    ],
)
def test_a_signal_lets_every_process_finish(home, processes, number, whole_group, extra):
    """Also one that reaches the whole group, as a terminal's Ctrl-C and `timeout` do."""
    running = home.start("--wait", NPROC_PER_NODE=processes, **extra)
    wait_for(home, running, processes)
    (os.killpg if whole_group else os.kill)(running.pid, number)
    assert running.wait(60) == 0
    assert all((home.folder / f"stopped{rank}").exists() for rank in range(processes))
    assert restarts(running.communicate()[1]) == []


def test_a_signal_never_restarts_even_where_it_kills(home):
    running = home.start("--wait-without-saving", NPROC_PER_NODE=2, MAX_RESTARTS=3)
    wait_for(home, running, 2)
    os.kill(running.pid, signal.SIGTERM)
    assert running.wait(60) == 128 + signal.SIGTERM
    assert restarts(running.communicate()[1]) == [] and starts(home) == 1


def test_the_first_machine_is_lost_and_comes_back(home):
    """It keeps the meeting point, so the other has to find that again."""

    def start(node: int) -> subprocess.Popen[str]:
        return home.start("--wait", **machine, NODE_RANK=node)

    def started(times: int) -> bool:
        files = home.folder.glob("starts*")
        return sum(file.stat().st_size for file in files) == 2 * times

    machine = {"NNODES": 2, "NPROC_PER_NODE": 1, "MASTER_ADDR": "127.0.0.1", "MAX_RESTARTS": 1}
    machine["MASTER_PORT"] = free_port()
    nodes = [start(0), start(1)]
    wait_until(lambda: started(1), nodes)
    kill_family(nodes[0])
    nodes[0] = start(0)
    wait_until(lambda: started(2), nodes)
    for node in nodes:
        node.terminate()
    assert [node.wait(60) for node in nodes] == [0, 0]
    said = restarts(nodes[1].communicate()[1])
    assert len(said) == 1 and said[0].startswith("restart 1 of 1: no connection to the other")


def test_a_signal_ends_a_recipe_after_its_run_has_saved(home):
    shutil.copy(home.folder / "my script.py", home.folder / "pretrain_gpt.py")
    recipe = 'source examples/common/recipe.sh\nlengen_setup\ntrain --wait\necho "next step"\n'
    (home.folder / "recipe.sh").write_text(f"set -e\n{recipe}")
    running = subprocess.Popen(
        ["bash", "recipe.sh"], cwd=home.folder, env=home.environment(), stdout=subprocess.PIPE
    )
    wait_for(home, running, 1)
    running.send_signal(signal.SIGTERM)
    output, _ = running.communicate(timeout=60)
    assert (running.returncode, output) == (0, b"")
    assert (home.folder / "stopped0").exists()


def test_a_recipe_passes_the_code_of_a_failed_run_on(home):
    shutil.copy(home.folder / "my script.py", home.folder / "pretrain_gpt.py")
    recipe = 'set -e; source examples/common/recipe.sh; lengen_setup; train "$@"; echo next'
    for code in ("0", "3"):
        done = subprocess.run(
            ["bash", "-c", recipe, "recipe", "--codes", code],
            cwd=home.folder,
            env=home.environment(),
            capture_output=True,
            text=True,
        )
        assert done.returncode == int(code) and ("next" in done.stdout) == (code == "0")


def test_torchrun_reads_the_folders_of_the_script():
    sys.path.insert(0, str(ROOT / "examples/common"))
    try:
        from torchrun import folders_of
    finally:
        sys.path.pop(0)
    words = ["--save-interval", "5", "--save", "a", "--load=b", "--lr", "1", "--save", "c"]
    assert folders_of(words) == ("c", "b")
    assert folders_of(["--save-interval", "5"]) == (None, None)
