"""The compiled CPU attention against its definition in float64, gradients included."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
from attention_cases import Case, assert_same, inputs, weighting_of
from torch import Tensor

from megatron_lengen.ops import attention_choice, native
from megatron_lengen.ops.attention import attention
from megatron_lengen.ops.attention_choice import choose_aloud, request_of
from megatron_lengen.ops.attention_native import native_attention
from megatron_lengen.ops.weighting import Weighting, naive_attention

pytestmark = pytest.mark.skipif(
    native.load_library() is None, reason="no C++ compiler: the CPU kernels are not built"
)

FEATURES = ["", "window scale", "slopes", "documents", "window slopes documents"]
SIZES = [(1, 1), (31, 31), (33, 33), (65, 65), (257, 257), (4, 300), (70, 200), (130, 131)]


def expected_of(qkv: list[Tensor], weighting: Weighting) -> Tensor:
    """The definition on float64 copies, whose gradients come back in the inputs' dtype."""
    return naive_attention(*(x.double() for x in qkv), weighting)


def assert_native(case: Case) -> None:
    qkv, weighting = case.inputs(), case.weighting()
    found = native_attention(*qkv, weighting)
    assert found.dtype == case.dtype
    # Gradients start from the output as it was rounded to bf16.
    tolerance = 5e-6 if case.dtype == torch.float32 else case.tolerance
    assert_same(qkv, found, expected_of(qkv, weighting), tolerance)


@pytest.mark.parametrize("names", FEATURES)
@pytest.mark.parametrize("sq, sk", SIZES)
@pytest.mark.parametrize("groups", [4, 2, 1])
def test_equals_the_definition(names, sq, sk, groups):
    assert_native(Case(names, 1.0, sq, sk, groups))


@pytest.mark.parametrize("channels", [1, 8, 24, 32, 64, 80, 128, 256, 300])
@pytest.mark.parametrize("names", ["", "window slopes documents"])
def test_heads_of_any_width(names, channels):
    assert_native(Case(names, 1.0, 67, 75, 2, channels=channels))


@pytest.mark.parametrize("names", FEATURES)
@pytest.mark.parametrize("sq, sk", [(65, 65), (257, 257), (70, 200)])
def test_bf16(names, sq, sk):
    assert_native(Case(names, 1.0, sq, sk, 2, channels=40, dtype=torch.bfloat16))


@pytest.mark.parametrize("window", [1, 2, 63, 64, 65, 128, 600, 700, 5000])
def test_windows_of_long_rows(window):
    """Several spans a row, whose sums for keys overlap, at every place of a tile's edge."""
    qkv = inputs(700, 900, 1, heads=2)
    weighting = Weighting(window)
    assert_same(qkv, native_attention(*qkv, weighting), expected_of(qkv, weighting), 5e-6)


@pytest.mark.parametrize("window", [None, 100])
def test_documents_of_all_lengths(window):
    qkv = inputs(650, 650, 1, heads=2)
    lengths = torch.tensor([[1, 1, 62, 64, 65, 200, 257], [300, 20, 44, 1, 127, 128, 30]])
    documents = torch.stack([torch.arange(7).repeat_interleave(row) * 3 for row in lengths])
    weighting = Weighting(window, documents=documents)
    assert_same(qkv, native_attention(*qkv, weighting), expected_of(qkv, weighting), 5e-6)


@pytest.mark.parametrize("scale", [0.0, -0.5, 3.0])
def test_any_scale(scale):
    qkv = inputs(90, 90, 2)
    weighting = Weighting(scale=scale)
    assert_same(qkv, native_attention(*qkv, weighting), expected_of(qkv, weighting), 2e-5)


def test_values_of_another_width():
    q, k, _ = inputs(100, 120, 2)
    v = torch.randn(2, 2, 120, 21, generator=torch.Generator().manual_seed(3)).requires_grad_()
    found = native_attention(q, k, v, Weighting(50))
    assert found.shape == (2, 4, 100, 21)
    assert_same([q, k, v], found, expected_of([q, k, v], Weighting(50)), 5e-6)


def test_large_scores_neither_overflow_nor_vanish():
    q, k, v = inputs(80, 80, 2)
    weighting = Weighting(scale=300.0)
    found = native_attention(q, k, v, weighting)
    torch.testing.assert_close(found.double(), expected_of([q, k, v], weighting), rtol=0, atol=2e-3)


def test_the_only_key_has_weight_one():
    q, k, v = inputs(70, 70, 4)
    assert torch.equal(native_attention(q, k, v, Weighting(1)), v)
    assert torch.equal(native_attention(q, k, v, Weighting())[:, :, 0], v[:, :, 0])


def test_megatrons_layout_needs_no_copy():
    """[s, b, heads, d] as slices of one projection; the output is laid out like the queries."""
    fused = torch.randn(130, 2, 2, 4 * 16, generator=torch.Generator().manual_seed(5))
    parts = fused.requires_grad_().split([32, 16, 16], dim=3)
    q, k, v = (x.reshape(130, 2, -1, 16).permute(1, 2, 0, 3) for x in parts)
    assert not k.is_contiguous()
    found = native_attention(q, k, v, Weighting(70))
    expected = expected_of([q, k, v], Weighting(70))
    assert found.permute(2, 0, 1, 3).is_contiguous() and not found._is_view()
    assert_same([fused], found, expected, 5e-6)


