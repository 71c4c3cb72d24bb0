"""One training step: a forward step for Megatron's schedules, the update, the loss to report."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel
from megatron.core.optimizer import MegatronOptimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.utils import get_attr_wrapped_model
from torch import Tensor, nn

from megatron_lengen.data.datasets import Batch
from megatron_lengen.layers.context_parallel import tokens_of_rank
from megatron_lengen.layers.coordinates import local_positions, set_documents, set_samples
from megatron_lengen.runtime import host
from megatron_lengen.runtime.agreement import finite_on_all
from megatron_lengen.training.arguments import Settings
from megatron_lengen.training.guards import Reruns, not_finite_in
from megatron_lengen.training.optimizer import apply_gradients

Data = Iterator[Batch] | None | list[Iterator[Batch] | None]


@dataclass(frozen=True)
class StepResult:
    """What a step did.

    Args:
        loss: sum of token losses over number of scored tokens, over the whole batch.
        tokens: number of scored tokens.
        grad_norm: L2 norm of the whole gradient before clipping; nan where the loss is not finite.
        learning_rate: the rate that the update used.
        skipped: whether the update was left out because loss or gradients were not finite.
        not_finite_in: (data-parallel rank, micro-batch) of losses that were not finite.
    """

    loss: float
    tokens: int
    grad_norm: float
    learning_rate: float
    skipped: bool
    not_finite_in: list[tuple[int, int]] = field(default_factory=list)


class Stepper:
    """Runs steps of a model on this rank's share of the batch."""

    def __init__(self, settings: Settings, chunks: list[DistributedDataParallel]) -> None:
        self.settings, self.chunks = settings, chunks
        self._run = get_forward_backward_func()
        self._reruns = Reruns(settings.training.rerun_mode)
        self.first_sample = 0

    def train(
        self,
        data: Data,
        first_sample: int,
        optimizer: MegatronOptimizer,
        scheduler: OptimizerParamScheduler,
    ) -> StepResult:
        """One optimizer step on samples first_sample .. first_sample + global batch - 1.

        Raises:
            Stop: where a rerun was asked for and needed (see guards.py).
        """
        reports: list[Tensor] = []
        for _ in self._reruns.attempts(data):
            for chunk in self.chunks:
                chunk.zero_grad_buffer()
            optimizer.zero_grad()
            reports = self._forward_backward(data, first_sample, forward_only=False)
        loss, tokens = sum_reports(reports)
        loss = finite_on_all(loss)
        rate = float(optimizer.param_groups[0]["lr"])
        grad_norm, places = math.nan, []
        skipped = not math.isfinite(loss)
        if skipped:
            places = not_finite_in(reports, self.settings)
        else:
            grad_norm = apply_gradients(optimizer)
            skipped = not math.isfinite(grad_norm)
        scheduler.step(increment=self.settings.training.global_batch_size)
        return StepResult(loss, tokens, grad_norm, rate, skipped, places)

    @torch.no_grad()
    def evaluate(self, data: Data, steps: int) -> float:
        """Mean loss over a number of global batches, in evaluation mode."""
        for chunk in self.chunks:
            chunk.eval()
        total, tokens = 0.0, 0
        for _ in range(steps):
            loss, count = sum_reports(self._forward_backward(data, 0, forward_only=True))
            total += loss * count
            tokens += count
        for chunk in self.chunks:
            chunk.train()
        return total / max(tokens, 1)

    def _forward_backward(self, data: Data, first_sample: int, forward_only: bool) -> list[Tensor]:
        """(sum of losses, tokens) of each of this rank's micro-batches, on the last stage."""
        self.first_sample = first_sample
        training = self.settings.training
        reports = self._run(
            forward_step_func=self.forward_step,
            data_iterator=data,
            model=self.chunks if len(self.chunks) > 1 else self.chunks[0],
            num_microbatches=self.settings.micro_batches,
            seq_length=self.settings.model.seq_length,
            micro_batch_size=training.micro_batch_size,
            forward_only=forward_only,
        )
        return [report["lm_loss"] for report in reports]

    def forward_step(self, data: Iterator[Batch] | None, chunk: nn.Module) -> tuple[Tensor, Any]:
        """Called by the schedule for each micro-batch on every stage.

        Written so that a GPU can compute one micro-batch while the next is launched: copies are
        from pinned memory, and only reruns (--rerun-mode) wait for a loss.
        """
        model = get_attr_wrapped_model(chunk, "decoder", return_model_obj=True)
        set_samples(self._samples(model.decoder.layers[0].current_microbatch))
        tokens = positions = labels = loss_mask = None
        if data is not None:
            batch = next(data)
            tokens, labels, loss_mask = (
                tokens_of_rank(batch[key]).to(host.device(), non_blocking=True)
                for key in ("tokens", "labels", "loss_mask")
            )
            if self.settings.model.document_boundaries == "mask":
                set_documents(batch["documents"].to(host.device(), non_blocking=True))
            positions = local_positions(tokens.shape[1], sequence_sharded=False).expand_as(tokens)
        scored: dict[str, Tensor | None] = {"labels": None}
        if model.post_process:
            scored = {"labels": labels, "loss_mask": loss_mask}
        output = chunk(tokens, positions, None, **scored)

        def loss(output: Tensor) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
            assert loss_mask is not None
            total = output.sum()  # the loss mask is in it
            if torch.is_grad_enabled():
                self._reruns.check(total.detach())
            count = loss_mask.sum().to(torch.int)
            return total, count, {"lm_loss": torch.stack((total.detach().double(), count.double()))}

        return output, loss

    def _samples(self, micro_batch: int) -> Tensor:
        """Sample numbers of a micro-batch: no stage needs data to know them."""
        rows = self.settings.training.micro_batch_size
        ranks = self.settings.data_parallel_size
        first = self.first_sample + micro_batch * rows * ranks
        first += parallel_state.get_data_parallel_rank() * rows
        return torch.arange(first, first + rows, device=host.device())


def sum_reports(reports: list[Tensor]) -> tuple[float, int]:
    """Loss and token count of the whole batch, on every rank."""
    total = torch.zeros(2, dtype=torch.float64, device=host.device())
    for report in reports:
        total += report
    dist.all_reduce(total, group=parallel_state.get_data_parallel_group(with_context_parallel=True))
    dist.broadcast(
        total,
        src=parallel_state.get_pipeline_model_parallel_last_rank(),
        group=parallel_state.get_pipeline_model_parallel_group(),
    )
    loss_sum, tokens = total.tolist()
    return loss_sum / max(tokens, 1.0), int(tokens)
