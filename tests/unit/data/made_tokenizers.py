"""Tokenizers made on the spot for tests, from three modules of the standard library."""

from __future__ import annotations

import json
import os
import random
from pathlib import Path

SOURCES = [Path(os.__file__), Path(json.__file__), Path(random.__file__)]


def source_texts() -> list[str]:
    return [path.read_text(encoding="utf-8") for path in SOURCES]


def make_hf_folder(folder: Path, eos: str | None = "<|end|>", bos: bool = False) -> Path:
    """A byte-level BPE tokenizer, written by transformers; `bos` makes it add a start token."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
    from transformers import PreTrainedTokenizerFast

    fast = Tokenizer(models.BPE())
    fast.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    fast.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=600,
        special_tokens=["<|end|>", "<|start|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    fast.train_from_iterator(source_texts(), trainer)
    if bos:
        fast.post_processor = processors.TemplateProcessing(
            single="<|start|> $A", special_tokens=[("<|start|>", 1)]
        )
    names = {"eos_token": eos} if eos else {}
    if bos:
        names["bos_token"] = "<|start|>"
    PreTrainedTokenizerFast(tokenizer_object=fast, model_max_length=32, **names).save_pretrained(
        folder
    )
    return folder
