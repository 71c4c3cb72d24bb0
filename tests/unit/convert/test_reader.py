"""Finding and reading checkpoints: trackers, layouts, damage."""

import json
import shutil

import pytest
import torch

from megatron_lengen.checkpoint_folder import locate
from megatron_lengen.convert.reader import open_checkpoint
from megatron_lengen.errors import BadInput


@pytest.fixture
def copied(checkpoint_folder, tmp_path):
    return shutil.copytree(checkpoint_folder, tmp_path / "copy")


@pytest.fixture
def run_folder(tmp_path):
    for number in (10, 20):
        (tmp_path / f"iter_{number:07d}").mkdir()
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("20\n")
    return tmp_path


def test_which_iteration(run_folder):
    assert locate(run_folder).name == "iter_0000020"
    assert locate(run_folder, 10).name == "iter_0000010"
    (run_folder / "latest_checkpointed_iteration.txt").write_text("release")
    (run_folder / "release").mkdir()
    assert locate(run_folder).name == "release"
    assert locate(run_folder, "release").name == "release"


@pytest.mark.parametrize("text", ["", "twelve", "-3"])
def test_a_spoilt_tracker_is_named(run_folder, text):
    (run_folder / "latest_checkpointed_iteration.txt").write_text(text)
    with pytest.raises(BadInput) as caught:
        locate(run_folder)
    assert "latest_checkpointed_iteration.txt: found" in str(caught.value)
    assert "iter_0000010, iter_0000020" in str(caught.value)


def test_missing_iterations_list_what_is_there(run_folder):
    with pytest.raises(BadInput, match=r"--iteration: found 30; .*iter_0000010, iter_0000020"):
        locate(run_folder, 30)
    (run_folder / "latest_checkpointed_iteration.txt").write_text("30")
    with pytest.raises(BadInput, match="names iter_0000030, which is missing"):
        locate(run_folder)
    with pytest.raises(BadInput, match="is not a folder"):
        locate(run_folder / "nothing")


def test_an_iteration_folder_is_taken_as_it_is(copied):
    assert locate(copied / "release") == copied / "release"
    with pytest.raises(BadInput, match="--iteration: found 5; --load is the iteration release"):
        locate(copied / "release", 5)


@pytest.mark.parametrize("keep", [0.9, 0.0], ids=["cut", "empty"])
def test_a_truncated_shard_is_refused(copied, keep):
    shard = copied / "release" / "__0_0.distcp"
    data = shard.read_bytes()
    shard.write_bytes(data[: int(keep * len(data))])
    with pytest.raises(BadInput, match=r"__0_0\.distcp: cut short \(\d+ of \d+ bytes\)"):
        open_checkpoint(copied)


def test_a_missing_shard_and_a_spoilt_one_are_refused(copied):
    shard = copied / "release" / "__0_0.distcp"
    shard.write_bytes(b"\0" * shard.stat().st_size)
    with pytest.raises(BadInput, match=r"__0_0\.distcp: embedding.* cannot be read"):
        open_checkpoint(copied).read("embedding.word_embeddings.weight")
    shard.unlink()
    with pytest.raises(BadInput, match=r"__0_0\.distcp: missing; the checkpoint is incomplete"):
        open_checkpoint(copied)


def test_foreign_or_damaged_notes_are_refused(copied):
    note = copied / "release" / "lengen.json"
    info = json.loads(note.read_text())
    note.write_text(json.dumps({**info, "format": 2}))
    with pytest.raises(BadInput, match="format 2; allowed: 1"):
        open_checkpoint(copied)
    note.write_text("{")
    with pytest.raises(BadInput, match=r"lengen\.json: damaged"):
        open_checkpoint(copied)
    note.unlink()
    with pytest.raises(BadInput, match="not a checkpoint of megatron_lengen"):
        open_checkpoint(copied)


def test_shards_of_several_ranks_and_foreign_entries(tmp_path, checkpoint_folder):
    """A checkpoint as Megatron saves it at TP 2, with optimizer states beside the model."""
    from megatron.core import dist_checkpointing
    from megatron.core.dist_checkpointing import ShardedObject, ShardedTensor

    from megatron_lengen.runtime import distributed

    table = torch.randn(1024, 8, dtype=torch.bfloat16)
    fc1 = torch.randn(12, 8)
    key, gated = "embedding.word_embeddings.weight", "decoder.layers.0.mlp.linear_fc1.weight"
    state = {}
    for rank, part in enumerate(table.chunk(2)):
        state[f"table{rank}"] = ShardedTensor.from_rank_offsets(key, part, (0, rank, 2))
        # A gated layer: the rank holds its slice of the gate rows and of the up rows.
        for half, rows in enumerate(fc1.chunk(2)):
            place = (0, 2 * half + rank, 4)
            shard = ShardedTensor.from_rank_offsets(gated, rows.chunk(2)[rank], place)
            state[f"fc1{half}{rank}"] = shard
    moments = torch.zeros(3)
    state["m"] = ShardedTensor.from_rank_offsets("optimizer.state.exp_avg." + key, moments)
    state["rng"] = ShardedObject("rng_state", [1], (1,), (0,))
    folder = tmp_path / "iter_0000010"
    folder.mkdir()
    distributed.start_process_group()
    try:
        dist_checkpointing.save(state, str(folder))
    finally:
        distributed.stop()
    note = checkpoint_folder / "release" / "lengen.json"
    shutil.copyfile(note, folder / "lengen.json")
    checkpoint = open_checkpoint(folder)
    assert sorted(checkpoint.model_keys) == sorted([key, gated])
    assert torch.equal(checkpoint.read(key), table)
    assert torch.equal(checkpoint.read(gated), fc1)
    assert checkpoint.meta(key).dtype == torch.bfloat16
    with pytest.raises(BadInput, match=r"no tensor output_layer\.weight"):
        checkpoint.read("output_layer.weight")
