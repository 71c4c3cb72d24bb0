"""Initial weights of Mamba2 blocks: mamba-ssm's, or Hugging Face's (`--mamba-init`).

| parameter | `reference`                              | `huggingface`                       |
|-----------|------------------------------------------|-------------------------------------|
| in_proj   | uniform +-1 / sqrt(hidden)               | normal, --init-method-std           |
| out_proj  | uniform +-1 / sqrt(d), / sqrt(layers)    | uniform +-1 / sqrt(d)               |
| conv1d    | uniform +-1 / sqrt(taps), its bias too   | the same, its bias 0                |
| A_log     | log of uniform [1, 16]                   | log of 1 .. heads                   |
| dt_bias   | softplus gives log-uniform [1e-3, 0.1]   | the same                            |
| D, gains  | 1                                        | 1                                   |
| head      | uniform +-1 / sqrt(hidden), if untied    | normal, --init-method-std           |

Embeddings are normal with --init-method-std in both. Both are PyTorch's default for a linear layer
and a convolution where they say uniform.
"""

from __future__ import annotations

import math

import torch
from torch import Generator, Tensor

from megatron_lengen.config import LengenConfig

_STEP_MIN, _STEP_MAX, _STEP_FLOOR = 1e-3, 0.1, 1e-4
_DECAY_MIN, _DECAY_MAX = 1.0, 16.0


def draw(name: str, shape: list[int], generator: Generator, config: LengenConfig) -> Tensor | None:
    """A whole parameter, or a part of a fused one, in fp32; None where GPT's rules hold.

    Args:
        name: as in checkpoints.
        generator: of this parameter alone.
    """
    reference = config.mamba_init == "reference"
    if ".mixer.A_log" in name:
        if not reference:
            return torch.arange(1.0, shape[0] + 1).log()
        return _uniform(shape, _DECAY_MIN, _DECAY_MAX, generator).log()
    if ".mixer.dt_bias" in name:
        low, high = math.log(_STEP_MIN), math.log(_STEP_MAX)
        step = _uniform(shape, low, high, generator).exp().clamp(min=_STEP_FLOOR)
        return step + torch.log(-torch.expm1(-step))  # softplus of this is the step
    if ".mixer.conv1d." in name:
        if ".bias" in name and not reference:
            return torch.zeros(shape)
        return _fan_in(shape, config.mamba_conv_kernel, generator)
    if ".mixer.out_proj." in name:
        weight = _fan_in(shape, shape[1], generator)
        return weight / math.sqrt(config.num_layers) if reference else weight
    if reference and (".mixer.in_proj.weight" in name or name == "output_layer.weight"):
        return _fan_in(shape, shape[1], generator)
    return None


def _fan_in(shape: list[int], inputs: int, generator: Generator) -> Tensor:
    bound = 1 / math.sqrt(inputs)
    return _uniform(shape, -bound, bound, generator)


def _uniform(shape: list[int], low: float, high: float, generator: Generator) -> Tensor:
    return torch.empty(shape).uniform_(low, high, generator=generator)
