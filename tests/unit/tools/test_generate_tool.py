"""The command line of generation: a trained checkpoint continues prompts."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

TOOL = Path(__file__).parents[3] / "tools" / "generate.py"


def run(*arguments: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(TOOL), *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=120)


def test_a_checkpoint_continues_prompts(tmp_path):
    pretrain = TOOL.parents[1] / "pretrain_gpt.py"
    flags = f"""
        --num-layers 2 --hidden-size 32 --ffn-hidden-size 48 --num-attention-heads 4 --swiglu
        --disable-bias-linear --seq-length 24 --position-embedding-type nape --mock-data
        --tokenizer-model byte --train-iters 1 --lr 1e-3 --eval-iters 0 --num-workers 0
        --query-scaling learned --save {tmp_path / "ck"}
    """
    subprocess.run([sys.executable, str(pretrain), *flags.split()], check=True, timeout=120)
    same = ("--load", tmp_path / "ck", "--max-new-tokens", 5, "--ignore-eos")
    done = run(*same, "--prompt", "abc")
    assert done.returncode == 0, done.stderr
    (tmp_path / "prompts.txt").write_text("abc\n")
    assert run(*same, "--prompt-file", tmp_path / "prompts.txt").stdout == done.stdout
    wrong = run("--load", tmp_path / "none", "--prompt", "abc")
    assert wrong.returncode == 2 and wrong.stderr.startswith("error: --load")


def test_bad_input():
    for arguments, said in (
        ((), "--load"),
        (("--load", "x"), "--prompt: not given"),
        (("--load", "x", "--prompt", "a", "--max-new-tokens", 0), "--max-new-tokens: found 0"),
        (("--load", "x", "--prompt", "a", "--temperature", -1), "--temperature: found -1"),
        (("--load", "x", "--prompt-file", "missing"), "--prompt-file: found no file"),
    ):
        done = run(*arguments)
        assert done.returncode == 2 and said in done.stderr and done.stderr.count("\n") == 1
