"""The settings of a run that are about synthetic tasks: their rows, and generated answers."""

from __future__ import annotations

from dataclasses import dataclass

from megatron_lengen.config import LengenConfig
from megatron_lengen.data.copy_task import MAX_SOURCE, CopyLengths, parse_lengths
from megatron_lengen.errors import require


@dataclass
class TaskSettings:
    """Fields of `TrainingSettings`."""

    copy_task: str | None = None
    """Instead of data, rows of the copy task with sources of MIN-MAX letters, as in 50-100. It
    brings its tokenizer and --seq-length (2 MAX + 2, the longest example)."""

    eval_generation: list[int] | int | None = None
    """With --copy-task, at each validation: generate the answers to sources of these lengths and
    report how many are right."""

    eval_generation_samples: int = 64
    """Sources of each of these lengths, a multiple of the data-parallel ranks."""

    @property
    def copy_lengths(self) -> CopyLengths | None:
        """What --copy-task says."""
        return None if self.copy_task is None else parse_lengths(self.copy_task)

    @property
    def generation_lengths(self) -> list[int]:
        """What --eval-generation says: in order, once each; none without it."""
        given = self.eval_generation
        return sorted({given} if isinstance(given, int) else set(given or ()))

    def check_tasks(self, model: LengenConfig, data_parallel_size: int) -> None:
        """Raise BadInput for settings that cannot work together.

        Args:
            model: complete.
            data_parallel_size: ranks among which samples are divided.
        """
        lengths = self.copy_lengths
        if lengths is not None:
            require(
                model.seq_length >= lengths.row,
                f"--seq-length: found {model.seq_length}; allowed: {lengths.row} or more, the "
                f"longest example of --copy-task {self.copy_task}",
            )
        if self.eval_generation is None:
            return
        require(lengths is not None, "--eval-generation: needs --copy-task")
        require(
            model.fp8 is None,
            "--eval-generation: not with --fp8-format, which computes no single tokens",
        )
        require(
            all(1 <= length <= MAX_SOURCE for length in self.generation_lengths),
            f"--eval-generation: found {self.eval_generation}; allowed: lengths of 1 or more",
        )
        samples = self.eval_generation_samples
        require(
            samples >= 1 and samples % data_parallel_size == 0,
            f"--eval-generation-samples: found {samples}; allowed: multiples of the "
            f"{data_parallel_size} data-parallel ranks",
        )
        for flag, size in (
            ("--pipeline-model-parallel-size", model.pipeline_model_parallel_size),
            ("--context-parallel-size", model.context_parallel_size),
        ):
            require(size == 1, f"{flag}: found {size}; allowed: 1 with --eval-generation")
