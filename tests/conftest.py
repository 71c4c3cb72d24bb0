"""What many tests need once per process, and how tests share the cores."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

# Tests of a GPU have it to themselves.
SHARED = {Path(__file__).parent / name for name in ("unit", "parallel", "parity")}


@pytest.hookimpl(tryfirst=True)
def pytest_cmdline_main(config: pytest.Config) -> None:
    """Give whole folders of tests to as many workers as there are cores; `-n 0` prevents it.

    Where pytest-xdist is installed. Outside of tests/unit a file's tests stay together: most share
    a fixture that takes long.
    """
    asked = getattr(config.option, "numprocesses", 0)  # of a worker, too: that has none of its own
    given = {config.invocation_params.dir / argument for argument in config.args}
    if given <= SHARED and asked is None and not hasattr(config, "workerinput"):
        from megatron_lengen.runtime.cores import available_cores

        config.option.numprocesses = min(8, available_cores())
        alone = {folder.name for folder in given} == {"unit"}
        config.option.dist = "worksteal" if alone else "loadfile"


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
