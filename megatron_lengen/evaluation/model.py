"""Models and tokenizers, loaded for evaluation, and the few questions that evaluations ask.

Shapes: b rows of equal length, s tokens, h hidden size, v vocabulary, n new tokens.

The LM head is never applied to more positions than needed: to the last one in a prefill, to
slices of positions for losses. With the attention of `evaluation.attention`, memory is linear in s.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megatron_lengen.convert.lengen import register_lengen
from megatron_lengen.convert.loading import quiet_transformers
from megatron_lengen.data.hub import check_on_hub
from megatron_lengen.errors import BadInput, require
from megatron_lengen.evaluation.attention import ATTENTION_NAME, register_attention
from megatron_lengen.evaluation.native import (
    LOGIT_BUDGET,
    NativeModel,
    is_mamba2,
    load_checkpoint,
)
from megatron_lengen.evaluation.sources import ModelSource
from megatron_lengen.runtime import host

if TYPE_CHECKING:
    from megatron_lengen.data.tokenizer import Tokenizer

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass
class EvaluationModel:
    """A Hugging Face causal language model that answers an evaluation's questions."""

    model: Any
    """The transformers model, in evaluation mode, on its device."""

    @property
    def device(self) -> torch.device:
        """Where inputs have to be."""
        return self.model.device

    @property
    def head(self) -> nn.Module:
        """The LM head: [..., h] -> [..., v]."""
        return self.model.get_output_embeddings()

    def describe(self) -> dict[str, Any]:
        """Facts for the results file, as JSON values."""
        return {
            "architecture": type(self.model).__name__,
            "parameters": self.model.num_parameters(),
            "dtype": str(self.model.dtype).removeprefix("torch."),
            "device": str(self.device),
            "attention": self.model.config._attn_implementation,
            "max_position_embeddings": getattr(self.model.config, "max_position_embeddings", None),
        }

    @torch.inference_mode()
    def hidden(self, ids: Tensor) -> Tensor:
        """The final norm's output, before the LM head.

        Args:
            ids: [b, s] int64.

        Returns:
            [b, s, h].
        """
        output = self.model.base_model(input_ids=self._placed(ids), use_cache=False)
        return output.last_hidden_state

    @torch.inference_mode()
    def token_losses(self, ids: Tensor, chunk: int | None = None) -> Tensor:
        """Cross-entropy of every next token, the LM head applied to a slice of positions at a time.

        Args:
            ids: [b, s] int64.
            chunk: positions per slice; by default as many as 128 MiB of fp32 logits allow.

        Returns:
            [b, s - 1] fp32 on the CPU; entry i is the loss of token i + 1 given tokens 0 to i.
        """
        hidden = self.hidden(ids)
        ids = ids.to(self.device)
        rows, length = ids.shape
        if chunk is None:
            chunk = max(1, LOGIT_BUDGET // (rows * self.model.config.vocab_size))
        losses = torch.empty(rows, length - 1)
        for start in range(0, length - 1, chunk):
            end = min(start + chunk, length - 1)
            logits = self.head(hidden[:, start:end]).float()
            targets = ids[:, start + 1 : end + 1]
            loss = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="none")
            losses[:, start:end] = loss.view(rows, -1).cpu()
        return losses

    @torch.inference_mode()
    def forced_tokens(self, ids: Tensor, last: int) -> Tensor:
        """The likeliest token at each of the last positions, given the true ones before it.

        Args:
            ids: [b, s] int64.
            last: how many positions n to predict.

        Returns:
            [b, n] int64 on the CPU, predictions of ids[:, -n:].
        """
        hidden = self.hidden(ids)[:, -last - 1 : -1]
        return self.head(hidden).argmax(dim=-1).cpu()

    @torch.inference_mode()
    def greedy(self, ids: Tensor, new_tokens: int) -> Tensor:
        """The likeliest continuation, one token after the other, with a cache of keys and values.

        Args:
            ids: [b, s] int64, rows of equal length.
            new_tokens: n, always generated in full.

        Returns:
            [b, n] int64 on the CPU.
        """
        from transformers import GenerationConfig

        ids = self._placed(ids)
        # No end token: rows stay aligned, and the caller cuts where its tokenizer's text ends.
        settings = GenerationConfig(
            max_new_tokens=new_tokens, do_sample=False, use_cache=True, pad_token_id=0
        )
        # Lengths beyond the declared maximum are the point here; transformers would remind of it.
        with quiet_transformers():
            output = self.model.generate(
                ids, attention_mask=torch.ones_like(ids), generation_config=settings
            )
        return output[:, ids.shape[1] :].cpu()

    def _placed(self, ids: Tensor) -> Tensor:
        largest, vocabulary = int(ids.max()), self.model.config.vocab_size
        if largest >= vocabulary:
            raise BadInput(
                f"--tokenizer: gave the id {largest}; the model has a vocabulary of {vocabulary}"
            )
        return ids.to(self.device)


