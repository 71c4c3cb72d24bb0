"""Transformers' models from folders and from tensors, without its progress bars."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor


def load_hf_fp32(folder: Path, model_class: Any) -> tuple[Any, dict[str, Any]]:
    """A folder's model in fp32 with transformers' loading report."""
    with quiet_transformers():
        return model_class.from_pretrained(folder, dtype=torch.float32, output_loading_info=True)


def load_state_dict_as_hf(
    hf: Mapping[str, Any], tensors: dict[str, Tensor], model_class: Any
) -> tuple[Any, dict[str, Any]]:
    """A model from a configuration and tensors, in the configuration's dtype."""
    with quiet_transformers():
        return model_class.from_pretrained(
            None,
            config=model_class.config_class.from_dict(dict(hf)),
            state_dict=tensors,
            dtype=getattr(torch, hf["dtype"]),
            output_loading_info=True,
        )


@contextmanager
def quiet_transformers() -> Iterator[None]:
    """Transformers without its progress bars and reminders; what matters is checked by callers."""
    from transformers.utils import logging

    shown, verbosity = logging.is_progress_bar_enabled(), logging.get_verbosity()
    logging.disable_progress_bar()
    logging.set_verbosity_error()
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)
        if shown:
            logging.enable_progress_bar()
