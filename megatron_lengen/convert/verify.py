"""Does the Hugging Face model compute what our model computes?

Both models run on random tokens in fp32 at lengths below, at and above the attention window, one
after the other so that memory holds one of them; where it has no room for one, each loads its
weights layer by layer.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from megatron_lengen.config import LengenConfig
from megatron_lengen.convert.family import Family, expected_kinds
from megatron_lengen.convert.loading import quiet_transformers
from megatron_lengen.models.by_layer import load_by_layer, without_weights
from megatron_lengen.runtime import host

TOLERANCE = 1e-4
_SEED = 20_240_607
_PLAIN_LENGTH = 64
_KEPT_POSITIONS = 256
# Of the weights in fp32, for what is computed besides.
_WITH_THE_REST = 1.3


class VerificationError(RuntimeError):
    """The two models differ; nothing was published."""


@dataclass(frozen=True)
class Verified:
    """What was measured: per length the largest difference and the largest logit."""

    lengths: tuple[int, ...]
    differences: tuple[float, ...]
    scales: tuple[float, ...]
    by_layer: bool = False
    """Whether weights were loaded layer by layer."""

    @property
    def worst(self) -> float:
        """Largest difference relative to the largest logit, over the lengths."""
        pairs = zip(self.differences, self.scales, strict=True)
        # A comparison that is not a number is the worst there can be.
        relative = [d / s if s > 0 else d for d, s in pairs]
        return max(r if r == r else float("inf") for r in relative)

    def __str__(self) -> str:
        parts = [
            f"{difference:.1e} of logits up to {scale:.3g} at {length} tokens"
            for length, difference, scale in zip(
                self.lengths, self.differences, self.scales, strict=True
            )
        ]
        return (
            f"largest difference of logits {self.worst:.1e} relative (allowed {TOLERANCE:.0e}): "
            + "; ".join(parts)
            + ("; weights loaded layer by layer" if self.by_layer else "; models loaded whole")
        )


@dataclass(frozen=True)
class Theirs:
    """The Hugging Face model, in either form.

    Args:
        load: gives the model in fp32 and transformers' loading report.
        build: gives the model with or without weights; None if it can be loaded only.
        names: what its tensors are called, as far as they are stored.
        read: a stored tensor.
    """

    load: Callable[[], tuple[Any, dict[str, Any]]]
    build: Callable[[], Any] | None
    names: Collection[str]
    read: Callable[[str], Tensor]

    def by_layer(self) -> tuple[Any, dict[str, Any]]:
        """The model with weights that come and go, and a report like transformers'."""
        assert self.build is not None
        with without_weights():
            model = self.build()
        wanted = {name for name, _ in model.named_parameters()}
        aliases = {name for name, _ in model.named_parameters(remove_duplicate=False)}
        report: dict[str, Any] = {
            "missing_keys": wanted - set(self.names),
            "unexpected_keys": set(self.names) - aliases,
        }

        def value(name: str, parameter: nn.Parameter) -> Tensor:
            tensor = self.read(name)
            if tensor.shape != parameter.shape:
                raise VerificationError(
                    f"verification failed: {name} is {list(tensor.shape)} in Hugging Face; "
                    f"expected {list(parameter.shape)}"
                )
            return tensor.to(host.device(), torch.float32)

        load_by_layer(model, model.base_model.layers, value)
        return model, report


def verification_lengths(config: LengenConfig) -> list[int]:
    """Lengths below, at and above the window; one where no layer has a window, two of Mamba2's."""
    if config.decoder == "mamba2":
        return [_PLAIN_LENGTH, 4 * _PLAIN_LENGTH + 15]
    if not any(kind.windowed for kind in config.layer_pattern()):
        return [_PLAIN_LENGTH]
    window = config.window_size[0] + 1
    below = max(1, min(window - 1, _PLAIN_LENGTH))
    above = window + max(1, min(window, _PLAIN_LENGTH))
    return sorted({below, window, above})


def verify_models(
    config: LengenConfig,
    family: Family,
    tensors: Callable[[str], Tensor],
    theirs: Theirs,
    elements: int,
    foreign: bool = False,
) -> Verified:
    """Compare our model with theirs: logits, layer pattern, keys, tying.

    Args:
        config: our model, as it should behave.
        family: the family of the Hugging Face model.
        tensors: our full tensor for a checkpoint key.
        theirs: the Hugging Face model.
        elements: how many a model has; from this and the memory that is free follows whether
            weights are loaded layer by layer.
        foreign: their modules are somebody else's, so that only logits and tying are compared.

    Raises:
        VerificationError: saying what differs.
    """
    needed = _WITH_THE_REST * elements * torch.float32.itemsize
    by_layer = theirs.build is not None and host.free_memory() < needed
    lengths = verification_lengths(config)
    batches = [_tokens(length, config.vocab_size) for length in lengths]
    model, report = theirs.by_layer() if by_layer else theirs.load()
    _check_loading(report)
    if not foreign:
        _check_pattern(config, family, model)
    _check_tying(config, model)
    family.prepare(model)
    device = host.device()
    # Weights that come layer by layer come to the device by themselves.
    model = model._apply(lambda t: t if t.is_meta else t.to(device)).eval()
    expected = [_their_logits(model, tokens.to(device)) for tokens in batches]
    del model
    gc.collect()
    with _own_process_group():
        ours = _our_model(config, tensors, max(lengths), by_layer)
        found = [_our_logits(ours, tokens.to(device)) for tokens in batches]
    pairs = list(zip(found, expected, strict=True))
    differences = tuple(float((logits - reference).abs().max()) for logits, reference in pairs)
    scales = tuple(float(reference.abs().max()) for reference in expected)
    result = Verified(tuple(lengths), differences, scales, by_layer)
    if not result.worst <= TOLERANCE:
        raise VerificationError(f"verification failed: {result}")
    return result