@pytest.mark.parametrize("order", [(0, 1, 2, 3), (2, 0, 1, 3), (3, 0, 1, 2), (0, 1, 3, 2)])
def test_any_strides(order):
    qkv = inputs(75, 90, 2)
    back = [order.index(i) for i in range(4)]
    views = [x.permute(order).contiguous().permute(back) for x in qkv]
    found = native_attention(*views, Weighting())
    assert torch.equal(found, native_attention(*qkv, Weighting()))
    grad = torch.randn(found.shape, generator=torch.Generator().manual_seed(2))
    grad = grad.permute(order).contiguous().permute(back)
    assert all(
        torch.equal(a, b)
        for a, b in zip(
            torch.autograd.grad(found, qkv, grad),
            torch.autograd.grad(native_attention(*qkv, Weighting()), qkv, grad.contiguous()),
            strict=True,
        )
    )


def results(qkv: list[Tensor], weighting: Weighting) -> list[Tensor]:
    """The output, and gradients of its weighted sum."""
    found = native_attention(*qkv, weighting)
    grad = torch.randn(found.shape, generator=torch.Generator().manual_seed(1))
    return [found.detach(), *torch.autograd.grad(found, qkv, grad)]


@pytest.mark.parametrize("names", ["", "window slopes documents"])
def test_no_bit_depends_on_the_number_of_threads(names):
    qkv, weighting = inputs(700, 700, 2), weighting_of(names, 700)
    before, found = torch.get_num_threads(), []
    try:
        for threads in (1, 2, 5):
            torch.set_num_threads(threads)
            found.append(results(qkv, weighting))
    finally:
        torch.set_num_threads(before)
    for other in found[1:]:
        assert all(torch.equal(a, b) for a, b in zip(found[0], other, strict=True))


def test_another_document_changes_no_bit():
    documents = (torch.arange(200) >= 90).long().repeat(2, 1)
    qkv = inputs(200, 200, 2)
    moved = [x.detach().clone() for x in qkv]
    for x in moved:
        x[:, :, :90] = x[:, :, :90].flip(2) * 5 + 1
        x.requires_grad_()
    for ours, theirs in zip(
        results(qkv, Weighting(documents=documents)),
        results(moved, Weighting(documents=documents)),
        strict=True,
    ):
        assert torch.equal(ours[:, :, 90:], theirs[:, :, 90:])
        assert not torch.equal(ours[:, :, :90], theirs[:, :, :90])


def test_rows_and_queries_may_be_none():
    for rows, queries in ((0, 5), (2, 0)):
        q = torch.zeros(rows, 4, queries, 8, requires_grad=True)
        k = torch.zeros(rows, 2, 5, 8, requires_grad=True)
        found = native_attention(q, k, k, Weighting())
        assert found.shape == q.shape
        found.sum().backward()
        assert torch.equal(k.grad, torch.zeros_like(k))


def test_not_a_number_is_not_hidden():
    q, k, v = (x.detach() for x in inputs(70, 70, 4))
    k[:, :, 40] = float("nan")
    found = native_attention(q, k, v, Weighting())
    assert found[:, :, 40:].isnan().all() and not found[:, :, :40].isnan().any()


def test_what_does_not_fit_is_refused():
    with pytest.raises(ValueError, match=r"more queries \(5\) than keys \(4\)"):
        native_attention(*inputs(5, 4, 2), Weighting())


@pytest.mark.parametrize("names", FEATURES)
def test_it_is_what_the_cpu_takes(names):
    qkv, weighting = inputs(40, 40, 2), weighting_of(names, 40)
    assert choose_aloud(request_of(qkv[0], qkv[1], weighting)) == "native"
    assert torch.equal(attention(*qkv, weighting), native_attention(*qkv, weighting))


def test_without_a_compiler_pytorch_does_the_work(monkeypatch):
    monkeypatch.setattr(attention_choice.native, "load_library", lambda: None)
    qkv = inputs(40, 40, 2)
    for names, backend in (("", "blocks"), ("window", "blocks"), ("documents", "tiles")):
        weighting = weighting_of(names, 40)
        assert choose_aloud(request_of(qkv[0], qkv[1], weighting)) == backend
        assert_same(qkv, attention(*qkv, weighting), expected_of(qkv, weighting), 2e-5)
    with pytest.raises(RuntimeError, match="could not be built"):
        native_attention(*qkv, Weighting())


MEASURE = """
import resource
import torch
from megatron_lengen.ops.attention_native import native_attention
from megatron_lengen.ops.weighting import Weighting
torch.set_num_threads(1)
q, k, v = (torch.randn(1, 4, 32768, 16, requires_grad=True) for _ in range(3))
documents = (torch.arange(32768) // 300)[None]
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
for weighting in (Weighting(512), Weighting(documents=documents)):
    native_attention(q, k, v, weighting).sum().backward()
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
"""


def test_memory_is_linear_in_the_length():
    """32k tokens: q, k and v take 8 MiB each; a head's scores would take 4 GiB."""
    command = [sys.executable, "-c", MEASURE]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert int(done.stdout) < 160 * 2**10  # KiB
