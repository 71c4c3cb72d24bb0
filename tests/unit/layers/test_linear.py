"""The projections' faster products give what Megatron-Core's layers give."""

from __future__ import annotations

import pytest
import torch
from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear
from tiny_models import tiny_config

from megatron_lengen.layers.linear import ColumnLinear, RowLinear
from megatron_lengen.ops import products

pytestmark = pytest.mark.usefixtures("process_groups")

KINDS = {
    "columns": (ColumnLinear, ColumnParallelLinear, {"gather_output": False}),
    "rows": (RowLinear, RowParallelLinear, {"input_is_parallel": True}),
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("skip_bias", [True, False])
def test_values_and_gradients(monkeypatch, kind, skip_bias):
    monkeypatch.setattr(products, "onednn_is_faster", lambda: True)
    monkeypatch.setattr(products, "SMALLEST", 1)
    ours, megatrons, options = KINDS[kind]
    found = []
    for layer_class in (ours, megatrons):
        layer = layer_class(
            32, 48, config=tiny_config(), init_method=torch.nn.init.zeros_, bias=True,
            skip_bias_add=skip_bias, **options,
        )  # fmt: skip
        generator = torch.Generator().manual_seed(0)
        for parameter in layer.parameters():
            parameter.data = torch.randn(parameter.shape, generator=generator)
        x = torch.randn(5, 2, 32, generator=generator).requires_grad_()
        output, bias = layer(x)
        assert (bias is None) is not skip_bias
        output.square().sum().backward()
        found.append((output, x.grad, layer.weight.grad))
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other)
