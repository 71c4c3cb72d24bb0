"""DeepSpeed around the same model: ZeRO stages 0 to 3, optimizer and weights on the CPU.

Data, masks, schedule, metrics and the weights in checkpoints are those of Megatron-Core's engine.
DeepSpeed partitions, reduces and updates.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.dist_checkpointing.strategies.async_utils import AsyncRequest
from megatron.core.pipeline_parallel.schedules import set_current_microbatch
from megatron.core.transformer.module import Float16Module
from torch import Tensor, nn

from megatron_lengen.data.datasets import Batch
from megatron_lengen.runtime import host
from megatron_lengen.training import checkpoint, deepspeed_state
from megatron_lengen.training.arguments import Settings
from megatron_lengen.training.checkpoint import Progress
from megatron_lengen.training.deepspeed_adam import build_adam
from megatron_lengen.training.deepspeed_host import import_deepspeed, quiet
from megatron_lengen.training.guards import not_finite_in
from megatron_lengen.training.optimizer import build_scheduler
from megatron_lengen.training.step import Data, Stepper, StepResult, sum_reports


class DeepSpeedEngine:
    """One model chunk under DeepSpeed, with tensor and data parallelism."""

    def __init__(self, settings: Settings, chunks: list[nn.Module]) -> None:
        (chunk,) = chunks
        if settings.model.bf16:
            chunk = Float16Module(settings.model, chunk)
        self.settings = settings
        self.chunks = [chunk.train()]
        _sum_partial_gradients(settings, chunk)
        self._mpu = _process_groups()
        self.optimizer = build_adam(settings, chunk, self._mpu)
        self.scheduler = build_scheduler(settings, self.optimizer)
        self.stepper = Stepper(settings, self.chunks)
        self._deepspeed: Any = None  # started by `load`

    def train(self, data: Data, first_sample: int) -> StepResult:
        """One optimizer step on samples first_sample .. first_sample + global batch - 1."""
        assert isinstance(data, Iterator)
        batches = [next(data) for _ in range(self.settings.micro_batches)]
        # The step's loss is a mean over its tokens, and DeepSpeed takes means over ranks.
        weight = self.settings.data_parallel_size / max(_scored_tokens(batches), 1)
        rate = float(self.optimizer.param_groups[0]["lr"])
        self.stepper.first_sample = first_sample
        reports = []
        for number, batch in enumerate(batches):
            set_current_microbatch(self._deepspeed, number)
            output, loss_of = self.stepper.forward_step(iter([batch]), self._deepspeed)
            total, _, report = loss_of(output)
            # A loss that is not finite makes every gradient nan, whatever backward would give:
            # DeepSpeed then leaves the update out, on all ranks.
            poison = 0.0 * total.detach()
            self._deepspeed.backward(total * (weight + poison), scale_wrt_gas=False)
            self._deepspeed.step()
            reports.append(report["lm_loss"])
        loss, tokens = sum_reports(reports)
        grad_norm, places = math.nan, []
        if math.isfinite(loss):
            grad_norm = float(self._deepspeed.get_global_grad_norm())
        else:
            places = not_finite_in(reports, self.settings)
        skipped = not self._deepspeed.was_step_applied()
        self.scheduler.step(increment=self.settings.training.global_batch_size)
        return StepResult(loss, tokens, grad_norm, rate, skipped, places)

    def evaluate(self, data: Data, steps: int) -> float:
        """Mean loss over a number of global batches, in evaluation mode."""
        return self.stepper.evaluate(data, steps)

    def load(self) -> Progress:
        """Load the run's checkpoint, if it has one; called once, before anything is trained.

        DeepSpeed starts here: it takes its copies from the weights as they are then.
        """
        settings, found = self.settings, self.settings.load_from
        resumes = checkpoint.resumes_optimizer(settings)
        if resumes:
            deepspeed_state.check(settings)
        loaded = None if found is None else checkpoint.read(settings, self.chunks)
        with quiet():
            self._deepspeed, *_ = import_deepspeed().initialize(
                model=self.chunks[0],
                optimizer=self.optimizer,
                mpu=self._mpu,
                config=copy.deepcopy(settings.deepspeed),
            )
        if resumes:
            deepspeed_state.load(settings, self._deepspeed)
        if loaded is None:
            return Progress()
        return checkpoint.position(settings, loaded, self.scheduler)

    def save(self, progress: Progress, folder: Path) -> AsyncRequest:
        """Prepare to save everything that a resumed run needs into an empty folder.

        Called by every rank. What is returned writes the weights, at once or in the background;
        the optimizer's state is written here.
        """
        with deepspeed_state.whole_weights(self.settings, self.chunks[0]):
            request = checkpoint.save(
                self.settings, self.chunks, None, self.scheduler, progress, folder
            )
        if not self.settings.training.no_save_optim:
            deepspeed_state.save(self._deepspeed, folder)
        return request


def _scored_tokens(batches: list[Batch]) -> int:
    """Number of tokens of the whole step that count, on every rank."""
    own = sum(int(batch["loss_mask"].sum()) for batch in batches)
    total = torch.tensor(own, dtype=torch.int64, device=host.device())
    dist.all_reduce(total, group=parallel_state.get_data_parallel_group())
    return int(total)


def _sum_partial_gradients(settings: Settings, chunk: nn.Module) -> None:
    """Let the gradients that sequence parallelism leaves partial be sums over all tokens.

    What is applied to a rank's own tokens (norm gains) sees only those in backward. Megatron-Core
    sums such gradients over tensor-parallel ranks at the end of a step; DeepSpeed does not, and
    replicas would drift apart.
    """
    if not settings.model.sequence_parallel:
        return
    group = parallel_state.get_tensor_model_parallel_group()

    def sum_over_ranks(gradient: Tensor) -> Tensor:
        total = gradient.to(torch.float32, copy=True)
        dist.all_reduce(total, group=group)
        return total.to(gradient.dtype)

    for parameter in chunk.parameters():
        if getattr(parameter, "sequence_parallel", False):
            parameter.register_hook(sum_over_ranks)


def _process_groups() -> SimpleNamespace:
    """Megatron-Core's process groups by the names that DeepSpeed asks for."""
    return SimpleNamespace(
        get_model_parallel_rank=parallel_state.get_tensor_model_parallel_rank,
        get_model_parallel_world_size=parallel_state.get_tensor_model_parallel_world_size,
        get_model_parallel_group=parallel_state.get_tensor_model_parallel_group,
        get_data_parallel_rank=parallel_state.get_data_parallel_rank,
        get_data_parallel_world_size=parallel_state.get_data_parallel_world_size,
        get_data_parallel_group=parallel_state.get_data_parallel_group,
    )
