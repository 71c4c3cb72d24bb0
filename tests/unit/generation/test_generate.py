"""Cached generation against one full forward for every token."""

from __future__ import annotations

import pytest
import torch
from tiny_models import VOCAB, tiny_config

from megatron_lengen.errors import BadInput
from megatron_lengen.generation import generate as generation
from megatron_lengen.generation.generate import Sampling, choose, generate, next_logits
from megatron_lengen.models.build import InferenceModel, build_chunks

pytestmark = pytest.mark.usefixtures("process_groups")

LEARNED = {"query_scaling": "learned", "query_scaling_identity_init": False}
MODELS = {
    "windows and global layers": {},
    "nape": {"position_embedding_type": "nape"},
    "yarn": {"position_embedding_type": "yarn", "rotary_scaling_factor": 4.0},
    "llama3": {"use_rope_scaling": True, "original_max_position_embeddings": 16},
    "scaled": LEARNED,
    "ssmax": {"query_scaling": "ssmax", "query_scaling_scope": "nope"},
    "entmax": {"attention_function": "entmax"},
    "all": {**LEARNED, "position_embedding_type": "nape", "attention_function": "entmax"},
}


def model_of(name: str) -> InferenceModel:
    config = tiny_config(**MODELS[name], max_position_embeddings=64)
    (model,) = build_chunks(config)
    return InferenceModel(model.eval(), config)


def prompt_of(length: int) -> list[int]:
    generator = torch.Generator().manual_seed(length)
    return torch.randint(0, VOCAB, (length,), generator=generator).tolist()


@pytest.mark.parametrize("length", [1, 7, 8, 20])
@pytest.mark.parametrize("name", MODELS)
def test_every_step_equals_a_full_forward(name, length):
    """The window has 8 keys: prompts below it, at it and above it."""
    model, row = model_of(name), prompt_of(length)
    rows = torch.tensor([row, row[::-1]])
    steps = next_logits(model, rows.tolist(), 12)
    found = next(steps)
    for _ in range(12):
        expected = model(rows)[:, -1]
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
        chosen = expected.argmax(-1)
        rows = torch.cat((rows, chosen[:, None]), dim=1)
        found = steps.send(chosen)


@pytest.mark.parametrize("name", MODELS)
def test_a_padded_batch_equals_its_prompts_alone(name):
    """Report 37 of the field: left padding leaks nowhere."""
    model = model_of(name)
    prompts = [prompt_of(length) for length in (3, 7, 20)]
    alone = [generate(model, [prompt], 10)[0] for prompt in prompts]
    assert generate(model, prompts, 10) == alone
    logits = next(next_logits(model, prompts, 1))
    for row, prompt in enumerate(prompts):
        expected = next(next_logits(model, [prompt], 1))[0]
        torch.testing.assert_close(logits[row], expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", ["scaled", "all"])
def test_prompts_in_parts(monkeypatch, name):
    model, prompts = model_of(name), [prompt_of(20), prompt_of(9)]
    expected = next(next_logits(model, prompts, 1))
    monkeypatch.setattr(generation, "_PREFILL", 6)
    found = next(next_logits(model, prompts, 1))
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


def test_rows_stop_at_the_end_token():
    model, prompts = model_of("nape"), [prompt_of(4), prompt_of(9)]
    whole = generate(model, prompts, 12)
    end = whole[0][3]
    stopped = generate(model, prompts, 12, end=end)
    for row, full in zip(stopped, whole, strict=True):
        assert row == (full[: full.index(end) + 1] if end in full else full)


def test_a_long_call_leaves_a_short_one_unchanged():
    model, prompt = model_of("scaled"), prompt_of(6)
    before = generate(model, [prompt], 5)
    generate(model, [prompt_of(40)], 20)
    assert generate(model, [prompt], 5) == before


def test_sampling_follows_the_probabilities():
    logits = torch.tensor([2.0, 1.0, 0.0, -1.0])
    draws = {
        name: [choose(logits, sampling, torch.Generator().manual_seed(i)) for i in range(4000)]
        for name, sampling in {
            "all": Sampling(temperature=1.0),
            "cold": Sampling(temperature=0.5),
            "two": Sampling(temperature=1.0, top_k=2),
            "nucleus": Sampling(temperature=1.0, top_p=0.6),
        }.items()
    }
    for name, temperature in (("all", 1.0), ("cold", 0.5)):
        shares = torch.bincount(torch.tensor(draws[name]), minlength=4) / 4000
        expected = (logits / temperature).softmax(0)
        assert (shares - expected).abs().max() < 5 * 0.5 / 4000**0.5
    assert set(draws["two"]) == {0, 1}
    assert set(draws["nucleus"]) == {0}  # 0.64 of the probability
    assert choose(logits, Sampling(), torch.Generator()) == 0


@pytest.mark.parametrize(
    "wrong", [{"temperature": -1.0}, {"top_k": -1}, {"top_p": 0.0}, {"top_p": 1.5}], ids=str
)
def test_samplings_that_do_not_exist(wrong):
    with pytest.raises(BadInput, match="--t"):
        Sampling(**wrong)


def test_empty_prompts():
    with pytest.raises(BadInput, match="empty"):
        generate(model_of("nape"), [[1], []], 3)
