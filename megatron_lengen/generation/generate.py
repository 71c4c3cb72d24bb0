"""Cached generation from a whole model in one process.

Keys and values sit in Megatron-Core's static inference context. Prompts of different lengths are
padded on the left, and the padding is a document of its own: nothing attends to it, positions of
the query scaling start behind it, and rotary positions and ALiBi's bias depend on differences
only. So a batch gives what its prompts give one at a time.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from megatron.core.inference.contexts.static_context import StaticInferenceContext
from torch import Tensor

from megatron_lengen.errors import require
from megatron_lengen.layers.coordinates import set_documents, set_first_position
from megatron_lengen.models.build import InferenceModel
from megatron_lengen.runtime import host

# Tokens of a prompt that are computed at a time.
_PREFILL = 2048


@dataclass(frozen=True)
class Sampling:
    """How the next token is chosen.

    Args:
        temperature: 0 takes the likeliest token; otherwise logits are divided by it.
        top_k: choose among so many of the likeliest tokens; 0 for all.
        top_p: choose among the likeliest tokens that together have this probability.
        seed: of the choices; each row has its own stream.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 0

    def __post_init__(self) -> None:
        require(
            self.temperature >= 0, f"--temperature: found {self.temperature}; allowed: 0 or more"
        )
        require(self.top_k >= 0, f"--top-k: found {self.top_k}; allowed: 0 or more")
        require(0 < self.top_p <= 1, f"--top-p: found {self.top_p}; allowed: above 0, up to 1")


def generate(
    model: InferenceModel,
    prompts: Sequence[Sequence[int]],
    new_tokens: int,
    end: int | None = None,
    sampling: Sampling | None = None,
) -> list[list[int]]:
    """Continue prompts.

    Args:
        model: from `models.build.build_for_inference`.
        prompts: token ids of each row, at least one a row.
        new_tokens: how many to generate at most.
        end: a row stops after this token, which is part of its result.
        sampling: the likeliest token by default.

    Returns:
        The new tokens of each row.
    """
    require(bool(prompts) and all(prompts), "prompts: found an empty one; allowed: 1 token or more")
    sampling = sampling or Sampling()
    generators = [torch.Generator().manual_seed(sampling.seed + row) for row in range(len(prompts))]
    rows: list[list[int]] = [[] for _ in prompts]
    open_rows = set(range(len(prompts)))
    steps = next_logits(model, prompts, new_tokens)
    logits = next(steps)
    for made in range(1, new_tokens + 1):
        chosen = [choose(logits[row], sampling, generators[row]) for row in range(len(prompts))]
        for row in tuple(open_rows):
            rows[row].append(chosen[row])
            if chosen[row] == end:
                open_rows.remove(row)
        if not open_rows or made == new_tokens:
            break
        logits = steps.send(torch.tensor(chosen))
    steps.close()
    return rows


@torch.no_grad()
def next_logits(
    model: InferenceModel, prompts: Sequence[Sequence[int]], new_tokens: int
) -> Generator[Tensor, Tensor, None]:
    """The logits of each next token: a generator that is sent what was chosen.

    Yields:
        [b, vocab_size] fp32 on the CPU, first for the prompts, then after each sent [b] int64.
    """
    longest = max(map(len, prompts))
    tokens = torch.zeros(len(prompts), longest, dtype=torch.int64)
    documents = torch.zeros(len(prompts), longest + new_tokens, dtype=torch.int64)
    for row, prompt in enumerate(prompts):
        tokens[row, longest - len(prompt) :] = torch.tensor(prompt)
        documents[row, longest - len(prompt) :] = 1
    padded = any(len(prompt) < longest for prompt in prompts)
    cache = StaticInferenceContext(len(prompts), longest + new_tokens)
    documents = documents.to(host.device())
    while True:
        logits = None
        for part in tokens.to(host.device()).split(_PREFILL, dim=1):
            known = cache.sequence_len_offset + part.shape[1]
            logits = _forward(model, part, cache, documents[:, :known] if padded else None)
        assert logits is not None
        tokens = (yield logits.cpu())[:, None]


def _forward(
    model: InferenceModel, tokens: Tensor, cache: StaticInferenceContext, documents: Tensor | None
) -> Tensor:
    """Logits of the last of some more tokens, which then are in the cache."""
    with more_tokens(cache, tokens.shape[1], documents):
        return model.last_logits(tokens, cache)


@contextmanager
def more_tokens(
    cache: StaticInferenceContext, count: int, documents: Tensor | None = None
) -> Iterator[None]:
    """A forward of tokens that follow those in the cache, which has them afterwards.

    Args:
        count: of tokens in a row.
        documents: [b, tokens in the cache with the new ones], or None for one document.
    """
    set_first_position(cache.sequence_len_offset)
    set_documents(documents)
    try:
        yield
    finally:
        cache.sequence_len_offset += count
        set_first_position(0)
        set_documents(None)


def choose(logits: Tensor, sampling: Sampling, generator: torch.Generator) -> int:
    """One token from [vocab_size] logits."""
    if sampling.temperature == 0:
        return int(logits.argmax())
    ordered, ids = (logits / sampling.temperature).sort(descending=True)
    probabilities = ordered.softmax(-1)
    if sampling.top_k:
        probabilities[sampling.top_k :] = 0
    # Those before a token hold less than top_p: the first is always kept.
    probabilities[probabilities.cumsum(-1) - probabilities >= sampling.top_p] = 0
    return int(ids[torch.multinomial(probabilities, 1, generator=generator)])
