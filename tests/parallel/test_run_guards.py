"""Ranks that die, hang, fail or compute nonsense end the run: all of it, soon, with one line."""

from __future__ import annotations

import re
import subprocess
import sys
import time
from pathlib import Path

import pytest
from launcher import HERE, PRETRAIN, Run, argv, environment, rows, start, tail, work
from launching import free_port

from megatron_lengen import checkpoint_folder

WORKER = HERE / "guards_worker.py"
MEMBER = r"rank {} \(node \S+, pid \d+\)"


def ended(
    started: list[subprocess.Popen[bytes]], logs: Path, stopped: int = -1, limit: float = 180
) -> tuple[list[int], list[str]]:
    """Exit codes and logs once all have left by themselves, but for one that was stopped."""
    waited_for = [process for rank, process in enumerate(started) if rank != stopped]
    end = time.monotonic() + limit
    try:
        while any(process.poll() is None for process in waited_for):
            assert time.monotonic() < end, [tail(logs, rank) for rank in range(len(started))]
            time.sleep(0.05)
    finally:
        for process in started:
            if process.poll() is None:
                process.kill()
    return [p.wait() for p in started], [tail(logs, rank) for rank in range(len(started))]


def lines(logs: list[str]) -> list[str]:
    """What was said, on all ranks, apart from the progress of the run."""
    quiet = ("iteration ", "2 processes ", "saved ")
    return [line for log in logs for line in log.splitlines() if not line.startswith(quiet)]


# ---- ranks that leave ----------------------------------------------------------------------------

# What one rank does (-1: each), the minutes that a rank may be silent, and how many there are.
TROUBLES = [
    ("dies", 0, 10.0, 2),
    ("dies", 1, 10.0, 3),
    ("stops", 0, 0.3, 2),
    ("stops", 1, 0.3, 2),
    ("sleeps", 1, 0.3, 2),
    ("raises", 1, 10.0, 2),
    ("raises", -1, 10.0, 3),
    ("bad input", -1, 10.0, 2),
    ("fault", 1, 10.0, 2),
    ("nothing", 0, 0.2, 2),
]


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory) -> dict[tuple[str, int], tuple[list[int], list[str]]]:
    """Exit codes and logs by what happened to whom. Most of each run is waiting: all at once."""
    folder = tmp_path_factory.mktemp("troubles")
    runs = []
    for what, rank, minutes, processes in TROUBLES:
        logs = folder / f"{what}{rank}"
        command = [HERE / "watch_worker.py", what, str(rank), str(minutes)]
        runs.append(((what, rank), start(command, processes, logs), logs))
    return {
        key: ended(started, logs, stopped=key[1] if key[0] == "stops" else -1)
        for key, started, logs in runs
    }


@pytest.mark.parametrize("rank, codes", [(0, [-9, 1]), (1, [1, -9, 1])])
def test_a_rank_that_is_killed_ends_the_others(outcomes, rank, codes):
    """Long before the ten minutes that it was given."""
    found, logs = outcomes["dies", rank]
    assert found == codes
    (said,) = lines(logs)
    assert re.fullmatch(rf"error: {MEMBER.format(rank)} died; last heard of at .*", said)


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_that_is_stopped_ends_the_others_in_time(outcomes, rank):
    """With rank 0 the store that the ranks talk through stops, too."""
    codes, logs = outcomes["stops", rank]
    assert codes[1 - rank] == 1
    (said,) = lines(logs)
    found = re.fullmatch(
        rf"error: {MEMBER.format(rank)} gives no sign of life; last heard of at iteration \d+, "
        r"(\d+) s ago",
        said,
    )
    assert found, said
    assert int(found[1]) <= 60 * 0.3


def test_a_rank_that_hangs_is_named_with_its_place(outcomes):
    codes, logs = outcomes["sleeps", 1]
    assert codes == [1, 1]
    (said,) = lines(logs)
    assert re.match(rf"error: {MEMBER.format(1)} hangs at parallel/watch_worker.py:\d+, it", said)


