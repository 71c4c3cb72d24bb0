"""The output layer: logits of the vocabulary, or in training the losses without them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

import torch
from megatron.core.tensor_parallel import (
    ColumnParallelLinear,
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
)
from torch import Tensor

from megatron_lengen.layers.linear import ColumnLinear
from megatron_lengen.ops.linear_cross_entropy import linear_cross_entropy


class Targets(NamedTuple):
    """What a micro-batch is scored on.

    Args:
        labels: [b, s] ids.
        loss_mask: [b, s] what each loss is multiplied by, or None.
    """

    labels: Tensor
    loss_mask: Tensor | None


class OutputLayer(ColumnLinear):
    """Megatron-Core's output projection, made of one by `turn_into_output_layer`.

    Padded rows of the vocabulary get no probability: padding depends on the layout (a multiple of
    the tensor-parallel size), the loss must not. Between its start and end, `scoring` turns the
    output from logits [s, b, v / tp] into losses [s, b].
    """

    vocabulary: int
    _targets: Targets | None

    @contextmanager
    def scoring(self, targets: Targets) -> Iterator[None]:
        """Let `forward` give losses instead of logits."""
        self._targets = targets
        try:
            yield
        finally:
            self._targets = None

    def forward(
        self,
        input_: Tensor,
        weight: Tensor | None = None,
        runtime_gather_output: bool | None = None,
    ) -> tuple[Tensor, None]:
        """[s, b, h] (a part of s under sequence parallelism) -> logits, or fp32 losses [s, b].

        Args:
            weight: the embedding's, where they are tied and on the same stage.
            runtime_gather_output: give all ranks' logits, whatever the layer was built for.
        """
        if self._targets is not None:
            weight = self.weight if weight is None else weight
            return self._losses(input_, weight, self._targets), None
        logits, _ = super().forward(input_, weight, runtime_gather_output)
        gathered = self.gather_output if runtime_gather_output is None else runtime_gather_output
        real = self.vocabulary if gathered else self._real_rows()
        if real < logits.shape[-1]:
            logits[..., real:] = torch.finfo(logits.dtype).min
        return logits, None

    def _real_rows(self) -> int:
        """This rank's rows that are no padding."""
        rows = self.output_size_per_partition
        return max(0, min(rows, self.vocabulary - rows * self.tp_group.rank()))

    def _losses(self, input_: Tensor, weight: Tensor, targets: Targets) -> Tensor:
        if self.sequence_parallel:
            hidden = gather_from_sequence_parallel_region(
                input_, tensor_parallel_output_grad=True, group=self.tp_group
            )
        else:
            hidden = copy_to_tensor_model_parallel_region(input_, group=self.tp_group)
        labels, mask = (
            None if x is None else x.transpose(0, 1).flatten()
            for x in (targets.labels, targets.loss_mask)
        )
        assert labels is not None
        losses = linear_cross_entropy(
            hidden.flatten(0, 1),
            weight,
            labels,
            mask,
            vocabulary=self._real_rows(),
            group=self.tp_group,
        )
        return losses.view(hidden.shape[:2])


def turn_into_output_layer(layer: ColumnParallelLinear, vocabulary: int) -> None:
    """Make Megatron-Core's output projection an `OutputLayer`, in place: its parameter stays.

    Args:
        vocabulary: rows of the whole weight that are tokens.
    """
    layer.__class__ = OutputLayer
    assert isinstance(layer, OutputLayer)
    layer.vocabulary, layer._targets = vocabulary, None