def kept_positions(length: int) -> Tensor:
    """Positions whose logits are compared: all of a short row, else spread ones and the last."""
    if length <= _KEPT_POSITIONS:
        return torch.arange(length)
    half = _KEPT_POSITIONS // 2
    spread = torch.linspace(0, length - half - 1, half).long()
    return torch.cat([spread, torch.arange(length - half, length)])


def _tokens(length: int, vocab_size: int) -> Tensor:
    generator = torch.Generator().manual_seed(_SEED + length)
    return torch.randint(0, vocab_size, (1, length), generator=generator)


def _our_model(
    config: LengenConfig, tensors: Callable[[str], Tensor], longest: int, by_layer: bool
) -> Any:
    from megatron_lengen.config import config_from_architecture
    from megatron_lengen.models.build import build_for_inference

    single = config_from_architecture(
        config.architecture(),
        max_position_embeddings=max(config.max_position_embeddings, longest),
    )
    return build_for_inference(single, lambda key: tensors(key).float(), by_layer)


@contextmanager
def _own_process_group() -> Iterator[None]:
    """Leave no process group behind where there was none: our model starts one."""
    from megatron_lengen.runtime import distributed

    had_one = torch.distributed.is_initialized()
    try:
        yield
    finally:
        if not had_one:
            distributed.stop()


def _our_logits(model: Any, tokens: Tensor) -> Tensor:
    """[1, s] -> fp32 logits [1, kept positions, V] on the CPU."""
    kept = kept_positions(tokens.shape[1]).to(tokens.device)

    def keep(head: nn.Module, args: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        return args[0][kept], *args[1:]  # [s, b, h]

    hook = model.model.output_layer.register_forward_pre_hook(keep)
    try:
        return model(tokens).float().cpu()
    finally:
        hook.remove()


@torch.inference_mode()
def _their_logits(model: Any, tokens: Tensor) -> Tensor:
    """[1, s] -> fp32 logits [1, kept positions, V] on the CPU."""
    kept = kept_positions(tokens.shape[1]).to(tokens.device)
    with quiet_transformers():  # which kernels are missing
        return model(tokens, logits_to_keep=kept, use_cache=False).logits.float().cpu()


def _check_loading(report: dict[str, Any]) -> None:
    for kind in ("missing_keys", "unexpected_keys", "mismatched_keys", "error_msgs"):
        found = sorted(str(item) for item in report.get(kind) or ())
        if found:
            listed = ", ".join(found[:5]) + (" ..." if len(found) > 5 else "")
            raise VerificationError(f"verification failed: {kind.replace('_', ' ')}: {listed}")


def _check_pattern(config: LengenConfig, family: Family, model: Any) -> None:
    expected, found = expected_kinds(config), family.attention_kinds(model)
    _same_length(expected, found)
    for layer, (want, have) in enumerate(zip(expected, found, strict=True)):
        for name, value in want._asdict().items():
            other = getattr(have, name)
            if value != other:
                raise VerificationError(
                    f"verification failed: layer {layer} has {name} {other} in Hugging Face; "
                    f"expected {value}"
                )


def _same_length(expected: Sequence[Any], found: Sequence[Any]) -> None:
    if len(expected) != len(found):
        raise VerificationError(
            f"verification failed: {len(found)} layers in Hugging Face; expected {len(expected)}"
        )


def _check_tying(config: LengenConfig, model: Any) -> None:
    embedding, head = (
        part.weight for part in (model.get_input_embeddings(), model.get_output_embeddings())
    )
    shared = embedding is head or (
        not embedding.is_meta and embedding.data_ptr() == head.data_ptr()
    )
    tied = not config.untie_embeddings_and_output_weights
    # transformers keeps a stored head apart even where the configuration says tied.
    flag = bool(model.config.tie_word_embeddings)
    if flag != tied:
        raise VerificationError(
            f"verification failed: tie_word_embeddings is {flag} in Hugging Face; expected {tied}"
        )
    if shared != tied:
        raise VerificationError(
            f"verification failed: embedding and head {'share' if shared else 'do not share'} "
            f"their storage; expected {'tied' if tied else 'separate'} weights"
        )
