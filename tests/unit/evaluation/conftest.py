"""A character tokenizer for the evaluation tests."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from evaluation_models import VOCAB


@pytest.fixture
def characters():
    """A tokenizer with one token a character (code points below 160)."""
    return SimpleNamespace(
        encode=lambda text: [ord(c) for c in text],
        decode=lambda ids: "".join(chr(i) for i in ids),
        vocab_size=VOCAB,
        eod=0,
        bos=None,
    )
