"""The compiled CPU kernels: built once, missed politely, the same on any number of threads."""

from __future__ import annotations

import logging

import pytest
import torch
from norm_reference import EPS, assert_near, dropout_at, reference, tensors

from megatron_lengen.ops import native
from megatron_lengen.ops.rmsnorm import rms_norm_dropout


def test_gradients_do_not_depend_on_the_number_of_threads():
    if native.load_library() is None:
        pytest.skip("no C++ compiler: the CPU kernels are not built")
    before, results = torch.get_num_threads(), []
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            x, gain, dz = tensors(101, 2, 130, torch.float32)
            z = rms_norm_dropout(x, gain, EPS, dropout_at("vpad", 101, 2, False, False))
            z.backward(dz)
            results.append((z.detach(), x.grad, gain.grad))
    finally:
        torch.set_num_threads(before)
    for other in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results[0], other, strict=True))


@pytest.fixture
def fresh_loader():
    native.load_library.cache_clear()
    yield
    native.load_library.cache_clear()


@pytest.mark.parametrize("compiler", ["none", "failing", "not a program"])
def test_without_a_compiler_pytorch_does_the_work(
    fresh_loader, monkeypatch, caplog, tmp_path, compiler
):
    monkeypatch.setenv("LENGEN_CACHE", str(tmp_path))
    if compiler == "none":
        monkeypatch.delenv("CXX", raising=False)
        monkeypatch.setattr(native.shutil, "which", lambda name: None)
    else:
        monkeypatch.setenv("CXX", "false" if compiler == "failing" else "/no/such/compiler")
    x, gain, dz = tensors(3, 2, 40, torch.float32)
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            z = rms_norm_dropout(x, gain, EPS, dropout_at("vpad", 3, 2))
    assert len(caplog.records) == 1
    assert "PyTorch operations" in caplog.text
    assert_near(z, reference(x, gain, dz, "vpad", True, True)[0], torch.float32)
    assert list(tmp_path.iterdir()) == []


def test_kernels_are_built_once_into_the_chosen_folder(fresh_loader, monkeypatch, tmp_path):
    if native.load_library() is None:
        pytest.skip("no C++ compiler")
    native.load_library.cache_clear()
    monkeypatch.setenv("LENGEN_CACHE", str(tmp_path / "cache"))
    assert native.load_library() is not None
    (built,) = (tmp_path / "cache").iterdir()
    native.load_library.cache_clear()
    monkeypatch.setattr(native.subprocess, "run", lambda *a, **k: pytest.fail("compiled again"))
    assert native.load_library() is not None
    assert list((tmp_path / "cache").iterdir()) == [built]
