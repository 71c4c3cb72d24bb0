"""One step: losses and gradients are sums over sums of tokens, whatever the split."""

from __future__ import annotations

import math

import pytest
import torch
from runs import trainer_of

SCORED = (1, 3, 10, 0)  # tokens of each row that count
LENGTH, VOCABULARY = 24, 101


def rows() -> dict[str, torch.Tensor]:
    """Four rows of unequal numbers of scored tokens, at scattered places."""
    generator = torch.Generator().manual_seed(3)
    text = torch.randint(0, VOCABULARY, (4, LENGTH + 1), generator=generator)
    mask = torch.zeros(4, LENGTH)
    for row, count in enumerate(SCORED):
        mask[row, torch.randperm(LENGTH, generator=generator)[:count]] = 1
    return {
        "tokens": text[:, :-1].contiguous(),
        "labels": text[:, 1:].contiguous(),
        "loss_mask": mask,
        "samples": torch.arange(4),
    }


def batches(rows: dict[str, torch.Tensor], size: int):
    """An iterator over micro-batches, as a loader gives them."""
    return iter(
        [{key: value[i : i + size] for key, value in rows.items()} for i in range(0, 4, size)]
    )


def gradients(trainer) -> dict[str, torch.Tensor]:
    (chunk,) = trainer.engine.chunks
    return {name: p.main_grad.clone() for name, p in chunk.named_parameters()}


def expected_of(trainer, rows: dict[str, torch.Tensor]) -> tuple[float, dict[str, torch.Tensor]]:
    """Loss and gradients by autograd, all rows at once, without the training code."""
    model = trainer.engine.chunks[0].module
    positions = torch.arange(LENGTH).expand(4, LENGTH)
    losses = model(rows["tokens"], positions, None, labels=rows["labels"])
    loss = (losses * rows["loss_mask"]).sum() / rows["loss_mask"].sum()
    weights = dict(model.named_parameters())
    found = torch.autograd.grad(loss, list(weights.values()), allow_unused=True)
    return loss.item(), dict(zip(weights, found, strict=True))


@pytest.mark.parametrize("size", [1, 2, 4])
def test_the_split_into_micro_batches_does_not_matter(process_groups, size):
    """Report 45 of the field: 14 tokens count alike, not 4 rows or the micro-batches."""
    trainer = trainer_of(f"--micro-batch-size {size} --clip-grad 0 --lr-decay-style constant")
    loss, expected = expected_of(trainer, rows())
    # Autograd above went through the accumulation hooks.
    trainer.engine.chunks[0].zero_grad_buffer()
    result = trainer.engine.train(batches(rows(), size), 0)
    assert result.tokens == sum(SCORED)
    assert not result.skipped
    assert result.loss == pytest.approx(loss, rel=1e-6)
    squares = 0.0
    for name, found in gradients(trainer).items():
        reference = expected[name.removeprefix("module.")]
        torch.testing.assert_close(found, reference, rtol=1e-5, atol=3e-7)
        squares += reference.double().pow(2).sum().item()
    assert result.grad_norm == pytest.approx(math.sqrt(squares), rel=1e-5)


@pytest.mark.parametrize("decoder", ["transformer", "mamba2"])
def test_losses_without_logits_train_like_those_from_logits(process_groups, decoder):
    """Losses and gradient norms of several steps, on rows of which few tokens count."""
    found = []
    for how in ("linear", "none"):
        flags = f"--micro-batch-size 2 --lr 1e-2 --cross-entropy-fusion-impl {how}"
        trainer = trainer_of(flags, decoder)
        steps = [trainer.engine.train(batches(rows(), 2), 0) for _ in range(6)]
        scores = [trainer.engine.evaluate(batches(rows(), 2), 1)]
        found.append([*(s.loss for s in steps), *(s.grad_norm for s in steps), *scores])
    assert found[0] == pytest.approx(found[1], rel=1e-5)
    assert found[0][0] > 1.1 * found[0][5]


def test_the_mean_of_means_is_something_else(process_groups):
    """The numbers above can tell the right average from the usual wrong one."""
    trainer = trainer_of("--micro-batch-size 1")
    loss, _ = expected_of(trainer, rows())
    model, batch = trainer.engine.chunks[0].module, rows()
    positions = torch.arange(LENGTH).expand(4, LENGTH)
    losses = model(batch["tokens"], positions, None, labels=batch["labels"])
    means = [
        (losses[i] * batch["loss_mask"][i]).sum() / batch["loss_mask"][i].sum() for i in range(3)
    ]
    assert abs(torch.stack(means).mean().item() - loss) > 1e-3


def test_nothing_scored_is_no_nan(process_groups):
    trainer = trainer_of("--micro-batch-size 2 --weight-decay 0 --lr-decay-style constant")
    batch = rows()
    batch["loss_mask"].zero_()
    before = [p.detach().clone() for p in trainer.engine.chunks[0].parameters()]
    result = trainer.engine.train(batches(batch, 2), 0)
    assert (result.loss, result.tokens, result.grad_norm) == (0.0, 0, 0.0)
    for old, new in zip(before, trainer.engine.chunks[0].parameters(), strict=True):
        assert torch.equal(old, new)


def test_a_loss_that_is_not_finite_skips_the_update(process_groups):
    trainer = trainer_of("--micro-batch-size 2 --lr-warmup-iters 4")
    weights = list(trainer.engine.chunks[0].parameters())
    with torch.no_grad():
        weights[-1].view(-1)[0] = float("inf")
    before = [p.detach().clone() for p in weights]
    result = trainer.engine.train(batches(rows(), 2), 0)
    assert result.skipped and not math.isfinite(result.loss) and math.isnan(result.grad_norm)
    for old, new in zip(before, weights, strict=True):
        assert torch.equal(old, new)
    # The schedule is counted in iterations all the same: the next rate is that of iteration 2.
    assert trainer.engine.optimizer.param_groups[0]["lr"] == pytest.approx(1e-3 / 4)


def test_gradients_that_are_not_finite_skip_the_update(process_groups):
    trainer = trainer_of("--micro-batch-size 2")
    weights = list(trainer.engine.chunks[0].parameters())
    before = [p.detach().clone() for p in weights]
    weights[0].register_hook(lambda gradient: gradient * float("inf"))
    result = trainer.engine.train(batches(rows(), 2), 0)
    assert result.skipped and math.isfinite(result.loss) and not math.isfinite(result.grad_norm)
    for old, new in zip(before, weights, strict=True):
        assert torch.equal(old, new)


def test_evaluation_weighs_tokens_and_draws_no_mask(process_groups):
    dropped = trainer_of("--micro-batch-size 2 --dropout-variant vpad --dropout-rate 0.5")
    plain = trainer_of("--micro-batch-size 2")
    loss, _ = expected_of(plain, rows())
    assert dropped.engine.evaluate(batches(rows(), 2), 1) == pytest.approx(loss, rel=1e-6)
    assert all(chunk.training for chunk in dropped.engine.chunks)


def test_masks_follow_the_sample_numbers(process_groups):
    """Rows 0-3 and rows 4-7 have other masks; the same rows have the same, step after step."""
    flags = "--dropout-variant vpad --dropout-rate 0.5 --lr 1e-30 --lr-decay-style constant"
    found = []
    for first in (0, 4, 0):
        trainer = trainer_of(f"--micro-batch-size 2 {flags}")
        loss = trainer.engine.train(batches(rows(), 2), first).loss
        found.append(loss)
    assert found[0] == found[2] != found[1]
