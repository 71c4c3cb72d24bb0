"""What many tests need once per process."""

from __future__ import annotations

from collections.abc import Iterator

import pytest


@pytest.fixture(scope="session")
def process_groups() -> Iterator[None]:
    """Megatron's process groups of a single process, and seeded generators."""
    from megatron.core import parallel_state
    from tiny_models import tiny_config

    from megatron_lengen.runtime import distributed

    if not parallel_state.model_parallel_is_initialized():
        distributed.start(tiny_config())
    yield
    distributed.stop()
