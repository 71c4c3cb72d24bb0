"""Constants are made once for each use, of the dtype that is asked for."""

from __future__ import annotations

import torch

from megatron_lengen.ops.constants import constant

CPU = torch.device("cpu")


def test_the_same_numbers_are_the_same_tensor():
    found = constant((0.5, 0.25), torch.float32, CPU)
    assert found.tolist() == [0.5, 0.25] and found.dtype == torch.float32
    assert constant((0.5, 0.25), torch.float32, CPU) is found
    assert constant((0.5, 0.25), torch.float32, CPU, "another") is not found


def test_equal_numbers_of_other_types_are_told_apart():
    found = [constant((1, 0), dtype, CPU) for dtype in (torch.int64, torch.bool, torch.float32)]
    assert [x.dtype for x in found] == [torch.int64, torch.bool, torch.float32]
    assert constant(3, torch.int64, CPU).shape == ()


def test_one_of_evaluation_serves_training():
    with torch.inference_mode():
        found = constant((0.125, 3.0), torch.float32, CPU)
    weight = torch.ones(2, requires_grad=True)
    (weight * found).sum().backward()
    assert weight.grad is not None and weight.grad.tolist() == [0.125, 3.0]
