"""What tests of this folder share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch.distributed as dist


@pytest.fixture
def own_process_group() -> Iterator[None]:
    """Models for inference start a process group: none is left where there was none."""
    from megatron_lengen.runtime import distributed

    had_one = dist.is_initialized()
    yield
    if not had_one:
        distributed.stop()
