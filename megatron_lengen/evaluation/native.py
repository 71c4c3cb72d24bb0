"""Checkpoints as they are, without Hugging Face: the same questions as `evaluation.model` answers.

Works where a model has no Hugging Face form, and on a model in training (`training.generation`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from megatron_lengen.evaluation.sources import ModelSource
from megatron_lengen.generation.generate import next_logits
from megatron_lengen.models.build import InferenceModel
from megatron_lengen.runtime import host


@dataclass
class NativeModel:
    """A model of Megatron's modules, whole or a tensor-parallel part, in evaluation mode."""

    model: InferenceModel

    def greedy(self, ids: Tensor, new_tokens: int) -> Tensor:
        """The likeliest continuation, one token after the other, cached.

        Args:
            ids: [b, s] int64, rows of equal length.
            new_tokens: n, always generated in full.

        Returns:
            [b, n] int64 on the CPU.
        """
        steps = next_logits(self.model, ids.tolist(), new_tokens)
        chosen = [next(steps).argmax(dim=-1)]
        while len(chosen) < new_tokens:
            chosen.append(steps.send(chosen[-1]).argmax(dim=-1))
        steps.close()
        return torch.stack(chosen, dim=1)

    def forced_tokens(self, ids: Tensor, last: int) -> Tensor:
        """The likeliest token at each of the last positions, given the true ones before it.

        Args:
            ids: [b, s] int64.
            last: how many positions n to predict.

        Returns:
            [b, n] int64 on the CPU, predictions of ids[:, -n:].
        """
        logits = self.model(ids[:, :-1].to(host.device()))
        return logits[:, -last:].argmax(dim=-1).cpu()

    def describe(self) -> dict[str, Any]:
        """Facts for the results file, as JSON values."""
        parameters = list(self.model.parameters())
        return {
            "architecture": self.model.config.decoder,
            "parameters": sum(parameter.numel() for parameter in parameters),
            "dtype": str(parameters[0].dtype).removeprefix("torch."),
            "device": str(parameters[0].device),
            "max_position_embeddings": self.model.config.max_position_embeddings,
        }


def load_checkpoint(source: ModelSource) -> NativeModel:
    """The model of a checkpoint in fp32, on this process's device.

    Args:
        source: of kind `megatron`, from `sources.find_model`.
    """
    from megatron_lengen.convert.reader import open_checkpoint
    from megatron_lengen.models.build import build_for_inference

    checkpoint = open_checkpoint(source.name, source.iteration)
    return NativeModel(
        build_for_inference(checkpoint.config(), lambda key: checkpoint.read(key).float())
    )
