"""Which backend is chosen, on devices and with packages that need not be here."""

from __future__ import annotations

import logging

import pytest
import torch
from attention_cases import inputs, weighting_of

from megatron_lengen.ops import attention_choice
from megatron_lengen.ops.attention import attention
from megatron_lengen.ops.attention_choice import Choice, Request, choose, request_of
from megatron_lengen.ops.weighting import Weighting, naive_attention

ALL = frozenset({"triton", "adasplash", "flash_attn", "native"})
NO_KERNELS = ALL - {"native"}
NO_ADASPLASH = ALL - {"adasplash"}


def request(*features: str, **changes) -> Request:
    settings = {
        "features": frozenset(features),
        "alpha": 1.0,
        "device": "cuda",
        "dtype": torch.bfloat16,
        "queries": 4096,
        "keys": 4096,
        "channels": 64,
        **changes,
    }
    return Request(**settings)


CHOICES = [
    # softmax on CUDA
    (request(), ALL, "blocks"),
    (request("scale"), ALL, "blocks"),
    (request("window"), ALL, "flex"),
    (request("documents"), ALL, "flex"),
    (request("slopes", "window", "documents", "scale"), ALL, "flex"),
    (request(queries=1024), ALL, "flex"),
    (request(queries=1), ALL, "blocks"),
    (request("slopes", queries=1), ALL, "tiles"),
    (request("dropout"), ALL, "tiles"),
    (request("window", "dropout"), ALL, "tiles"),
    (request("window", channels=8), ALL, "blocks"),
    (request("window", channels=512), ALL, "blocks"),
    (request("window", dtype=torch.float64), ALL, "blocks"),
    (request("window"), frozenset(), "blocks"),
    (request("documents"), frozenset(), "tiles"),
    # Transformer Engine's spec
    (request(te=True), ALL, "te"),
    (request("window", "scale", te=True), ALL, "te"),
    (request("window", te=True, context_parallel=True), ALL, "te"),
    (request("slopes", te=True), ALL, "flex"),
    (request("documents", te=True), ALL, "te"),
    (request("documents", "window", "scale", te=True), ALL, "te"),
    (request("documents", "slopes", te=True), ALL, "flex"),
    (request("documents", te=True), frozenset({"triton"}), "flex"),
    (request("documents", te=True, context_parallel=True), ALL, "flex"),
    (request("dropout", te=True), ALL, "tiles"),
    (request("window", te=True, dtype=torch.float32), ALL, "flex"),
    (request("window", te=True, queries=1024), ALL, "flex"),
    (request(te=True, alpha=1.5), NO_ADASPLASH, "triton"),
    # entmax on CUDA
    (request(alpha=1.5), ALL, "adasplash"),
    (request("scale", alpha=1.5), ALL, "adasplash"),
    (request(alpha=1.5), NO_ADASPLASH, "triton"),
    (request(alpha=1.4), ALL, "triton"),
    (request(alpha=1.5, channels=80), ALL, "triton"),
    (request(alpha=1.5, queries=1000, keys=1000), ALL, "triton"),
    (request(alpha=1.5, queries=32, keys=32), ALL, "triton"),
    (request(alpha=1.5, queries=2048), ALL, "triton"),
    (request("slopes", alpha=1.5), ALL, "triton"),
    (request("window", alpha=1.5), ALL, "triton"),
    (request("documents", alpha=1.5), ALL, "triton"),
    (request("dropout", alpha=1.5), ALL, "tiles"),
    (request(alpha=1.5, channels=512), NO_ADASPLASH, "tiles"),
    (request(alpha=1.5, dtype=torch.float64), NO_ADASPLASH, "tiles"),
    (request(alpha=1.5), frozenset(), "tiles"),
    # the CPU, whatever is installed
    (request(device="cpu"), ALL, "native"),
    (request("window", device="cpu", queries=1024), ALL, "native"),
    (request("window", "slopes", "documents", "scale", device="cpu"), ALL, "native"),
    (request(device="cpu", dtype=torch.float32, te=True), ALL, "native"),
    (request(device="cpu", dtype=torch.float64), ALL, "blocks"),
    (request(device="cpu", dtype=torch.float16), ALL, "blocks"),
    (request(device="cpu", queries=1), ALL, "blocks"),
    (request("slopes", device="cpu", queries=1), ALL, "tiles"),
    (request("dropout", device="cpu"), ALL, "tiles"),
    (request(device="cpu", alpha=1.5), ALL, "tiles"),
    # the CPU without a compiler
    (request(device="cpu"), NO_KERNELS, "blocks"),
    (request("window", device="cpu", queries=1024), NO_KERNELS, "tiles"),
    (request("documents", device="cpu"), NO_KERNELS, "tiles"),
    (request("slopes", device="cpu"), NO_KERNELS, "tiles"),
    (request("window", device="cpu", te=True), NO_KERNELS, "blocks"),
]


