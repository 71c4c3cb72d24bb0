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
        "--groups", "2", "--channels", "8", "--repeat", "1", "--kind-lengths", "64", "128",
        "--no-compile", "--json", str(file),
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    report = json.loads(file.read_text())
    kinds = [row for row in report["results"] if row["part"] == "kinds"]
    others = [row for row in report["results"] if row["part"] != "kinds"]
    assert len(done.stdout.splitlines()) == 2 + len(report["results"])
    softmax, entmax = {"ours", "PyTorch sdpa", "limit"}, {"ours", "package entmax", "limit"}
    # S x S is written up to --dense-length 96.
    expected = {
        ("causal", 64): softmax, ("causal", 128): softmax,
        ("window", 64): softmax, ("window", 128): {"ours", "limit"},
        ("documents", 64): softmax, ("documents", 128): {"ours", "limit"},
        ("slopes", 64): softmax, ("slopes", 128): {"ours", "limit"},
        ("entmax", 64): entmax, ("entmax", 128): {"ours", "limit"},
        ("entmax, slopes", 64): entmax, ("entmax, slopes", 128): {"ours", "limit"},
    }  # fmt: skip
    found: dict[tuple[str, int], set[str]] = {}
    for row in kinds:
        assert "failed" not in row, row
        found.setdefault((row["kind"], row["length"]), set()).add(row["form"])
    assert found == expected
    (one,) = (r for r in kinds if (r["kind"], r["form"], r["length"]) == ("causal", "ours", 128))
    # Seven products of 2 d operations for each of the pairs of four heads.
    assert one["tflops"] == pytest.approx(14 * 8 * 4 * 128 * 129 / 2 / one["seconds"] / 1e12)
    rows = {(row["part"], row["form"], row["length"]): row for row in others}
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


@pytest.fixture
def tool(monkeypatch):
    monkeypatch.syspath_prepend(SCRIPT.parent)  # what the benchmarks share
    spec = importlib.util.spec_from_file_location("attention_benchmark", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


NEAR = {"rtol": 1e-4, "atol": 1e-5}


def test_candidates_compute_the_same(tool):
    args = tool.build_parser().parse_args(["--entmax-length", "40", "--groups", "2"])
    tool.check(args)
    q, k, v = (x.detach() for x in tool.inputs(args, 40))
    forms = {name: form(q, k, v) for name, form in tool.entmax_forms(args).items()}
    torch.testing.assert_close(forms["ours"], forms["package entmax"], **NEAR)
    torch.testing.assert_close(forms["ours, NAPE"], forms["package entmax, NAPE"], **NEAR)
    theirs = tool.hugging_faces(40, 16, "cpu")(q, k, v)
    torch.testing.assert_close(tool.ours(window=16)(q, k, v), theirs, **NEAR)


def test_peers_of_every_kind_compute_the_same(tool):
    arguments = ["--groups", "2", "--window", "16", "--channels", "8"]
    args = tool.build_parser().parse_args(arguments)
    tool.check(args)
    q, k, v = (x.detach() for x in tool.inputs(args, 40))
    for kind in tool.KINDS:
        forms = tool.forms_of(kind, tool.sizes_of(args, 40)._replace(compiled=False))
        assert len(forms) == 2
        mine, theirs = (make()(q, k, v) for make in forms.values())
        torch.testing.assert_close(mine, theirs, **NEAR, msg=kind)


@pytest.mark.parametrize("kind", ["causal", "window", "documents"])
def test_visible_pairs_are_those_of_the_mask(tool, kind):
    args = tool.build_parser().parse_args(["--window", "7"])
    tool.check(args)
    weighting = tool.weighting_of(kind, tool.sizes_of(args, 45))
    place = torch.arange(45)
    pairs = int(weighting.visible(place, place).sum())
    assert tool.operations(weighting, tool.sizes_of(args, 45)) == 14 * 64 * 4 * pairs


@pytest.mark.parametrize(
    "arguments", [("--window", "0"), ("--groups", "3"), ("--kind-lengths", "0")]
)
def test_bad_input_names_its_flag(tool, arguments):
    with pytest.raises(BadInput, match=arguments[0]):
        tool.check(tool.build_parser().parse_args(arguments))


def test_bad_input_is_one_line():
    done = run("--device", "tpu")
    assert done.returncode == 2
    assert done.stderr == "error: --device: found tpu; allowed: cpu, cuda\n"
