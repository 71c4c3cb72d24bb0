"""Real data on several layouts: rows, validation, loading processes."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from launcher import Run, rows, train

from megatron_lengen.data.indexed import DatasetWriter

PP = "--pipeline-model-parallel-size 2"
LAYOUTS = {
    "loaders": (1, "--num-workers 2"),
    "pp": (2, f"{PP} --num-workers 1"),
    "vpp": (2, f"{PP} --num-virtual-stages-per-pipeline-rank 2"),
    "dp": (2, "--num-workers 1"),
    "tp": (2, "--tensor-model-parallel-size 2"),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Runs with four validations each."""
    folder = tmp_path_factory.mktemp("data")
    generator = np.random.default_rng(0)
    for name in ("a", "b"):
        with DatasetWriter(folder / name, np.uint16) as writer:
            lengths = generator.integers(5, 60, 50)
            tokens = generator.integers(0, 100, lengths.sum()).astype(np.uint16)
            writer.add_documents(tokens, lengths)
    flags = "--train-iters 11 --eval-interval 3 --eval-iters 2 --split 80,20"
    flags += f" --data-path 0.7 {folder}/a 0.3 {folder}/b --data-cache-path {folder}/cache"
    train(folder, 1, [Run("single", flags), Run("loaders", f"{flags} {LAYOUTS['loaders'][1]}")])
    two = [Run(name, f"{flags} {more}") for name, (n, more) in LAYOUTS.items() if n == 2]
    train(folder, 2, two)
    return folder


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("validation", [False, True], ids=["training", "validation"])
def test_same_rows_everywhere(folder, layout, validation):
    expected, found = (rows(folder / f"{n}.jsonl", validation) for n in ("single", layout))
    iterations = [3, 6, 9, 11] if validation else list(range(1, 12))
    assert [row["iteration"] for row in expected] == iterations
    assert [row["iteration"] for row in found] == iterations
    losses = [torch.tensor([row["lm_loss"] for row in each]) for each in (found, expected)]
    tolerance = 0 if layout == "loaders" else 1e-5
    torch.testing.assert_close(*losses, rtol=tolerance, atol=0)


def test_every_validation_sees_the_same_rows(folder):
    """The loss falls or rises with the weights, but little: the rows do not change."""
    losses = [row["lm_loss"] for row in rows(folder / "single.jsonl", validation=True)]
    assert len(set(losses)) == 4
    assert max(losses) - min(losses) < 0.5
