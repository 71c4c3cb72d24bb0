"""What a run reports, and the operations it counts."""

from __future__ import annotations

import json
import sys

import pytest
from runs import settings_of

from megatron_lengen.errors import BadInput
from megatron_lengen.training import metrics
from megatron_lengen.training.checkpoint import Progress
from megatron_lengen.training.metrics import Reporter, flops_per_token
from megatron_lengen.training.step import StepResult

CONTRACT = {
    "iteration",
    "consumed_samples",
    "consumed_tokens",
    "lm_loss",
    "grad_norm",
    "learning_rate",
    "tokens_per_second",
    "skipped",
}
RESULT = StepResult(
    loss=1 / 3 + 1e-16, tokens=96, grad_norm=2 / 7, learning_rate=1e-4 / 3, skipped=False
)


@pytest.mark.parametrize(
    "flags",
    [
        "",
        "--sliding-window 8 --seq-length 20",
        "--sliding-window 24",
        "--sliding-window 100",
        "--untie-embeddings-and-output-weights",
        "--num-query-groups 4 --kv-channels 16",
    ],
)
def test_operations_counted_from_the_models_own_matrices(process_groups, flags):
    """Twice a multiply-add for each weight of each matrix and each key that a query sees."""
    from megatron_lengen.models.build import build_chunk

    config = settings_of(flags).model
    model = build_chunk(config)
    forward = 0.0
    for name, weight in model.named_parameters():
        looked_up = name.startswith("embedding")  # but tied weights multiply at the end
        if weight.dim() == 2 and (not looked_up or model.share_embeddings_and_output_weights):
            forward += 2 * weight.numel()
    for layer in config.layer_pattern():
        pairs = sum(
            1
            for query in range(config.seq_length)
            for key in range(query + 1)
            if not layer.windowed or query - key < config.sliding_window
        )
        # q k^T and probabilities times v, for every head
        operations = 2 * 2 * config.num_attention_heads * config.kv_channels
        forward += operations * pairs / config.seq_length
    assert flops_per_token(config) == pytest.approx(3 * forward, rel=1e-12)


def test_flops_of_mamba(process_groups):
    """Matrices and taps from the model's own weights; the recurrence of every channel and state."""
    from megatron_lengen.models.build import build_chunk

    config = settings_of("--mamba-num-groups 2", decoder="mamba2").model
    model = build_chunk(config)
    forward = 0.0
    for weight in model.parameters():
        if weight.dim() >= 2:
            forward += 2 * weight.numel()  # [out, in], and [channels, 1, taps]
    heads, channels, states = 8, 8, 12
    # h = a h + b x (b x, a h, the sum), y = c h (product and sum)
    forward += config.num_layers * heads * channels * states * 5
    assert flops_per_token(config) == pytest.approx(3 * forward, rel=1e-12)


def read(file) -> list[dict]:
    return [json.loads(line) for line in file.read_text().splitlines()]


def test_json_lines_hold_the_contract_in_full_precision_and_append(tmp_path):
    file = tmp_path / "new" / "metrics.jsonl"
    settings = settings_of(f"--metrics-jsonl {file}")
    for iteration in (1, 2):  # two processes of one run
        reporter = Reporter(settings, 1, Progress(iteration - 1))
        reporter.step(Progress(iteration, 4 * iteration), RESULT)
        reporter.validation(Progress(iteration, 4 * iteration), 2 / 3)
        reporter.close()
    train, validation, resumed, _ = read(file)
    assert set(train) >= CONTRACT and "validation" not in train
    assert (train["lm_loss"], train["grad_norm"]) == (RESULT.loss, RESULT.grad_norm)
    assert train["learning_rate"] == RESULT.learning_rate
    assert (train["consumed_samples"], train["consumed_tokens"]) == (4, 4 * 24)
    assert train["tokens_per_second"] > 0 and train["skipped"] == 0
    assert validation["validation"] is True and validation["lm_loss"] == 2 / 3
    assert (validation["iteration"], resumed["iteration"]) == (1, 2)


def test_skipped_steps_are_counted_and_no_number_is_null(tmp_path, capsys):
    file = tmp_path / "metrics.jsonl"
    reporter = Reporter(settings_of(f"--metrics-jsonl {file}"), 1, Progress())
    bad = StepResult(float("nan"), 96, float("nan"), 1e-4, skipped=True)
    for skipped, result in ((1, bad), (1, RESULT), (2, bad)):
        reporter.step(Progress(1, 4, skipped), result)
    rows = read(file)
    assert [row["skipped"] for row in rows] == [1, 1, 2]
    assert rows[0]["lm_loss"] is None and rows[0]["grad_norm"] is None
    assert "NaN" not in file.read_text()
    assert capsys.readouterr().out.count("skipped 1") == 2


def test_only_the_first_rank_writes(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("RANK", "1")
    reporter = Reporter(settings_of(f"--metrics-jsonl {tmp_path / 'm'}"), 2, Progress())
    reporter.step(Progress(1, 4), RESULT)
    assert not (tmp_path / "m").exists() and capsys.readouterr().out == ""


def test_console_lines_come_at_their_interval(capsys):
    reporter = Reporter(settings_of("--log-interval 2"), 1, Progress())
    for iteration in range(1, 5):
        reporter.step(Progress(iteration, 4 * iteration), RESULT)
    lines = capsys.readouterr().out.splitlines()
    assert [line.split("|")[0].strip() for line in lines] == ["iteration  2/12", "iteration  4/12"]
    assert "loss 0.3333" in lines[0] and "grad norm 0.286" in lines[0] and "left" in lines[0]


@pytest.mark.parametrize(
    "number, text",
    [(0.5, "0.5"), (999, "999"), (1500, "1.5k"), (2.5e6, "2.5M"), (3e9, "3G"), (4e12, "4T")],
)
def test_short_numbers(number, text):
    assert metrics._short(number) == text


@pytest.mark.parametrize("seconds, text", [(0, "0:00:00"), (59.6, "0:01:00"), (3661, "1:01:01")])
def test_clock(seconds, text):
    assert metrics._clock(seconds) == text


def test_tensorboard(tmp_path):
    event_accumulator = pytest.importorskip(
        "tensorboard.backend.event_processing.event_accumulator"
    )
    reporter = Reporter(settings_of(f"--tensorboard-dir {tmp_path}"), 1, Progress())
    reporter.step(Progress(1, 4), RESULT)
    reporter.validation(Progress(1, 4), 2 / 3)
    reporter.validation(Progress(2, 8), None, {"copy_exact_match_30": 12.5})
    reporter.close()
    events = event_accumulator.EventAccumulator(str(tmp_path))
    events.Reload()
    assert {"train/lm_loss", "train/grad_norm", "validation/lm_loss"} <= set(
        events.Tags()["scalars"]
    )
    (loss,) = events.Scalars("validation/lm_loss")
    assert loss.step == 1 and loss.value == pytest.approx(2 / 3)
    (score,) = events.Scalars("validation/copy_exact_match_30")
    assert score.step == 2 and score.value == 12.5


@pytest.mark.parametrize(
    "flags, package", [("--wandb-project p", "wandb"), ("--tensorboard-dir d", "tensorboard")]
)
def test_a_missing_package_is_named_before_anything_is_built(monkeypatch, flags, package):
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(BadInput, match=f"needs {package}: pip install {package}"):
        settings_of(flags)
