"""launch.sh: the command for every kind of cluster, exit codes, signals, paths with spaces."""

from __future__ import annotations

import os
import shlex
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
# Programs that launch.sh may find on any machine; a PATH of these alone hides GPUs and Slurm.
PLAIN = "bash cat cksum dirname env find getconf grep head mkdir sed sleep tee tr"
# What stands in for a training script: it reports, and obeys its first argument.
SCRIPT = """
import os, signal, sys, time
if "--dry-run" in sys.argv:
    print("resolved configuration", os.environ.get("RANK"), os.environ.get("WORLD_SIZE"))
    if "--bad" in sys.argv:
        if os.environ["RANK"] == "0":
            print("error: --bad: found it", file=sys.stderr)
        sys.exit(2)
    sys.exit(5 if "--fault" in sys.argv else 0)
if "--wait" in sys.argv:
    def leave(*_):
        open(f"stopped{os.environ.get('RANK', '')}", "w").close()
        sys.exit(0)
    signal.signal(signal.SIGTERM, leave)
    open(f"started{os.environ.get('RANK', '')}", "w").close()
    time.sleep(60)
rank, size = os.environ.get("RANK"), os.environ.get("WORLD_SIZE")
sys.stdout.write(f"rank {rank} of {size}: {sys.argv[1:]}\\n")
sys.exit(3 if "--three" in sys.argv else 0)
"""


@pytest.fixture
def home(tmp_path: Path) -> Path:
    """A copy of what launch.sh needs, in a folder whose name holds a space, and a script."""
    home = tmp_path / "my project"
    shutil.copytree(ROOT / "examples/common", home / "examples/common")
    (home / "bin").mkdir()
    for name in PLAIN.split():
        program = shutil.which(name)
        assert program, name
        (home / "bin" / name).symlink_to(program)
    (home / "my script.py").write_text(SCRIPT)
    return home


def add_program(home: Path, name: str, body: str) -> None:
    program = home / "bin" / name
    program.write_text(f"#!/bin/bash\n{body}\n")
    program.chmod(0o755)


def environment(home: Path, **variables: object) -> dict[str, str]:
    given = {name: str(value) for name, value in variables.items()}
    return {"PATH": str(home / "bin"), "LENGEN_NO_SETUP": "1", "PYTHON": sys.executable, **given}


def launch(home: Path, *arguments: str, **variables: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["bash", "examples/common/launch.sh", "my script.py", *arguments],
        cwd=home,
        env=environment(home, **variables),
        capture_output=True,
        text=True,
        timeout=120,
    )


def command(home: Path, *arguments: str, **variables: object) -> list[str]:
    """The words of the command that a dry run prints."""
    done = launch(home, *arguments, DRY_RUN=1, **variables)
    assert (done.returncode, done.stderr) == (0, "")
    (line,) = done.stdout.splitlines()
    return shlex.split(line)


def layout(words: list[str]) -> dict[str, str]:
    """torchrun's flags in a command."""
    assert words[1:3] == ["-m", "torch.distributed.run"]
    return {words[i][2:]: words[i + 1] for i in range(3, len(words), 2) if words[i][:2] == "--"}


def test_one_process_needs_no_torchrun(home):
    words = command(home, "--name", "a b", "$HOME", "it's")
    assert words == [sys.executable, "my script.py", "--name", "a b", "$HOME", "it's"]


@pytest.mark.parametrize(
    "variables, processes",
    [
        ({"NPROC_PER_NODE": 3}, 3),
        ({"GPUS_PER_NODE": 4}, 4),
        ({"PET_NPROC_PER_NODE": 5}, 5),
        ({"NPROC_PER_NODE": 3, "GPUS_PER_NODE": 4, "PET_NPROC_PER_NODE": 5}, 3),
    ],
)
def test_processes_of_one_machine(home, variables, processes):
    found = layout(command(home, **variables))
    assert int(found.pop("master-port")) > 1024
    assert found == {
        "nnodes": "1",
        "node-rank": "0",
        "nproc-per-node": str(processes),
        "master-addr": "127.0.0.1",
    }


def test_runs_on_one_machine_get_ports_of_their_own(home):
    ports = {layout(command(home, NPROC_PER_NODE=2))["master-port"] for _ in range(3)}
    assert len(ports) > 1
    assert layout(command(home, NPROC_PER_NODE=2, MASTER_PORT=1234))["master-port"] == "1234"


