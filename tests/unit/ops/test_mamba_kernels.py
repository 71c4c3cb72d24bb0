"""When Mamba's own CUDA packages are used, and what they are given; stand-ins compute here."""

from __future__ import annotations

import logging
import sys
from types import SimpleNamespace

import pytest
import torch
from mamba_cases import Scan, documents

from megatron_lengen import compat
from megatron_lengen.ops import mamba_kernels
from megatron_lengen.ops.causal_conv import causal_conv1d
from megatron_lengen.ops.ssd import ssd_scan


@pytest.fixture
def fresh():
    """Nothing imported or said yet."""
    for function in (compat._imports, mamba_kernels._say):
        function.cache_clear()
    yield
    for function in (compat._imports, mamba_kernels._say):
        function.cache_clear()


@pytest.mark.parametrize(
    "error", ["ImportError('undefined symbol')", "OSError()", "RuntimeError()"]
)
def test_a_broken_package_counts_as_absent(fresh, monkeypatch, tmp_path, caplog, error):
    (tmp_path / "causal_conv1d").mkdir()
    (tmp_path / "causal_conv1d" / "__init__.py").write_text(f"raise {error}\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "causal_conv1d", raising=False)
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            assert compat.optional_module("causal_conv1d") is None
    assert len(caplog.records) == 1
    assert "causal_conv1d" in caplog.text


def test_an_absent_package(fresh):
    assert compat.optional_module("no_such_package.of_any.kind") is None


def test_on_the_cpu_neither_is_looked_for(fresh, monkeypatch):
    monkeypatch.setattr(mamba_kernels, "optional_module", lambda name: pytest.fail("looked for"))
    ssd_scan(**Scan(1, 3, 2, 4, 1, 3).inputs())
    causal_conv1d(torch.zeros(1, 3, 8), torch.zeros(8, 4))


@pytest.mark.parametrize(
    "chunk_size, given", [(1, 16), (40, 32), (50, 32), (64, 64), (256, 256), (1000, 256)]
)
def test_kernels_get_powers_of_two(chunk_size, given):
    assert mamba_kernels.kernel_chunk(chunk_size) == given


def test_what_each_package_lacks():
    half = torch.bfloat16
    assert mamba_kernels.lacks_scan(half, 1) is None
    assert mamba_kernels.lacks_scan(torch.float64, 1) == "float64"
    assert "length" in (mamba_kernels.lacks_scan(half, 0) or "")
    assert mamba_kernels.lacks_conv(half, 16, 4, 1) is None
    assert "5 taps" in (mamba_kernels.lacks_conv(half, 16, 5, 1) or "")
    assert "12 channels" in (mamba_kernels.lacks_conv(half, 12, 4, 1) or "")
    assert "documents" in (mamba_kernels.lacks_conv(half, 16, 4, 1, both=True) or "")


@pytest.mark.parametrize("width, rows", [(35072, 8), (35072, 1), (3328, 8)])
def test_rows_within_32_bits(width, rows):
    """Views of a projection's output: its whole width lies between two tokens."""
    for length in (1000, 2**31 // width + 1, 2**31 // width // 4):
        x = torch.empty_strided((rows, length, 64), (length * width, width, 1), device="meta")
        found = mamba_kernels.rows_at_once((x,), 0)
        assert found == min(rows, (2**31 - 1) // (length * width))
    assert mamba_kernels.rows_at_once((torch.zeros(4, 2),), 2**30) == 1


@pytest.fixture
def stand_ins(fresh, monkeypatch):
    """The two packages' functions by their signatures, which note what they are given."""
    seen = []

    def scan(
        x, dt, A, B, C, chunk_size, D=None, z=None, dt_bias=None, initial_states=None,
        seq_idx=None, cu_seqlens=None, dt_softplus=False, return_final_states=False,
    ):  # fmt: skip
        seen.append(("scan", x.shape[0], chunk_size, None if seq_idx is None else seq_idx.dtype))
        return ssd_scan_here(
            x, dt, A, B, C, D=D, seq_idx=seq_idx, initial_states=initial_states,
            return_final_states=return_final_states,
        )  # fmt: skip

    def conv(x, weight, bias=None, seq_idx=None, initial_states=None, activation=None):
        assert x.stride(1) == 1 and x.stride(2) % 8 == 0
        seen.append(("conv", x.shape[0], None if seq_idx is None else seq_idx.dtype))
        return conv_here(
            x.transpose(1, 2), weight, bias, seq_idx=seq_idx, initial_state=initial_states,
            activation=activation,
        ).transpose(1, 2)  # fmt: skip

    module = SimpleNamespace(mamba_chunk_scan_combined=scan, causal_conv1d_fn=conv)

    def without(function):
        def call(*args, **kwargs):
            monkeypatch.setattr(mamba_kernels, "_module", lambda *_: None)
            try:
                return function(*args, **kwargs)
            finally:
                monkeypatch.setattr(mamba_kernels, "_module", lambda *_: module)

        return call

    ssd_scan_here, conv_here = without(ssd_scan), without(causal_conv1d)
    monkeypatch.setattr(mamba_kernels, "_module", lambda *_: module)
    return seen, ssd_scan_here


def test_the_scan_goes_through_it_in_few_rows(stand_ins, monkeypatch):
    seen, ours = stand_ins
    scan = Scan(5, 20, 2, 4, 1, 3)
    seq_idx = documents([7, 13], 5)
    given = {k: v.detach() for k, v in scan.inputs().items()}
    wanted = ours(**given, seq_idx=seq_idx, return_final_states=True)
    monkeypatch.setattr(mamba_kernels, "MOST_NUMBERS", 2 * 20 * 2 * 4)
    found = ssd_scan(**given, seq_idx=seq_idx, chunk_size=50, return_final_states=True)
    assert seen == [("scan", rows, 32, torch.int32) for rows in (2, 2, 1)]
    for a, b in zip(found, wanted, strict=True):
        torch.testing.assert_close(a, b)


def test_rows_too_long_for_it_are_computed_here(stand_ins, monkeypatch, caplog):
    seen, _ = stand_ins
    monkeypatch.setattr(mamba_kernels, "MOST_NUMBERS", 100)
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            assert mamba_kernels.scan(
                *(Scan(2, 20, 2, 4, 1, 3).inputs()[k] for k in ("x", "dt", "A", "B", "C")),
                chunk_size=64, D=None, documents=None, initial=None,
            ) is None  # fmt: skip
    assert not seen
    assert len(caplog.records) == 1
    assert "length in mamba-ssm" in caplog.text


def test_the_convolution_goes_through_it(stand_ins, monkeypatch):
    seen, _ = stand_ins
    x, weight = torch.randn(3, 10, 21)[..., 3:19], torch.randn(16, 4)
    state = torch.randn(3, 16, 3)
    monkeypatch.setattr(mamba_kernels, "MOST_NUMBERS", 500)
    seq_idx = documents([4, 6], 3)
    for options in ({"seq_idx": seq_idx}, {"initial_state": state}):
        found = mamba_kernels.conv(
            x, weight, None,
            state.transpose(1, 2) if "initial_state" in options else None,
            options.get("seq_idx"), True,
        )  # fmt: skip
        torch.testing.assert_close(found, causal_conv1d(x, weight, **options))
    assert [entry[:2] for entry in seen] == [("conv", 2), ("conv", 1)] * 2
    assert {entry[2] for entry in seen[:2]} == {torch.int32}