@pytest.mark.parametrize("rank, processes", [(1, 2), (-1, 3)])
def test_an_exception_is_shown_once(outcomes, rank, processes):
    """With -1, on every rank at once: the first speaks for all."""
    codes, logs = outcomes["raises", rank]
    assert codes == [1] * processes
    said = "\n".join(lines(logs))
    assert said.count("Traceback") == 1
    assert said.count("ZeroDivisionError: divided\n") == 1
    assert len(re.findall(r"error: rank \d .* failed at iteration 6: ZeroDiv", said)) == 1


@pytest.mark.parametrize(
    "what, rank, code, line",
    [
        ("bad input", -1, 2, "error: --flag: found 1; allowed: 2"),
        ("fault", 1, 16, "error: a fault that has a code"),
    ],
)
def test_one_line_and_one_code_for_all(outcomes, what, rank, code, line):
    codes, logs = outcomes[what, rank]
    assert codes == [code] * 2
    assert lines(logs) == [line]


def test_those_who_leave_at_the_end_are_not_missed(outcomes):
    codes, logs = outcomes["nothing", 0]
    assert codes == [0, 0], logs
    assert lines(logs) == []


def torchrun(*command: str | Path) -> subprocess.CompletedProcess[str]:
    run = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2"]
    run += [f"--master-port={free_port()}", *map(str, command)]
    return subprocess.run(run, env=environment(), capture_output=True, text=True, timeout=180)


def test_a_killed_rank_under_torchrun():
    rank = 0  # the launcher keeps the store
    done = torchrun(HERE / "watch_worker.py", "dies", str(rank), "10")
    assert done.returncode == 1
    said = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    assert len(said) == 1
    assert re.match(rf"error: {MEMBER.format(rank)} died; last heard of", said[0])


def test_a_training_run_under_torchrun():
    """An exception in the middle of a real step, and what a person sees of it."""
    done = torchrun(WORKER, "raise", "1", "5", *argv("--train-iters 100"))
    assert done.returncode == 1
    assert done.stderr.count("ZeroDivisionError: the trouble") == 2  # the traceback's end, the line
    said = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    assert len(said) == 1
    assert re.match(rf"error: {MEMBER.format(1)} failed at iteration 3: ZeroDiv", said[0])
    assert "Connection closed by peer" not in done.stderr


def test_bad_input_on_one_rank_while_a_run_is_built(tmp_path):
    command = [WORKER, "bad-input-while-building", "1", "1", *argv("--train-iters 4")]
    codes, logs = ended(start(command, 2, tmp_path), tmp_path)
    assert codes == [2, 2]
    assert lines(logs) == ["error: --load: found a crack; allowed: none"]


