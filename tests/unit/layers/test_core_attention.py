"""The core-attention slot: the window by layer number, Megatron's shapes, no silent masks."""

from __future__ import annotations

import pytest
import torch
from tiny_models import tiny_config

from megatron_lengen.layers.attention import CausalAttention
from megatron_lengen.ops.weighting import Weighting, naive_attention

pytestmark = pytest.mark.usefixtures("process_groups")


def attention(layer_number: int, **changes) -> CausalAttention:
    return CausalAttention(
        tiny_config(**changes),
        layer_number=layer_number,
        attn_mask_type=None,
        attention_type="self",
    )


@pytest.mark.parametrize("layer_number, window", [(1, 8), (3, 8), (4, None)])
def test_layers_have_their_window(layer_number, window):
    q, k, v = (torch.randn(20, 2, heads, 8) for heads in (4, 2, 2))
    found = attention(layer_number)(q, k, v)
    expected = naive_attention(*(t.permute(1, 2, 0, 3) for t in (q, k, v)), Weighting(window))
    assert found.shape == (20, 2, 32)
    torch.testing.assert_close(found, expected.permute(2, 0, 1, 3).flatten(2), atol=1e-5, rtol=1e-5)


def test_no_window_at_all():
    layer = attention(1, sliding_window=None, window_attn_skip_freq=None)
    assert layer.window is None


def test_a_given_scale_is_used():
    q, k, v = (torch.randn(6, 1, 4, 8) for _ in range(3))
    layer = CausalAttention(tiny_config(), layer_number=4, softmax_scale=1e-9)
    means = v.cumsum(0) / torch.arange(1, 7)[:, None, None, None]
    torch.testing.assert_close(layer(q, k, v), means.flatten(2))


@pytest.mark.parametrize(
    "extra",
    [
        {"attention_mask": torch.ones(1, 1, 4, 4, dtype=torch.bool)},
        {"attention_bias": torch.zeros(1, 4, 4, 4)},
        {"packed_seq_params": object()},
    ],
    ids=lambda extra: next(iter(extra)),
)
def test_masks_that_would_be_ignored_are_refused(extra):
    q = torch.randn(4, 1, 4, 8)
    with pytest.raises(ValueError, match="takes no mask"):
        attention(1)(q, q, q, **extra)
