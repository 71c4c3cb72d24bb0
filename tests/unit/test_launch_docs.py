"""The examples of docs/launching.md start what they say."""

from __future__ import annotations

import itertools
import re
import shlex
import shutil
import subprocess

import pytest
from launching import ROOT, Home

yaml = pytest.importorskip("yaml")
PAGE = (ROOT / "docs/launching.md").read_text()
BLOCKS = re.findall(r"```(bash|yaml)\n(.*?)```", PAGE, re.DOTALL)
# Runs its command once for each task, as srun does on four machines.
SRUN = """
[[ "$1" == --kill-on-bad-exit=* ]] && shift
for ((task = 0; task < 4 * TASKS; task++)); do
    SLURM_PROCID=$task SLURM_LOCALID=$((task % TASKS)) SLURM_NODEID=$((task / TASKS)) \\
        SLURM_STEP_NUM_NODES=4 SLURM_STEP_NUM_TASKS=$((4 * TASKS)) SLURM_STEP_NODELIST=gpu[3-6] \\
        SLURM_STEP_ID=0 "$@" || exit
done
"""


@pytest.fixture
def home(tmp_path):
    """With the script of all examples, and a program to train with."""
    home = Home(tmp_path)
    (home.folder / "train.sh").write_text(block("train.sh"))
    shutil.copy(home.folder / "my script.py", home.folder / "pretrain_gpt.py")
    return home


def block(name: str) -> str:
    """The example whose first comment begins with a file's name."""
    (found,) = [text for _, text in BLOCKS if re.search(rf"^# {re.escape(name)}: ", text, re.M)]
    return found


def commands(home: Home, script: str, **variables: object) -> list[dict[str, str]]:
    """torchrun's flags, or the variables of a task, in each command that a dry run prints."""
    done = subprocess.run(
        ["bash", "-c", script],
        cwd=home.folder,
        env=home.environment(DRY_RUN=1, **variables),
        capture_output=True,
        text=True,
    )
    assert (done.returncode, done.stderr) == (0, "")
    found = []
    for line in done.stdout.splitlines():
        words = shlex.split(line)
        end = words.index("pretrain_gpt.py")
        assert words[end + 1 : end + 3] == ["--num-layers", "8"]
        pairs = [word.partition("=")[::2] for word in words[:end] if word[0].isupper()]
        flags = itertools.pairwise(words[:end])
        found.append(dict(pairs) | {a[2:]: b for a, b in flags if a.startswith("--")})
    return found


@pytest.mark.parametrize("text", [text for kind, text in BLOCKS if kind == "bash"])
def test_the_scripts_are_bash(text):
    assert subprocess.run(["bash", "-n"], input=text, text=True).returncode == 0


def test_one_machine(home):
    lines = next(text for _, text in BLOCKS if "NPROC_PER_NODE=4" in text)
    every, two, four, restarts = [commands(home, line)[0] for line in lines.splitlines()]
    assert every == two == {} and four["nproc-per-node"] == "4"
    assert restarts["max-restarts"] == "3" and restarts["log-dir"] == "logs"


def test_machines_by_hand(home):
    lines = next(text for _, text in BLOCKS if "NODE_RANK=1" in text)
    for rank, line in enumerate(lines.splitlines()):
        (found,) = commands(home, line)
        assert (found["node-rank"], found["master-addr"]) == (str(rank), "node0")
        assert (found["nnodes"], found["nproc-per-node"]) == ("2", "8")


def test_a_rendezvous(home):
    (found,) = commands(home, next(text for _, text in BLOCKS if "RDZV_ENDPOINT" in text))
    assert (found["rdzv-endpoint"], found["rdzv-id"]) == ("node0:29400", "mine")


def sbatch(home: Home, name: str, saved: int) -> list[dict[str, str]]:
    text = block(name).replace("/shared", "shared")
    tasks = re.search(r"--ntasks-per-node=(\d+)", text)
    assert tasks is not None and "--nodes=4" in text
    home.add_program("srun", SRUN)
    # Hosts are asked for by name; a job is put back into the queue.
    home.add_program("scontrol", '[ "$1" = requeue ] && echo "$2" >requeued || echo gpu3')
    tracker = home.folder / "shared/runs/mine/latest_checkpointed_iteration.txt"
    tracker.parent.mkdir(parents=True)
    tracker.write_text(str(saved))
    return commands(home, text, TASKS=tasks[1], SLURM_JOB_ID=77, SLURM_JOB_NUM_NODES=4)


