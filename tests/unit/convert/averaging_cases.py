"""Small runs and folders to average, and an independent mean of them."""

import os
import shutil

import torch
from conversion_models import tiny_architecture
from safetensors.torch import load_file

from megatron_lengen.checkpoint_folder import write_tracker
from megatron_lengen.config import config_from_architecture
from megatron_lengen.convert.reader import open_checkpoint
from megatron_lengen.convert.writer import write_release

TABLE = "embedding.word_embeddings.weight"
LAST_NORM = "decoder.final_layernorm.weight"
EDGES = torch.tensor([0.0, -0.0, 1e-45, -1e-45, 3.0e38, 1 / 3, -7e-12])


def quiet(line):
    """Takes the lines for the user."""


def numbers(seed, dtype=torch.float32):
    """A model of two tensors whose numbers span many magnitudes, padded to 16 rows."""
    generator = torch.Generator().manual_seed(seed)
    table = torch.randn(16, 7, generator=generator) * 10 ** torch.randn(16, 1, generator=generator)
    table[12:] = 0
    return {TABLE: table.to(dtype), LAST_NORM: torch.randn(7, generator=generator).to(dtype)}


def write_iteration(root, number, tensors, **settings):
    """One iteration of a run in `root`."""
    architecture = tiny_architecture(vocab_size=12, make_vocab_size_divisible_by=16, **settings)
    metas = {name: tensor.to("meta") for name, tensor in tensors.items()}
    config = config_from_architecture(architecture)
    written = write_release(
        root / "new",
        config,
        metas,
        tensors.__getitem__,
        write_tokenizer=lambda folder: (folder / "own.txt").write_text(f"tokens of {number}"),
        details={
            "iteration": number,
            "arguments": {"training": {"lr": number}},
            "source": {"family": "llama"},
        },
    )
    os.rename(written, root / f"iter_{number:07d}")
    shutil.rmtree(root / "new")
    write_tracker(root, str(number))


def write_run(root, dtype=torch.float32, models=(10, 20, 30, 40)):
    for number in models:
        write_iteration(root, number, numbers(number, dtype))
    return root


def read_all(folder):
    model = open_checkpoint(folder)
    return {name: model.read(name) for name in model.model_keys}


def mean64(models, weights=None):
    """Independent of the package: stacked, in float64."""
    weights = torch.tensor(weights or [1.0] * len(models), dtype=torch.float64)
    stacked = torch.stack([model.double() for model in models])
    shaped = weights.view(-1, *[1] * (stacked.dim() - 1))
    return (stacked * shaped).sum(0) / weights.sum()


def assert_mean(found, models, weights=None):
    for name, tensor in found.items():
        expected = mean64([model[name] for model in models], weights).to(tensor.dtype)
        # A unit in the last place, where float64 itself falls between two numbers.
        ulp = torch.finfo(tensor.dtype).eps
        torch.testing.assert_close(tensor.double(), expected.double(), rtol=ulp, atol=0)
        assert (tensor == expected).float().mean() > 0.95


def weights_in(folder):
    return load_file(folder / "model.safetensors")
