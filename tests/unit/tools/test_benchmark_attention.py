"""The benchmark of attention: it runs, writes what it prints, and refuses bad sizes in one line."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from megatron_lengen.errors import BadInput

SCRIPT = Path(__file__).parents[3] / "tools" / "benchmark" / "attention.py"


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, str(SCRIPT), *arguments], capture_output=True, text=True)


def test_every_part_is_measured_and_written(tmp_path):
    file = tmp_path / "attention.json"
    done = run(
        "--lengths", "96", "192", "--window", "16", "--dense-length", "96", "--entmax-length", "64",
        "--groups", "2", "--channels", "8", "--repeat", "1", "--json", str(file),
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    report = json.loads(file.read_text())
    rows = {(row["part"], row["form"], row["length"]): row for row in report["results"]}
    assert set(rows) == {
        ("window", "ours", 96), ("window", "ours", 192),
        ("dense", "ours", 96), ("dense", "Hugging Face sdpa", 96),
        ("entmax", "ours", 64), ("entmax", "package entmax", 64),
        ("entmax", "ours, NAPE", 64), ("entmax", "package entmax, NAPE", 64),
        ("memory", "ours, entmax", 96), ("memory", "ours, entmax", 192),
    }  # fmt: skip
    assert all(row["seconds"] > 0 for key, row in rows.items() if key[0] != "memory")
    short, long = rows["window", "ours", 96], rows["window", "ours", 192]
    assert short["ratio"] == 1
    assert long["ratio"] == pytest.approx(long["seconds"] / short["seconds"] / 2)
    assert report["settings"]["window"] == 16
    assert len(done.stdout.splitlines()) == 2 + len(rows)


@pytest.fixture
def tool(monkeypatch):
    monkeypatch.syspath_prepend(SCRIPT.parent)  # what the benchmarks share
    spec = importlib.util.spec_from_file_location("attention_benchmark", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_candidates_compute_the_same(tool):
    args = tool.build_parser().parse_args(["--entmax-length", "40", "--groups", "2"])
    q, k, v = (x.detach() for x in tool.inputs(args, 40))
    forms = {name: form(q, k, v) for name, form in tool.entmax_forms(args).items()}
    near = {"rtol": 1e-4, "atol": 1e-5}
    torch.testing.assert_close(forms["ours"], forms["package entmax"], **near)
    torch.testing.assert_close(forms["ours, NAPE"], forms["package entmax, NAPE"], **near)
    theirs = tool.hugging_faces(40, 16, "cpu")(q, k, v).transpose(1, 2)
    torch.testing.assert_close(tool.ours(window=16)(q, k, v), theirs, **near)


@pytest.mark.parametrize("arguments", [("--window", "0"), ("--groups", "3"), ("--dtype", "fp8")])
def test_bad_input_names_its_flag(tool, arguments):
    with pytest.raises(BadInput, match=arguments[0]):
        tool.check(tool.build_parser().parse_args(arguments))


def test_bad_input_is_one_line():
    done = run("--device", "tpu")
    assert done.returncode == 2
    assert done.stderr == "error: --device: found tpu; allowed: cpu, cuda\n"