@pytest.mark.parametrize("saved", [400, 1000])
def test_slurm_with_a_task_for_each_machine(home, saved):
    found = sbatch(home, "train.sbatch", saved)
    assert [each["rdzv-conf"] for each in found] == ["join_timeout=900,is_host=1"] + 3 * [
        "join_timeout=900,is_host=0"
    ]
    for each in found:
        assert each["rdzv-endpoint"] == "gpu3:20077" and each["rdzv-id"] == "77"
        assert (each["nnodes"], each["nproc-per-node"], each["max-restarts"]) == ("4", "8", "3")
    assert (home.folder / "requeued").exists() == (saved == 400)


def test_slurm_with_a_task_for_each_process(home):
    found = sbatch(home, "tasks.sbatch", 0)
    assert [int(each["RANK"]) for each in found] == list(range(32))
    assert [int(each["LOCAL_RANK"]) for each in found] == 4 * list(range(8))
    assert {(each["WORLD_SIZE"], each["MASTER_ADDR"]) for each in found} == {("32", "gpu3")}


def container(pod: dict) -> tuple[str, dict[str, str]]:
    """The command of a pod's container, and its variables."""
    (found,) = pod["spec"]["containers"]
    variables = {each["name"]: each["value"] for each in found.get("env", [])}
    assert pod["spec"]["terminationGracePeriodSeconds"] >= 120
    mounted = {each["name"] for each in found["volumeMounts"]}
    assert mounted == {each["name"] for each in pod["spec"]["volumes"]}
    return shlex.join(found["command"]), variables


def test_an_indexed_job(home):
    service, job = yaml.safe_load_all(block("train.yaml"))
    name, spec = job["metadata"]["name"], job["spec"]
    assert service["spec"]["selector"] == {"job-name": name}
    command, variables = container(spec["template"])
    assert variables["MASTER_ADDR"] == f"{name}-0.{spec['template']['spec']['subdomain']}"
    assert spec["template"]["spec"]["subdomain"] == service["metadata"]["name"]
    assert int(variables["NNODES"]) == spec["completions"] == spec["parallelism"]
    for index in range(2):
        (found,) = commands(home, command, **variables, JOB_COMPLETION_INDEX=index)
        assert found["rdzv-endpoint"] == f"{name}-0.{name}:29500"
        assert found["rdzv-conf"].endswith(f"is_host={1 - index}")
        assert (found["nproc-per-node"], found["max-restarts"]) == ("8", "3")


def test_a_pytorch_job(home):
    (job,) = yaml.safe_load_all(block("pytorchjob.yaml"))
    replicas = job["spec"]["pytorchReplicaSpecs"]
    pods = {"MASTER_ADDR": "vpad-master-0", "MASTER_PORT": 23456, "PET_NPROC_PER_NODE": 8}
    for rank, kind in enumerate(("Master", "Worker")):
        command, variables = container(replicas[kind]["template"])
        numbers = {"WORLD_SIZE": 16, "RANK": 8 * rank, "PET_NNODES": 2, "PET_NODE_RANK": rank}
        (found,) = commands(home, command, **variables, **pods, **numbers)
        assert (found["node-rank"], found["nnodes"]) == (str(rank), "2")
        assert found["nproc-per-node"] == "8"
        assert (found["master-addr"], found["master-port"]) == ("vpad-master-0", "23456")


def test_every_variable_is_listed():
    launcher = (ROOT / "examples/common/launch.sh").read_text().partition("\nset -uo")
    code = launcher[2] + (ROOT / "examples/common/layout.sh").read_text()
    names = set(re.findall(r"\$\{([A-Z][A-Z_]+)[:+-]", code))
    # What a scheduler or another launcher says of itself, and what is only looked at.
    names -= {"BASH_SOURCE", "CUDA_VISIBLE_DEVICES", "LOCAL_RANK", "SLURM_STEP_NUM_TASKS"}
    names -= {"SLURM_CPUS_PER_TASK", "SLURM_STEP_ID"}
    assert len(names) > 20
    for text in (launcher[0], PAGE):
        missing = {name for name in names if not re.search(rf"\b{name}\b", text)}
        assert not missing
