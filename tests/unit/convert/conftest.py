"""Folders with a random model in both formats, several to average, and the tools for them."""

import importlib.util
import sys
from pathlib import Path

import pytest
import torch
from conversion_models import random_smollm3

from megatron_lengen.convert.to_megatron import hf_to_checkpoint
from megatron_lengen.errors import run_main

TOOLS = Path(__file__).resolve().parents[3] / "tools" / "checkpoint"


@pytest.fixture(scope="session")
def hf_folder(tmp_path_factory):
    """A tied SmolLM3 of 4 layers, window 8, vocabulary 101."""
    folder = tmp_path_factory.mktemp("hf") / "model"
    random_smollm3(folder)
    return folder


@pytest.fixture(scope="session")
def checkpoint_folder(hf_folder, tmp_path_factory):
    """The same model as a checkpoint; tests must not change it."""
    folder = tmp_path_factory.mktemp("checkpoint") / "model"
    hf_to_checkpoint(hf_folder, folder, verify=False, report=lambda line: None)
    return folder


@pytest.fixture(scope="session")
def hf_models(tmp_path_factory):
    """Three folders of one architecture with files besides the weights; not to be changed."""
    root = tmp_path_factory.mktemp("hf")
    for seed in range(3):
        folder = root / f"step-{seed}"
        random_smollm3(folder, layers=2, dtype=torch.bfloat16, seed=seed)
        for name, text in (
            ("tokenizer.json", '{"own":  %d}\r\n'),
            ("modeling_mine.py", "# %d"),
            ("trainer_state.json", "{}"),
            ("README.md", "# step %d"),
            ("additional_chat_templates/tools.jinja", "tools %d"),
        ):
            (folder / name).parent.mkdir(exist_ok=True)
            (folder / name).write_text(text % seed if "%" in text else text, newline="")
    return root


@pytest.fixture
def tool(monkeypatch, capsys):
    """tool(NAME) loads tools/checkpoint/NAME.py; called, that runs in this process and gives
    (exit code, stdout, stderr)."""

    def load(name):
        script = TOOLS / f"{name}.py"
        spec = importlib.util.spec_from_file_location(f"{name}_tool", script)
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)

        def run(*arguments):
            monkeypatch.setattr(sys, "argv", [script.name, *map(str, arguments)])
            with pytest.raises(SystemExit) as left:
                run_main(module.main)
            return left.value.code, *capsys.readouterr()

        return run

    return load
