"""What tools/benchmark/attention.py compares: ours, its peers, and their arithmetic.

Every form takes q [1, hq, S, d], k and v [1, hkv, S, d] and gives [1, hq, S, d]. What layers share
(masks, biases, documents) is made beforehand.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron_lengen.compat import have_transformer_engine, optional_module
from megatron_lengen.ops.attention import attention, window_mask
from megatron_lengen.ops.weighting import Weighting, naive_attention, repeat_heads

KINDS = ("causal", "window", "documents", "slopes", "entmax", "entmax, slopes")
DOCUMENTS = 8  # of a row
# Products of d numbers for each visible pair: scores and values forward; the scores again, and the
# gradients of values, weights, queries and keys backward.
PRODUCTS = 2 + 5
Attend = Callable[[Tensor, Tensor, Tensor], Tensor]


class Sizes(NamedTuple):
    """What a form is made for; `dense_most` is the greatest length at which S x S is written."""

    length: int
    heads: int
    groups: int
    channels: int
    window: int
    device: str
    dtype: torch.dtype
    dense_most: int
    compiled: bool


def weighting_of(kind: str, sizes: Sizes) -> Weighting:
    """The weighting of one of the KINDS; slopes, as NAPE has them, on half of the heads."""
    place = torch.arange(sizes.length, device=sizes.device)
    slopes = torch.zeros(sizes.heads, device=sizes.device)
    half = sizes.heads // 2
    slopes[:half] = 1 / torch.arange(1, half + 1, device=sizes.device)
    return Weighting(
        window=sizes.window if kind == "window" else None,
        slopes=slopes if "slopes" in kind else None,
        documents=(place * DOCUMENTS // sizes.length)[None] if kind == "documents" else None,
        alpha=1.5 if kind.startswith("entmax") else 1.0,
    )


def visible_pairs(weighting: Weighting, length: int) -> int:
    """Pairs of a query and a key that it sees, in one row of one head."""
    place = torch.arange(length)
    first = torch.zeros(length, dtype=torch.int64)
    if weighting.documents is not None:
        documents = weighting.documents[0].cpu()
        first = torch.searchsorted(documents, documents)
    if weighting.window is not None:
        first = torch.maximum(first, place - weighting.window + 1)
    return int((place - first + 1).sum())


def operations(weighting: Weighting, sizes: Sizes) -> int:
    """Floating-point operations of the products of a forward and a backward, visible pairs only."""
    return 2 * PRODUCTS * sizes.channels * sizes.heads * visible_pairs(weighting, sizes.length)


# ---- runs ----------------------------------------------------------------------------------------


def normal(shape: Sequence[int], generator: torch.Generator, dtype: torch.dtype) -> Tensor:
    """Normal numbers, drawn in fp32 where the generator is."""
    return torch.randn(*shape, generator=generator, device=generator.device).to(dtype)


def one_run(attend: Attend, qkv: list[Tensor], dy: Tensor) -> None:
    """One forward and backward."""
    for x in qkv:
        x.grad = None
    attend(*qkv).backward(dy)


def run_of(attend: Attend, qkv: list[Tensor]) -> Callable[[], None]:
    """One forward and backward as a function; the gradient of the output is random."""
    generator = torch.Generator(qkv[0].device).manual_seed(1)
    return partial(one_run, attend, qkv, normal(qkv[0].shape, generator, qkv[0].dtype))


# ---- forms ---------------------------------------------------------------------------------------


def ours(**features: Any) -> Attend:
    """This package's attention with a weighting."""
    return ours_with(Weighting(**features))


def ours_with(weighting: Weighting) -> Attend:
    """The same."""
    return lambda q, k, v: attention(q, k, v, weighting)


def hugging_faces(length: int, window: int, device: str) -> Attend:
    """Hugging Face's sdpa path with a window, whose mask is S x S."""
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    mask = window_mask(length, length, window, torch.device(device))[None, None]

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        module = torch.nn.Module()
        module.num_key_value_groups = q.shape[1] // k.shape[1]  # type: ignore[assignment]
        return sdpa_attention_forward(module, q, k, v, mask)[0].transpose(1, 2)

    return attend


def dense_entmax(length: int, slopes: Tensor | None, device: str) -> Attend:
    """Scores, the package's entmax15, values; the mask and the bias are made beforehand."""
    from entmax import entmax15

    place = torch.arange(length, device=device)
    hidden = place[None] > place[:, None]
    bias = None if slopes is None else slopes[:, None, None] * (place[None] - place[:, None])

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        k, v = repeat_heads(q, k), repeat_heads(q, v)
        scores = q.float() @ k.float().transpose(-2, -1) * q.shape[-1] ** -0.5
        scores = scores if bias is None else scores + bias
        weights = entmax15(scores.masked_fill(hidden, float("-inf")), dim=-1)
        return weights.to(v.dtype) @ v

    return attend


