"""The mean of a run's checkpoints is the same on every layout, and over a resume on another."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from launcher import Run, train

from megatron_lengen import checkpoint_folder
from megatron_lengen.convert.reader import open_checkpoint

FLAGS = "--train-iters 6 --save-interval 2 --average-last 2 --keep-last 2"
DROPOUT = "--dropout-variant vpad --dropout-rate 0.2"
LAYOUTS = {
    "sp-do": "--tensor-model-parallel-size 2 --sequence-parallel --use-distributed-optimizer",
    "pp": "--pipeline-model-parallel-size 2",
    "dp": "--async-save",
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """Checkpoints of every run; `moved` begins in one process and ends in two."""
    folder = tmp_path_factory.mktemp("averaging")

    def run(name: str, flags: str, where: str | None = None) -> Run:
        return Run(name, f"{FLAGS} {DROPOUT} {flags} --save FOLDER/{where or name}")

    train(folder, 1, [run("one", ""), run("half", "--exit-interval 4", "moved")])
    again = run("rest", f"{LAYOUTS['sp-do'].split(' --use')[0]} --load FOLDER/moved", "moved")
    train(folder, 2, [*(run(name, flags) for name, flags in LAYOUTS.items()), again])
    return folder


def weights(root: Path, iteration: int) -> dict[str, torch.Tensor]:
    """Full tensors; the embedding without rows of padding, whose number depends on the layout."""
    stored = open_checkpoint(root, iteration)
    size = stored.info["model"]["vocab_size"]
    tensors = {key: stored.read(key) for key in stored.model_keys}
    return {key: t[:size] if "word_embeddings" in key else t for key, t in tensors.items()}


@pytest.mark.parametrize("name", ["one", *LAYOUTS, "moved"])
def test_the_mean_of_checkpoints(folder, name):
    root = folder / name
    assert checkpoint_folder.iterations(root / "averaged") == [4, 6]
    found, models = weights(root / "averaged", 6), [weights(root, n) for n in (4, 6)]
    for key, tensor in found.items():
        expected = torch.stack([model[key].double() for model in models]).mean(0).float()
        assert torch.equal(tensor, expected), key
    # Steps between the two moved every weight's mean away from both.
    key = "decoder.final_layernorm.weight"
    assert not torch.equal(found[key], models[0][key])
    reference = weights(folder / "one" / "averaged", 6)
    assert set(found) == set(reference)
    for key, tensor in found.items():
        torch.testing.assert_close(tensor, reference[key], rtol=1e-4, atol=1e-5)
