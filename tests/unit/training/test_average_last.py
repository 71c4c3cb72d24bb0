"""The mean of a run's newest checkpoints: against float64, and what stays on the disk."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from runs import settings_of, trainer_of

from megatron_lengen import checkpoint_folder
from megatron_lengen.convert.averaging import average
from megatron_lengen.convert.reader import open_checkpoint
from megatron_lengen.convert.to_hf import checkpoint_to_hf
from megatron_lengen.errors import BadInput
from megatron_lengen.training import checkpoint
from megatron_lengen.training.checkpoint import Progress

FLAGS = "--save-interval 1 --average-last 3"


@pytest.fixture
def root(process_groups, tmp_path) -> Path:
    return tmp_path / "ck"


def train(root: Path, flags: str, first: int, last: int) -> None:
    """Iterations first to last, each saved."""
    trainer = trainer_of(f"--save {root} {flags}")
    data = trainer._train_data()
    for iteration in range(first, last + 1):
        trainer.engine.train(data, 4 * iteration)
        trainer.saver.save(Progress(iteration, 4 * iteration))
    trainer.saver.finish()


def weights(folder: Path, iteration: int | None = None) -> dict[str, torch.Tensor]:
    stored = open_checkpoint(folder, iteration)
    return {key: stored.read(key) for key in stored.model_keys}


def assert_mean_of(root: Path, iteration: int, window: list[int]) -> None:
    found = weights(root / "averaged", iteration)
    models = [weights(root, number) for number in window]
    assert set(found) == set(models[0]) and found
    for key, tensor in found.items():
        expected = torch.stack([model[key].double() for model in models]).mean(0)
        assert tensor.dtype == models[0][key].dtype
        torch.testing.assert_close(tensor, expected.to(tensor.dtype), rtol=2**-23, atol=0)
    folder = checkpoint_folder.iteration_folder(root / "averaged", iteration)
    described = json.loads((folder / "lengen.json").read_text())
    assert [Path(e["name"]).name for e in described["averaged"]] == [
        f"iter_{number:07d}" for number in window
    ]


def numbers(root: Path) -> list[int]:
    return checkpoint_folder.iterations(root)


def test_each_checkpoint_brings_the_mean_of_the_newest(root, capsys):
    train(root, FLAGS, 1, 4)
    for iteration, window in {1: [1], 2: [1, 2], 3: [1, 2, 3], 4: [2, 3, 4]}.items():
        assert_mean_of(root, iteration, window)
    # What the tool makes of the same checkpoints.
    average([str(root)], root.parent / "tool", last=3, report=lambda line: None)
    tool = weights(root.parent / "tool")
    assert all(torch.equal(tensor, tool[key]) for key, tensor in weights(root / "averaged").items())
    assert f"averaged {root / 'averaged' / 'iter_0000004'}\n" in capsys.readouterr().out
    assert not torch.equal(*(weights(root, n)["decoder.final_layernorm.weight"] for n in (3, 4)))


def test_with_an_interval_and_at_the_end(root):
    """Of 12 iterations every fourth counts, and the last."""
    flags = "--train-iters 11 --save-interval 2 --average-last 2 --average-interval 4"
    train(root, f"{flags} --async-save --bf16", 1, 11)
    assert numbers(root / "averaged") == [4, 8, 11]
    assert_mean_of(root, 8, [4, 8])
    assert_mean_of(root, 11, [8, 11])


def test_what_is_needed_stays(root):
    train(root, f"{FLAGS} --keep-last 1", 1, 5)
    assert numbers(root) == [3, 4, 5] and numbers(root / "averaged") == [5]
    assert_mean_of(root, 5, [3, 4, 5])


def test_what_an_abandoned_branch_left_is_not_averaged(root):
    train(root, FLAGS, 1, 4)
    train(root, FLAGS, 2, 3)
    assert_mean_of(root, 3, [1, 2, 3])


def test_a_mean_starts_a_run_and_converts(root, tmp_path):
    train(root, FLAGS, 1, 3)
    # Weights only: the run starts at iteration 0, as from a converted model.
    trainer = trainer_of(f"--load {root / 'averaged'}")
    assert trainer.progress == Progress()
    expected = weights(root / "averaged")["decoder.final_layernorm.weight"]
    (chunk,) = trainer.engine.chunks
    (found,) = [p for n, p in chunk.named_parameters() if n.endswith("final_layernorm.weight")]
    assert torch.equal(found, expected)
    verified = checkpoint_to_hf(root / "averaged", tmp_path / "hf", report=lambda line: None)
    assert verified.worst < 1e-4
    assert "`ck/iter_0000001`, `ck/iter_0000002`" in (tmp_path / "hf" / "README.md").read_text()


def test_without_a_mean_the_run_goes_on(root, monkeypatch, caplog):
    train(root, FLAGS, 1, 2)
    shard = next((root / "iter_0000001").glob("*.distcp"))
    shard.write_bytes(shard.read_bytes()[:100])
    train(root, FLAGS, 3, 3)
    assert "--average-last: no mean at iteration 3: " in caplog.text and "cut short" in caplog.text
    assert numbers(root) == [1, 2, 3] and numbers(root / "averaged") == [1, 2]
    shutil.rmtree(root / "iter_0000001")

    def full(*args):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(checkpoint, "_describe", full)  # the last thing that is written
        trainer = trainer_of(f"--save {root} {FLAGS}")
        trainer.saver._averager.follow(Progress(3, 12))
    assert "no mean at iteration 3: No space left on device" in caplog.text
    assert not list((root / "averaged").glob(".*"))
    train(root, FLAGS, 4, 4)
    assert_mean_of(root, 4, [2, 3, 4])


@pytest.mark.parametrize(
    "flags, says",
    [
        ("--average-last 0 --save {}", "--average-last: found 0; allowed: 1 or more"),
        ("--average-last 2", "--average-last: needs --save"),
        ("--average-last 2 --save {}", "--average-last: needs --save-interval"),
        ("--average-interval 2 --save {}", "--average-interval: needs --average-last"),
        (
            "--average-last 2 --save-interval 4 --average-interval 6 --save {}",
            "--average-interval: found 6; allowed: multiples of --save-interval 4",
        ),
    ],
)
def test_flags_that_cannot_work(tmp_path, flags, says):
    with pytest.raises(BadInput) as caught:
        settings_of(flags.format(tmp_path))
    assert str(caught.value) == says
