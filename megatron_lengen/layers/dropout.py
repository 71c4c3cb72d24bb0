"""The dropout family as modules use it: which site, and how a mask finds its coordinates."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import IntEnum

import torch.distributed as dist
from torch import Tensor, nn

from megatron_lengen.layers.coordinates import current_samples, local_positions
from megatron_lengen.ops.mask import MaskCoordinates
from megatron_lengen.ops.rmsnorm import Dropout, affine_dropout


class Site(IntEnum):
    """Numbers of the places of a layer that draw masks; part of every mask, so never renumber."""

    ATTENTION_NORM = 0
    MLP_NORM = 1
    FINAL_NORM = 2
    ATTENTION_OUTPUT = 3
    MLP_OUTPUT = 4
    ATTENTION_WEIGHTS = 5
    MIXER_NORM = 6  # Mamba2: the block's norm, the gated norm, the output, the projections' inputs
    GATED_NORM = 7
    Q = 8
    K = 9
    V = 10
    O = 11  # noqa: E741
    G = 12
    U = 13
    D = 14
    MIXER_OUTPUT = 15
    I = 16  # noqa: E741


@dataclass(frozen=True)
class DropoutSite:
    """Dropout at one place of one layer.

    Args:
        variant, rate, detach_alpha, detach_beta: see `ops.rmsnorm.Dropout`.
        seed: the run's seed.
        layer: zero-based global layer.
        site: the place in the layer.
        sequence_sharded: whether tensor-parallel ranks hold parts of the sequence here (SP).
    """

    variant: str
    rate: float
    detach_alpha: bool
    detach_beta: bool
    seed: int
    layer: int
    site: Site
    sequence_sharded: bool

    def for_tensor(
        self, x: Tensor, first_channel: int = 0, group: dist.ProcessGroup | None = None
    ) -> Dropout:
        """Dropout of x [s, b, d] of the current micro-batch.

        Args:
            first_channel, group: where the features are sharded: this rank's first channel and
                the ranks that share them.
        """
        samples = current_samples()
        if samples.shape[0] != x.shape[1]:
            raise RuntimeError(
                f"dropout knows {samples.shape[0]} sample numbers for a batch of {x.shape[1]} rows"
            )
        coordinates = MaskCoordinates(
            seed=self.seed,
            samples=samples,
            positions=local_positions(x.shape[0], self.sequence_sharded),
            layer=self.layer,
            site=self.site,
            first_channel=first_channel,
        )
        return Dropout(
            self.variant, self.rate, coordinates, self.detach_alpha, self.detach_beta, group
        )


class ResidualAdd(nn.Module):
    """Adds a sublayer's output to the residual stream, with `pre_norm` dropout on it (Eq. 6).

    Fills a spec's bias-dropout-add slots: called with (training, fused) it returns the function
    that Megatron's layer applies. `site` stays None without dropout. `sums` is set where the norm
    that reads the sum can be computed in the same pass.
    """

    def __init__(self) -> None:
        super().__init__()
        self.site: DropoutSite | None = None
        self.sums: Callable[[Tensor, Tensor], Tensor] | None = None

    def forward(self, training: bool, fused: bool) -> Callable[..., Tensor]:
        """The function (output and bias, residual, probability) -> [s, b, h]."""

        def add(
            output_with_bias: tuple[Tensor, Tensor | None], residual: Tensor, probability: float
        ) -> Tensor:
            output, bias = output_with_bias
            if bias is not None:
                output = output + bias
            if training and self.site is not None:
                output = affine_dropout(output, self.site.for_tensor(output))
            # Megatron-Core turns gradients on around this also where a layer is to be recomputed:
            # the norm's weight would then keep what no backward asks for.
            if training and output.requires_grad and self.sums is not None:
                return self.sums(output, residual)
            return residual + output

        return add
