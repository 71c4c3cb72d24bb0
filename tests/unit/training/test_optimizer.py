"""Which parameters decay, and what an update does with gradients that are zero or not finite."""

from __future__ import annotations

import pytest
import torch
from runs import trainer_of

from megatron_lengen.errors import BadInput
from megatron_lengen.training.optimizer import apply_gradients, load_scheduler, scheduler_state

GAINS = ["decoder.final_layernorm.weight"] + [
    f"decoder.layers.{layer}.{name}.weight"
    for layer in range(4)
    for name in ("input_layernorm", "pre_mlp_layernorm")
]
MATRICES = [
    f"decoder.layers.{layer}.{name}.weight"
    for layer in range(4)
    for name in (
        "self_attention.linear_qkv",
        "self_attention.linear_proj",
        "mlp.linear_fc1",
        "mlp.linear_fc2",
    )
]
BIASES = [f"decoder.layers.{layer}.self_attention.linear_qkv.bias" for layer in range(4)]
SCALING = [
    f"decoder.layers.{layer}.self_attention.query_scaling.{kind}_{form}"
    for layer in range(4)
    for kind in ("coef", "pow")
    for form in ("weight", "bias")
]
TABLE, HEAD = "embedding.word_embeddings.weight", "output_layer.weight"

# flags -> (names that decay, names that do not)
GROUPS = {
    "": ([TABLE, *MATRICES], GAINS),
    "--add-qkv-bias": ([TABLE, *MATRICES], [*GAINS, *BIASES]),
    "--query-scaling learned": ([TABLE, *MATRICES], [*GAINS, *SCALING]),
    "--no-decay-embeddings": (MATRICES, [TABLE, *GAINS]),
    "--decay-all --add-qkv-bias": ([TABLE, *MATRICES, *GAINS, *BIASES], []),
    "--untie-embeddings-and-output-weights": ([TABLE, HEAD, *MATRICES], GAINS),
    "--untie-embeddings-and-output-weights --no-decay-embeddings": (
        MATRICES,
        [TABLE, HEAD, *GAINS],
    ),
}


def parameters(trainer) -> dict[str, torch.nn.Parameter]:
    (chunk,) = trainer.engine.chunks
    return {name.removeprefix("module."): p for name, p in chunk.named_parameters()}


def by_decay(trainer) -> tuple[set[str], set[str]]:
    """Names in groups with and without weight decay, as the optimizer sees them."""
    names = {id(p): name for name, p in parameters(trainer).items()}
    decayed: set[str] = set()
    spared: set[str] = set()
    for group in trainer.engine.optimizer.param_groups:
        home = decayed if group["weight_decay"] > 0 else spared
        home |= {names[id(p)] for p in group["params"]}
    return decayed, spared


@pytest.mark.parametrize("flags", GROUPS)
def test_parameter_groups(process_groups, flags):
    decayed, spared = GROUPS[flags]
    assert by_decay(trainer_of(f"--weight-decay 0.1 {flags}")) == (set(decayed), set(spared))


MIXERS = [f"decoder.layers.{layer}.mixer." for layer in range(4)]
MAMBA_MATRICES = [
    f"{mixer}{name}.weight" for mixer in MIXERS for name in ("in_proj", "conv1d", "out_proj")
]
MAMBA_SPARED = ["decoder.final_norm.weight"] + [f"decoder.layers.{i}.norm.weight" for i in range(4)]
MAMBA_SPARED += [
    mixer + name
    for mixer in MIXERS
    for name in ("A_log", "D", "dt_bias", "conv1d.bias", "norm.weight")
]


@pytest.mark.parametrize("flags", ["", "--bf16", "--decay-all"])
def test_parameter_groups_of_mamba(process_groups, flags):
    """Report 42 of the field: only matrices, convolution weights and the embedding decay."""
    decayed, spared = {TABLE, *MAMBA_MATRICES}, set(MAMBA_SPARED)
    if flags == "--decay-all":
        decayed, spared = decayed | spared, set()
    trainer = trainer_of(f"--weight-decay 0.1 {flags}", "mamba2")
    # Under bf16 the optimizer holds masters.
    named = {
        id(getattr(p, "main_param", p)): name.removeprefix("module.")
        for name, p in parameters(trainer).items()
    }
    for group in trainer.engine.optimizer.param_groups:
        expected = decayed if group["weight_decay"] > 0 else spared
        found = {named[id(p)] for p in group["params"]}
        assert found <= expected
        expected -= found
    assert not decayed and not spared


