"""FlexAttention: values in its eager form on the CPU, which has no backward for it; block masks."""

from __future__ import annotations

import warnings

import pytest
import torch
from attention_cases import inputs, weighting_of

from megatron_lengen.ops import attention_flex
from megatron_lengen.ops.attention_flex import block_reach, flex_attention
from megatron_lengen.ops.weighting import Weighting, naive_attention


@pytest.fixture
def eager(monkeypatch):
    from torch.nn.attention.flex_attention import flex_attention as uncompiled

    monkeypatch.setattr(attention_flex, "_kernel", lambda: uncompiled)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


@pytest.mark.parametrize("dtype, tolerance", [(torch.float32, 1e-5), (torch.bfloat16, 2e-2)])
@pytest.mark.parametrize(
    "names", ["", "window scale", "slopes", "documents", "window slopes documents"]
)
@pytest.mark.parametrize(
    "sq, sk, groups", [(1, 1, 4), (63, 63, 2), (65, 65, 4), (257, 257, 1), (100, 257, 2)]
)
def test_values_equal_the_definition(eager, sq, sk, groups, names, dtype, tolerance):
    q, k, v = (x.detach() for x in inputs(sq, sk, groups, dtype, channels=16))
    weighting = weighting_of(names, sk)
    found, expected = flex_attention(q, k, v, weighting), naive_attention(q, k, v, weighting)
    assert found.dtype == dtype
    torch.testing.assert_close(found.float(), expected.float(), rtol=0, atol=tolerance * 4)


@pytest.mark.parametrize("window", [None, 1, 7, 16, 40])
@pytest.mark.parametrize("sq, sk", [(1, 1), (64, 64), (65, 65), (40, 97), (97, 97)])
@pytest.mark.parametrize("with_documents", [False, True])
def test_blocks_follow_from_the_mask(sq, sk, window, with_documents):
    """Against the mask written out: no visible pair outside, no hidden pair in a whole block."""
    documents = torch.stack([torch.arange(sk) // 9, (torch.arange(sk) > 30).long()])
    weighting = Weighting(window, documents=documents if with_documents else None)
    j = torch.arange(sk)
    seen = weighting.visible(j[sk - sq :], j)
    some, every = block_reach(sq, sk, window, weighting.documents, torch.device("cpu"), block=16)
    padded = torch.nn.functional.pad(seen, (0, -sk % 16, 0, -sq % 16))
    blocks = padded.unflatten(1, (-1, 16)).unflatten(3, (-1, 16))
    assert (some >= blocks.any(4).any(2)).all()
    assert torch.equal(every, blocks.all(4).all(2))
    if not with_documents:
        assert torch.equal(some, blocks.any(4).any(2))


def test_long_documents_leave_few_blocks():
    documents = (torch.arange(4096) // 512)[None]
    some, _ = block_reach(4096, 4096, None, documents, torch.device("cpu"))
    assert some.sum() == 8 * (4 * 5 // 2)


def test_a_mask_is_made_once_for_all_layers():
    attention_flex._block_mask.cache_clear()
    documents = torch.arange(40).repeat(2, 1) // 9

    def of(documents, window=7, keys=40):
        return attention_flex._block_mask(
            attention_flex._Places(
                keys, keys, window, documents.device, attention_flex._Kept(documents)
            )
        )

    first = of(documents)
    assert of(documents) is first and of(documents[:]) is first
    assert of(documents, window=8) is not first
    assert of(documents.clone()) is not first
    documents[0] = 0
    assert of(documents) is not first


def test_a_mask_made_in_evaluation_serves_training():
    attention_flex._block_mask.cache_clear()
    with torch.inference_mode():
        mask = attention_flex._block_mask(
            attention_flex._Places(40, 40, 7, torch.device("cpu"), None)
        )
    assert not mask.kv_indices.is_inference()


def test_lengths_and_offsets_share_compiled_forms(monkeypatch):
    """Nothing of a window, an offset or a document is built into the code."""
    from torch._dynamo.utils import counters
    from torch.nn.attention.flex_attention import flex_attention as uncompiled

    torch._dynamo.reset()
    counters.clear()
    compiled = torch.compile(uncompiled, fullgraph=True, backend="eager")
    monkeypatch.setattr(attention_flex, "_kernel", lambda: compiled)
    for keys in (130, 150, 170, 190):
        for window in (3, 40):
            q, k, v = (x.detach() for x in inputs(129, keys, 2, channels=16))
            documents = torch.arange(keys).repeat(2, 1) // 9
            flex_attention(q, k, v, Weighting(window, documents=documents))
    assert counters["stats"]["unique_graphs"] <= 3
    torch._dynamo.reset()


def test_a_compiled_layer_calls_the_same_compiled_form(monkeypatch):
    from torch._dynamo.utils import counters
    from torch.nn.attention.flex_attention import flex_attention as uncompiled

    torch._dynamo.reset()
    counters.clear()
    compiled = torch.compile(uncompiled, fullgraph=True, backend="eager")
    monkeypatch.setattr(attention_flex, "_kernel", lambda: compiled)
    q, k, v = (x.detach() for x in inputs(160, 160, 2, channels=16))
    weighting = weighting_of("window slopes", 160)

    def layer(q):
        return flex_attention(2 * q, k, v, weighting) + 1

    expected = naive_attention(2 * q, k, v, weighting) + 1
    found = torch.compile(layer, backend="eager")(q)
    torch.testing.assert_close(found, expected, rtol=0, atol=4e-5)
    # In front of it, itself, and behind it.
    assert counters["stats"]["unique_graphs"] == 3
    torch._dynamo.reset()


@pytest.mark.parametrize("names, alpha", [("", 1.5), ("dropout", 1.0)])
def test_what_it_does_not_serve_is_refused(names, alpha):
    with pytest.raises(ValueError, match="softmax without dropout"):
        flex_attention(*inputs(4, 4, 4), weighting_of(names, 4, alpha))
