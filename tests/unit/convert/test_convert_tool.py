"""The command line: exit codes and one-line errors, once as a user runs it."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from conversion_models import random_checkpoint

SCRIPT = Path(__file__).resolve().parents[3] / "tools" / "checkpoint" / "convert.py"


@pytest.fixture
def convert(tool):
    return tool("convert")


def test_as_a_user_runs_it(hf_folder, tmp_path):
    """From another folder, without installation."""
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    arguments = ["to-megatron", "--load", str(hf_folder), "--save", "c"]
    command = [sys.executable, str(SCRIPT), *arguments]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("verified: largest difference of logits")
    assert (tmp_path / "c" / "latest_checkpointed_iteration.txt").read_text() == "release"


def test_export_with_every_option(convert, checkpoint_folder, tmp_path):
    copy = shutil.copytree(checkpoint_folder, tmp_path / "c")
    os.rename(copy / "release", copy / "iter_0000010")
    arguments = ["--set", "sliding_window=16", "rope_theta=100", "--dtype", "bf16", "--verify"]
    code, out, error = convert(
        *("to-hf", "--load", copy, "--save", tmp_path / "out", "--iteration", 10, *arguments)
    )
    assert code == 0, error
    assert "at 15 tokens" in out and "at 32 tokens" in out and "bfloat16" in out
    assert (tmp_path / "out" / "config.json").exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "error: the following arguments are required: way"),
        (["to-hf", "--save", "x"], "error: the following arguments are required: --load"),
        (["to-hf", "--load", "nowhere", "--save", "x"], "error: --load: nowhere is not a folder"),
        (["to-hf", "--load", ".", "--save", "x", "--dtype", "f8"], "error: argument --dtype:"),
        (["to-hf", "--load", ".", "--save", "x", "--set", "a"], "error: --set: found 'a'"),
        (["to-megatron", "--load", "a b", "--save", "x"], "error: --load: found a b; allowed:"),
        (
            ["to-megatron", "--load", ".", "--save", "x", "--rename", "a"],
            "error: --rename: found 'a'",
        ),
    ],
)
def test_bad_input_is_one_line_and_code_2(convert, arguments, message):
    code, out, error = convert(*arguments)
    assert code == 2 and out == ""
    assert error.startswith(message) and error.count("\n") == 1


def test_a_failed_verification_is_code_1(convert, hf_folder, tmp_path):
    """A source whose weights are not numbers cannot be verified."""
    import torch
    from safetensors.torch import load_file, save_file

    folder = shutil.copytree(hf_folder, tmp_path / "hf")
    tensors = load_file(folder / "model.safetensors")
    tensors["model.norm.weight"][0] = torch.nan
    save_file(tensors, folder / "model.safetensors")
    code, _, error = convert("to-megatron", "--load", folder, "--save", tmp_path / "c")
    assert code == 1 and not (tmp_path / "c").exists()
    assert error.startswith("error: verification failed:") and error.count("\n") == 1


def test_a_family_that_cannot_hold_the_model_refuses_it(convert, tmp_path):
    """NAPE and logarithmic scaling have no parameters whose loss could be noticed later."""
    settings = {"position_embedding_type": "nape", "query_scaling": "log"}
    random_checkpoint(tmp_path / "c", **settings)
    for verify in ("--verify", "--no-verify"):
        arguments = ["to-hf", "--load", tmp_path / "c", "--save", tmp_path / "o", verify]
        code, out, error = convert(*arguments, "--family", "smollm3")
        assert code == 2 and out == "" and not (tmp_path / "o").exists()
        expected = "error: to-hf: smollm3 cannot represent --position-embedding-type nape\n"
        assert error == expected
    code, _, error = convert(*arguments)
    assert code == 0, error
    card = (tmp_path / "o" / "README.md").read_text()
    for line in (
        "load it with `trust_remote_code=True`",
        "- 4 layers without rotary positions",
        "- ALiBi's bias on 2 of 4 heads",
        "- query scaling: log\n",
    ):
        assert line in card
