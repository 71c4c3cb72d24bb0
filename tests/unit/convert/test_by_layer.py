"""Verification without memory for a model: what is loaded when, and how little of it at once."""

import gc
import weakref

import pytest
import torch
from conversion_models import random_checkpoint, random_smollm3

from megatron_lengen.convert.hf_folder import HFFolder
from megatron_lengen.convert.reader import Checkpoint, open_checkpoint
from megatron_lengen.convert.to_hf import checkpoint_to_hf
from megatron_lengen.convert.to_megatron import hf_to_checkpoint
from megatron_lengen.convert.verify import VerificationError
from megatron_lengen.runtime import host

LAYERS = 24


def silent(line):
    pass


class Loaded:
    """Bytes of the tensors that were read and are still there."""

    def __init__(self, monkeypatch):
        self._alive, self.most, self.total = [], 0, 0
        for kind in (Checkpoint, HFFolder):
            self._count(kind, monkeypatch)

    def _count(self, kind, monkeypatch):
        read = kind.read

        def counted(source, name):
            tensor = read(source, name)
            # As a storage, since a layer keeps it under other tensors.
            storage = tensor.untyped_storage()
            size = storage.nbytes()
            self._alive = [pair for pair in self._alive if pair[0]() is not None]
            self._alive.append((weakref.ref(tensor), size))
            self.most = max(self.most, sum(size for _, size in self._alive))
            self.total += size
            return tensor

        monkeypatch.setattr(kind, "read", counted)


@pytest.mark.parametrize("tied", [True, False])
def test_about_a_layer_is_in_memory(tied, tmp_path, monkeypatch):
    random_smollm3(tmp_path / "hf", layers=LAYERS, tied=tied)
    hf_to_checkpoint(tmp_path / "hf", tmp_path / "c", verify=False, report=silent)
    opened = open_checkpoint(tmp_path / "c")
    layers = [k for k in opened.model_keys if k.startswith("decoder.layers.0.")]
    layer = sum(opened.meta(key).nbytes for key in layers)
    tables = max(opened.meta(key).nbytes for key in opened.model_keys)
    whole = sum(opened.meta(key).nbytes for key in opened.model_keys)
    found = {}
    for name, free in (("whole", 1 << 50), ("by layer", 0)):
        gc.collect()
        monkeypatch.setattr(host, "free_memory", lambda free=free: free)
        with monkeypatch.context() as patched:
            loaded = Loaded(patched)
            measured = checkpoint_to_hf(tmp_path / "c", tmp_path / name, report=silent, verify=True)
        assert measured.by_layer == (name == "by layer")
        assert f"{'loaded layer by layer' if measured.by_layer else 'loaded whole'}" in str(
            measured
        )
        found[name] = (loaded, measured)
    bound = max(layer, tables) + layer
    assert found["by layer"][0].most <= bound < whole / 4
    assert found["by layer"][1].differences == pytest.approx(
        found["whole"][1].differences, abs=1e-5
    )


EVERYTHING = {
    "position_embedding_type": "nape",
    "attention_function": "entmax",
    "query_scaling": "learned",
    "untie_embeddings_and_output_weights": True,
}


@pytest.mark.parametrize(("family", "settings"), [("lengen", EVERYTHING), ("llama", {})])
def test_other_families(family, settings, tmp_path, monkeypatch):
    """With code of its own, and a stock one; both ways."""
    monkeypatch.setattr(host, "free_memory", lambda: 0)
    random_checkpoint(tmp_path / "c", **settings)
    there = checkpoint_to_hf(tmp_path / "c", tmp_path / "o", family=family, report=silent)
    back = hf_to_checkpoint(tmp_path / "o", tmp_path / "again", report=silent)
    for measured in (there, back):
        assert measured.by_layer and max(measured.differences) < 1e-4 and min(measured.scales) > 1


def test_what_is_wrong_with_the_files_is_said(tmp_path, monkeypatch):
    """As transformers says it of a model that it loads whole."""
    from safetensors.torch import load_file, save_file

    from megatron_lengen.convert.to_hf import ShardWriter

    monkeypatch.setattr(host, "free_memory", lambda: 0)
    random_smollm3(tmp_path / "hf")
    hf_to_checkpoint(tmp_path / "hf", tmp_path / "c", verify=False, report=silent)
    close = ShardWriter.close

    def spoil(change):
        def closed(writer, complete=True):
            close(writer, complete)
            file = writer._folder / "model.safetensors"
            tensors = load_file(file)
            change(tensors)
            save_file(tensors, file)

        monkeypatch.setattr(ShardWriter, "close", closed)

    norm = "model.norm.weight"
    for change, message in (
        (lambda tensors: tensors.pop(norm), f"missing keys: {norm}"),
        (lambda tensors: tensors.update(more=torch.ones(1)), "unexpected keys: more"),
        (lambda tensors: tensors.update({norm: torch.ones(31)}), r"is \[31\] in Hugging Face"),
    ):
        spoil(change)
        with pytest.raises(VerificationError, match=message):
            checkpoint_to_hf(tmp_path / "c", tmp_path / "o", report=silent)
        assert not (tmp_path / "o").exists()
