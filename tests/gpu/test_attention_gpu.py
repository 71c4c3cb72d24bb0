"""Attention's CUDA backends against the definition, gradients included."""

from __future__ import annotations

import importlib.util

import pytest
import torch
from attention_cases import FEATURES, Case, assert_naive, assert_same, weighting_of

from megatron_lengen.ops.attention import attention
from megatron_lengen.ops.attention_choice import choose, installed, request_of
from megatron_lengen.ops.tiles import tiled_attention
from megatron_lengen.ops.weighting import Weighting

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

SIZES = [(1, 1, 4), (63, 63, 2), (65, 65, 4), (257, 257, 1), (100, 257, 2), (200, 456, 2)]
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("names", ["", "window scale", "slopes", "documents", "slopes documents"])
@pytest.mark.parametrize("sq, sk, groups", SIZES)
def test_flex_attention(sq, sk, groups, names, dtype):
    from megatron_lengen.ops.attention_flex import flex_attention

    assert_naive(Case(names, 1.0, sq, sk, groups, dtype=dtype), flex_attention, "cuda")


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("alpha", [1.2, 1.5, 2.0])
@pytest.mark.parametrize("names", ["", "window scale", "slopes", "documents", "slopes documents"])
@pytest.mark.parametrize("sq, sk, groups", SIZES)
def test_triton_kernels(sq, sk, groups, names, alpha, dtype):
    from megatron_lengen.ops.entmax_triton import entmax_attention

    assert_naive(Case(names, alpha, sq, sk, groups, dtype=dtype), entmax_attention, "cuda")


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("channels", [8, 16, 64, 80, 128, 256])
def test_triton_kernels_of_every_width(channels, dtype):
    from megatron_lengen.ops.entmax_triton import entmax_attention

    case = Case("slopes documents", 1.5, 130, 130, 2, channels=channels, dtype=dtype)
    assert_naive(case, entmax_attention, "cuda")


@pytest.mark.skipif(importlib.util.find_spec("adasplash") is None, reason="needs adasplash")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_adasplash(dtype):
    case = Case("scale", 1.5, 256, 256, 2, channels=64, dtype=dtype)
    q, k, _ = case.inputs("cuda")
    request = request_of(q, k, case.weighting("cuda"))
    assert choose(request, installed()).backend == "adasplash"
    assert_naive(case, attention, "cuda")


@pytest.mark.parametrize("alpha", [1.0, 1.5])
@pytest.mark.parametrize("names", FEATURES)
def test_whatever_is_chosen(names, alpha):
    assert_naive(Case(names, alpha, 257, 257, 2, dtype=torch.bfloat16), attention, "cuda")


@pytest.mark.parametrize("names", ["", "slopes"])
def test_triton_kernels_equal_tiles_at_length(names):
    """A row of 4096: marks, reach and Newton's steps where most blocks have no weight."""
    from megatron_lengen.ops.entmax_triton import entmax_attention

    case = Case(names, 1.5, 4096, 4096, 1, heads=2, channels=64)
    qkv, weighting = case.inputs("cuda"), case.weighting("cuda")
    found = entmax_attention(*qkv, weighting)
    assert_same(qkv, found, tiled_attention(*qkv, weighting), 5e-5)


@pytest.mark.parametrize("alpha", [1.0, 1.5])
def test_memory_is_linear(alpha):
    """64k tokens: one head's scores alone would take 16 GiB."""
    generator = torch.Generator("cuda").manual_seed(0)
    q, k, v = (
        torch.randn(1, 2, 2**16, 64, generator=generator, device="cuda", dtype=torch.bfloat16)
        .requires_grad_()
        for _ in range(3)
    )  # fmt: skip
    documents = (torch.arange(2**16, device="cuda") // 5000)[None]
    torch.cuda.reset_peak_memory_stats()
    attention(q, k, v, Weighting(documents=documents, alpha=alpha)).sum().backward()
    assert torch.cuda.max_memory_allocated() < 2**30


@pytest.mark.parametrize("alpha", [1.0, 1.5])
@pytest.mark.parametrize("names", ["documents", "documents window", "documents slopes"])
def test_another_document_changes_no_bit(names, alpha):
    case = Case(names, alpha, 180, 180, 2)
    q, k, v = (x.detach() for x in case.inputs("cuda"))
    weighting = weighting_of(names, 180, alpha, device="cuda")  # row 0: documents of 9 keys
    before = attention(q, k, v, weighting)
    k[0, :, 8] += 3
    v[0, :, 8] -= 5
    after = attention(q, k, v, weighting)
    assert torch.equal(before[0, :, 9:], after[0, :, 9:])
    assert not torch.equal(before[0, :, 8], after[0, :, 8])
