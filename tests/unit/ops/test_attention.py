"""Causal and windowed attention against its definition, and against one written here."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
from torch import Tensor

from megatron_lengen.ops.attention import causal_attention, window_mask
from megatron_lengen.ops.weighting import Weighting, naive_attention


def explicit_attention(
    q: Tensor, k: Tensor, v: Tensor, window: int | None, scale: float | None = None
) -> Tensor:
    """Query by query over the list of keys it may see, in float64."""
    q, k, v = q.double(), k.double(), v.double()
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    group = q.shape[1] // k.shape[1]
    offset = k.shape[2] - q.shape[2]
    heads = []
    for head in range(q.shape[1]):
        keys, values = k[:, head // group], v[:, head // group]
        rows = []
        for i in range(q.shape[2]):
            last = i + offset
            first = 0 if window is None else max(0, last - window + 1)
            scores = (keys[:, first : last + 1] @ q[:, head, i, :, None])[..., 0] * scale
            weights = scores.softmax(-1)
            rows.append((weights[..., None] * values[:, first : last + 1]).sum(1))
        heads.append(torch.stack(rows, dim=1))
    return torch.stack(heads, dim=1)


def random_qkv(
    sq: int, sk: int, heads: int = 4, groups: int = 2, dtype: torch.dtype = torch.float32
) -> list[Tensor]:
    generator = torch.Generator().manual_seed(sq * 1000 + sk)
    shapes = [(2, heads, sq, 16), (2, groups, sk, 16), (2, groups, sk, 16)]
    return [torch.randn(shape, generator=generator).to(dtype).requires_grad_() for shape in shapes]


def assert_same(qkv: list[Tensor], found: Tensor, expected: Tensor, tolerance: float) -> None:
    """Outputs and the gradients of q, k and v."""
    generator = torch.Generator().manual_seed(1)
    weights = torch.randn(found.shape, generator=generator)
    pairs = [(found, expected)]
    pairs += zip(
        torch.autograd.grad(found, qkv, weights.to(found.dtype)),
        torch.autograd.grad(expected, qkv, weights.to(expected.dtype), retain_graph=True),
        strict=True,
    )
    for ours, theirs in pairs:
        assert ours.dtype == qkv[0].dtype
        error = (ours.double() - theirs.double()).abs().max()
        assert error <= tolerance * max(1.0, theirs.abs().max().item())


@pytest.mark.parametrize("size", [1, 63, 65, 257])
@pytest.mark.parametrize("window", [None, 1, 2, 63, 64, 65, "S", "S - 1", "S + 1"])
@pytest.mark.parametrize("heads, groups", [(4, 2), (2, 2), (3, 1)])
def test_equals_the_definition(size, window, heads, groups):
    window = {"S": size, "S - 1": max(1, size - 1), "S + 1": size + 1}.get(window, window)
    qkv = random_qkv(size, size, heads, groups)
    assert_same(qkv, causal_attention(*qkv, window), naive_attention(*qkv, Weighting(window)), 2e-5)


@pytest.mark.parametrize("size, window", [(1, 1), (40, None), (65, 2), (65, 64), (130, 65)])
@pytest.mark.parametrize("scale", [None, 0.5])
def test_equals_query_by_query_float64(size, window, scale):
    qkv = random_qkv(size, size)
    expected = explicit_attention(*qkv, window, scale)
    assert_same(qkv, causal_attention(*qkv, window, scale), expected, 2e-5)
    assert_same(qkv, naive_attention(*qkv, Weighting(window, scale)), expected, 2e-5)


@pytest.mark.parametrize("size, window", [(63, None), (65, 64), (257, 63)])
def test_bf16(size, window):
    qkv = random_qkv(size, size, dtype=torch.bfloat16)
    expected = explicit_attention(*qkv, window)
    assert_same(qkv, causal_attention(*qkv, window), expected, 3e-2)


@pytest.mark.parametrize("window", [None, 1, 3, 64, 100, 400])
@pytest.mark.parametrize("sq, sk", [(1, 1), (1, 90), (2, 90), (70, 71), (300, 390)])
def test_fewer_queries_than_keys_are_the_last_positions(sq, sk, window):
    qkv = random_qkv(sk, sk)
    full = causal_attention(*qkv, window)
    last = causal_attention(qkv[0][:, :, sk - sq :], qkv[1], qkv[2], window)
    torch.testing.assert_close(last, full[:, :, sk - sq :], atol=2e-6, rtol=1e-5)
    decode = random_qkv(sq, sk)
    expected = naive_attention(*decode, Weighting(window))
    assert_same(decode, causal_attention(*decode, window), expected, 2e-5)


def visible_keys(sq: int, sk: int, window: int | None) -> list[set[int]]:
    """Which keys reach each query, found by putting a mark on one key at a time."""
    q, k = torch.zeros(1, 1, sq, 8), torch.zeros(1, 1, sk, 8)
    found: list[set[int]] = [set() for _ in range(sq)]
    for key in range(sk):
        v = torch.zeros(1, 1, sk, 8)
        v[:, :, key] = 1.0
        reached = causal_attention(q, k, v, window)[0, 0, :, 0] > 0
        for query in reached.nonzero().flatten().tolist():
            found[query].add(key)
    return found


def test_a_window_of_4_sees_exactly_4_keys():
    assert visible_keys(10, 10, 4)[9] == {6, 7, 8, 9}
    assert visible_keys(10, 10, 4)[2] == {0, 1, 2}
    assert visible_keys(3, 10, 4) == [{4, 5, 6, 7}, {5, 6, 7, 8}, {6, 7, 8, 9}]
    assert visible_keys(1, 10, 1) == [{9}]
    assert visible_keys(4, 4, 4) == visible_keys(4, 4, None)


@pytest.mark.parametrize("size, window", [(130, 65), (200, 64), (150, 3)])
def test_every_query_of_the_block_form_sees_exactly_its_window(size, window):
    expected = [set(range(max(0, i - window + 1), i + 1)) for i in range(size)]
    assert visible_keys(size, size, window) == expected
    dense = [set(row.nonzero().flatten().tolist()) for row in window_mask(
        size, size, window, torch.device("cpu"))]  # fmt: skip
    assert dense == expected


def test_a_change_outside_the_window_changes_nothing():
    q, k, v = (t.detach() for t in random_qkv(10, 10))
    before = causal_attention(q, k, v, 4)
    for token, moved in ((5, False), (6, True)):
        k2, v2 = k.clone(), v.clone()
        k2[:, :, token] += 1
        v2[:, :, token] += 1
        after = causal_attention(q, k2, v2, 4)
        assert torch.equal(before[:, :, 9], after[:, :, 9]) is not moved


def test_strided_inputs():
    """Megatron's [s, b, heads, d] tensors arrive as permuted views."""
    qkv = [t.detach() for t in random_qkv(130, 130)]
    views = [t.permute(2, 0, 1, 3).contiguous().permute(1, 2, 0, 3) for t in qkv]
    for window in (None, 20, 65):
        torch.testing.assert_close(causal_attention(*views, window), causal_attention(*qkv, window))


def test_more_queries_than_keys_are_refused():
    q, k, v = random_qkv(5, 4)
    with pytest.raises(ValueError, match=r"more queries \(5\) than keys \(4\)"):
        causal_attention(q, k, v)


@pytest.mark.parametrize("window", [0, -3])
def test_a_window_without_keys_is_refused(window):
    with pytest.raises(ValueError, match="window"):
        causal_attention(*random_qkv(5, 5), window)


def test_heads_that_do_not_divide_are_refused():
    with pytest.raises(ValueError, match="4 query heads cannot share 3"):
        causal_attention(*random_qkv(5, 5, heads=4, groups=3))


MEASURE = """
import resource
import torch
from megatron_lengen.ops.attention import causal_attention
torch.set_num_threads(1)
q, k, v = (torch.randn(1, 4, 32768, 32, requires_grad=True) for _ in range(3))
causal_attention(q, k, v, window=512).sum().backward()
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)
"""


def test_memory_is_linear_in_the_length():
    """32k tokens, window 512: the scores alone would take 16 GiB as an S x S tensor."""
    done = subprocess.run(
        [sys.executable, "-c", MEASURE], capture_output=True, text=True, check=True
    )
    assert int(done.stdout) < 1.5 * 2**20  # KiB
