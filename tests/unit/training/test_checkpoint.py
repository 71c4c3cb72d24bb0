"""Saving and loading in one process; layouts and kills are tests/parallel/test_resume.py."""

from __future__ import annotations

import json
import logging
import shutil
from dataclasses import replace

import pytest
import torch
from runs import settings_of, trainer_of

from megatron_lengen.errors import BadInput
from megatron_lengen.training import checkpoint
from megatron_lengen.training.checkpoint import Progress


@pytest.fixture(scope="module")
def saved(process_groups, tmp_path_factory):
    """A checkpoint after two iterations, and the trainer that wrote it."""
    root = tmp_path_factory.mktemp("saved") / "ck"
    trainer = trainer_of(f"--save {root}")
    data = trainer._train_data()
    for first in (0, 4):
        trainer.engine.train(data, first)
    trainer.progress = Progress(2, 8, skipped=1)
    trainer.saver.save(trainer.progress)
    return root, trainer


def weights(trainer) -> list[torch.Tensor]:
    return [p.detach() for chunk in trainer.engine.chunks for p in chunk.parameters()]


def moments(trainer) -> list[torch.Tensor]:
    (inner,) = trainer.engine.optimizer.chained_optimizers
    return [
        state[key]
        for state in inner.optimizer.state.values()
        for key in ("exp_avg", "exp_avg_sq", "step")
    ]


def equal(one: list[torch.Tensor], other: list[torch.Tensor]) -> bool:
    return len(one) == len(other) and all(map(torch.equal, one, other))


def test_everything_comes_back(saved):
    root, trainer = saved
    again = trainer_of(f"--load {root}")
    assert again.progress == Progress(2, 8, skipped=1)
    assert equal(weights(again), weights(trainer)) and equal(moments(again), moments(trainer))
    assert again.engine.scheduler.num_steps == trainer.engine.scheduler.num_steps == 8
    fresh = trainer_of()
    assert not equal(weights(fresh), weights(trainer))


def test_weights_only(saved):
    root, trainer = saved
    start = trainer_of(f"--load {root} --finetune")
    assert start.progress == Progress(0, 0) and start.engine.scheduler.num_steps == 0
    assert equal(weights(start), weights(trainer)) and moments(start) == []
    position = trainer_of(f"--load {root} --no-load-optim")
    assert (
        position.progress == Progress(2, 8, skipped=1) and position.engine.scheduler.num_steps == 8
    )
    assert equal(weights(position), weights(trainer)) and moments(position) == []


def test_what_a_model_was_converted_from_stays_known(saved, tmp_path):
    """Exports take the family and the token ids from it, after any number of runs."""
    folder = shutil.copytree(saved[0], tmp_path / "ck")
    path = folder / "iter_0000002" / "lengen.json"
    source = {"name": "org/model", "family": "llama", "token_ids": {"eos_token_id": [7, 8]}}
    path.write_text(json.dumps({**json.loads(path.read_text()), "source": source}))
    for flags in (f"--load {folder} --finetune", f"--load {tmp_path / 'next'}"):
        trainer = trainer_of(f"{flags} --save {tmp_path / 'next'}")
        trainer.saver.save(replace(trainer.progress, iteration=trainer.progress.iteration + 1))
    written = tmp_path / "next" / "iter_0000002" / "lengen.json"
    assert json.loads(written.read_text())["source"] == source


def test_a_checkpoint_without_the_optimizer(saved, tmp_path):
    root, trainer = saved
    lean = trainer_of(f"--load {root} --save {tmp_path / 'lean'} --no-save-optim")
    lean.saver.save(lean.progress)
    back = trainer_of(f"--load {tmp_path / 'lean'}")
    assert back.progress == Progress(2, 8, skipped=1) and moments(back) == []
    assert equal(weights(back), weights(trainer))
    # A later resume of that run saves the optimizer again and is a full checkpoint.
    full = trainer_of(f"--load {tmp_path / 'lean'} --save {tmp_path / 'full'}")
    data = full._train_data()
    full.engine.train(data, 8)
    full.progress = Progress(3, 12)
    full.saver.save(full.progress)
    assert equal(moments(trainer_of(f"--load {tmp_path / 'full'}")), moments(full))


@pytest.mark.parametrize("flags", ["", "--use-distributed-optimizer", "--bf16"])
def test_a_checkpoint_before_the_first_update_is_gone_on_from(process_groups, tmp_path, flags):
    """All steps so far were skipped, say."""
    first = trainer_of(f"--save {tmp_path} {flags}")
    first.saver.save(Progress(1, 4, skipped=1))
    again = trainer_of(f"--load {tmp_path} {flags}")
    assert again.progress == Progress(1, 4, skipped=1) and equal(weights(again), weights(first))
    unbroken = trainer_of(flags)
    unbroken.progress = again.progress
    runs = [(trainer, trainer._train_data()) for trainer in (again, unbroken)]
    for sample in (4, 8):
        resumed, expected = (trainer.engine.train(data, sample) for trainer, data in runs)
        assert resumed.loss == expected.loss and not resumed.skipped


def test_masters_of_16_bit_weights_come_from_the_weights_without_optimizer(saved):
    root, _ = saved
    start = trainer_of(f"--load {root} --finetune --bf16")
    (inner,) = start.engine.optimizer.chained_optimizers
    for group in inner.float16_groups:
        for parameter in group:
            assert parameter.main_param.dtype == torch.float32
            assert torch.equal(parameter.main_param, parameter.float())


@pytest.mark.parametrize(
    "flags, says",
    [
        ("--use-distributed-optimizer", "--use-distributed-optimizer: not as when"),
        ("--bf16", "--bf16: not as when"),
        ("--no-decay-embeddings", "--no-decay-embeddings: not as when"),
        ("--lr 2e-3", r"--lr 0.002 \(checkpoint: 0.001\)"),
        ("--lr-warmup-iters 3", r"--lr-warmup-iters 3.0 \(checkpoint: 0.0\)"),
        ("--train-iters 24", r"--train-iters\) 24.0 \(checkpoint: 12.0\)"),
        ("--weight-decay 0.5", "--weight-decay 0.5"),
        ("--lr-decay-style WSD --lr-wsd-decay-iters 2", "--lr-decay-style WSD"),
    ],
)
def test_what_cannot_be_resumed_is_one_line(saved, flags, says):
    root, _ = saved
    with pytest.raises(BadInput, match=says) as caught:
        trainer_of(f"--load {root} {flags}")
    assert "\n" not in str(caught.value)


def test_shapes_are_the_checkpoints(saved):
    root, _ = saved
    for flag, value in (("--num-layers", 8), ("--hidden-size", 64), ("--num-query-groups", 4)):
        with pytest.raises(BadInput, match=f"{flag}: found {value}; allowed: the checkpoint's"):
            settings_of(f"--load {root} {flag} {value}")


def test_flags_win_over_the_checkpoint_with_one_line(saved, caplog):
    root, _ = saved
    with caplog.at_level(logging.WARNING):
        model = settings_of(f"--load {root} --sliding-window 4").model
    assert model.sliding_window == 4
    assert "--sliding-window 4 (checkpoint: 8)" in caplog.text
    without_shapes = "--tokenizer-type NullTokenizer --vocab-size 101 --seq-length 24 --mock-data"
    stored = settings_of(f"--load {root} --train-iters 12 --lr 1e-3", without_shapes).model
    assert (stored.num_layers, stored.sliding_window, stored.gated_linear_unit) == (4, 8, True)


@pytest.mark.parametrize(
    "flags, says",
    [
        ("", None),
        ("--seed 5", "--seed 5 (checkpoint: 1234)"),
        ("--split 90,10,0", "--split 90,10,0 (checkpoint: 99,1,0)"),
        ("--seq-length 16", "--seq-length 16 (checkpoint: 24)"),
        ("--train-iters 6 --lr-decay-iters 12", "--train-iters 6 (checkpoint: 12)"),
        (
            "--global-batch-size 8 --lr-decay-iters 6 --train-iters 7",
            "--global-batch-size 8 (checkpoint: 4)",
        ),
    ],
)
def test_another_order_of_the_data_is_said(saved, caplog, flags, says):
    """Report 31 of the field."""
    root, _ = saved
    with caplog.at_level(logging.WARNING):
        trainer = trainer_of(f"--load {root} {flags}")
    assert ("order of the data differs" in caplog.text) == (says is not None)
    assert says is None or says in caplog.text
    assert trainer.progress == Progress(2, 8, skipped=1)


def test_another_batch_size_has_data_for_all_its_iterations(saved):
    root, _ = saved
    flags = f"--load {root} --global-batch-size 2 --lr-decay-iters 24 --train-iters 12"
    trainer = trainer_of(flags)
    assert sum(1 for _ in trainer._train_data()) == 10 * 2  # iterations left x micro-batches


def test_damaged_contents_are_one_line(saved, tmp_path):
    import shutil

    root, _ = saved
    copy = shutil.copytree(root, tmp_path / "copy")
    for shard in (copy / "iter_0000002").glob("*.distcp"):
        shard.write_bytes(b"\0" * shard.stat().st_size)
    with pytest.raises(BadInput, match=r"--load: .*iter_0000002") as caught:
        trainer_of(f"--load {copy}")
    assert "\n" not in str(caught.value)


def test_nothing_to_load_is_a_start(process_groups, tmp_path):
    trainer = trainer_of(f"--load {tmp_path / 'ck'} --save {tmp_path / 'ck'}")
    assert trainer.progress == Progress()
    assert checkpoint.load(trainer.settings, trainer.engine.chunks, None, None) == Progress()