@pytest.mark.parametrize(
    "visible, processes", [(None, 8), ("0,1,2", 3), ("3", 1), ("", 1), ("-1", 1)]
)
def test_one_process_for_each_gpu(home, visible, processes):
    add_program(home, "nvidia-smi", 'for i in {0..7}; do echo "GPU $i: H200 (UUID: x)"; done')
    words = command(home, **({} if visible is None else {"CUDA_VISIBLE_DEVICES": visible}))
    found = layout(words)["nproc-per-node"] if "-m" in words else "1"
    assert found == str(processes)


def test_a_machine_without_gpus_runs_one_process_whatever_is_visible(home):
    add_program(home, "nvidia-smi", "echo 'no devices were found'; exit 6")
    assert "-m" not in command(home, CUDA_VISIBLE_DEVICES="0,1")


SLURM = {
    "SLURM_JOB_NUM_NODES": 3,
    "SLURM_NODEID": 2,
    "SLURM_JOB_NODELIST": "gpu[07-08],login",
    "SLURM_JOB_ID": 4123456,
    "GPUS_PER_NODE": 8,
}


def test_slurm_asks_scontrol_for_the_first_machine(home):
    add_program(
        home,
        "scontrol",
        '[ "$*" = "show hostnames gpu[07-08],login" ] && printf "%s\\n" first second',
    )
    assert layout(command(home, **SLURM)) == {
        "nnodes": "3",
        "node-rank": "2",
        "nproc-per-node": "8",
        "master-addr": "first",
        "master-port": "23456",
    }


@pytest.mark.parametrize(
    "machines, first",
    [
        ("gpu[07-12,15],login", "gpu07"),
        ("gpu[9,3]", "gpu9"),
        ("a1,b[2-3]", "a1"),
        ("rack-4-[001-003]-ib", "rack-4-001-ib"),
        ("node.cluster.org,other", "node.cluster.org"),
    ],
)
def test_slurm_in_a_container_without_scontrol(home, machines, first):
    found = layout(command(home, **{**SLURM, "SLURM_JOB_NODELIST": machines}))
    assert found["master-addr"] == first


def test_given_values_win_over_slurm(home):
    found = layout(
        command(home, **SLURM, NNODES=2, NODE_RANK=1, MASTER_ADDR="here", MASTER_PORT=77)
    )
    assert (found["nnodes"], found["node-rank"]) == ("2", "1")
    assert (found["master-addr"], found["master-port"]) == ("here", "77")
    assert layout(command(home, **SLURM, NNODES=1))["master-addr"] == "127.0.0.1"


@pytest.mark.parametrize(
    "variables",
    [
        {"WORLD_SIZE": 4, "RANK": 3},
        {"PET_NNODES": 4, "PET_NODE_RANK": 3, "WORLD_SIZE": 8, "RANK": 6},
        {"NNODES": 4, "JOB_COMPLETION_INDEX": 3},
    ],
    ids=["pods", "pods with several processes", "indexed job"],
)
def test_kubernetes(home, variables):
    pod = {"MASTER_ADDR": "job-0.job", "MASTER_PORT": 23456, "NPROC_PER_NODE": 2}
    assert layout(command(home, **pod, **variables)) == {
        "nnodes": "4",
        "node-rank": "3",
        "nproc-per-node": "2",
        "master-addr": "job-0.job",
        "master-port": "23456",
    }


@pytest.mark.parametrize(
    "variables, said",
    [
        ({"NPROC_PER_NODE": "two"}, "NPROC_PER_NODE: found two; allowed: 1 to 4096"),
        ({"NPROC_PER_NODE": "0"}, "NPROC_PER_NODE: found 0; allowed: 1 to 4096"),
        ({"NNODES": "1:4"}, "NNODES: found 1:4; allowed: 1 to 65536"),
        ({"NNODES": 2}, "NODE_RANK: found nothing; allowed: 0 to 1"),
        ({"NNODES": 2, "NODE_RANK": 2}, "NODE_RANK: found 2; allowed: 0 to 1"),
        ({"NNODES": 2, "NODE_RANK": 1}, "MASTER_ADDR: not set"),
        ({"NPROC_PER_NODE": 2, "MASTER_PORT": 70000}, "MASTER_PORT: found 70000"),
        ({"SLURM_STEP_NUM_TASKS": 8, "SLURM_STEP_NUM_NODES": 2}, "srun: found 8 tasks"),
    ],
)
def test_an_impossible_layout_is_one_line(home, variables, said):
    done = launch(home, **variables)
    assert (done.returncode, done.stdout) == (2, "")
    assert said in done.stderr and done.stderr.count("\n") == 1


