"""Conversion between checkpoints of this package and Hugging Face folders.

`to_hf.checkpoint_to_hf` and `to_megatron.hf_to_checkpoint` are the two ways; a family of models is
one file (`smollm3.py`), a table of tensor rules and a configuration map.
"""
