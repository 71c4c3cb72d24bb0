"""Losses of a model: one mix-in for both of Megatron-Core's classes of language models."""

from __future__ import annotations

from typing import Any

from megatron.core.models.common.language_module.language_module import LanguageModule
from megatron.core.models.gpt import GPTModel
from torch import Tensor

from megatron_lengen.layers.output import OutputLayer, Targets


class WeightedLosses(LanguageModule):
    """Comes before GPTModel or MambaModel; its output layer is an `OutputLayer`.

    With labels, `forward` gives fp32 losses [b, s], times the loss mask where there is one. The
    output layer computes them without logits under `--cross-entropy-fusion-impl linear`, otherwise
    Megatron-Core does from logits.
    """

    _targets: Targets | None = None

    def forward(
        self,
        input_ids: Tensor | None,
        position_ids: Tensor | None,
        attention_mask: Tensor | None,
        decoder_input: Tensor | None = None,
        labels: Tensor | None = None,
        *args: Any,
        loss_mask: Tensor | None = None,
        **kwargs: Any,
    ) -> Tensor:
        """Hidden states of an inner pipeline stage, logits [b, s, v / tp], or losses [b, s]."""
        inputs = (input_ids, position_ids, attention_mask, decoder_input)
        if labels is None or not self.post_process:
            return super().forward(*inputs, labels, *args, **kwargs)
        self._targets = Targets(labels, loss_mask)
        try:
            if self.config.cross_entropy_fusion_impl != "linear":
                return super().forward(*inputs, labels, *args, **kwargs)
            assert isinstance(self.output_layer, OutputLayer)
            with self.output_layer.scoring(self._targets):
                return super().forward(*inputs, labels, *args, **kwargs)
        finally:
            self._targets = None

    def compute_language_model_loss(self, labels: Tensor, logits: Tensor) -> Tensor:
        """[b, s] losses; `logits` are what the output layer gave."""
        targets = self._targets
        if targets is not None and self.config.cross_entropy_fusion_impl == "linear":
            return logits.transpose(0, 1).contiguous()
        losses = super().compute_language_model_loss(labels, logits)
        mask = None if targets is None else targets.loss_mask
        return losses if mask is None else losses * mask


class TransformerModel(WeightedLosses, GPTModel):
    """Megatron-Core's GPTModel with this package's losses."""
