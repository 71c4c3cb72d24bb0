"""launch.sh: the command for every kind of cluster, and what it refuses."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from launching import ROOT, Home, settings

from megatron_lengen.runtime.cores import available_cores


@pytest.fixture
def home(tmp_path: Path) -> Home:
    return Home(tmp_path)


def test_one_process_needs_no_torchrun(home):
    words = home.command("--name", "a b", "$HOME", "it's")
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
    assert home.flags(**variables) == {
        "nnodes": "1",
        "nproc-per-node": str(processes),
        "rdzv-backend": "c10d",
        "rdzv-endpoint": "localhost:0",  # any free port
        "rdzv-id": "run",
        "local-addr": "localhost",
    }
    assert home.flags(**variables, MASTER_PORT=1234)["rdzv-endpoint"] == "localhost:1234"


@pytest.mark.parametrize(
    "visible, processes", [(None, 8), ("0,1,2", 3), ("3", 1), ("", 1), ("-1", 1)]
)
@pytest.mark.parametrize("auto", [False, True])
def test_one_process_for_each_gpu(home, visible, processes, auto):
    home.add_program("nvidia-smi", 'for i in {0..7}; do echo "GPU $i: H200 (UUID: x)"; done')
    variables = {} if visible is None else {"CUDA_VISIBLE_DEVICES": visible}
    variables |= {"PET_NPROC_PER_NODE": "auto"} if auto else {}
    if processes == 1:
        assert "env" not in home.command(**variables)
    else:
        assert home.flags(**variables)["nproc-per-node"] == str(processes)


def test_a_machine_without_gpus_runs_one_process_whatever_is_visible(home):
    home.add_program("nvidia-smi", "echo 'no devices were found'; exit 6")
    assert home.command(CUDA_VISIBLE_DEVICES="0,1") == [sys.executable, "my script.py"]


def test_processors_are_shared_out(home):
    assert settings(home.command(NPROC_PER_NODE=2)) == {
        "OMP_NUM_THREADS": str(max(1, available_cores() // 2)),
        "CUDA_DEVICE_MAX_CONNECTIONS": "1",
    }
    given = {"OMP_NUM_THREADS": 7, "CUDA_DEVICE_MAX_CONNECTIONS": 8}
    assert settings(home.command(NPROC_PER_NODE=2, **given)) == {
        name: str(value) for name, value in given.items()
    }
    assert settings(home.command(NPROC_PER_NODE=4096))["OMP_NUM_THREADS"] == "1"


SLURM = {
    "SLURM_JOB_NUM_NODES": 3,
    "SLURM_NODEID": 2,
    "SLURM_JOB_NODELIST": "gpu[07-08],login",
    "SLURM_JOB_ID": 4123456,
    "GPUS_PER_NODE": 8,
}


def test_slurm_asks_scontrol_for_the_first_machine(home):
    home.add_program(
        "scontrol",
        '[ "$*" = "show hostnames gpu[07-08],login" ] && printf "%s\\n" first second',
    )
    assert home.flags(**SLURM) == {
        "nnodes": "3",
        "nproc-per-node": "8",
        "node-rank": "2",
        "master-addr": "first",
        "master-port": "23456",
        "rdzv-conf": "timeout=900",
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
    found = home.flags(**{**SLURM, "SLURM_JOB_NODELIST": machines})
    assert found["master-addr"] == first


def test_a_step_on_some_of_a_jobs_machines(home):
    step = {"SLURM_STEP_NUM_NODES": 2, "SLURM_STEP_NODELIST": "gpu[09-10]", "SLURM_NODEID": 1}
    found = home.flags(**{**SLURM, **step, "SLURM_STEP_NUM_TASKS": 2})
    assert (found["nnodes"], found["node-rank"], found["master-addr"]) == ("2", "1", "gpu09")


def test_given_values_win_over_slurm(home):
    found = home.flags(**SLURM, NNODES=2, NODE_RANK=1, MASTER_ADDR="here", MASTER_PORT=77)
    assert (found["nnodes"], found["node-rank"]) == ("2", "1")
    assert (found["master-addr"], found["master-port"]) == ("here", "77")
    assert home.flags(**SLURM, NNODES=1)["rdzv-endpoint"] == "localhost:0"


TASKS = {
    "SLURM_STEP_NUM_TASKS": 6,
    "SLURM_STEP_NUM_NODES": 2,
    "SLURM_PROCID": 4,
    "SLURM_LOCALID": 1,
    "SLURM_NODEID": 1,
    "SLURM_STEP_NODELIST": "gpu[07-08]",
    "SLURM_JOB_ID": 4123456,
}


def test_srun_with_one_task_for_each_process(home):
    words = home.command("--flag", **TASKS, SLURM_CPUS_PER_TASK=12)
    assert words[-3:] == [sys.executable, "my script.py", "--flag"]
    assert settings(words) == {
        "RANK": "4",
        "WORLD_SIZE": "6",
        "LOCAL_RANK": "1",
        "MASTER_ADDR": "gpu07",
        "MASTER_PORT": "23456",
        "OMP_NUM_THREADS": "12",
        "CUDA_DEVICE_MAX_CONNECTIONS": "1",
    }
    done = home.launch(**TASKS, LOG_DIR="logs")
    assert (done.returncode, done.stdout) == (0, "rank 4 of 6: []\n")
    assert (home.folder / "logs/rank-4/stdout.log").read_text() == done.stdout


POD = {"MASTER_ADDR": "job-0.job", "MASTER_PORT": 23456, "NPROC_PER_NODE": 2}


@pytest.mark.parametrize(
    "variables",
    [
        {"WORLD_SIZE": 4, "RANK": 3},
        {"PET_NNODES": 4, "PET_NODE_RANK": 3, "WORLD_SIZE": 8, "RANK": 6},
        {"PET_NNODES": "4:4", "PET_NODE_RANK": 3},
        {"NNODES": 4, "JOB_COMPLETION_INDEX": 3},
    ],
    ids=["pods", "pods with several processes", "elastic pods", "indexed job"],
)
def test_kubernetes(home, variables):
    assert home.flags(**POD, **variables) == {
        "nnodes": "4",
        "nproc-per-node": "2",
        "node-rank": "3",
        "master-addr": "job-0.job",
        "master-port": "23456",
        "rdzv-conf": "timeout=900",
    }


@pytest.mark.parametrize("prefix", ["", "PET_"])
@pytest.mark.parametrize("endpoint, found", [("head:1234", "head:1234"), ("head", "head:29400")])
def test_a_rendezvous_needs_no_numbers(home, prefix, endpoint, found):
    variables = {f"{prefix}RDZV_ENDPOINT": endpoint, f"{prefix}RDZV_ID": "mine"}
    assert home.flags(NNODES=3, NPROC_PER_NODE=1, RDZV_TIMEOUT=60, **variables) == {
        "nnodes": "3",
        "nproc-per-node": "1",
        "rdzv-backend": "c10d",
        "rdzv-endpoint": found,
        "rdzv-id": "mine",
        "rdzv-conf": "join_timeout=60",
    }


@pytest.mark.parametrize("node", [0, 1])
def test_restarts_on_several_machines_need_a_rendezvous(home, node):
    found = home.flags(NNODES=2, NODE_RANK=node, MASTER_ADDR="a", MAX_RESTARTS=3)
    assert found == {
        "nnodes": "2",
        "nproc-per-node": "1",
        "rdzv-backend": "c10d",
        "rdzv-endpoint": "a:29500",
        "rdzv-id": "run",
        "rdzv-conf": f"join_timeout=900,is_host={1 - node}",
        "max-restarts": "3",
    }


def test_restarts_as_an_argument(home):
    expected = home.command(MAX_RESTARTS=4)
    assert expected[expected.index("--max-restarts") + 1] == "4"
    for words in (["--max-restarts", "4"], ["--max-restarts=4"]):
        done = subprocess.run(
            ["bash", home.launcher, *words, "my script.py"],
            cwd=home.folder,
            env=home.environment(DRY_RUN=1),
            capture_output=True,
            text=True,
        )
        assert done.stdout == home.launch(DRY_RUN=1, MAX_RESTARTS=4).stdout, done.stderr


def test_logs_of_every_machine_have_a_folder(home):
    machines = {"NNODES": 2, "NODE_RANK": 1, "MASTER_ADDR": "a", "LOG_DIR": "my logs"}
    assert home.flags(**machines)["log-dir"] == "my logs/node-1"
    assert home.flags(LOG_DIR="my logs", NPROC_PER_NODE=2)["log-dir"] == "my logs"


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
        ({"NNODES": 2, "RDZV_ENDPOINT": "a:b"}, "MASTER_PORT: found b; allowed: 0 to 65535"),
        ({"MAX_RESTARTS": "-1"}, "MAX_RESTARTS: found -1; allowed: 0 to 10000"),
        ({"OMP_NUM_THREADS": "many"}, "OMP_NUM_THREADS: found many; allowed: 1 to 4096"),
        ({"DRY_RUN": "yes"}, "DRY_RUN: found yes; allowed: 0 or 1"),
        ({"PYTHON": "/none"}, "PYTHON: found no program /none"),
        ({**TASKS, "NPROC_PER_NODE": 4}, "srun: found 6 tasks on 2 machines with NPROC_PER_NODE=4"),
        ({**TASKS, "MAX_RESTARTS": 1}, "MAX_RESTARTS: found 1 with one task for each process"),
    ],
)
def test_an_impossible_layout_is_one_line(home, variables, said):
    done = home.launch(**variables)
    assert (done.returncode, done.stdout) == (2, "")
    assert said in done.stderr and done.stderr.count("\n") == 1


def test_the_script_may_be_named_from_anywhere(home, tmp_path):
    path, environment = home.launcher, home.environment()
    for name, code in (("my script.py", 0), (str(home.folder / "my script.py"), 0), ("none.py", 2)):
        done = subprocess.run(
            ["bash", path, name], cwd=tmp_path, env=environment, capture_output=True
        )
        assert done.returncode == code
    for words in ([], ["--max-restarts"], ["--max-restarts", "2"]):
        nothing = subprocess.run(
            ["bash", path, *words], env=environment, capture_output=True, text=True
        )
        assert nothing.returncode == 2 and "no script given" in nothing.stderr


@pytest.mark.skipif(shutil.which("shellcheck") is None, reason="shellcheck is not installed")
def test_shellcheck_finds_nothing():
    scripts = [*(ROOT / "examples/common").glob("*.sh"), ROOT / "tests/run.sh"]
    command = ["shellcheck", "-x", "-P", "SCRIPTDIR", *scripts]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout
