"""--copy-task and --eval-generation: what they bring, what they refuse, what they leave alone."""

from __future__ import annotations

import json

import pytest
import torch
from runs import settings_of, trainer_of

from megatron_lengen.errors import BadInput
from megatron_lengen.evaluation.copy_task import SCORES
from megatron_lengen.training.generation import GenerationEvaluation

COPY = """
    --num-workers 0 --train-iters 6 --lr 1e-2 --global-batch-size 4 --copy-task 3-7
    --num-layers 2 --hidden-size 32 --make-vocab-size-divisible-by 16 --eval-iters 0
"""
OF_DECODER = {
    "mamba2": "--mamba-head-dim 8 --mamba-state-dim 12",
    "transformer": "--num-attention-heads 4 --swiglu --disable-bias-linear --init-method-std 0.1",
}
DROPOUT = "--dropout-variant vpad --dropout-rate 0.3"


def copy_settings(flags: str = "", decoder: str = "mamba2"):
    return settings_of(flags, base=f"{COPY} {OF_DECODER[decoder]}", decoder=decoder)


@pytest.mark.parametrize("decoder", OF_DECODER)
def test_the_task_brings_its_tokenizer_and_length(decoder):
    settings = copy_settings(decoder=decoder)
    assert settings.tokenizer.kind == "copy" and settings.model.vocab_size == 30
    assert settings.model.seq_length == settings.model.max_position_embeddings == 2 * 7 + 2
    assert copy_settings("--seq-length 40", decoder).model.seq_length == 40
    assert copy_settings("--tokenizer-type copy", decoder).tokenizer.kind == "copy"


REFUSED = {
    "--copy-task 9-3": "--copy-task: found 9-3",
    "--copy-task long": "--copy-task: found long",
    "--seq-length 15": "--seq-length: found 15; allowed: 16 or more",
    "--mock-data": "--mock-data and --copy-task",
    "--data-path x": "--data-path and --copy-task",
    "--tokenizer-type NullTokenizer": "--tokenizer-type: found NullTokenizer",
    "--tokenizer-model byte": "--tokenizer-model: found byte",
    "--vocab-size 29": "--vocab-size: found 29",
    "--eval-generation 0,3": "--eval-generation: found",
    "--eval-generation five": "--eval-generation",
    "--eval-generation 5 --eval-generation-samples 0": "--eval-generation-samples: found 0",
}


@pytest.mark.parametrize("flags", REFUSED)
def test_what_cannot_work_is_refused(flags):
    with pytest.raises(BadInput, match=REFUSED[flags]):
        copy_settings(flags)


def test_layouts_that_cannot_generate_are_refused(monkeypatch):
    asked = "--eval-generation 5 --eval-generation-samples 6"
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(BadInput, match=r"--pipeline-model-parallel-size: found 2; allowed: 1"):
        copy_settings(f"{asked} --pipeline-model-parallel-size 2")
    with pytest.raises(BadInput, match=r"--context-parallel-size: found 2; allowed: 1"):
        copy_settings(f"{asked} --context-parallel-size 2", "transformer")
    copy_settings(f"{asked} --tensor-model-parallel-size 2 --sequence-parallel")
    assert copy_settings(asked).data_parallel_size == 2
    with pytest.raises(BadInput, match=r"--eval-generation-samples: found 7; .*2 data-parallel"):
        copy_settings("--eval-generation 5 --eval-generation-samples 7")


def test_generation_needs_the_task():
    with pytest.raises(BadInput, match="--eval-generation: needs --copy-task"):
        settings_of("--eval-generation 5")


def run(tmp_path, name: str, flags: str, decoder: str) -> tuple[list[dict], list[dict]]:
    """Training rows and validation rows of a run."""
    file = tmp_path / f"{name}.jsonl"
    flags = f"{COPY} {OF_DECODER[decoder]} {DROPOUT} --metrics-jsonl {file} {flags}"
    trainer_of(flags, decoder=decoder, base="").run()
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    return (
        [row for row in rows if "validation" not in row],
        [row for row in rows if row.get("validation")],
    )


@pytest.mark.usefixtures("process_groups")
@pytest.mark.parametrize("decoder", OF_DECODER)
def test_training_does_not_notice(tmp_path, decoder):
    """Bitwise the same losses and gradients, with dropout, although answers come in between."""
    asked = "--eval-interval 2 --eval-generation 9,4 --eval-generation-samples 8"
    plain, nothing = run(tmp_path, "plain", "", decoder)
    watched, found = run(tmp_path, "watched", asked, decoder)
    for key in ("lm_loss", "grad_norm"):
        assert [row[key] for row in plain] == [row[key] for row in watched]
    assert len(plain) == 6 and nothing == []
    assert [row["iteration"] for row in found] == [2, 4, 6]
    names = {f"copy_{score}_{length}" for score in SCORES for length in (4, 9)}
    for row in found:
        assert set(row) == {"iteration", "consumed_samples", "validation"} | names
        assert all(0 <= row[name] <= 100 for name in names)
    both, found = run(tmp_path, "both", f"{asked} --eval-iters 1", decoder)
    assert [row["lm_loss"] for row in both] == [row["lm_loss"] for row in plain]
    assert all("lm_loss" in row and names <= set(row) for row in found)


class Counted:
    """A task that notes how it is asked, and in which mode the model is."""

    def __init__(self, chunk):
        self.chunk, self.asked = chunk, []

    def count_right(self, model, length, numbers):
        assert not any(module.training for module in self.chunk.modules())
        assert not torch.is_grad_enabled() or not model.model(torch.ones(1, 2).long()).requires_grad
        self.asked.append((length, list(numbers)))
        return {"right": len(numbers) / 4}


@pytest.mark.usefixtures("process_groups")
def test_any_task_can_be_asked():
    trainer = trainer_of(
        f"{COPY} {OF_DECODER['mamba2']} --eval-generation 6,3,6 --eval-generation-samples 4",
        decoder="mamba2",
        base="",
    )
    (chunk,) = trainer.engine.chunks
    task = Counted(chunk)
    found = GenerationEvaluation(trainer.settings, "other", task, chunk).scores()
    assert found == {"other_right_3": 25.0, "other_right_6": 25.0}
    assert task.asked == [(3, [0, 1, 2, 3]), (6, [0, 1, 2, 3])]
    assert all(module.training for module in chunk.modules())
