"""The command line under torchrun: one line for a person's mistake, whatever the processes."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from launcher import PRETRAIN, argv, environment, rows, start, tail, wait
from launching import free_port

# Every rank finds the same mistake, each after its own number of seconds.
MISTAKES = """
import os, sys, time
from megatron_lengen import errors

def main():
    time.sleep(float(sys.argv[1 + int(os.environ["RANK"])]))
    raise errors.BadInput("--flag: found it")

errors.PATIENCE = 8.0
errors.run_main(main)
"""


def torchrun(*command: str | Path, processes: int = 2) -> subprocess.CompletedProcess[str]:
    """A run as a user starts it."""
    launch = [sys.executable, "-m", "torch.distributed.run", f"--nproc-per-node={processes}"]
    launch += [f"--master-port={free_port()}", *map(str, command)]
    return subprocess.run(launch, env=environment(), capture_output=True, text=True, timeout=180)


def test_a_bad_flag_is_said_once():
    done = torchrun(PRETRAIN, *argv("--train-iters 4 --micro-batch-size 3"))
    assert done.returncode != 0
    said = [
        line for line in (done.stdout + done.stderr).splitlines() if "--micro-batch-size" in line
    ]
    assert len(said) == 1 and said[0].startswith("error: --global-batch-size: found 8"), done.stderr
    assert "Traceback" not in done.stdout


@pytest.mark.parametrize(
    ("seconds", "line"),
    [
        (("4", "0", "0"), "error: --flag: found it"),
        (("100", "0", "20"), "error: rank 1: --flag: found it"),
    ],
)
def test_a_mistake_is_said_once_whoever_is_first_to_find_it(tmp_path, seconds, line):
    """Torchrun ends the others as soon as one leaves: rank 0 must have had time to speak."""
    (tmp_path / "mistakes.py").write_text(MISTAKES)
    done = torchrun(tmp_path / "mistakes.py", *seconds, processes=3)
    assert [said for said in done.stderr.splitlines() if "--flag" in said] == [line]


def test_each_process_leaves_with_2_and_the_first_speaks(tmp_path):
    flags = argv("--train-iters 4 --pipeline-model-parallel-size 4")
    codes = wait(start([PRETRAIN, *flags], 2, tmp_path), 120)
    assert set(codes) <= {2, -9} and 2 in codes
    first = tail(tmp_path, 0)
    assert first == "" or (first.startswith("error: --") and first.count("\n") == 1)
    assert tail(tmp_path, 1) == ""


def test_a_run_as_users_start_it(tmp_path):
    flags = (
        f"--train-iters 4 --tensor-model-parallel-size 2 --sequence-parallel --save {tmp_path}/ck"
        f" --metrics-jsonl {tmp_path}/m.jsonl --dropout-variant vpad --dropout-rate 0.1"
    )
    done = torchrun(PRETRAIN, *argv(flags))
    assert done.returncode == 0, done.stderr[-3000:]
    assert len(rows(tmp_path / "m.jsonl")) == 4
    lines = done.stdout.splitlines()
    assert lines[0].startswith("2 processes (TP 2, PP 1, DP 1) on cpu")
    assert sum(line.startswith("iteration") for line in lines) == 4
    assert lines[-1] == f"saved {tmp_path}/ck/iter_0000004"
    assert "Traceback" not in done.stderr
