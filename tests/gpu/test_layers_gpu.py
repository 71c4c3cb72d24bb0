"""Layers on CUDA: what they need in every step is there, and nothing waits for the device."""

from __future__ import annotations

import pytest
import torch
from tiny_models import tiny_config

from megatron_lengen.layers.attention import CausalAttention
from megatron_lengen.layers.query_scaling import QueryScaling

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

CHANGES = {
    "window": {"sliding_window": 100},
    "nape": {"position_embedding_type": "nape", "no_rope_freq": None},
    "entmax": {"attention_function": "entmax"},
}


@pytest.mark.parametrize("name", CHANGES)
def test_training_waits_for_nothing(process_groups, name):
    config = tiny_config(
        hidden_size=128,
        query_scaling="learned",
        query_scaling_scope="nope",
        seq_length=256,
        **CHANGES[name],
    )
    core, scaling = CausalAttention(config, 3), QueryScaling(config, 3).cuda()
    for parameter in scaling.parameters():
        torch.nn.init.normal_(parameter, std=0.02)
    q, k, v = (torch.randn(256, 2, heads, 32, device="cuda") for heads in (4, 2, 2))
    q, k, v = (x.bfloat16().requires_grad_() for x in (q, k, v))
    for mode in ("default", "error"):  # the first call compiles
        torch.cuda.set_sync_debug_mode(mode)
        try:
            factor = scaling(q.flatten(2))[..., None]
            (core(q * factor.to(q.dtype), k, v).float().square().sum()).backward()
        finally:
            torch.cuda.set_sync_debug_mode("default")
