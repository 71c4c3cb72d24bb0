"""What a run reports: the console, a JSON line an iteration, TensorBoard, Weights & Biases."""

from __future__ import annotations

import time
from typing import Any, Protocol

from megatron_lengen.config import LengenConfig
from megatron_lengen.errors import is_first_rank, missing_package
from megatron_lengen.training.arguments import Settings
from megatron_lengen.training.checkpoint import Progress
from megatron_lengen.training.metrics_file import JsonLines
from megatron_lengen.training.step import StepResult


def flops_per_token(config: LengenConfig) -> float:
    """Floating-point operations of a training step, per token: forward once, backward twice.

    A multiply-add counts as two; attention counts the keys that causality and windows leave, on
    average over the row.
    """
    head_width = config.num_attention_heads * config.kv_channels
    kv_width = 2 * config.num_query_groups * config.kv_channels
    h = config.hidden_size
    matrices = h * (head_width + kv_width) + head_width * h
    matrices += (3 if config.gated_linear_unit else 2) * h * config.ffn_hidden_size
    attention = 0.0
    for layer in config.layer_pattern():
        keys = _mean_keys(config.seq_length, config.sliding_window if layer.windowed else None)
        attention += 2 * 2 * head_width * keys
    forward = 2 * matrices * config.num_layers + attention + 2 * h * config.padded_vocab_size
    return 3.0 * forward


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

    def validation(self, progress: Progress, loss: float) -> None:
        """Report a validation loss."""
        row = {
            "iteration": progress.iteration,
            "consumed_samples": progress.consumed_samples,
            "lm_loss": loss,
            "validation": True,
        }
        for writer in self._writers:
            writer.write(row)
        if is_first_rank():
            print(f"validation at iteration {progress.iteration}: loss {loss:.6f}", flush=True)

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
