"""Answers generated during training: how many are right, on fixed sets, at each validation.

Sets are the same at each validation, for every seed and on every layout. Data-parallel ranks take
equal shares of them; tensor-parallel ranks compute the same answers together. Nothing that training
goes on with is touched: no generator, no sample number, no gradient.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Protocol

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.utils import get_attr_wrapped_model
from torch import nn

from megatron_lengen.evaluation import copy_task
from megatron_lengen.evaluation.native import NativeModel
from megatron_lengen.models.build import InferenceModel
from megatron_lengen.runtime import host
from megatron_lengen.training.arguments import Settings
from megatron_lengen.training.compilation import uncompiled

if TYPE_CHECKING:
    from megatron_lengen.evaluation.needle import Answerer

# What modules of Megatron-Core go by, each for itself.
_SEQUENCE_PARALLEL = (
    "sequence_parallel",
    "scatter_to_sequence_parallel",
    "reduce_scatter_embeddings",
)


class GenerationTask(Protocol):
    """What can be asked of a model at a length; the module `evaluation.copy_task` is one."""

    def count_right(self, model: Answerer, length: int, numbers: Sequence[int]) -> dict[str, float]:
        """For each score, the sum over some examples of a fixed set of the share that is right."""


class GenerationEvaluation:
    """One task at several lengths.

    Args:
        settings: of the run.
        name: what the names of scores begin with.
        task: makes examples and scores answers.
        chunk: this rank's model, wrapped as the engine needs it.
    """

    def __init__(
        self, settings: Settings, name: str, task: GenerationTask, chunk: nn.Module
    ) -> None:
        self._settings, self._name, self._task, self._chunk = settings, name, task, chunk

    @classmethod
    def of(cls, settings: Settings, chunks: list[nn.Module]) -> GenerationEvaluation | None:
        """What --eval-generation asks for; None without it."""
        if not settings.training.generation_lengths:
            return None
        return cls(settings, "copy", copy_task, chunks[0])

    def scores(self) -> dict[str, float]:
        """`NAME_SCORE_LENGTH` in percent, on every rank."""
        samples = self._settings.training.eval_generation_samples
        rank, ranks = parallel_state.get_data_parallel_rank(), self._settings.data_parallel_size
        found: dict[str, float] = {}
        with uncompiled(self._settings), _answering(self._chunk, self._settings) as model:
            for length in self._settings.training.generation_lengths:
                totals = self._task.count_right(model, length, range(rank, samples, ranks))
                summed = torch.tensor(list(totals.values()), dtype=torch.float64)
                summed = summed.to(host.device())
                dist.all_reduce(summed, group=parallel_state.get_data_parallel_group())
                for score, total in zip(totals, summed.tolist(), strict=True):
                    found[f"{self._name}_{score}_{length}"] = 100 * total / samples
        return found


@contextlib.contextmanager
def _answering(chunk: nn.Module, settings: Settings) -> Iterator[NativeModel]:
    """The model in evaluation mode, whole rows on every rank: one token cannot be divided.

    Megatron-Core's `set_model_to_sequence_parallel` would also turn on what was off before.
    """
    inner = get_attr_wrapped_model(chunk, "decoder", return_model_obj=True)
    config = settings.model
    divided = [
        (module, name)
        for module in inner.modules()
        for name in _SEQUENCE_PARALLEL
        if getattr(module, name, None) is True
    ]
    sequence_parallel = config.sequence_parallel
    _set(divided, False)
    config.sequence_parallel = False
    chunk.eval()
    try:
        yield NativeModel(InferenceModel(chunk, config))
    finally:
        chunk.train()
        config.sequence_parallel = sequence_parallel
        _set(divided, True)


def _set(attributes: list[tuple[nn.Module, str]], value: bool) -> None:
    for module, name in attributes:
        setattr(module, name, value)
