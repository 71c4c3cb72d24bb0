"""What is written is what Megatron-Core reads, and it appears last and whole."""

import json
import os

import pytest
import torch

from megatron_lengen.config import config_from_architecture
from megatron_lengen.convert.reader import open_checkpoint
from megatron_lengen.convert.writer import write_release
from megatron_lengen.errors import BadInput

TABLE, FC1 = "embedding.word_embeddings.weight", "decoder.layers.0.mlp.linear_fc1.weight"


@pytest.fixture
def config():
    return config_from_architecture(
        {
            "num_layers": 1,
            "hidden_size": 8,
            "ffn_hidden_size": 8,
            "num_attention_heads": 4,
            "gated_linear_unit": True,
            "vocab_size": 1100,
            "max_position_embeddings": 16,
        }
    )


@pytest.fixture
def tensors(config):
    table = torch.zeros(config.padded_vocab_size, 8)
    table[:1100] = torch.randn(1100, 8)
    return {TABLE: table, FC1: torch.randn(16, 8).bfloat16()}


def write(save, config, tensors, **options):
    metas = {key: tensor.to("meta") for key, tensor in tensors.items()}
    return write_release(save, config, metas, tensors.__getitem__, **options)


def test_megatron_reads_it_at_another_size_and_padding(tmp_path, config, tensors):
    from megatron.core import dist_checkpointing
    from megatron.core.dist_checkpointing import ShardedTensor
    from megatron.core.dist_checkpointing.validation import StrictHandling

    from megatron_lengen.runtime import distributed

    folder = write(tmp_path / "c", config, tensors)
    at_four = config_from_architecture(config.architecture(), tensor_model_parallel_size=4)
    assert (config.padded_vocab_size, at_four.padded_vocab_size) == (1152, 1536)
    distributed.start_process_group()
    try:
        rows = at_four.padded_vocab_size // 4
        wanted = {}
        for rank in range(4):
            wanted[f"table{rank}"] = ShardedTensor.from_rank_offsets(
                TABLE, torch.ones(rows, 8), (0, rank, 4), allow_shape_mismatch=True
            )
            wanted[f"fc1{rank}"] = ShardedTensor.from_rank_offsets(
                FC1, torch.ones(4, 8).bfloat16(), (0, rank, 4)
            )
        loaded = dist_checkpointing.load(wanted, str(folder), strict=StrictHandling.RAISE_ALL)
    finally:
        distributed.stop()
    assert torch.equal(torch.cat([loaded[f"fc1{rank}"] for rank in range(4)]), tensors[FC1])
    full = torch.cat([loaded[f"table{rank}"] for rank in range(4)])
    assert torch.equal(full[:1100], tensors[TABLE][:1100])
    assert full[1100:].eq(0).all()


def test_notes_and_tracker(tmp_path, config, tensors):
    save = tmp_path / "c"
    folder = write(save, config, tensors, details={"source": {"name": "x"}})
    assert (save / "latest_checkpointed_iteration.txt").read_text() == "release"
    info = json.loads((folder / "lengen.json").read_text())
    assert info["format"] == 1 and info["iteration"] == 0 and info["source"] == {"name": "x"}
    assert config_from_architecture(info["model"]).architecture() == config.architecture()
    checkpoint = open_checkpoint(save)
    assert sorted(checkpoint.model_keys) == sorted(tensors)
    for key, tensor in tensors.items():
        assert torch.equal(checkpoint.read(key), tensor)
    assert checkpoint.tokenizer_folder is None


def test_a_failed_check_publishes_nothing(tmp_path, config, tensors):
    save = tmp_path / "new" / "c"

    def check(folder):
        assert (folder / "lengen.json").exists() and not save.joinpath("release").exists()
        raise RuntimeError("differs")

    with pytest.raises(RuntimeError, match="differs"):
        write(save, config, tensors, check=check)
    assert list(tmp_path.iterdir()) == []


def test_an_existing_checkpoint_needs_force(tmp_path, config, tensors):
    folder = write(tmp_path, config, tensors)
    with pytest.raises(BadInput, match="holds a checkpoint already"):
        write(tmp_path, config, tensors)
    changed = {**tensors, FC1: tensors[FC1] + 1}
    with pytest.raises(RuntimeError):
        write(tmp_path, config, changed, force=True, check=_fail)
    assert torch.equal(open_checkpoint(folder).read(FC1), tensors[FC1])
    write(tmp_path, config, changed, force=True)
    assert torch.equal(open_checkpoint(folder).read(FC1), changed[FC1])
    assert sorted(os.listdir(tmp_path)) == ["latest_checkpointed_iteration.txt", "release"]


def test_an_error_of_the_source_comes_out_as_it_is(tmp_path, config, tensors):
    def fetch(key):
        raise BadInput("model.safetensors: cut short")

    metas = {key: tensor.to("meta") for key, tensor in tensors.items()}
    with pytest.raises(BadInput, match=r"^model\.safetensors: cut short$"):
        write_release(tmp_path / "c", config, metas, fetch)
    assert list(tmp_path.iterdir()) == []


def _fail(folder):
    raise RuntimeError
