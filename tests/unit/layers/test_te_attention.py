"""The core attention of Transformer Engine's spec; a class stands in for Transformer Engine's."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
from te_stand_in import Calls, DotProductAttention
from tiny_models import tiny_config

from megatron_lengen.errors import BadInput
from megatron_lengen.layers import te_attention
from megatron_lengen.layers.coordinates import set_documents
from megatron_lengen.layers.te_attention import TEAttention, messages_for, packed_documents
from megatron_lengen.ops.attention_choice import choose
from megatron_lengen.ops.weighting import naive_attention

pytestmark = pytest.mark.usefixtures("process_groups")


class Wrapper(DotProductAttention):
    """Megatron-Core's, as far as it is used; tests/unit/models/te_cases.py runs the real one."""

    def __init__(self, config, layer_number, attn_mask_type, softmax_scale, cp_comm_type, **others):
        windowed = config.layer_pattern()[layer_number - 1].windowed
        super().__init__(
            config.num_attention_heads,
            config.kv_channels,
            config.num_query_groups,
            attn_mask_type=attn_mask_type.name,
            window_size=config.window_size if windowed else None,
            softmax_scale=softmax_scale,
            cp_comm_type=cp_comm_type,
            **others,
        )

    def forward(self, query, key, value, mask, attn_mask_type, packed_seq_params=None):
        if packed_seq_params is None:
            return super().forward(query, key, value, mask, attn_mask_type=attn_mask_type.name)
        packed = {name: x for name, x in vars(packed_seq_params).items() if x is not None}
        kind = f"padding_{attn_mask_type.name}"
        return super().forward(query, key, value, mask, attn_mask_type=kind, **packed)


@pytest.fixture
def as_on_a_gpu(monkeypatch):
    """Choices as they would be on CUDA with everything installed."""
    packages = frozenset({"triton", "flash_attn"})

    def choice(request):
        asked = request._replace(device="cuda", dtype=torch.bfloat16)
        return choose(asked, packages).backend

    monkeypatch.setattr(te_attention, "choose_aloud", choice)
    monkeypatch.setattr(te_attention, "te_dot_product_attention", lambda: Wrapper)


@pytest.fixture(autouse=True)
def no_calls():
    Calls.clear()


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
    "layer_number, changes, formats",
    [
        (1, {}, ["sbhd"]),
        (4, {}, ["sbhd"]),
        (1, {"position_embedding_type": "nape", "no_rope_freq": None}, []),
        (4, {"attention_function": "entmax"}, []),
    ],
    ids=["window", "no window", "slopes", "entmax"],
)
def test_each_layer_computes_its_weighting(as_on_a_gpu, layer_number, changes, formats):
    layer, found, expected = attend(layer_number, **changes)
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)
    assert [call["format"] for call in Calls.attention] == formats
    assert (layer.te is None) == ("attention_function" in changes)


@pytest.mark.parametrize("layer_number", [1, 4], ids=["window", "no window"])
def test_documents_are_packed_rows(as_on_a_gpu, layer_number):
    set_documents(torch.stack((torch.arange(20) // 7, torch.arange(20) // 12)))
    try:
        _, found, expected = attend(layer_number)
    finally:
        set_documents(None)
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)
    (call,) = Calls.attention
    assert call["format"] == "thd" and call["ends"] == [0, 7, 14, 20, 32, 40]
    assert call["window"] == ((7, 0) if layer_number == 1 else None)


def test_documents_are_counted_once():
    generator = torch.Generator().manual_seed(0)
    documents = (torch.rand(3, 50, generator=generator) < 0.1).cumsum(1)
    ends, longest = [0], 0
    for row in documents.tolist():
        for number in sorted(set(row)):
            ends.append(ends[-1] + row.count(number))
            longest = max(longest, row.count(number))
    packed = packed_documents(documents)
    assert packed.cu_seqlens_q.tolist() == packed.cu_seqlens_kv.tolist() == ends
    assert packed.cu_seqlens_q.dtype == torch.int32 and packed.qkv_format == "thd"
    assert packed.max_seqlen_q == packed.max_seqlen_kv == longest
    assert packed_documents(documents) is packed
    assert packed_documents(documents.clone()) is not packed
    forgotten = weakref.ref(packed)
    del documents, packed
    gc.collect()
    assert forgotten() is None


def test_its_own_dropout_stays_off(as_on_a_gpu):
    attend(1, attention_dropout=0.2)  # the stand-in refuses a rate


def test_a_scale_is_passed_on(as_on_a_gpu):
    layer = TEAttention(tiny_config(), layer_number=4, softmax_scale=0.125)
    assert layer.te.softmax_scale == 0.125


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
