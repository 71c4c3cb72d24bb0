"""Losses without logits are those from logits: values, gradients, masks, both decoders."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from tiny_models import LENGTH, VOCAB, tiny_batch, tiny_config, tiny_mamba
from torch import Tensor, nn

from megatron_lengen.layers.coordinates import set_documents, set_samples
from megatron_lengen.models.build import build_chunks
from megatron_lengen.ops import linear_cross_entropy as operator

CONFIGS = {"transformer": tiny_config, "mamba2": tiny_mamba}
BF16 = {"bf16": True, "params_dtype": torch.bfloat16, "pipeline_dtype": torch.bfloat16}


@pytest.fixture(autouse=True)
def rows(process_groups):
    set_documents(None)
    set_samples([0, 1])


def model_of(decoder: str, **changes) -> nn.Module:
    (model,) = build_chunks(CONFIGS[decoder](**changes))
    return model


def mask_of() -> Tensor:
    """[2, s]: zeros, ones and fractions."""
    mask = torch.rand(2, LENGTH, generator=torch.Generator().manual_seed(5))
    return torch.where(mask < 0.3, 0, torch.where(mask < 0.6, 1, mask))


def outcome(model: nn.Module, mask: Tensor | None) -> tuple[Tensor, dict[str, Tensor]]:
    """Losses, and gradients of their sum."""
    tokens, labels, positions = tiny_batch()
    losses = model(tokens, positions, None, labels=labels, loss_mask=mask)
    names, weights = zip(*model.named_parameters(), strict=True)
    found = torch.autograd.grad(losses.sum(), weights)
    return losses.detach(), dict(zip(names, found, strict=True))


@pytest.mark.parametrize("untie", [False, True], ids=["tied", "untied"])
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("decoder", CONFIGS)
def test_losses_and_gradients_are_those_from_logits(decoder, masked, untie):
    mask, changes = mask_of() if masked else None, {"untie_embeddings_and_output_weights": untie}
    expected = outcome(model_of(decoder, **changes, cross_entropy_fusion_impl="none"), mask)
    losses, found = outcome(model_of(decoder, **changes), mask)
    assert losses.dtype == torch.float32 and losses.shape == (2, LENGTH)
    torch.testing.assert_close(losses, expected[0], rtol=1e-6, atol=1e-6)
    assert found.keys() == expected[1].keys()
    for name, gradient in found.items():
        scale = expected[1][name].abs().max()
        assert (gradient - expected[1][name]).abs().max() <= 1e-5 * scale, name


@pytest.mark.parametrize("decoder", CONFIGS)
def test_losses_are_the_definition_on_the_models_own_logits(decoder):
    """Of the true vocabulary: padded rows have no share."""
    model = model_of(decoder, init_method_std=1.0).eval()
    tokens, labels, positions = tiny_batch()
    with torch.no_grad():
        logits = model(tokens, positions, None)
        losses = model(tokens, positions, None, labels=labels)
        weighted = model(tokens, positions, None, labels=labels, loss_mask=mask_of())
        last = model(tokens, positions, None)
    assert logits.shape[-1] > VOCAB and torch.equal(last, logits)
    expected = F.cross_entropy(
        logits[..., :VOCAB].double().flatten(0, 1), labels.flatten(), reduction="none"
    ).view_as(losses)
    torch.testing.assert_close(losses.double(), expected, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(weighted.double(), expected * mask_of(), rtol=1e-5, atol=1e-6)


def test_bf16(decoder="transformer"):
    """Both round logits to bf16; the losses are fp32."""
    expected = outcome(model_of(decoder, **BF16, cross_entropy_fusion_impl="none"), mask_of())
    losses, found = outcome(model_of(decoder, **BF16), mask_of())
    torch.testing.assert_close(losses, expected[0].float(), rtol=1e-5, atol=1e-5)
    for name, gradient in found.items():
        difference = (gradient - expected[1][name]).float().norm()
        assert difference <= 2e-2 * expected[1][name].float().norm(), name


def test_a_failed_forward_leaves_no_targets_behind(monkeypatch):
    model = model_of("transformer")
    tokens, labels, positions = tiny_batch()

    def fail(*_: object) -> None:
        raise RuntimeError("no")

    with monkeypatch.context() as patch:
        patch.setattr(operator, "softmax_step", fail)
        with pytest.raises(RuntimeError, match="no"):
            model(tokens, positions, None, labels=labels)
    assert model(tokens, positions, None).dim() == 3


def test_the_training_loss_computes_no_logits_twice(monkeypatch):
    """The mask that a step hands over is what its gradient is made of."""
    steps: list[str] = []
    compute = operator.softmax_step

    def noted(step: str, *rest: Tensor) -> None:
        steps.append(step)
        compute(step, *rest)

    monkeypatch.setattr(operator, "softmax_step", noted)
    outcome(model_of("transformer"), mask_of())
    assert steps == ["both"]