def test_the_script_may_be_named_from_anywhere(home, tmp_path):
    path = home / "examples/common/launch.sh"
    for name, code in (("my script.py", 0), (str(home / "my script.py"), 0), ("none.py", 2)):
        done = subprocess.run(
            ["bash", path, name], cwd=tmp_path, env=environment(home), capture_output=True
        )
        assert done.returncode == code
    nothing = subprocess.run(["bash", path], env=environment(home), capture_output=True, text=True)
    assert nothing.returncode == 2 and "no script given" in nothing.stderr


@pytest.mark.parametrize("flag, code", [("--fine", 0), ("--three", 3)])
def test_one_process_passes_its_code_on(home, flag, code):
    done = launch(home, flag, WORLD_SIZE=1, RANK=0, MASTER_ADDR="pod-0")
    assert done.returncode == code
    assert done.stdout == f"rank None of None: ['{flag}']\n"


def test_bad_arguments_leave_with_2_before_torchrun_starts(home):
    done = launch(home, "--bad", NPROC_PER_NODE=2)
    assert (done.returncode, done.stdout, done.stderr) == (2, "", "error: --bad: found it\n")
    other = launch(
        home, "--bad", NPROC_PER_NODE=2, NNODES=2, NODE_RANK=1, MASTER_ADDR="none.invalid"
    )
    assert (other.returncode, other.stdout, other.stderr) == (2, "", "")
    assert launch(home, "--fault", NPROC_PER_NODE=2).returncode == 5


def test_a_dry_run_of_the_script_speaks_once_for_all_processes(home):
    done = launch(home, "--dry-run", NPROC_PER_NODE=4, NNODES=2, NODE_RANK=0, MASTER_ADDR="x")
    assert (done.returncode, done.stdout) == (0, "resolved configuration 0 8\n")


def test_a_process_that_is_started_already_stays_one(home):
    done = launch(home, RANK=5, LOCAL_RANK=1, WORLD_SIZE=8, NPROC_PER_NODE=4)
    assert (done.returncode, done.stdout) == (0, "rank 5 of 8: []\n")


def test_logs_of_one_process(home):
    done = launch(home, LOG_DIR="my logs")
    assert done.returncode == 0 and done.stdout == "rank None of None: []\n"
    assert (home / "my logs/stdout.log").read_text() == done.stdout


def test_two_processes_and_their_logs(home):
    done = launch(home, "a b", NPROC_PER_NODE=2, LOG_DIR="my logs")
    assert done.returncode == 0, done.stderr
    logs = sorted(path.read_text() for path in home.glob("my logs/*/*/*/stdout.log"))
    assert logs == [f"rank {rank} of 2: ['a b']\n" for rank in (0, 1)]
    assert "resolved" not in done.stdout
    assert sorted(line.partition(":")[2] for line in done.stdout.splitlines()) == [
        log.strip() for log in logs
    ]


@pytest.mark.parametrize("processes, whole_group", [(1, False), (2, False), (2, True)])
def test_a_signal_lets_every_process_finish(home, processes, whole_group):
    """Also one that reaches the whole group, as a terminal's Ctrl-C and `timeout` do."""
    ranks = [""] if processes == 1 else [str(rank) for rank in range(processes)]
    running = subprocess.Popen(
        ["bash", "examples/common/launch.sh", "my script.py", "--wait"],
        cwd=home,
        env=environment(home, NPROC_PER_NODE=processes),
        start_new_session=True,
    )
    end = time.monotonic() + 60
    while not all((home / f"started{rank}").exists() for rank in ranks):
        assert running.poll() is None and time.monotonic() < end
        time.sleep(0.1)
    (os.killpg if whole_group else os.kill)(running.pid, signal.SIGTERM)
    assert running.wait(60) == 0
    assert all((home / f"stopped{rank}").exists() for rank in ranks)
