"""The core attention of Transformer Engine's spec; a class stands in for Transformer Engine's."""

from __future__ import annotations

import pytest
import torch
from tiny_models import tiny_config

from megatron_lengen.errors import BadInput
from megatron_lengen.layers import te_attention
from megatron_lengen.layers.coordinates import set_documents
from megatron_lengen.layers.te_attention import TEAttention, messages_for
from megatron_lengen.ops.attention_choice import choose
from megatron_lengen.ops.weighting import Weighting, naive_attention

pytestmark = pytest.mark.usefixtures("process_groups")


class DotProductAttention(torch.nn.Module):
    """Transformer Engine's own class, by the definition of its arguments."""

    def __init__(self, **settings):
        super().__init__()
        self.settings, self.calls = settings, []
        config, number = settings["config"], settings["layer_number"]
        windowed = config.layer_pattern()[number - 1].windowed
        self.window_size = config.window_size if windowed else (-1, 0)

    def forward(
        self,
        query,
        key,
        value,
        attention_mask=None,
        attn_mask_type=None,
        core_attention_bias_type="no_bias",
        alibi_slopes=None,
    ):
        assert attn_mask_type == "causal" and attention_mask is None
        assert (core_attention_bias_type == "alibi") == (alibi_slopes is not None)
        self.calls.append(core_attention_bias_type)
        # Bounds are inclusive there: left 7 means 8 keys.
        window = None if self.window_size[0] < 0 else self.window_size[0] + 1
        weighting = Weighting(window, self.settings["softmax_scale"], alibi_slopes)
        q, k, v = (x.permute(1, 2, 0, 3) for x in (query, key, value))
        return naive_attention(q, k, v, weighting).permute(2, 0, 1, 3).flatten(2)


class Wrapper(DotProductAttention):
    """Megatron-Core's, which has no argument for slopes."""

    def forward(self, query, key, value, attention_mask, attn_mask_type):
        return super().forward(query, key, value, attention_mask, attn_mask_type.name)


@pytest.fixture
def as_on_a_gpu(monkeypatch):
    """Choices as they would be on CUDA with everything installed."""
    packages = frozenset({"triton", "flash_attn"})

    def choice(request):
        asked = request._replace(device="cuda", dtype=torch.bfloat16)
        return choose(asked, packages).backend

    monkeypatch.setattr(te_attention, "choose_aloud", choice)
    monkeypatch.setattr(te_attention, "te_dot_product_attention", lambda: Wrapper)


def attend(layer_number: int, **changes) -> tuple[TEAttention, torch.Tensor, torch.Tensor]:
    """The layer, its output and that of the definition for the weighting that it makes."""
    layer = TEAttention(tiny_config(**changes), layer_number=layer_number)
    q, k, v = (
        torch.randn(20, 2, heads, 8, generator=torch.Generator().manual_seed(heads))
        for heads in (4, 2, 2)
    )
    found = layer(q, k, v)
    expected = naive_attention(*(x.permute(1, 2, 0, 3) for x in (q, k, v)), layer._weighting(q))
    return layer, found, expected.permute(2, 0, 1, 3).flatten(2)


@pytest.mark.parametrize(
    "layer_number, changes, calls",
    [
        (1, {}, ["no_bias"]),
        (4, {}, ["no_bias"]),
        (1, {"position_embedding_type": "nape", "no_rope_freq": None}, ["alibi"]),
        (4, {"attention_function": "entmax"}, None),
    ],
    ids=["window", "no window", "slopes", "entmax"],
)
def test_each_layer_computes_its_weighting(as_on_a_gpu, layer_number, changes, calls):
    layer, found, expected = attend(layer_number, **changes)
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)
    assert (layer.te and layer.te.calls) == calls


def test_documents_are_not_lost(as_on_a_gpu):
    set_documents((torch.arange(20) // 7).repeat(2, 1))
    try:
        layer, found, expected = attend(1)
    finally:
        set_documents(None)
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)
    assert layer.te.calls == []


def test_its_own_dropout_stays_off(as_on_a_gpu):
    layer, _, _ = attend(1, attention_dropout=0.2)
    assert layer.te.settings["attention_dropout"] == 0.0


def test_a_scale_is_passed_on(as_on_a_gpu):
    layer = TEAttention(tiny_config(), layer_number=4, softmax_scale=0.125)
    assert layer.te.settings["softmax_scale"] == 0.125


def test_windows_under_context_parallelism_gather_keys():
    alone, parallel = tiny_config(), tiny_config(context_parallel_size=2)
    assert messages_for(alone, 1, 8, None) == "p2p"
    assert messages_for(parallel, 1, 8, None) == "all_gather"
    assert messages_for(parallel, 4, None, None) == "p2p"
    assert messages_for(parallel, 1, 8, "a2a") == "a2a"
    assert messages_for(parallel, 4, None, "p2p") == "p2p"
    for ring in ("p2p", "a2a+p2p"):
        with pytest.raises(BadInput, match=f"found {ring.replace('+', '.')} in layer 3"):
            messages_for(parallel, 3, 8, ring)
