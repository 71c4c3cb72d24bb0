"""Which backend computes an attention: one function of the request and of what is installed.

| name      | what it is                                   | where | weights of |
|-----------|----------------------------------------------|-------|------------|
| te        | Transformer Engine, in layers of its spec    | CUDA  | softmax    |
| flex      | FlexAttention (`ops.attention_flex`)         | CUDA  | softmax    |
| native    | compiled kernels (`ops.attention_native`)    | CPU   | softmax    |
| blocks    | PyTorch's SDPA by blocks (`ops.attention`)   | any   | softmax    |
| adasplash | the package of that name, where installed    | CUDA  | entmax     |
| triton    | kernels of our own (`ops.entmax_triton`)     | CUDA  | entmax     |
| tiles     | PyTorch operations (`ops.tiles`)             | any   | both       |

The first of its row that serves every feature of the request is taken. One that is passed over for
a feature is named in one line, once; nothing that was asked for is left out.
"""

from __future__ import annotations

import functools
import importlib.util
import logging
import sys
from typing import NamedTuple

import torch
from torch import Tensor

from megatron_lengen.errors import is_first_rank
from megatron_lengen.ops import native
from megatron_lengen.ops.weighting import Weighting

logger = logging.getLogger(__name__)

ORDER = {
    "softmax": ("te", "flex", "native", "blocks", "tiles"),
    "entmax": ("te", "adasplash", "triton", "tiles"),
}
TITLES = {
    "te": "Transformer Engine",
    "flex": "FlexAttention",
    "native": "the CPU kernels",
    "blocks": "PyTorch's SDPA",
    "adasplash": "adasplash",
    "triton": "the Triton kernels",
    "tiles": "tiles of PyTorch operations",
}
_HALVES = (torch.bfloat16, torch.float16)
# Compiling for every length of cached decoding costs more than a few rows of scores.
_FEWEST_COMPILED_QUERIES = 128
# The CPU kernels take 32 queries at a time; fewer than these leave too much of that unused.
_FEWEST_NATIVE_QUERIES = 4


class Request(NamedTuple):
    """What attention is asked for; `features` are those of `ops.weighting` beyond causality."""

    features: frozenset[str]
    alpha: float
    device: str
    dtype: torch.dtype
    queries: int
    keys: int
    channels: int
    te: bool = False
    context_parallel: bool = False


class Choice(NamedTuple):
    """The backend, and those before it in the order with the feature that they lack."""

    backend: str
    passed_over: tuple[tuple[str, str], ...]


def request_of(q: Tensor, k: Tensor, weighting: Weighting, **layer: bool) -> Request:
    """The request of q [b, hq, sq, d] and k [b, hkv, sk, d] with a weighting.

    Args:
        layer: `te` and `context_parallel`, as in `Request`.
    """
    window = weighting.window
    has = {
        "window": window is not None and window < k.shape[2],
        "slopes": weighting.slopes is not None,
        "documents": weighting.documents is not None,
        "dropout": weighting.dropout is not None,
        "scale": weighting.scale is not None,
    }
    return Request(
        features=frozenset(name for name, there in has.items() if there),
        alpha=weighting.alpha,
        device=q.device.type,
        dtype=q.dtype,
        queries=q.shape[2],
        keys=k.shape[2],
        channels=q.shape[3],
        **layer,
    )


@functools.cache
def installed() -> frozenset[str]:
    """Optional packages that can be found; none is imported."""
    names = ("triton", "adasplash", "flash_attn")
    return frozenset(
        name
        for name in names
        if sys.modules.get(name, name) is not None and importlib.util.find_spec(name) is not None
    )


def available(device: str) -> frozenset[str]:
    """`installed`, and "native" on the CPU where the kernels there are built, or can be."""
    if device != "cpu" or native.load_library() is None:
        return installed()
    return installed() | {"native"}


def choose(request: Request, packages: frozenset[str]) -> Choice:
    """The backend for a request.

    Args:
        packages: what `available` found.
    """
    passed_over: list[tuple[str, str]] = []
    for backend in ORDER["softmax" if request.alpha == 1 else "entmax"]:
        if not _is_candidate(backend, request, packages):
            continue
        lacking = lacks(backend, request, packages)
        if lacking is None:
            return Choice(backend, tuple(passed_over))
        passed_over.append((backend, lacking))
    raise AssertionError("tiles serve everything")