def forms_of(kind: str, sizes: Sizes) -> dict[str, Callable[[], Attend]]:
    """By name, what makes each form of a kind that can be had here; the first is ours."""
    weighting = weighting_of(kind, sizes)
    found: dict[str, Callable[[], Attend]] = {"ours": lambda: ours_with(weighting)}
    dense = sizes.length <= sizes.dense_most
    on_cuda = sizes.device == "cuda"
    if weighting.alpha != 1:
        if dense and optional_module("entmax") is not None:
            found["package entmax"] = lambda: dense_entmax(
                sizes.length, weighting.slopes, sizes.device
            )
        if on_cuda and weighting.slopes is None and optional_module("adasplash") is not None:
            found["adasplash"] = adasplashes
        return found
    if kind == "causal" or dense:
        found["PyTorch sdpa"] = lambda: pytorch_sdpa(weighting, sizes)
    if sizes.compiled and on_cuda:
        found["PyTorch flex, compiled"] = lambda: pytorch_flex(weighting, sizes)
    elif sizes.compiled and dense:
        found["PyTorch, compiled"] = lambda: pytorch_compiled(weighting)
    halves = sizes.dtype in (torch.bfloat16, torch.float16)
    if on_cuda and halves and optional_module("flash_attn") is not None:
        found["flash-attn"] = lambda: flash_attn(weighting, sizes)
    if on_cuda and halves and kind in ("causal", "window") and have_transformer_engine():
        found["Transformer Engine"] = lambda: transformer_engines(weighting, sizes)
    return found


def pytorch_sdpa(weighting: Weighting, sizes: Sizes) -> Attend:
    """PyTorch's operator: causal by its flag, everything else by a mask or a bias of S x S."""
    shared = sizes.heads != sizes.groups
    if weighting == Weighting():
        return lambda q, k, v: F.scaled_dot_product_attention(
            q, k, v, is_causal=True, enable_gqa=shared
        )
    place = torch.arange(sizes.length, device=sizes.device)
    mask = weighting.visible(place, place)[:, None]
    bias = weighting.bias(range(sizes.heads), place, place)
    if bias is not None:
        mask = bias.masked_fill(~mask, float("-inf")).to(sizes.dtype)
    return lambda q, k, v: F.scaled_dot_product_attention(q, k, v, mask, enable_gqa=shared)


def pytorch_compiled(weighting: Weighting) -> Attend:
    """The definition in PyTorch operations, S x S and all, through its compiler."""
    return torch.compile(
        lambda q, k, v: naive_attention(q, k, v, weighting), dynamic=False, fullgraph=True
    )


def pytorch_flex(weighting: Weighting, sizes: Sizes) -> Attend:
    """PyTorch's FlexAttention as its documentation shows it, the block mask by its own helper."""
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    window, slopes, documents = weighting.window, weighting.slopes, weighting.documents

    def visible(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        seen = i >= j
        if window is not None:
            seen = seen & (i - j < window)
        return seen if documents is None else seen & (documents[0, i] == documents[0, j])

    def biased(score: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        assert slopes is not None
        return score - slopes[h] * (i - j)

    length = sizes.length
    mask = torch.compile(create_block_mask)(visible, None, None, length, length, sizes.device)
    kernel = torch.compile(flex_attention, dynamic=False, fullgraph=True)
    shared = sizes.heads != sizes.groups
    score_mod = None if slopes is None else biased
    return lambda q, k, v: kernel(q, k, v, score_mod=score_mod, block_mask=mask, enable_gqa=shared)


def flash_attn(weighting: Weighting, sizes: Sizes) -> Attend:
    """The package flash-attn; documents as packed rows."""
    from flash_attn import flash_attn_func, flash_attn_varlen_func

    window = (-1 if weighting.window is None else weighting.window - 1, 0)
    if weighting.documents is None:
        return lambda q, k, v: flash_attn_func(
            *(x.transpose(1, 2) for x in (q, k, v)),
            causal=True,
            window_size=window,
            alibi_slopes=weighting.slopes,
        ).transpose(1, 2)
    lengths = weighting.documents[0].unique_consecutive(return_counts=True)[1]
    ends = F.pad(lengths.cumsum(0), (1, 0)).to(torch.int32)
    longest = int(lengths.max())

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        packed = (x[0].transpose(0, 1) for x in (q, k, v))
        y = flash_attn_varlen_func(*packed, ends, ends, longest, longest, causal=True)
        return y.transpose(0, 1)[None]

    return attend


def transformer_engines(weighting: Weighting, sizes: Sizes) -> Attend:
    """Transformer Engine's attention, causal with or without a window."""
    from transformer_engine.pytorch import DotProductAttention

    module = DotProductAttention(
        sizes.heads,
        sizes.channels,
        num_gqa_groups=sizes.groups,
        attention_dropout=0.0,
        qkv_format="bshd",
        attn_mask_type="causal",
        window_size=(-1 if weighting.window is None else weighting.window - 1, 0),
    )
    return lambda q, k, v: (
        module(*(x.transpose(1, 2).contiguous() for x in (q, k, v)))
        .unflatten(-1, (sizes.heads, sizes.channels))
        .transpose(1, 2)
    )


def adasplashes() -> Attend:
    """The package adasplash, whose weights are 1.5-entmax's."""
    from adasplash import adasplash

    return lambda q, k, v: adasplash(
        *(repeat_heads(q, x).contiguous() for x in (q, k, v)), alpha=1.5, is_causal=True
    )
