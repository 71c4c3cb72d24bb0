"""Losses and logits where ranks divide the vocabulary and its padding."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from launcher import Run, dumps, work
from loss_worker import ROWS, VOCABULARIES, inputs

TP = "--tensor-model-parallel-size 2"
STEP = "--train-iters 1 --lr-warmup-iters 0"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("losses")
    work("loss_worker.py", folder, 1, [Run("logits-1", STEP)])
    work("loss_worker.py", folder, 2, [Run("logits-2", f"{STEP} {TP}")])
    return folder


@pytest.mark.parametrize("total", ["sum", "squares"])
@pytest.mark.parametrize("masked", [True, False])
@pytest.mark.parametrize("vocabulary", VOCABULARIES)
def test_losses_and_gradients_are_the_definitions(folder, vocabulary, masked, total):
    hidden, weight, labels, mask = inputs(vocabulary)
    x, w = (tensor.double().requires_grad_() for tensor in (hidden, weight[:vocabulary]))
    losses = F.cross_entropy(x @ w.t(), labels, reduction="none")
    losses = losses * mask if masked else losses
    (losses.sum() if total == "sum" else losses.square().sum()).backward()
    ranks = [found[f"{vocabulary} {masked} {total}"] for found in dumps(folder, "operator", 2)]
    whole = torch.cat([found["weight"] for found in ranks])
    assert len(whole) == 2 * ROWS and not whole[vocabulary:].any()
    near = {"rtol": 1e-5, "atol": 1e-5}
    torch.testing.assert_close(whole[:vocabulary].double(), w.grad, **near)
    for found in ranks:
        torch.testing.assert_close(found["losses"].double(), losses.detach(), **near)
        torch.testing.assert_close(found["again"].double(), losses.detach(), **near)
        torch.testing.assert_close(found["hidden"].double(), x.grad, **near)
    assert torch.equal(ranks[0]["losses"], ranks[1]["losses"])


def test_gathered_logits_are_those_of_one_process(folder):
    """On every rank, whichever rank's rows the padding is among."""
    (expected,) = dumps(folder, "logits-1", 1)
    for found in dumps(folder, "logits-2", 2):
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
