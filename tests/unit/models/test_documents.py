"""Documents in a row of a whole model: nothing crosses a boundary, whatever the layers do."""

from __future__ import annotations

import pytest
import torch
from tiny_models import LENGTH, tiny_batch, tiny_config

from megatron_lengen.data.datasets import document_numbers
from megatron_lengen.layers.coordinates import set_documents, set_samples
from megatron_lengen.models.build import build_chunks

LAYERS = {
    "full": {"sliding_window": None, "window_attn_skip_freq": None, "no_rope_freq": None},
    "windows": {"window_attn_skip_freq": None, "no_rope_freq": None},
    "nope": {"sliding_window": None, "window_attn_skip_freq": None, "no_rope_freq": 1},
    "mixed": {},
    "nape": {"position_embedding_type": "nape"},
    "yarn": {"position_embedding_type": "yarn", "rotary_scaling_factor": 4.0},
    "entmax": {"attention_function": "entmax", "position_embedding_type": "nape"},
    "scaled": {"query_scaling": "learned", "query_scaling_identity_init": False},
}
FIRST = 10  # tokens of document A


@pytest.fixture(autouse=True)
def no_documents(process_groups):
    yield
    set_documents(None)


def model_of(name: str, **changes):
    (model,) = build_chunks(tiny_config(**LAYERS[name], **changes))
    return model


def logits(model, tokens, documents=None) -> torch.Tensor:
    set_documents(documents)
    with torch.no_grad():
        return model(tokens, torch.arange(tokens.shape[1]).expand_as(tokens), None)


@pytest.mark.parametrize("training", [False, True], ids=["evaluation", "training"])
@pytest.mark.parametrize("name", LAYERS)
def test_another_document_changes_no_bit(name, training):
    """Report 21 of the field: full, windowed and NoPE layers, with dropout everywhere too."""
    dropout = {"dropout_variant": "vpad", "dropout_rate": 0.2, "attention_dropout": 0.2}
    model = model_of(name, **dropout).train(training)
    set_samples([3, 4])
    tokens, _, _ = tiny_batch()
    documents = (torch.arange(LENGTH) >= FIRST).long().expand(2, -1)
    before = logits(model, tokens, documents)
    other = tokens.clone()
    other[:, FIRST - 1] = (other[:, FIRST - 1] + 7) % 100
    after = logits(model, other, documents)
    assert torch.equal(before[:, FIRST:], after[:, FIRST:])
    assert not torch.equal(before[:, FIRST - 1], after[:, FIRST - 1])
    crossing = logits(model, other)
    assert not torch.equal(logits(model, tokens)[:, FIRST:], crossing[:, FIRST:])


@pytest.mark.parametrize("name", LAYERS)
def test_a_document_in_a_row_is_that_document_alone(name):
    """Positions restart: what counts from the start of the row would differ here."""
    model = model_of(name).eval()
    tokens, _, _ = tiny_batch()
    documents = (torch.arange(LENGTH) >= FIRST).long().expand(2, -1)
    found = logits(model, tokens, documents)
    torch.testing.assert_close(
        found[:, :FIRST], logits(model, tokens[:, :FIRST]), rtol=1e-4, atol=1e-5
    )
    torch.testing.assert_close(
        found[:, FIRST:], logits(model, tokens[:, FIRST:]), rtol=1e-4, atol=1e-5
    )


def test_documents_end_with_their_end_token():
    tokens = torch.tensor([[5, 9, 3, 9, 9, 1], [9, 1, 2, 3, 4, 9]])
    assert document_numbers(tokens, eod=9).tolist() == [[0, 0, 1, 1, 2, 3], [0, 1, 1, 1, 1, 1]]