def test_a_rank_that_never_comes_is_not_waited_for_longer_than_asked(tmp_path):
    variables = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1"}
    flags = argv("--train-iters 4 --distributed-timeout-minutes 0.05")
    done = subprocess.run(
        [sys.executable, str(PRETRAIN), *flags],
        env=environment(**variables, MASTER_PORT=str(free_port())),
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 1
    said = [line for line in done.stderr.splitlines() if not line.startswith("[")]
    assert len(said) == 1 and said[0].startswith("error: 2 processes did not meet at 127.0.0.1:")
    assert "1/2 clients joined" in said[0]


# ---- steps that are not finite -------------------------------------------------------------------

STEPS = "--train-iters 12 --max-skipped-steps 3"
TP, PP = "--tensor-model-parallel-size 2", "--pipeline-model-parallel-size 2"
LAYOUTS = {
    "nan,1,5,dp": f"{STEPS} --save FOLDER/ck --save-interval 1",
    "nan,1,5,dpdo": f"{STEPS} --use-distributed-optimizer --overlap-grad-reduce"
    " --overlap-param-gather",
    "nan,1,5,tp": f"{STEPS} {TP}",
    "nan,1,5,sp": f"{STEPS} {TP} --sequence-parallel",
    "nan,0,5,pp": f"{STEPS} {PP}",
    "nan,1,5,pp": f"{STEPS} {PP}",
    "norm,1,0,dp": STEPS,
    "norm,1,0,tp": f"{STEPS} {TP}",
    "nan once,1,5,dp": f"{STEPS} --metrics-jsonl FOLDER/once.jsonl",
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("skips")
    work("skips_worker.py", folder, 2, [Run(name, flags) for name, flags in LAYOUTS.items()])
    return folder


def said_of(folder: Path, name: str) -> str:
    """What both ranks said of a run: the same."""
    first, second = ((folder / f"{name}.rank{rank}.txt").read_text() for rank in range(2))
    assert first == second
    return first


@pytest.mark.parametrize("name", [name for name in LAYOUTS if "once" not in name])
def test_every_rank_stops_at_the_same_step_and_says_the_same(folder, name):
    said = said_of(folder, name)
    # The fifth forward pass: 2 micro-batches a step on each of two data-parallel ranks, else 4.
    first = 3 if ",dp" in name or name.startswith("norm") else 2
    samples = f"samples {8 * (first - 1)} to {8 * (first + 2) - 1}"
    assert said.startswith("1 loss or gradient not finite in 3 steps in a row")
    assert f"iterations {first} to {first + 2}, {samples};" in said
    last = 8 * (first + 1)
    if name.startswith("norm"):
        assert "the gradient's norm" in said
    elif ",dp" in name:
        places = f"{last + 2} to {last + 3} (data-parallel rank 1), {last + 6} to {last + 7}"
        assert f"samples {places} (data-parallel rank 1)" in said
    else:
        assert f"samples {last} to {last + 1} (data-parallel rank 0), {last + 2} to" in said


def test_the_last_good_checkpoint_stays_the_newest(folder):
    found = checkpoint_folder.find(folder / "ck")
    assert found is not None and found.iteration == 2


def test_one_bad_step_is_counted_and_training_goes_on(folder):
    assert said_of(folder, "nan once,1,5,dp") == "nothing"
    steps = rows(folder / "once.jsonl")
    assert [row["skipped"] for row in steps] == [0, 0] + [1] * 10
    assert [row["iteration"] for row in steps if row["lm_loss"] is None] == [3]


# ---- reruns --------------------------------------------------------------------------------------

RERUN = "--train-iters 6 --rerun-mode validate_results --save FOLDER/ck --load FOLDER/ck"


def test_a_fault_that_stays_is_computed_again_on_another_machine(tmp_path):
    """16 asks for another machine, the same one asks again, another one decides with 17."""
    runs = [
        Run("nan,1,5", f"{RERUN} --save-interval 1"),
        Run("nan,1,1", RERUN),
        Run("elsewhere,1,1", RERUN),
        Run("nan elsewhere,1,1", RERUN),
        Run("none,1,1", RERUN.replace("validate_results", "disabled")),
    ]
    work("skips_worker.py", tmp_path, 2, runs)
    said = {run.name: said_of(tmp_path, run.name) for run in runs}
    assert said["nan,1,5"].startswith("16 iteration 3: what was not finite came out the same when")
    assert said["nan,1,1"].startswith("16 iteration 3: this is the same machine as before")
    assert said["elsewhere,1,1"].startswith("17 iteration 3: computed again on another machine")
    assert said["nan elsewhere,1,1"].startswith("17 iteration 3: computed again on another machine")
    # Megatron-Core says which rank it was, and the finding.
    log = (tmp_path / "logs2" / "rank1.log").read_text()
    assert re.search("Rank 1, node .* iteration #3: .* is reproducible", log)
    assert log.index("Possible persistent error") < log.index("Correct result")
    # Without reruns the run goes on from there, to its end.
    assert said["none,1,1"] == "nothing"
    found = checkpoint_folder.find(tmp_path / "ck")
    assert found is not None and found.iteration == 6