@pytest.mark.parametrize("asked, packages, backend", CHOICES)
def test_the_first_that_serves_everything(asked, packages, backend):
    assert choose(asked, packages).backend == backend


def test_what_is_passed_over_is_named_with_what_it_lacks():
    assert choose(request("documents", "dropout", te=True), ALL) == Choice(
        "tiles",
        (("te", "dropout of weights"), ("flex", "dropout of weights"), ("blocks", "documents")),
    )
    assert choose(request("slopes", alpha=1.5), ALL).passed_over == (("adasplash", "ALiBi slopes"),)
    assert choose(request("window"), frozenset()).passed_over == (("flex", "Triton"),)
    for asked, packages, _ in CHOICES:
        choice = choose(asked, packages)
        assert choice.backend not in dict(choice.passed_over)


def test_a_request_names_every_feature_of_a_weighting():
    q, k, _ = inputs(5, 21, 2, torch.bfloat16)
    found = request_of(q, k, weighting_of("window slopes documents dropout scale", 21, 1.5))
    assert found == Request(
        features=frozenset({"window", "slopes", "documents", "dropout", "scale"}),
        alpha=1.5,
        device="cpu",
        dtype=torch.bfloat16,
        queries=5,
        keys=21,
        channels=8,
    )
    assert request_of(q, k, Weighting(window=21)).features == frozenset()


def test_it_is_said_once(caplog, monkeypatch):
    monkeypatch.setattr(attention_choice.native, "load_library", lambda: None)
    attention_choice._say.cache_clear()
    qkv = inputs(9, 9, 2)
    with caplog.at_level(logging.WARNING, logger=attention_choice.__name__):
        for _ in range(3):
            attention(*qkv, weighting_of("documents", 9))
            attention(*qkv, weighting_of("window", 9))
            attention(*qkv, weighting_of("", 9, 1.5))
    assert [record.getMessage() for record in caplog.records] == [
        "attention: no documents in PyTorch's SDPA; tiles of PyTorch operations used"
    ]


def test_adasplash_is_called_as_it_documents(monkeypatch):
    """A scale of its own, contiguous rows, causal; the package stands in."""
    import sys
    import types

    def stand_in(q, k, v, alpha, is_causal):
        assert is_causal and all(x.is_contiguous() for x in (q, k, v))
        return naive_attention(q, k, v, Weighting(alpha=alpha))

    package = types.ModuleType("adasplash")
    package.adasplash = stand_in
    monkeypatch.setitem(sys.modules, "adasplash", package)
    monkeypatch.setattr("megatron_lengen.ops.attention.choose_aloud", lambda asked: "adasplash")
    q, k, v = inputs(64, 64, 2, channels=16)
    weighting = Weighting(alpha=1.5, scale=0.7)
    found = attention(q.transpose(1, 2).contiguous().transpose(1, 2), k, v, weighting)
    torch.testing.assert_close(found, naive_attention(q, k, v, weighting), rtol=1e-5, atol=1e-5)
