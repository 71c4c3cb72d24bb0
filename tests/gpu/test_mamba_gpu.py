"""Mamba2's scan and convolution on CUDA, by whatever is installed and by PyTorch operations."""

from __future__ import annotations

import pytest
import torch
from mamba_cases import Scan, assert_conv, assert_scan, boundaries, documents

from megatron_lengen.ops import mamba_kernels
from megatron_lengen.ops.causal_conv import causal_conv1d
from megatron_lengen.ops.ssd import ssd_scan

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

SCANS = [Scan(2, 1, 4, 8, 1, 16), Scan(2, 65, 4, 16, 2, 16), Scan(1, 300, 4, 64, 1, 64)]


@pytest.fixture(params=["installed", "torch"])
def backend(request, monkeypatch) -> str:
    """The packages where they are, and PyTorch operations."""
    if request.param == "torch":
        monkeypatch.setattr(mamba_kernels, "_module", lambda *_: None)
    else:
        modules = (mamba_kernels.SCAN_MODULE, mamba_kernels.CONV_MODULE)
        if not any(mamba_kernels.optional_module(name) for name in modules):
            pytest.skip("needs mamba-ssm or causal-conv1d")
        # Triton's products of fp32 numbers round them to TF32.
        return "installed"
    return request.param


def dtypes_of(backend: str) -> list[torch.dtype]:
    halves = [torch.bfloat16, torch.float16]
    return halves if backend == "installed" else [torch.float32, torch.float64, *halves]


@pytest.fixture(autouse=True)
def exact_products():
    before = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = False
    yield
    torch.backends.cuda.matmul.allow_tf32 = before


@pytest.mark.parametrize("scan", SCANS, ids=str)
def test_scan(backend, scan):
    for dtype in dtypes_of(backend):
        assert_scan(scan, dtype, "cuda")


@pytest.mark.parametrize("places", [(1,), (3,), (64,), (65,), (5, 20, 150, 257)])
def test_documents(backend, places):
    seq_idx = documents(boundaries(300, *places), 1, "cuda")
    for dtype in dtypes_of(backend):
        assert_scan(SCANS[2], dtype, "cuda", seq_idx=seq_idx)
        assert_conv((1, 300, 16), 4, dtype, "cuda", seq_idx=seq_idx)


@pytest.mark.parametrize("taps", [2, 4, 5])
def test_convolution(backend, taps):
    for dtype in dtypes_of(backend):
        assert_conv((2, 70, 24), taps, dtype, "cuda")


def test_nothing_waits_for_the_device(monkeypatch):
    """No value travels to the host, where each would stop the stream."""
    monkeypatch.setattr(mamba_kernels, "_module", lambda *_: None)
    given = SCANS[2].inputs(device="cuda")
    seq_idx = documents([100, 200], 1, "cuda")
    x, weight = torch.randn(1, 300, 16, device="cuda"), torch.randn(16, 4, device="cuda")
    torch.cuda.set_sync_debug_mode("error")
    try:
        ssd_scan(**given, seq_idx=seq_idx).sum().backward()
        causal_conv1d(x, weight, seq_idx=seq_idx)
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_memory_is_linear(monkeypatch):
    """64k tokens: products of all pairs of one head would take 16 GiB."""
    monkeypatch.setattr(mamba_kernels, "_module", lambda *_: None)
    given = Scan(1, 2**16, 4, 64, 1, 64).inputs(torch.bfloat16, "cuda")
    torch.cuda.reset_peak_memory_stats()
    ssd_scan(**given).sum().backward()
    assert torch.cuda.max_memory_allocated() < 8 * 2**30
