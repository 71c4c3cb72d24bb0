"""What a family of models is; to add one, subclass `Family` and list it in `families.py`."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, NamedTuple

from megatron_lengen.config import LengenConfig
from megatron_lengen.convert.mapping import Rule, expand
from megatron_lengen.errors import require


class AttentionKind(NamedTuple):
    """What one attention layer of a Hugging Face model really does."""

    rope: bool
    window: int | None
    """Visible keys, the query's own included; None: all earlier ones."""


class Family(ABC):
    """Translation of one kind of model: a table of tensor rules and a configuration map."""

    name: str
    """Hugging Face's `model_type`."""

    settable: frozenset[str]
    """Configuration keys that `--set` may change on the way."""

    @abstractmethod
    def objection(self, config: LengenConfig) -> str | None:
        """Why this family cannot represent the model, or None."""

    @abstractmethod
    def rules(self, config: LengenConfig) -> list[Rule]:
        """The tensor table; `{i}` stands for every layer."""

    @abstractmethod
    def hf_config(self, config: LengenConfig) -> dict[str, Any]:
        """Hugging Face's configuration, complete: nothing is left to defaults of a class."""

    @abstractmethod
    def architecture(self, hf: dict[str, Any]) -> dict[str, Any]:
        """The fields of `LengenConfig` for an effective Hugging Face configuration.

        Raises:
            BadInput: for settings that our models do not have.
        """

    @abstractmethod
    def with_settings(self, hf: dict[str, Any], settings: dict[str, Any]) -> dict[str, Any]:
        """The configuration with the user's settings and what follows from them.

        Raises:
            BadInput: for a value that cannot be.
        """

    @abstractmethod
    def attention_kinds(self, model: Any) -> list[AttentionKind]:
        """Read off the modules of a loaded Hugging Face model, not off its configuration."""

    def apply(self, hf: dict[str, Any], settings: dict[str, Any]) -> dict[str, Any]:
        """`with_settings` after refusing unknown keys."""
        unknown = sorted(set(settings) - self.settable)
        require(
            not unknown,
            f"--set: found {', '.join(unknown)}; allowed for {self.name}: "
            f"{', '.join(sorted(self.settable))}",
        )
        return self.with_settings(hf, settings) if settings else hf

    def tensor_rules(self, config: LengenConfig) -> list[Rule]:
        """The tensor table, layer by layer."""
        return expand(self.rules(config), config.num_layers)
