"""Answers generated during training: the same scores on every layout that can generate."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from launcher import Run, curve, rows, train

COPY = (
    "--copy-task 1-3 --tokenizer-type copy --train-iters 24 --eval-interval 12"
    " --eval-generation 2,5 --eval-generation-samples 24 --dropout-variant vpad --dropout-rate 0.1"
)
TP = "--tensor-model-parallel-size 2"
LAYOUTS = {  # name -> (processes, flags)
    "single": (1, ""),
    "dp": (2, "--use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather"),
    "tp": (2, TP),
    "sp": (2, f"{TP} --sequence-parallel"),
}
DECODERS = ("mamba2", "transformer")


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """Metrics of every run."""
    folder = tmp_path_factory.mktemp("generation")
    for processes in (1, 2):
        runs = [
            Run(f"{layout}-{decoder}", f"{COPY} {flags}", decoder=decoder)
            for layout, (needed, flags) in LAYOUTS.items()
            for decoder in DECODERS
            if needed == processes
        ]
        train(folder, processes, runs)
    return folder


@pytest.mark.parametrize("decoder", DECODERS)
def test_scores_are_those_of_one_process(folder, decoder):
    expected = rows(folder / f"single-{decoder}.jsonl", validation=True)
    assert [row["iteration"] for row in expected] == [12, 24]
    # Neither all wrong nor all right, and not twice the same: equal scores say something.
    scores = [row["copy_forced_character_accuracy_2"] for row in expected]
    assert 0 < scores[-1] < 100 and scores[0] != scores[1]
    for layout in LAYOUTS:
        found = rows(folder / f"{layout}-{decoder}.jsonl", validation=True)
        assert found == [pytest.approx(row, rel=1e-9) for row in expected], layout


@pytest.mark.parametrize("decoder", DECODERS)
@pytest.mark.parametrize("layout", [name for name in LAYOUTS if name != "single"])
def test_training_goes_on_as_on_one_process(folder, layout, decoder):
    """What an evaluation switches off is on again: sequence parallelism, dropout, gradients."""
    single, other = (curve(folder / f"{name}-{decoder}.jsonl") for name in ("single", layout))
    assert len(single) == 24
    torch.testing.assert_close(other, single, rtol=1e-5, atol=0)
