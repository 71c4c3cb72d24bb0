"""Weights in the older `pytorch_model.bin` files: where each tensor lies in one."""

from __future__ import annotations

import pickle
import warnings
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatron_lengen.convert.safetensors_files import Entry
from megatron_lengen.errors import BadInput, require


def bin_entries(path: Path) -> dict[str, Entry]:
    """The tensors of a file by name; none is read, and no code in the file is run.

    Raises:
        BadInput: if the file is damaged, holds something else than tensors, or was written before
            PyTorch 1.6.
    """
    from torch._subclasses.fake_tensor import FakeTensorMode

    try:
        with FakeTensorMode(), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch's, of files that it then refuses
            # Shapes and places alone.
            found = torch.load(path, map_location="cpu", weights_only=True)
        return {name: _entry(tensor) for name, tensor in found.items()}
    except pickle.UnpicklingError as error:
        raise BadInput(f"{path}: holds code, which is not run, or is no file of weights") from error
    except Exception as error:
        raise BadInput(f"{path}: damaged or not a file of weights") from error


def _entry(tensor: Tensor) -> Entry:
    first: Any = tensor.untyped_storage()._checkpoint_offset
    require(first is not None, "written before PyTorch 1.6")
    offset = int(first + tensor.storage_offset() * tensor.element_size())
    strides = None if tensor.is_contiguous() else tensor.stride()
    return Entry(tensor.dtype, tuple(tensor.shape), offset, strides)
