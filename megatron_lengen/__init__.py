"""Megatron-Core training of language models that work beyond their training length."""

__version__ = "0.1.0"
