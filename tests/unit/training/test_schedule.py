"""Learning rates, iteration by iteration, against the formulas and the documentation's table."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from runs import settings_of

from megatron_lengen.training.optimizer import build_scheduler

Shape = Callable[[float], float]
DOCUMENT = Path(__file__).parents[3] / "docs" / "schedules.md"
ITERATIONS, WARMUP, ANNEALING, HIGH, LOW = 12, 3, 4, 1e-3, 1e-4
BASE = f"--lr {HIGH} --min-lr {LOW} --lr-warmup-iters {WARMUP}"
WSD = f"--lr-decay-style WSD --lr-wsd-decay-iters {ANNEALING} --lr-wsd-decay-style"


def warmed(after: Shape) -> list[float]:
    """Iteration i has taken i - 1 steps: linear from 0, then `after` of the steps."""
    return [HIGH * step / WARMUP if step <= WARMUP else after(step) for step in range(ITERATIONS)]


def falling(shape: Shape) -> list[float]:
    """From HIGH to LOW between the warm-up and the end."""
    return warmed(lambda step: LOW + (HIGH - LOW) * shape((step - WARMUP) / (ITERATIONS - WARMUP)))


def annealed(shape: Shape) -> list[float]:
    """HIGH, then from HIGH to LOW in the last ANNEALING iterations."""
    start = ITERATIONS - ANNEALING
    return warmed(
        lambda step: (
            HIGH if step <= start else LOW + (HIGH - LOW) * shape((step - start) / ANNEALING)
        )
    )


EXPECTED = {
    "constant": ("--lr-decay-style constant", warmed(lambda step: HIGH)),
    "linear": ("--lr-decay-style linear", falling(lambda r: 1 - r)),
    "cosine": ("--lr-decay-style cosine", falling(lambda r: (1 + math.cos(math.pi * r)) / 2)),
    "inverse-square-root": (
        "--lr-decay-style inverse-square-root",
        warmed(lambda step: max(LOW, HIGH * math.sqrt(WARMUP / step))),
    ),
    "WSD linear": (f"{WSD} linear", annealed(lambda r: 1 - r)),
    "WSD cosine": (f"{WSD} cosine", annealed(lambda r: (1 + math.cos(math.pi * r)) / 2)),
    "WSD exponential": (f"{WSD} exponential", annealed(lambda r: 2 * 0.5**r - 1)),
    "WSD minus_sqrt": (f"{WSD} minus_sqrt", annealed(lambda r: 1 - math.sqrt(r))),
}


class Groups:
    """What a scheduler asks of an optimizer."""

    def __init__(self) -> None:
        self.param_groups = [{"lr": 0.0, "weight_decay": 0.0}]


def rates(flags: str) -> list[float]:
    """The rate of each update of a run."""
    settings, optimizer = settings_of(flags), Groups()
    scheduler = build_scheduler(settings, optimizer)
    found = []
    for _ in range(settings.training.train_iters):
        found.append(optimizer.param_groups[0]["lr"])
        scheduler.step(increment=settings.training.global_batch_size)
    return found


@pytest.mark.parametrize("name", EXPECTED)
def test_rates_follow_the_formula(name):
    flags, expected = EXPECTED[name]
    assert rates(f"{BASE} {flags}") == pytest.approx(expected, rel=1e-12)


def test_warm_up_as_a_share_and_from_a_rate():
    shared = rates(f"--lr {HIGH} --lr-warmup-fraction 0.25 --lr-decay-style constant")
    assert shared == pytest.approx(warmed(lambda step: HIGH), rel=1e-12)
    start = rates(f"{BASE} --lr-warmup-init {LOW} --lr-decay-style constant")
    assert start[:4] == pytest.approx([1e-4, 4e-4, 7e-4, 1e-3], rel=1e-12)
    assert rates(f"--lr {HIGH} --lr-decay-style constant") == [HIGH] * ITERATIONS


def test_after_the_schedule_the_rate_stays_low():
    found = rates(f"{BASE} --lr-decay-style linear --lr-decay-iters 6")
    assert found[6:] == pytest.approx([LOW] * 6, rel=1e-12)
    assert found[5] == pytest.approx(LOW + (HIGH - LOW) / 3, rel=1e-12)


def test_rates_do_not_depend_on_the_batch():
    flags = f"{BASE} --lr-decay-style cosine"
    assert rates(f"{flags} --global-batch-size 7") == pytest.approx(rates(flags), rel=1e-12)


def test_the_last_update_is_one_step_above_the_minimum():
    """torchtitan and Hugging Face end alike: the rate after the last update is --min-lr."""
    assert rates(f"{BASE} {EXPECTED['WSD linear'][0]}")[-1] == pytest.approx(
        LOW + (HIGH - LOW) / ANNEALING
    )


def test_hugging_faces_schedules_are_the_same():
    from transformers import get_cosine_with_min_lr_schedule_with_warmup, get_wsd_schedule

    def hugging_face(make, **options) -> list[float]:
        optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=HIGH)
        schedule = make(optimizer, num_warmup_steps=WARMUP, **options)
        found = []
        for _ in range(ITERATIONS):
            found.append(schedule.get_last_lr()[0])
            optimizer.step()
            schedule.step()
        return found

    cosine = hugging_face(
        get_cosine_with_min_lr_schedule_with_warmup, num_training_steps=ITERATIONS, min_lr=LOW
    )
    assert rates(f"{BASE} {EXPECTED['cosine'][0]}") == pytest.approx(cosine, rel=1e-9)
    wsd = hugging_face(
        get_wsd_schedule,
        num_decay_steps=ANNEALING,
        num_stable_steps=ITERATIONS - WARMUP - ANNEALING,
        decay_type="linear",
    )
    ours = rates(f"{BASE} --min-lr 0 {EXPECTED['WSD linear'][0]}")
    assert ours == pytest.approx(wsd, rel=1e-9)


def table() -> dict[str, list[float]]:
    """The documentation's table: a column for each schedule, a row for each iteration."""
    lines = [line for line in DOCUMENT.read_text().splitlines() if line.startswith("|")]
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    heads = [head.strip("`") for head in cells[0][1:]]
    body = [row for row in cells if row[0].isdigit()]
    assert [int(row[0]) for row in body] == list(range(1, ITERATIONS + 1))
    return {head: [float(row[i + 1]) for row in body] for i, head in enumerate(heads)}


def test_the_documented_table_is_what_runs():
    documented = table()
    assert documented.keys() == EXPECTED.keys()
    for name, (flags, _) in EXPECTED.items():
        assert documented[name] == pytest.approx(rates(f"{BASE} {flags}"), abs=5e-8), name
