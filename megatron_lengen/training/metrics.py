"""What a run reports: the console, a JSON line an iteration, TensorBoard, Weights & Biases."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any, Protocol

from megatron_lengen.config import LengenConfig
from megatron_lengen.errors import is_first_rank, missing_package
from megatron_lengen.mamba_config import convolved_parts, inner_size, projected_parts
from megatron_lengen.training.arguments import Settings
from megatron_lengen.training.checkpoint import Progress
from megatron_lengen.training.metrics_file import JsonLines
from megatron_lengen.training.step import StepResult


def flops_per_token(config: LengenConfig) -> float:
    """Floating-point operations of a training step, per token: forward once, backward twice.

    A multiply-add counts as two; attention counts the keys that causality and windows leave, on
    average over the row, and Mamba2's state space its recurrence, not the form that computes it.
    """
    head = 2 * config.hidden_size * config.padded_vocab_size
    if config.decoder == "mamba2":
        return 3.0 * (_mamba_block(config) * config.num_layers + head)
    head_width = config.num_attention_heads * config.kv_channels
    kv_width = 2 * config.num_query_groups * config.kv_channels
    h = config.hidden_size
    matrices = h * (head_width + kv_width) + head_width * h
    matrices += (3 if config.gated_linear_unit else 2) * h * config.ffn_hidden_size
    attention = 0.0
    for layer in config.layer_pattern():
        keys = _mean_keys(config.seq_length, config.sliding_window if layer.windowed else None)
        attention += 2 * 2 * head_width * keys
    return 3.0 * (2 * matrices * config.num_layers + attention + head)


def _mamba_block(config: LengenConfig) -> float:
    """Forward operations of a block for each token: projections, convolution, state space."""
    inner, state = inner_size(config), config.mamba_state_dim
    projected = sum(part.rows for part in projected_parts(config))
    convolved = sum(part.rows for part in convolved_parts(config))
    matrices = config.hidden_size * (projected + inner) + convolved * config.mamba_conv_kernel
    # For each channel and state: the decay, B x, their sum, and C h.
    return 2 * matrices + 5 * inner * state


def _mean_keys(length: int, window: int | None) -> float:
    """Keys that a query sees, averaged over a row."""
    w = min(window or length, length)
    return (w * (w + 1) / 2 + (length - w) * w) / length


class Writer(Protocol):
    """Takes one row of numbers at a time."""

    def write(self, row: dict[str, Any]) -> None:
        """Record a row; it has an `iteration`."""

    def close(self) -> None:
        """Flush what is pending."""


class TensorBoard:
    """Scalars by iteration; what follows `start`, and comes again, is hidden."""

    def __init__(self, folder: str, start: int | None = None) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError as error:
            raise missing_package("tensorboard", "--tensorboard-dir") from error
        self._writer = SummaryWriter(folder, purge_step=None if start is None else start + 1)

    def write(self, row: dict[str, Any]) -> None:
        """Add the row's numbers."""
        prefix = "validation/" if row.get("validation") else "train/"
        for key, value in row.items():
            if isinstance(value, float):
                self._writer.add_scalar(prefix + key, value, row["iteration"])

    def close(self) -> None:
        """Flush and close."""
        self._writer.close()


class WeightsAndBiases:
    """A Weights & Biases run; WANDB_MODE=offline works without a network."""

    def __init__(self, settings: Settings) -> None:
        try:
            import wandb
        except ImportError as error:
            raise missing_package("wandb", "--wandb-project") from error
        training = settings.training
        self._run = wandb.init(
            project=training.wandb_project,
            name=training.wandb_exp_name,
            dir=training.wandb_save_dir,
            config=settings.as_json(),
        )

    def write(self, row: dict[str, Any]) -> None:
        """Log the row."""
        prefix = "validation/" if row.get("validation") else ""
        numbers = {prefix + key: value for key, value in row.items() if key != "iteration"}
        self._run.log(numbers, step=row["iteration"])

    def close(self) -> None:
        """Finish the run."""
        self._run.finish()


