"""docs/attention.md says which backend serves what; so does the code."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

from megatron_lengen.ops.attention_choice import ORDER, Request, lacks
from megatron_lengen.training.flags import all_flags

TEXT = (Path(__file__).parents[3] / "docs" / "attention.md").read_text()
PACKAGES = frozenset({"triton", "adasplash", "flash_attn"})
PLAIN = Request(frozenset(), 1.0, "cuda", torch.bfloat16, 4096, 4096, 64, te=True)
ASKED = {
    "softmax": {},
    "entmax, alpha 1.5": {"alpha": 1.5},
    "entmax, other alpha": {"alpha": 1.3},
    "windows": {"features": frozenset({"window"})},
    "ALiBi's slopes": {"features": frozenset({"slopes"})},
    "documents": {"features": frozenset({"documents"})},
    "other scales": {"features": frozenset({"scale"})},
    "dropout of weights": {"features": frozenset({"dropout"})},
    "part of a row (queries of a context-parallel rank)": {"queries": 1024},
    "grouped heads": {},
    "rows of any length": {"queries": 1001, "keys": 1001},
    "heads of 8 channels": {"channels": 8},
    "heads of 80 channels": {"channels": 80},
    "fp32": {"dtype": torch.float32},
    "bf16": {},
}


def matrix() -> dict[str, dict[str, bool]]:
    """Feature -> backend -> whether the table says yes."""
    lines = TEXT[TEXT.index("| feature | te |") :].split("\n\n")[0].splitlines()
    names, _, *rows = ([cell.strip() for cell in line.strip("|").split("|")] for line in lines)
    return {
        feature: dict(zip(names[1:], (cell.startswith("yes") for cell in cells), strict=True))
        for feature, *cells in rows
    }


def serves(backend: str, asked: dict) -> bool:
    """Whether a backend computes a request; entmax where it knows no softmax."""
    request = PLAIN._replace(**asked)
    if "alpha" not in asked and backend in ("adasplash", "triton"):
        request = request._replace(alpha=1.5)
    order = ORDER["softmax" if request.alpha == 1 else "entmax"]
    return backend in order and lacks(backend, request, PACKAGES) is None


@pytest.mark.parametrize("feature", ASKED)
def test_the_matrix_is_what_the_code_does(feature):
    asked = ASKED[feature]
    for backend, said in matrix()[feature].items():
        if feature == "softmax" and backend in ("adasplash", "triton"):
            assert not said
        else:
            assert said == serves(backend, asked), backend


def test_every_row_is_checked():
    assert set(matrix()) == set(ASKED)


def test_flags_exist():
    known = {flag.name for flag in all_flags()}
    assert set(re.findall(r"`(--[a-z][\w-]+)", TEXT)) <= known


def test_files_exist():
    root = Path(__file__).parents[3]
    for name in re.findall(r"`((?:tests|megatron_lengen|ops|layers)/[\w/]+(?:\.py)?)`", TEXT):
        assert (root / name).exists() or (root / "megatron_lengen" / name).exists(), name
