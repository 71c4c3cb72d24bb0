"""The command line under torchrun: one line for a person's mistake, whatever the processes."""

from __future__ import annotations

import subprocess
import sys

from launcher import PRETRAIN, argv, environment, rows, start, tail, wait
from launching import free_port


def torchrun(flags: str, processes: int = 2) -> subprocess.CompletedProcess[str]:
    """A run as a user starts it."""
    command = [sys.executable, "-m", "torch.distributed.run", f"--nproc-per-node={processes}"]
    command += [f"--master-port={free_port()}", str(PRETRAIN), *argv(flags)]
    return subprocess.run(command, env=environment(), capture_output=True, text=True, timeout=180)


def test_a_bad_flag_is_said_once():
    done = torchrun("--train-iters 4 --micro-batch-size 3")
    assert done.returncode != 0
    said = [
        line for line in (done.stdout + done.stderr).splitlines() if "--micro-batch-size" in line
    ]
    assert len(said) == 1 and said[0].startswith("error: --global-batch-size: found 8"), done.stderr
    assert "Traceback" not in done.stdout


def test_each_process_leaves_with_2_and_the_first_speaks(tmp_path):
    flags = argv("--train-iters 4 --pipeline-model-parallel-size 4")
    codes = wait(start([PRETRAIN, *flags], 2, tmp_path), 120)
    assert set(codes) <= {2, -9} and 2 in codes
    first = tail(tmp_path, 0)
    assert first == "" or (first.startswith("error: --") and first.count("\n") == 1)
    assert tail(tmp_path, 1) == ""


def test_a_run_as_users_start_it(tmp_path):
    done = torchrun(
        f"--train-iters 4 --tensor-model-parallel-size 2 --sequence-parallel --save {tmp_path}/ck"
        f" --metrics-jsonl {tmp_path}/m.jsonl --dropout-variant vpad --dropout-rate 0.1"
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert len(rows(tmp_path / "m.jsonl")) == 4
    lines = done.stdout.splitlines()
    assert lines[0].startswith("2 processes (TP 2, PP 1, DP 1) on cpu")
    assert sum(line.startswith("iteration") for line in lines) == 4
    assert lines[-1] == f"saved {tmp_path}/ck/iter_0000004"
    assert "Traceback" not in done.stderr