def open_writers(settings: Settings, start: int | None = None) -> list[Writer]:
    """The writers that were asked for; none but on rank 0.

    Args:
        start: the iteration that the run goes on from; None for a new one.
    """
    training = settings.training
    writers: list[Writer] = []
    if not is_first_rank():
        return writers
    if training.metrics_jsonl:
        writers.append(JsonLines(training.metrics_jsonl, start))
    if training.tensorboard_dir:
        writers.append(TensorBoard(training.tensorboard_dir, start))
    if training.wandb_project:
        writers.append(WeightsAndBiases(settings))
    return writers


class Reporter:
    """Turns steps into rows and lines.

    Args:
        start: how far the run is when it starts.
    """

    def __init__(self, settings: Settings, world_size: int, start: Progress) -> None:
        self._settings, self._world_size = settings, world_size
        goes_on = settings.training.saves_here or start.iteration > 0
        self._writers = open_writers(settings, start.iteration if goes_on else None)
        self._flops = flops_per_token(settings.model)
        self._last = time.perf_counter()
        self._seconds_per_step: float | None = None

    def restart_clock(self) -> None:
        """Leave out of the next step's time what happened since the last one."""
        self._last = time.perf_counter()

    def step(self, progress: Progress, result: StepResult) -> None:
        """Report a training step, which `progress` counts already."""
        now = time.perf_counter()
        seconds, self._last = now - self._last, now
        batch = self._settings.training.global_batch_size or 0
        tokens = batch * self._settings.model.seq_length
        row = {
            "iteration": progress.iteration,
            "consumed_samples": progress.consumed_samples,
            "consumed_tokens": progress.consumed_samples * self._settings.model.seq_length,
            "lm_loss": result.loss,
            "grad_norm": result.grad_norm,
            "learning_rate": result.learning_rate,
            "tokens_per_second": tokens / seconds,
            "tflops_per_process": tokens * self._flops / seconds / 1e12 / self._world_size,
            "skipped": progress.skipped,
        }
        for writer in self._writers:
            writer.write(row)
        # Averaged over recent steps, so that the time left does not jump about.
        old = self._seconds_per_step
        self._seconds_per_step = seconds if old is None else 0.9 * old + 0.1 * seconds
        if is_first_rank() and progress.iteration % self._settings.training.log_interval == 0:
            print(self._line(row), flush=True)

    def validation(
        self, progress: Progress, loss: float | None, scores: Mapping[str, float] | None = None
    ) -> None:
        """Report a validation loss, where there is one, and other scores."""
        numbers = ({} if loss is None else {"lm_loss": loss}) | dict(scores or {})
        row = {
            "iteration": progress.iteration,
            "consumed_samples": progress.consumed_samples,
            **numbers,
            "validation": True,
        }
        for writer in self._writers:
            writer.write(row)
        if is_first_rank():
            said = [] if loss is None else [f"loss {loss:.6f}"]
            said += [f"{name} {score:.2f}" for name, score in (scores or {}).items()]
            print(f"validation at iteration {progress.iteration}: {' | '.join(said)}", flush=True)

    def close(self) -> None:
        """Close the writers."""
        for writer in self._writers:
            writer.close()

    def _line(self, row: dict[str, Any]) -> str:
        total = self._settings.training.train_iters
        left = (total - row["iteration"]) * (self._seconds_per_step or 0.0)
        line = (
            f"iteration {row['iteration']:>{len(str(total))}}/{total} | loss {row['lm_loss']:.4f} "
            f"| grad norm {row['grad_norm']:.3f} | lr {row['learning_rate']:.3e} "
            f"| tokens {_short(row['consumed_tokens'])} "
            f"| {_short(row['tokens_per_second'])} tokens/s "
            f"| {row['tflops_per_process']:.3g} TFLOP/s/process | {_clock(left)} left"
        )
        return line + (f" | skipped {row['skipped']}" if row["skipped"] else "")


def _short(number: float) -> str:
    for limit, unit in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if number >= limit:
            return f"{number / limit:.3g}{unit}"
    return f"{number:.3g}"


def _clock(seconds: float) -> str:
    minutes, rest = divmod(int(seconds + 0.5), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}"
