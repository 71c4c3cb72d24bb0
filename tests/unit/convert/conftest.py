"""Folders with a random model in both formats."""

import pytest
from conversion_models import random_smollm3

from megatron_lengen.convert.to_megatron import hf_to_checkpoint


@pytest.fixture(scope="session")
def hf_folder(tmp_path_factory):
    """A tied SmolLM3 of 4 layers, window 8, vocabulary 101."""
    folder = tmp_path_factory.mktemp("hf") / "model"
    random_smollm3(folder)
    return folder


@pytest.fixture(scope="session")
def checkpoint_folder(hf_folder, tmp_path_factory):
    """The same model as a checkpoint; tests must not change it."""
    folder = tmp_path_factory.mktemp("checkpoint") / "model"
    hf_to_checkpoint(hf_folder, folder, verify=False, report=lambda line: None)
    return folder
