"""Both ways of computing on the CPU."""

from __future__ import annotations

import pytest

from megatron_lengen.ops import native


@pytest.fixture(params=["native", "torch"])
def path(request, monkeypatch) -> str:
    """Run with the compiled kernels, and with PyTorch operations."""
    if request.param == "torch":
        monkeypatch.setattr(native, "load_library", lambda: None)
    elif native.load_library() is None:
        pytest.skip("no C++ compiler: the CPU kernels are not built")
    return request.param