def load_model(
    source: ModelSource, device: str = "auto", dtype: str = "auto"
) -> EvaluationModel | NativeModel:
    """Load a model for evaluation: weights checked, the package's attention in place.

    Mamba2 runs in our own form, which carries its state through long rows.

    Args:
        source: from `sources.find_model`.
        device: `auto`, `cpu`, `cuda`, `cuda:1`.
        dtype: `auto` (bf16 on CUDA, fp32 on CPU), `fp32`, `bf16`, `fp16`.

    Raises:
        BadInput: if it cannot be loaded, weights are missing, or the device is not there.
    """
    place = _device(device)
    kind = ("bf16" if place.type == "cuda" else "fp32") if dtype == "auto" else dtype
    if kind not in DTYPES:
        raise BadInput(f"--dtype: found {dtype}; allowed: auto, {', '.join(DTYPES)}")
    if is_mamba2(source):
        require(place == host.device(), f"--device: found {device}; allowed: {host.device()}")
        require(kind != "fp16", "--dtype: found fp16; allowed for Mamba2: fp32, bf16")
        return load_checkpoint(source, DTYPES[kind])
    if source.kind == "megatron":
        from megatron_lengen.convert.to_hf import load_checkpoint_as_hf

        model = load_checkpoint_as_hf(source.name, source.iteration)
    else:
        model = _from_pretrained(source, DTYPES[kind])
    return prepare_model(model.to(device=place, dtype=DTYPES[kind]))


def prepare_model(model: Any) -> EvaluationModel:
    """Put a transformers causal LM, in place, into the state that evaluations need.

    Raises:
        BadInput: if its logits are not simply its LM head's output, which losses and scores need.
    """
    from transformers import GenerationConfig

    model.eval()
    model.requires_grad_(False)
    # A released model's own generation settings (sampling, end tokens) are not wanted here.
    model.generation_config = GenerationConfig()
    if getattr(model, "_supports_attention_backend", False):
        register_attention()
        model.set_attn_implementation(ATTENTION_NAME)
    loaded = EvaluationModel(model)
    _check_head(loaded)
    return loaded


def load_tokenizer(source: ModelSource, override: str | None = None) -> Tokenizer:
    """The model's own tokenizer, or another one.

    Args:
        source: from `sources.find_model`.
        override: folder, hub id or kind, as `data.tokenizer.build_tokenizer` takes it.

    Raises:
        BadInput: if there is none.
    """
    from megatron_lengen.data.tokenizer import build_tokenizer

    if override is not None:
        return build_tokenizer(override)
    if source.folder is None:
        return build_tokenizer(source.name, revision=source.revision)
    folder = source.folder / "tokenizer" if source.kind == "megatron" else source.folder
    names = ("lengen_tokenizer.json", "tokenizer.json", "tokenizer_config.json", "tokenizer.model")
    if not any((folder / name).is_file() for name in names):
        raise BadInput(f"--model: {source.folder} has no tokenizer; give one with --tokenizer")
    return build_tokenizer(folder)


def _device(name: str) -> torch.device:
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise BadInput(f"--device: found {name}; allowed: auto, cpu, cuda, cuda:N") from error
    count = torch.cuda.device_count()
    if device.type == "cuda" and (device.index or 0) >= count:
        raise BadInput(f"--device: found {name}; this machine has {count} CUDA devices")
    return device


def _from_pretrained(source: ModelSource, dtype: torch.dtype) -> Any:
    from transformers import AutoModelForCausalLM

    register_lengen()
    revision = source.revision or "main"
    if source.kind == "hub":
        check_on_hub(source.name, "--model")
    try:
        with quiet_transformers():
            model, info = AutoModelForCausalLM.from_pretrained(
                source.name,
                revision=revision,
                dtype=dtype,
                trust_remote_code=False,
                output_loading_info=True,
            )
    except Exception as error:  # transformers, safetensors and torch each raise what they like
        reason = " ".join(str(error).split())
        raise BadInput(f"--model: {source.name} cannot be loaded: {reason}") from error
    # Transformers only warns, and evaluates random weights.
    absent = sorted(info["missing_keys"]) + sorted(str(m) for m in info["mismatched_keys"])
    if absent:
        raise BadInput(
            f"--model: {source.name} lacks {len(absent)} weights, the first is {absent[0]}"
        )
    return model


@torch.inference_mode()
def _check_head(loaded: EvaluationModel) -> None:
    """Families that scale or cap their logits would get wrong losses: refuse them by trying."""
    model = loaded.model
    ids = torch.arange(4, device=loaded.device)[None] % model.config.vocab_size
    whole = model(input_ids=ids, use_cache=False).logits
    if not torch.allclose(whole.float(), loaded.head(loaded.hidden(ids)).float(), atol=1e-3):
        raise BadInput(
            f"--model: {type(model).__name__} changes its logits after the LM head, "
            "which this evaluation does not know"
        )
