"""Skipped steps are counted and named; a rerun is the same computation, bit for bit."""

from __future__ import annotations

import math

import pytest
import torch
from runs import settings_of, trainer_of

from megatron_lengen.training.guards import SkipGuard, Stop, replayable
from megatron_lengen.training.step import StepResult

BATCH = 4
GOOD = StepResult(2.0, 96, 1.0, 1e-3, skipped=False)
BAD = StepResult(math.nan, 96, math.nan, 1e-3, skipped=True, not_finite_in=[(0, 1), (1, 0)])


def said_after(flags: str, results: list[StepResult]) -> tuple[int, str]:
    """The iteration at which a guard stops, and why; 0 where it never does."""
    guard = SkipGuard(settings_of(flags))
    for iteration, result in enumerate(results, 1):
        try:
            guard.note(iteration, iteration * BATCH - 1, result)
        except Stop as stop:
            assert stop.code == 1 and not stop.save
            return iteration, str(stop)
    return 0, ""


def test_steps_in_a_row_are_counted_and_named(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    results = [GOOD, BAD, BAD, GOOD, BAD, BAD, BAD, BAD]
    iteration, said = said_after("--max-skipped-steps 3", results)
    assert iteration == 7
    # Iterations 5 to 7 are the samples 16 to 27; of the last, rank 0's second micro-batch is its
    # third row and rank 1's first its second one.
    assert "iterations 5 to 7, samples 16 to 27" in said
    assert "the loss was nan" in said
    assert "26 to 26 (data-parallel rank 0), 25 to 25 (data-parallel rank 1)" in said
    assert "\n" not in said


def test_a_gradient_alone_is_named():
    bad = StepResult(2.0, 96, math.inf, 1e-3, skipped=True)
    _, said = said_after("--max-skipped-steps 1", [bad])
    assert "the loss was 2 and the gradient's norm inf" in said
    assert "iterations 1 to 1, samples 0 to 3" in said


@pytest.mark.parametrize("flags, bad, stops", [("", 9, 0), ("", 10, 10)])
def test_ten_in_a_row_end_a_run_by_default(flags, bad, stops):
    assert said_after(flags, [BAD] * bad)[0] == stops


def test_0_never_ends_a_run():
    assert said_after("--max-skipped-steps 0", [BAD] * 100)[0] == 0


# ---- what a skipped step leaves alone ------------------------------------------------------------


def adam_state(trainer) -> dict[tuple[int, str], torch.Tensor]:
    found = {}
    for index, state in enumerate(trainer.engine.optimizer.optimizer.state.values()):
        found |= {(index, key): torch.as_tensor(value).clone() for key, value in state.items()}
    return found


def test_a_skipped_step_changes_no_moment_and_no_counter(process_groups):
    trainer = trainer_of("--micro-batch-size 2")
    data = trainer._train_data()
    trainer.engine.train(data, 0)
    before = adam_state(trainer)
    assert before
    chunk = trainer.engine.chunks[0].module
    hook = chunk.register_forward_hook(lambda module, inputs, output: output * math.nan)
    assert trainer.engine.train(data, 4).skipped
    after = adam_state(trainer)
    assert before.keys() == after.keys()
    for key, value in before.items():
        assert torch.equal(value, after[key]), key
    hook.remove()
    assert not trainer.engine.train(data, 8).skipped
    counters = [value for (_, key), value in adam_state(trainer).items() if key == "step"]
    assert counters and all(int(counter) == 2 for counter in counters)


# ---- reruns --------------------------------------------------------------------------------------

VPAD = "--micro-batch-size 1 --dropout-variant vpad --dropout-rate 0.3 --clip-grad 0"


class Spoiled:
    """A model whose loss of one micro-batch is nan the first time; notes every loss."""

    def __init__(self, trainer, at: int) -> None:
        self.losses: list[torch.Tensor] = []
        self._at = at
        trainer.engine.chunks[0].module.register_forward_hook(self._note)

    def _note(self, module, inputs, output):
        self.losses.append(output.detach().clone())
        return output * math.nan if len(self.losses) - 1 == self._at else None


def test_a_rerun_is_bitwise_the_same_computation(process_groups, tmp_path):
    flags = f"{VPAD} --rerun-mode validate_results --save {tmp_path}"
    trainer = trainer_of(flags)
    spoiled = Spoiled(trainer, at=5)  # the second micro-batch of the second step
    data = replayable(trainer._train_data(), "validate_results")
    trainer.engine.train(data, 0)
    with pytest.raises(Stop, match=r"iteration 2: .*transient") as caught:
        trainer.engine.train(data, 4)
    assert caught.value.code == 17 and caught.value.save
    first, again = spoiled.losses[4:8], spoiled.losses[8:12]
    assert len(again) == 4
    for one, other in zip(first, again, strict=True):
        assert torch.equal(one, other)
    # Its gradients are those of a run that met no trouble.
    untroubled = trainer_of(VPAD)
    data = untroubled._train_data()
    for sample in (0, 4):
        untroubled.engine.train(data, sample)
    for found, expected in zip(
        trainer.engine.chunks[0].parameters(), untroubled.engine.chunks[0].parameters(), strict=True
    ):
        assert torch.equal(found.main_grad, expected.main_grad)


def test_rerun_mode_needs_a_place_to_save_and_a_known_mode():
    for flags, said in (
        ("--rerun-mode validate_results", "--rerun-mode validate_results: needs --save"),
        ("--rerun-mode report_stats", "--rerun-mode: .*validate_results"),
        ("--max-skipped-steps -1", "--max-skipped-steps: found -1"),
    ):
        with pytest.raises(ValueError, match=said):
            settings_of(flags)
