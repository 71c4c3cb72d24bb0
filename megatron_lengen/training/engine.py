"""What computes: a model under data parallelism with its optimizer and schedule.

The loop counts iterations and decides when to validate, save and leave; an engine does the work.
"""

from __future__ import annotations

from pathlib import Path
from typing import Protocol

from megatron.core.dist_checkpointing.strategies.async_utils import AsyncRequest
from megatron.core.distributed import DistributedDataParallel, finalize_model_grads
from megatron.core.optimizer import MegatronOptimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from megatron.core.transformer.module import Float16Module
from torch import nn

from megatron_lengen.runtime import host
from megatron_lengen.training import checkpoint
from megatron_lengen.training.arguments import Settings
from megatron_lengen.training.checkpoint import Progress
from megatron_lengen.training.optimizer import build_optimizer, build_scheduler
from megatron_lengen.training.step import Data, Stepper, StepResult


class Engine(Protocol):
    """What the loop asks of one.

    Args:
        chunks: this rank's model chunks, wrapped as the engine needs them.
    """

    chunks: list[nn.Module]

    def train(self, data: Data, first_sample: int) -> StepResult:
        """One optimizer step on samples first_sample .. first_sample + global batch - 1."""

    def evaluate(self, data: Data, steps: int) -> float:
        """Mean loss over a number of global batches, in evaluation mode."""

    def load(self) -> Progress:
        """Load the run's checkpoint, if it has one; called once, before anything is trained."""

    def save(self, progress: Progress, folder: Path) -> AsyncRequest:
        """Prepare to save everything that a resumed run needs into an empty folder.

        Called by every rank. What is returned writes the tensors, at once or in the background.
        """


class MegatronEngine:
    """Megatron-Core's data parallelism, pipeline schedules and optimizer."""

    def __init__(self, settings: Settings, chunks: list[nn.Module]) -> None:
        self.settings = settings
        self.chunks = _wrap(chunks, settings)
        self.optimizer: MegatronOptimizer = build_optimizer(settings, self.chunks)
        self.scheduler: OptimizerParamScheduler = build_scheduler(settings, self.optimizer)
        _connect(settings, self.chunks, self.optimizer)
        self.stepper = Stepper(settings, self.chunks)

    def train(self, data: Data, first_sample: int) -> StepResult:
        """One optimizer step on samples first_sample .. first_sample + global batch - 1."""
        return self.stepper.train(data, first_sample, self.optimizer, self.scheduler)

    def evaluate(self, data: Data, steps: int) -> float:
        """Mean loss over a number of global batches, in evaluation mode."""
        return self.stepper.evaluate(data, steps)

    def load(self) -> Progress:
        """Load the run's checkpoint, if it has one; called once, before anything is trained."""
        return checkpoint.load(self.settings, self.chunks, self.optimizer, self.scheduler)

    def save(self, progress: Progress, folder: Path) -> AsyncRequest:
        """Prepare to save everything that a resumed run needs into an empty folder.

        Called by every rank. What is returned writes the tensors, at once or in the background.
        """
        return checkpoint.save(
            self.settings, self.chunks, self.optimizer, self.scheduler, progress, folder
        )


def _wrap(chunks: list[nn.Module], settings: Settings) -> list[nn.Module]:
    """Move to the device, to 16 bits where asked, and under data parallelism."""
    wrapped = []
    for index, chunk in enumerate(chunks):
        chunk = chunk.to(host.device())
        if settings.model.bf16:
            chunk = _in_16_bits(chunk, settings)
        wrapped.append(
            DistributedDataParallel(
                settings.model, settings.ddp, chunk, disable_bucketing=index > 0
            )
        )
    for chunk in wrapped:
        chunk.broadcast_params()
        chunk.train()
    return wrapped


def _in_16_bits(chunk: nn.Module, settings: Settings) -> nn.Module:
    """Megatron-Core's wrapper casts every parameter; those that ask for it stay in fp32."""
    kept = [(p, p.data) for p in chunk.parameters() if getattr(p, "keep_in_fp32", False)]
    chunk = Float16Module(settings.model, chunk)
    for parameter, data in kept:
        parameter.data = data
    return chunk


def _connect(settings: Settings, chunks: list[nn.Module], optimizer: MegatronOptimizer) -> None:
    """The callbacks through which Megatron's schedules reach data parallelism and optimizer."""
    config = settings.model
    config.finalize_model_grads_func = finalize_model_grads
    config.grad_scale_func = optimizer.scale_loss
    single = len(chunks) == 1
    if settings.ddp.overlap_grad_reduce:
        no_sync = [chunk.no_sync for chunk in chunks]
        config.no_sync_func = no_sync[0] if single else no_sync
    if settings.ddp.overlap_param_gather:
        sync = [chunk.start_param_sync for chunk in chunks]
        config.param_sync_func = sync[0] if single else sync
