"""Small tensors that are the same in every layer and step, kept on their device.

To make one on a GPU is a copy from the host, which waits until the GPU has done all it was asked.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor

Numbers = float | tuple[float, ...]


@functools.lru_cache(maxsize=256)
def constant(values: Numbers, dtype: torch.dtype, device: torch.device, use: str = "") -> Tensor:
    """A number as [], or numbers as [n]; not to be changed.

    One that is made while a model is evaluated may serve training afterwards.

    Args:
        use: equal numbers of two uses are two tensors, for a compiler that looks for the same one.
    """
    with torch.inference_mode(False):
        return torch.tensor(values, dtype=dtype, device=device)
