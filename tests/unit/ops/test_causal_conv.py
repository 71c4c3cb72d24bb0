"""The convolution against its definition token by token in float64, and against PyTorch's."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from mamba_cases import assert_conv, assert_near, boundaries, documents
from torch.utils.checkpoint import checkpoint

from megatron_lengen.ops import causal_conv_native
from megatron_lengen.ops.causal_conv import causal_conv1d, conv_step

SHAPES = [(1, 1, 1), (2, 2, 5), (3, 40, 17), (2, 33, 64)]


@pytest.fixture(params=[256, 16])
def block(request, monkeypatch) -> int:
    """Tokens of a block of the compiled kernels: a whole row of these tests, and a part."""
    monkeypatch.setattr(causal_conv_native, "_BLOCK", request.param)
    return request.param


@pytest.mark.parametrize("activation", ["silu", None])
@pytest.mark.parametrize("taps", [1, 2, 4, 7])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_values_and_gradients(path, block, shape, taps, activation):
    assert_conv(shape, taps, torch.float32, activation=activation)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16], ids=str)
def test_dtypes(path, dtype):
    assert_conv((2, 40, 17), 4, dtype)


@pytest.mark.parametrize("places", [(1,), (3,), (4,), (2, 3, 5, 16, 17), (15, 30)])
def test_documents(path, block, places):
    assert_conv((2, 33, 6), 4, torch.float32, seq_idx=documents(boundaries(33, *places), 2))


def test_pytorchs_convolution(path):
    x, weight, bias = torch.randn(2, 50, 12), torch.randn(12, 4), torch.randn(12)
    wanted = F.conv1d(x.transpose(1, 2), weight[:, None], bias, padding=3, groups=12)[..., :50]
    torch.testing.assert_close(causal_conv1d(x, weight, bias), F.silu(wanted).transpose(1, 2))
    without = causal_conv1d(x, weight, activation=None)
    torch.testing.assert_close(without, (wanted - bias[:, None]).transpose(1, 2))


@pytest.mark.parametrize("taps", [1, 2, 4])
def test_pieces_and_steps_equal_the_whole_row(path, taps):
    x, weight, bias = torch.randn(2, 20, 6), torch.randn(6, taps), torch.randn(6)
    wanted, last = causal_conv1d(x, weight, bias, return_final_state=True)
    state, found = None, []
    for piece in x.split([1, 2, 9, 8], dim=1):
        y, state = causal_conv1d(piece, weight, bias, initial_state=state, return_final_state=True)
        found.append(y)
    torch.testing.assert_close(torch.cat(found, 1), wanted)
    assert torch.equal(state, last)
    state = torch.zeros(2, 6, taps - 1)
    for t in range(20):
        y, state = conv_step(x[:, t], state, weight, bias)
        torch.testing.assert_close(y, wanted[:, t])
    assert torch.equal(state, last)


def test_a_state_holds_its_own_document_alone(path):
    x, weight = torch.randn(1, 10, 3), torch.randn(3, 4)
    _, state = causal_conv1d(x, weight, seq_idx=documents([8, 2], 1), return_final_state=True)
    wanted = torch.cat((torch.zeros(1, 1, 3), x[:, 8:]), dim=1)
    assert torch.equal(state, wanted.transpose(1, 2))


def test_gradients_through_the_state(path):
    """Two pieces give a row's gradients."""
    weight = torch.randn(5, 4)
    grads = []
    for split in ([12], [2, 10]):
        x = torch.randn(2, 12, 5, generator=torch.Generator().manual_seed(0)).requires_grad_()
        state, total = None, 0.0
        for piece in x.split(split, dim=1):
            y, state = causal_conv1d(piece, weight, initial_state=state, return_final_state=True)
            total = total + y.square().sum()
        (total + state.square().sum()).backward()
        grads.append(x.grad)
    torch.testing.assert_close(*grads)


def test_views_of_wider_tensors(path):
    row = torch.randn(2, 30, 20)
    weight = torch.randn(8, 4)
    part = row[..., 5:13]
    assert torch.equal(causal_conv1d(part, weight), causal_conv1d(part.contiguous(), weight))


@pytest.mark.parametrize("shape", [(0, 5, 3), (2, 0, 3), (2, 5, 0)])
def test_nothing_to_do(path, shape):
    state = torch.randn(shape[0], shape[2], 3)
    x, seq_idx = torch.randn(shape), torch.zeros(shape[:2], dtype=torch.int64)
    y, last = causal_conv1d(
        x, torch.randn(shape[2], 4), initial_state=state, seq_idx=seq_idx, return_final_state=True
    )
    assert y.shape == shape
    if not shape[1]:
        assert torch.equal(last, state)


def test_recomputation_and_threads_change_no_bit(path):
    before, results = torch.get_num_threads(), []
    try:
        for threads, again in ((1, False), (1, True), (3, False)):
            torch.set_num_threads(threads)
            generator = torch.Generator().manual_seed(0)
            x = torch.randn(2, 600, 6, generator=generator).requires_grad_()
            weight = torch.randn(6, 4, generator=generator).requires_grad_()
            if again:
                y = checkpoint(causal_conv1d, x, weight, use_reentrant=False)
            else:
                y = causal_conv1d(x, weight)
            y.square().sum().backward()
            results.append((y, x.grad, weight.grad))
    finally:
        torch.set_num_threads(before)
    for other in results[1:]:
        for a, b in zip(results[0], other, strict=True):
            assert_near(a, b.double(), torch.float32, "result")
    if path == "native":
        assert all(torch.equal(a, b) for a, b in zip(results[0], results[2], strict=True))


def test_what_does_not_fit():
    x = torch.zeros(2, 5, 3)
    with pytest.raises(ValueError, match="weight of"):
        causal_conv1d(x, torch.zeros(4, 4))
    with pytest.raises(ValueError, match="initial_state of"):
        causal_conv1d(x, torch.zeros(3, 4), initial_state=torch.zeros(2, 3, 4))
    with pytest.raises(ValueError, match="activation relu"):
        causal_conv1d(x, torch.zeros(3, 4), activation="relu")