def test_ten_steps_without_gradients(process_groups):
    """Report 42 of the field: exempt parameters keep every bit, others shrink by 1 - lr wd."""
    lr, decay = 1e-2, 0.1
    trainer = trainer_of(f"--weight-decay {decay} --lr {lr} --lr-decay-style constant")
    _, spared = by_decay(trainer)
    before = {name: p.detach().clone() for name, p in parameters(trainer).items()}
    for _ in range(10):
        for chunk in trainer.engine.chunks:
            chunk.zero_grad_buffer()
        assert apply_gradients(trainer.engine.optimizer) == 0
        trainer.engine.scheduler.step(4)
    for name, after in parameters(trainer).items():
        if name in spared:
            assert torch.equal(after, before[name]), name
        else:
            expected = before[name].double() * (1 - lr * decay) ** 10
            torch.testing.assert_close(after.double(), expected, rtol=1e-6, atol=1e-9)
            assert not torch.equal(after, before[name]), name


@pytest.mark.parametrize("clip", [0.0, 0.5])
def test_norm_and_clipping(process_groups, clip):
    """The norm is that of all gradients; above the limit they are scaled to it."""
    trainer = trainer_of(f"--clip-grad {clip}")
    total = 0.0
    for chunk in trainer.engine.chunks:
        chunk.zero_grad_buffer()
    for index, p in enumerate(parameters(trainer).values()):
        p.main_grad.fill_(0.01 * (index + 1))
        total += p.numel() * (0.01 * (index + 1)) ** 2
    norm = apply_gradients(trainer.engine.optimizer)
    assert norm == pytest.approx(total**0.5, rel=1e-5) and norm > 0.5
    scale = clip / norm if clip else 1.0
    first = next(iter(parameters(trainer).values()))
    torch.testing.assert_close(
        first.main_grad, torch.full_like(first, 0.01 * scale), rtol=1e-4, atol=0
    )


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("flags", ["", "--bf16", "--use-distributed-optimizer"])
def test_bad_gradients_leave_the_weights_alone(process_groups, flags, bad):
    trainer = trainer_of(f"{flags} --lr-decay-style constant")
    before = {name: p.detach().clone() for name, p in parameters(trainer).items()}
    for chunk in trainer.engine.chunks:
        chunk.zero_grad_buffer()
    list(parameters(trainer).values())[3].main_grad.view(-1)[0] = bad
    assert not torch.isfinite(torch.tensor(apply_gradients(trainer.engine.optimizer)))
    for name, p in parameters(trainer).items():
        assert torch.equal(p, before[name]), name


# ---- resuming with another length ----------------------------------------------------------------

SCHEDULE = "--lr 1e-3 --min-lr 1e-4 --train-iters 12"


def resumed_rates(before: str, after: str, steps: int) -> list[float]:
    """Rates of five steps under `before`'s schedule, then of `steps` more under `after`'s."""
    first, then = trainer_of(f"{SCHEDULE} {before}"), trainer_of(f"{SCHEDULE} {after}")
    rates = []
    for _ in range(5):
        rates.append(first.engine.optimizer.param_groups[0]["lr"])
        first.engine.scheduler.step(increment=4)
    state = scheduler_state(first.engine.scheduler)
    load_scheduler(then.engine.scheduler, state, then.settings)
    for _ in range(steps):
        rates.append(then.engine.optimizer.param_groups[0]["lr"])
        then.engine.scheduler.step(increment=4)
    return rates


@pytest.mark.parametrize(
    "schedule",
    [
        "--lr-decay-style constant",
        "--lr-decay-style constant --lr-warmup-iters 3",
        "--lr-decay-style constant --lr-warmup-fraction 0.2",  # 2.4 iterations, then 4: both past
        "--lr-decay-style cosine --lr-decay-iters 12",
        "--lr-decay-style WSD --lr-decay-iters 12 --lr-wsd-decay-iters 4",
    ],
)
def test_a_longer_run_needs_no_override_where_no_rate_changes(process_groups, schedule):
    """Expected are the rates of the schedule that was planned, and its last one from then on."""
    found = resumed_rates(schedule, f"{schedule} --train-iters 20", 10)
    planned = resumed_rates(schedule, schedule, 10)
    assert found == planned
    if "constant" in schedule:
        assert found[5:] == [1e-3] * 10


@pytest.mark.parametrize(
    "schedule, named",
    [
        ("--lr-decay-style cosine", "--lr-decay-iters .* 20.0 .checkpoint: 12.0."),
        ("--lr-decay-style linear", "--lr-decay-iters"),
        ("--lr-decay-style inverse-square-root --lr-warmup-iters 2", "--lr-decay-iters"),
        # Still warming up, and more slowly than before.
        ("--lr-decay-style constant --lr-warmup-fraction 0.5", "--lr-warmup-iters"),
    ],
)
def test_a_longer_run_needs_an_override_where_rates_change(process_groups, schedule, named):
    with pytest.raises(BadInput, match=f"the schedule differs .*{named}.*--override-opt-param"):
        resumed_rates(schedule, f"{schedule} --train-iters 20", 1)
    resumed_rates(schedule, f"{schedule} --train-iters 20 --override-opt-param-scheduler", 1)
