"""Megatron-Core training of language models that work beyond their training length."""

from megatron_lengen.compat import hide_unusable_packages

__version__ = "0.1.0"

# Megatron-Core decides on optional packages while it is imported, so this has to come first.
hide_unusable_packages()
