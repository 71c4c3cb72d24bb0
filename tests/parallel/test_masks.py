"""Which ranks draw equal masks and which draw others (reports 1 to 4 and 45 of the field)."""

from __future__ import annotations

import pytest
import torch
from launcher import Run, dumps, work

RATE = 0.5
NORM = f"--train-iters 1 --lr-warmup-iters 0 --dropout-variant pre_linear --dropout-rate {RATE}"
PROJECTIONS = f"{NORM} --dropout-apply-to q,o,u,d"
TP = "--tensor-model-parallel-size 2"
SP = f"{TP} --sequence-parallel"
CP = "--context-parallel-size 2"
STEP = "--train-iters 1 --lr-warmup-iters 0 --clip-grad 0 --global-batch-size 4"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Masks of every layout, from ones; and steps on rows of unequal length."""
    folder = tmp_path_factory.mktemp("masks")
    both = (("norm", NORM), ("projections", PROJECTIONS))
    jobs = {
        1: [Run(f"{kind}-1", flags) for kind, flags in both]
        + [Run(f"step-1-{size}", f"{STEP} --micro-batch-size {size}") for size in (1, 2, 4)],
        2: [
            Run(f"{kind}-{name}", f"{flags} {layout}")
            for kind, flags in both
            for name, layout in (("tp", TP), ("sp", SP), ("cp", CP), ("dp", ""))
        ]
        + [Run(f"step-dp-{size}", f"{STEP} --micro-batch-size {size}") for size in (1, 2)]
        + [Run(f"step-cp-{size}", f"{STEP} --micro-batch-size {size} {CP}") for size in (1, 4)],
        4: [Run("norm-dp-tp", f"{NORM} {TP}"), Run("norm-cp-sp", f"{NORM} {CP} {SP}")],
    }
    for processes, runs in jobs.items():
        work("mask_worker.py", folder, processes, runs)
    return folder


def agreement(one: torch.Tensor, other: torch.Tensor) -> float:
    """Share of equal elements: 1 for one mask, about a half for independent ones at p = 0.5."""
    return (one == other).double().mean().item()


def independent(one: torch.Tensor, other: torch.Tensor) -> bool:
    deviation = 0.5 / one.numel() ** 0.5
    return abs(agreement(one, other) - 0.5) < 5 * deviation


def test_rates_and_independence_in_one_process(folder):
    """Layers, places and micro-batches differ; the rate is kept."""
    (masks,) = dumps(folder, "norm-1", 1)
    names = sorted(masks)
    assert len(names) == 2 * 4 * 2
    for index, name in enumerate(names):
        deviation = 0.5 / masks[name].numel() ** 0.5
        assert abs(masks[name].double().mean().item() - (1 - RATE)) < 5 * deviation, name
        for other in names[index + 1 :]:
            assert independent(masks[name], masks[other]), (name, other)


def test_tensor_parallel_ranks_draw_the_same(folder):
    (single,) = dumps(folder, "norm-1", 1)
    one, other = dumps(folder, "norm-tp", 2)
    for name, mask in single.items():
        assert torch.equal(one[name], other[name]) and torch.equal(one[name], mask), name


def test_under_sequence_parallelism_each_rank_draws_its_part(folder):
    (single,) = dumps(folder, "norm-1", 1)
    one, other = dumps(folder, "norm-sp", 2)
    for name, mask in single.items():
        assert independent(one[name], other[name]), name
        assert torch.equal(torch.cat((one[name], other[name])), mask), name


def in_order(first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
    """A row from its two context-parallel ranks: the outer quarters and the inner ones."""
    (a, d), (b, c) = first.chunk(2), second.chunk(2)
    return torch.cat((a, b, c, d))


@pytest.mark.parametrize("kind", ["norm", "projections"])
def test_under_context_parallelism_each_rank_draws_its_part(folder, kind):
    """Report 4 of the field: other tokens, other masks; the parts make up the row's mask."""
    (single,) = dumps(folder, f"{kind}-1", 1)
    one, other = dumps(folder, f"{kind}-cp", 2)
    for name, mask in single.items():
        assert independent(one[name], other[name]), name
        assert torch.equal(in_order(one[name], other[name]), mask), name


def test_context_and_sequence_parallelism_together(folder):
    """Ranks 0 and 1 divide what the first context-parallel rank holds, 2 and 3 the second's."""
    (single,) = dumps(folder, "norm-1", 1)
    ranks = dumps(folder, "norm-cp-sp", 4)
    for name, mask in single.items():
        parts = [rank[name] for rank in ranks]
        assert torch.equal(in_order(torch.cat(parts[:2]), torch.cat(parts[2:])), mask), name
        for i in range(4):
            assert all(independent(parts[i], parts[j]) for j in range(i)), name


def test_data_parallel_ranks_draw_others(folder):
    """Micro-batch m of rank r holds the rows that one process has in micro-batch 2 m + r."""
    (single,) = dumps(folder, "norm-1", 1)
    one, other = dumps(folder, "norm-dp", 2)
    for name in single:
        assert independent(one[name], other[name]), name
        if name.startswith("0."):
            assert torch.equal(one[name], single[name]), name
            assert torch.equal(other[name], single[name.replace("0.", "1.", 1)]), name


def test_data_and_tensor_parallel_together(folder):
    """Report 3: equal inside a tensor-parallel group, different between replicas."""
    ranks = dumps(folder, "norm-dp-tp", 4)
    for name in ranks[0]:
        assert torch.equal(ranks[0][name], ranks[1][name]), name
        assert torch.equal(ranks[2][name], ranks[3][name]), name
        assert independent(ranks[0][name], ranks[2][name]), name


@pytest.mark.parametrize("layout", ["tp", "sp"])
def test_projections_see_global_features(folder, layout):
    """Inputs of q and up are whole on every rank; those of o and down are sharded."""
    (single,) = dumps(folder, "projections-1", 1)
    one, other = dumps(folder, f"projections-{layout}", 2)
    for name, mask in single.items():
        if name[-1] in "qu":
            assert torch.equal(one[name], mask) and torch.equal(other[name], mask), name
        else:
            assert independent(one[name], other[name]), name
            assert torch.equal(torch.cat((one[name], other[name]), dim=-1), mask), name


@pytest.mark.parametrize(
    "layout, ranks, size",
    [("1", 1, 1), ("1", 1, 2), ("dp", 2, 1), ("dp", 2, 2), ("cp", 2, 1), ("cp", 2, 4)],
)
def test_unequal_rows_weigh_by_their_tokens_on_every_layout(folder, layout, ranks, size):
    """Report 45: rows with 1, 3, 10 and 0 scored tokens."""
    (expected,) = dumps(folder, "step-1-4", 1)
    assert expected["tokens"] == 14
    for found in dumps(folder, f"step-{layout}-{size}", ranks):
        assert found["tokens"] == 14
        assert found["loss"] == pytest.approx(expected["loss"], rel=1e-6)
        for name, gradient in expected["gradients"].items():
            torch.testing.assert_close(found["gradients"][name], gradient, rtol=1e-5, atol=1e-7)
