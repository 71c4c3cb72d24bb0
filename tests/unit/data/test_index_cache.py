"""The index of a dataset is built where it is missing or broken, or one line says what to do."""

from __future__ import annotations

import shutil

import numpy as np
import pytest
import torch

from megatron_lengen.data.datasets import build_datasets
from megatron_lengen.data.indexed import DatasetWriter
from megatron_lengen.data.tokenizer import build_tokenizer
from megatron_lengen.errors import BadInput


@pytest.fixture
def prefix(tmp_path):
    with DatasetWriter(tmp_path / "a", np.int32) as writer:
        writer.add_documents(np.arange(300, dtype=np.int32), np.full(10, 30))
    return str(tmp_path / "a")


def rows(prefix, cache) -> torch.Tensor:
    """[20, 8] the first training rows."""
    tokenizer = build_tokenizer("NullTokenizer", vocab_size=400)
    paths = {"data_path": [prefix], "cache_path": None if cache is None else str(cache)}
    train, _ = build_datasets(tokenizer, 8, 1, (20, 0), **paths)
    return torch.stack([torch.as_tensor(train[i]["tokens"]) for i in range(20)])


@pytest.mark.parametrize("beside", [True, False], ids=["beside the data", "in a folder"])
@pytest.mark.parametrize("name", ["document", "sample", "shuffle"])
@pytest.mark.parametrize("kept", [0, 20, 0.5, 0.99])
def test_a_half_built_index_is_built_again(process_groups, prefix, tmp_path, beside, name, kept):
    cache = None if beside else tmp_path / "cache"
    expected = rows(prefix, cache)
    folder = tmp_path / "a/cache/GPTDataset_indices" if beside else cache
    (file,) = folder.glob(f"*-train-{name}_index.npy")
    whole = file.read_bytes()
    length = kept if kept == int(kept) else int(kept * len(whole))
    file.write_bytes(whole[:length])
    torch.testing.assert_close(rows(prefix, cache), expected, rtol=0, atol=0)
    assert file.read_bytes() == whole


def test_a_missing_part_is_built_again(process_groups, prefix, tmp_path):
    expected = rows(prefix, tmp_path / "cache")
    next((tmp_path / "cache").glob("*shuffle_index.npy")).unlink()
    torch.testing.assert_close(rows(prefix, tmp_path / "cache"), expected, rtol=0, atol=0)


def test_data_where_nothing_can_be_written(process_groups, prefix, tmp_path):
    """A file stands where the folder of the index would be made."""
    (tmp_path / "a").write_text("")
    with pytest.raises(BadInput, match=r"--data-cache-path: found none, .*allowed: a folder"):
        rows(prefix, None)
    assert rows(prefix, tmp_path / "cache").shape == (20, 8)


def test_an_index_that_is_there_needs_no_writing(process_groups, prefix, tmp_path):
    expected = rows(prefix, tmp_path / "cache")
    copy = shutil.copytree(tmp_path / "cache", tmp_path / "read only")
    times = {file: file.stat().st_mtime_ns for file in copy.iterdir()}
    torch.testing.assert_close(rows(prefix, copy), expected, rtol=0, atol=0)
    assert {file: file.stat().st_mtime_ns for file in copy.iterdir()} == times
