"""Megatron-Core training of language models that work beyond their training length."""

from megatron_lengen.compat import compile_when_called, hide_unusable_packages

__version__ = "0.1.0"

# Megatron-Core decides on optional packages and compiles while it is imported: these come first.
hide_unusable_packages()
compile_when_called()