def choose_aloud(request: Request) -> str:
    """The backend for a request here; what is passed over for a feature is logged once."""
    choice = choose(request, available(request.device))
    for backend, lacking in choice.passed_over:
        _say(backend, lacking, choice.backend)
    return choice.backend


@functools.cache
def _say(backend: str, lacking: str, taken: str) -> None:
    if is_first_rank():
        logger.warning("attention: no %s in %s; %s used", lacking, TITLES[backend], TITLES[taken])


def _is_candidate(backend: str, request: Request, packages: frozenset[str]) -> bool:
    """Whether a backend is there for such requests at all."""
    if backend in ("blocks", "tiles"):
        return True
    if backend == "native":
        enough = request.queries >= _FEWEST_NATIVE_QUERIES
        return request.device == "cpu" and "native" in packages and enough
    if request.device != "cuda":
        return False
    if backend == "te":
        return request.te
    if backend == "adasplash":
        return "adasplash" in packages
    if request.queries < _FEWEST_COMPILED_QUERIES and request.queries < request.keys:
        return False
    # The causal kernel behind SDPA needs no compiling where nothing else is asked for.
    plain = not request.features - {"scale"} and request.queries == request.keys
    return not (backend == "flex" and plain)


def lacks(backend: str, request: Request, packages: frozenset[str]) -> str | None:
    """The first thing that a backend would not compute of a request, or None."""
    if backend == "te":
        return _lacks_te(request, packages)
    if backend == "flex":
        return _first(request, {"dropout"}) or _lacks_compiled(request, packages, least=16)
    if backend == "native":
        lacks = _first(request, {"dropout"})
        if lacks is None and request.dtype not in (torch.float32, torch.bfloat16):
            lacks = str(request.dtype).removeprefix("torch.")
        return lacks
    if backend == "blocks":
        lacks = _first(request, {"slopes", "documents", "dropout"})
        if lacks is None and request.queries not in (1, request.keys):
            lacks = "queries of a part of the row"  # it would keep masks for every few of them
        return lacks
    if backend == "adasplash":
        return _lacks_adasplash(request)
    if backend == "triton":
        return _first(request, {"dropout"}) or _lacks_compiled(request, packages, least=1)
    return None


def _first(request: Request, missing: set[str]) -> str | None:
    names = {
        "window": "windows",
        "slopes": "ALiBi slopes",
        "documents": "documents",
        "dropout": "dropout of weights",
        "scale": "other scales",
    }
    return next((names[name] for name in names if name in request.features & missing), None)


def _lacks_te(request: Request, packages: frozenset[str]) -> str | None:
    # Slopes become a bias of S x S there (get_alibi), and a mask of weights needs our coordinates.
    lacking = "entmax" if request.alpha != 1 else _first(request, {"slopes", "dropout"})
    if lacking is None and request.queries != request.keys:
        lacking = "queries of a part of the row"
    if lacking is None and request.dtype not in _HALVES:
        lacking = "linear memory for fp32"  # its own fallback writes S x S scores
    if lacking is None and "documents" in request.features:
        if request.context_parallel:  # every document would have to divide by 2 x CP
            lacking = "documents under context parallelism"
        elif "flash_attn" not in packages:  # cuDNN may not pack rows; the fallback writes S x S
            lacking = "documents without flash-attn"
    return lacking


def _lacks_compiled(request: Request, packages: frozenset[str], least: int) -> str | None:
    if "triton" not in packages:
        return "Triton"
    if request.dtype not in (*_HALVES, torch.float32):
        return str(request.dtype).removeprefix("torch.")
    if not least <= request.channels <= 256:
        return f"heads of {request.channels} channels"
    return None


def _lacks_adasplash(request: Request) -> str | None:
    """What adasplash 0.2 documents and asserts; scales are folded into the queries."""
    if request.alpha != 1.5:
        return f"alpha {request.alpha:g}"
    lacking = _first(request, {"window", "slopes", "documents", "dropout"})
    if lacking is None and request.channels not in (16, 32, 64, 128, 256):
        lacking = f"heads of {request.channels} channels"
    if lacking is None and request.queries != request.keys:
        lacking = "queries of a part of the row"
    if lacking is None and (request.keys < 64 or request.keys & (request.keys - 1)):
        lacking = f"rows of {request.keys} keys"
    return lacking
