"""Mamba2 in evaluation: pieces of a long row, from checkpoints and from Hugging Face folders."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A random Mamba2 of transformers, saved."""
    from transformers import Mamba2Config, Mamba2ForCausalLM

    torch.manual_seed(0)
    config = Mamba2Config(
        vocab_size=101, hidden_size=32, num_heads=8, head_dim=8, state_size=12, n_groups=2,
        num_hidden_layers=2, chunk_size=16, tie_word_embeddings=True, bos_token_id=None,
        eos_token_id=1, pad_token_id=None,
    )  # fmt: skip
    folder = tmp_path_factory.mktemp("mamba2") / "hf"
    Mamba2ForCausalLM(config).save_pretrained(folder)
    return folder


def test_losses_in_pieces_are_hugging_faces(process_groups, folder, tmp_path):
    from transformers import Mamba2ForCausalLM

    from megatron_lengen.convert.to_megatron import hf_to_checkpoint
    from megatron_lengen.evaluation.model import load_model
    from megatron_lengen.evaluation.sources import find_model

    ids = torch.randint(0, 101, (2, 90), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        logits = Mamba2ForCausalLM.from_pretrained(folder)(ids).logits[:, :-1]
    expected = F.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten(), reduction="none")
    hf_to_checkpoint(folder, tmp_path / "ck", verify=False, report=lambda _: None)
    for place in (folder, tmp_path / "ck"):
        model = load_model(find_model(str(place)))
        for chunk in (None, 7, 1):
            found = model.token_losses(ids, chunk)
            torch.testing.assert_close(found, expected.view(2, -1), rtol=0, atol=1e-5)
        assert model.token_losses(ids[:, :1]).shape == (2, 0)
        forced = model.forced_tokens(ids, 5)
        assert torch.equal(forced, logits[:, -5:].argmax(-1))
        assert model.describe()["architecture"] == "mamba2"


def test_memory_does_not_grow_with_the_length(folder):
    """64 times as many tokens: less than 8 MB more, where one state a token would be 768 MB."""
    script = """
import resource, sys, torch
from megatron_lengen.evaluation.model import load_model
from megatron_lengen.evaluation.sources import find_model
model = load_model(find_model(sys.argv[1]))
peaks = []
for length in (1024, 1024, 65536):
    ids = torch.arange(length)[None] % 101
    assert model.token_losses(ids, 512).isfinite().all()
    peaks.append(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)
print(peaks[2] - peaks[1])
"""
    done = subprocess.run(
        [sys.executable, "-c", script, str(folder)],
        capture_output=True, text=True, timeout=300, cwd=ROOT,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert int(done.stdout.split()[-1]) < 8 * 1024  # kB
