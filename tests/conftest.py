"""What many tests need once per process, and how the unit tests share the cores."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

UNIT = Path(__file__).parent / "unit"


@pytest.hookimpl(tryfirst=True)
def pytest_cmdline_main(config: pytest.Config) -> None:
    """Give all unit tests to as many workers as there are cores, where pytest-xdist is installed.

    `-n 0` prevents it. The other tests start several processes each, and run one after the other.
    """
    asked = getattr(config.option, "numprocesses", 0)  # of a worker, too: that has none of its own
    whole = [config.invocation_params.dir / argument for argument in config.args] == [UNIT]
    if whole and asked is None and not hasattr(config, "workerinput"):
        from megatron_lengen.runtime.cores import available_cores

        config.option.numprocesses = min(8, available_cores())
        config.option.dist = "worksteal"


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
