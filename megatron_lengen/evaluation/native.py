"""Checkpoints as they are, without Hugging Face: the same questions as `evaluation.model` answers.

Works where a model has no Hugging Face form, on a model in training (`training.generation`), and
for Mamba2, whose state it carries from piece to piece of a long row.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.inference.contexts.static_context import StaticInferenceContext
from torch import Tensor

from megatron_lengen.config import config_from_architecture
from megatron_lengen.convert.mamba2 import is_of_mamba_ssm
from megatron_lengen.convert.reader import open_checkpoint
from megatron_lengen.evaluation.sources import ModelSource
from megatron_lengen.generation.generate import more_tokens, next_logits
from megatron_lengen.models.build import InferenceModel
from megatron_lengen.runtime import host

# Elements of fp32 logits that exist at a time (128 MiB).
LOGIT_BUDGET = 1 << 25


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

    @torch.no_grad()
    def token_losses(self, ids: Tensor, chunk: int | None = None) -> Tensor:
        """Cross-entropy of every next token, a piece of the row at a time.

        From piece to piece Mamba2 carries states, so that memory does not depend on the length;
        transformers carry keys and values.

        Args:
            ids: [b, s] int64.
            chunk: tokens of a piece; by default as many as 128 MiB of fp32 logits allow.

        Returns:
            [b, s - 1] fp32 on the CPU; entry i is the loss of token i + 1 given tokens 0 to i.
        """
        rows, length = ids.shape
        ids = ids.to(host.device())
        if chunk is None:
            chunk = max(1, LOGIT_BUDGET // (rows * self.model.config.vocab_size))
        cache = StaticInferenceContext(rows, length)
        losses = [torch.empty(rows, 0)]
        for start in range(0, length - 1, chunk):
            piece = ids[:, start : min(start + chunk, length - 1)]
            with more_tokens(cache, piece.shape[1]):
                logits = self.model.cached_logits(piece, cache)
            targets = ids[:, start + 1 : start + 1 + piece.shape[1]]
            loss = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="none")
            losses.append(loss.view(rows, -1).cpu())
        return torch.cat(losses, dim=1)

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


def is_mamba2(source: ModelSource) -> bool:
    """Whether a model's layers are Mamba2's; of a hub id, which is not looked at, False."""
    if source.folder is None:
        return False
    file = "lengen.json" if source.kind == "megatron" else "config.json"
    described = json.loads((source.folder / file).read_text(encoding="utf-8"))
    if source.kind == "megatron":
        return described["model"].get("decoder") == "mamba2"
    return described.get("model_type") == "mamba2" or is_of_mamba_ssm(described)


def load_checkpoint(source: ModelSource, dtype: torch.dtype = torch.float32) -> NativeModel:
    """The model of a checkpoint or a Hugging Face folder, on this process's device.

    Args:
        source: from `sources.find_model`; of Hugging Face a folder of a family that is known.
        dtype: fp32 or bf16 (numbers of Mamba2's heads stay fp32).

    Raises:
        BadInput: if it cannot be read.
    """
    from megatron_lengen.convert.to_megatron import read_as_ours
    from megatron_lengen.models.build import build_for_inference

    if source.kind == "megatron":
        checkpoint = open_checkpoint(source.name, source.iteration)
        architecture = checkpoint.info["model"]
        read: Callable[[str], Tensor] = checkpoint.read
    else:
        architecture, read = read_as_ours(source.name)
    config = config_from_architecture(architecture, bf16=dtype == torch.bfloat16)
    return NativeModel(build_for_inference(config, read))
