"""The dataset's two files: written whole, merged, and refused when they do not fit together."""

from __future__ import annotations

import shutil
import struct
from pathlib import Path

import numpy as np
import pytest

from megatron_lengen.data.indexed import DatasetWriter, check_dataset, dtype_for, merge_datasets
from megatron_lengen.errors import BadInput


def write(prefix: Path, documents: list[list[int]], dtype: type[np.number] = np.uint16) -> Path:
    with DatasetWriter(prefix, dtype) as writer:
        tokens = np.array([i for document in documents for i in document], dtype=dtype)
        writer.add_documents(tokens, np.array([len(document) for document in documents]))
    return prefix


def read(prefix: Path) -> list[list[int]]:
    dataset = check_dataset(prefix)
    return [dataset[i].tolist() for i in range(len(dataset))]


def test_documents_come_back(tmp_path: Path) -> None:
    documents = [[1, 2, 3], [65535], [4, 5]]
    prefix = write(tmp_path / "new" / "folder" / "set", documents)
    assert read(prefix) == documents
    assert check_dataset(prefix).document_indices.tolist() == [0, 1, 2, 3]
    # By hand, from the format: 3 + 1 + 2 ids of 2 bytes; header, 3 lengths and offsets, 4 ends.
    assert (tmp_path / "new/folder/set.bin").stat().st_size == 12
    assert (tmp_path / "new/folder/set.idx").stat().st_size == 34 + 3 * 12 + 4 * 8
    assert {path.name for path in prefix.parent.iterdir()} == {"set.bin", "set.idx"}


def test_width_of_ids_follows_the_vocabulary() -> None:
    assert dtype_for(257) is np.uint16 and dtype_for(65499) is np.uint16
    assert dtype_for(65500) is np.int32 and dtype_for(70000) is np.int32


@pytest.mark.parametrize("vocab_size", [65499, 65500, 70000])
def test_largest_id_does_not_overflow(vocab_size: int, tmp_path: Path) -> None:
    prefix = write(tmp_path / "set", [[0, vocab_size - 1]], dtype_for(vocab_size))
    assert read(prefix) == [[0, vocab_size - 1]]


def test_offsets_beyond_two_gigabytes_increase(tmp_path: Path) -> None:
    """Lengths as numpy int32 that sum to more than 2^31 bytes; the data itself is a sparse file."""
    prefix = tmp_path / "large"
    lengths = np.full(40, 50_000_000, dtype=np.int32)
    with DatasetWriter(prefix, np.int32) as writer:
        writer.add_documents(np.empty(0, np.int32), lengths)
        writer._builder.data_file.truncate(int(lengths.astype(np.int64).sum()) * 4)
    dataset = check_dataset(prefix)
    offsets = dataset.index.sequence_pointers
    assert offsets.dtype == np.int64
    assert offsets.tolist() == [i * 200_000_000 for i in range(40)]
    assert offsets[-1] > 2**31 and (np.diff(offsets) > 0).all()


def test_offsets_that_wrapped_are_refused(tmp_path: Path) -> None:
    """What a writer with 32-bit offsets leaves behind."""
    prefix = write(tmp_path / "set", [[1, 2], [3, 4], [5, 6]])
    raw = bytearray((tmp_path / "set.idx").read_bytes())
    struct.pack_into("<q", raw, 34 + 3 * 4 + 8, 4 - 2**32)
    (tmp_path / "set.idx").write_bytes(raw)
    with pytest.raises(BadInput, match="byte offsets that do not follow"):
        check_dataset(prefix)


def test_merge_keeps_documents(tmp_path: Path) -> None:
    first = write(tmp_path / "a", [[1, 2], [3]])
    second = write(tmp_path / "b", [[4], [5, 6, 7], [8, 9]])
    assert merge_datasets([first, second], tmp_path / "ab") == 5
    assert read(tmp_path / "ab") == [[1, 2], [3], [4], [5, 6, 7], [8, 9]]
    assert check_dataset(tmp_path / "ab").document_indices.tolist() == [0, 1, 2, 3, 4, 5]
    wide = write(tmp_path / "wide", [[1]], np.int32)
    with pytest.raises(BadInput, match=r"wide with ids as int32 .* with uint16"):
        merge_datasets([first, wide], tmp_path / "no")
    assert not list(tmp_path.glob("no*"))


def test_existing_output_needs_force(tmp_path: Path) -> None:
    prefix = write(tmp_path / "set", [[1, 2]])
    with pytest.raises(BadInput, match="--force"):
        write(prefix, [[3]])
    assert read(prefix) == [[1, 2]]
    with DatasetWriter(prefix, np.uint16, force=True) as writer:
        writer.add_documents(np.array([3], np.uint16), np.array([1]))
    assert read(prefix) == [[3]]
    with pytest.raises(BadInput, match=r"--output-prefix: found .*set\.bin; allowed: a path with"):
        DatasetWriter(tmp_path / "set.bin", np.uint16)


def test_failed_write_leaves_nothing_and_keeps_the_old(tmp_path: Path) -> None:
    prefix = write(tmp_path / "set", [[1, 2]])
    with pytest.raises(RuntimeError), DatasetWriter(prefix, np.uint16, force=True) as writer:
        writer.add_documents(np.array([3], np.uint16), np.array([1]))
        raise RuntimeError("stopped half-way")
    assert read(prefix) == [[1, 2]]
    assert {path.name for path in tmp_path.iterdir()} == {"set.bin", "set.idx"}


def cut_bin(folder: Path) -> str:
    data = (folder / "set.bin").read_bytes()
    (folder / "set.bin").write_bytes(data[:-1])
    return r"set\.bin with 9 bytes; .*set\.idx describes 10"


def lengthen_bin(folder: Path) -> str:
    with (folder / "set.bin").open("ab") as stream:
        stream.write(b"\0\0")
    return r"set\.bin with 12 bytes; .*set\.idx describes 10"


def empty_bin(folder: Path) -> str:
    (folder / "set.bin").write_bytes(b"")
    return r"set\.bin empty"


def foreign_idx(folder: Path) -> str:
    write(folder / "other", [[1], [2, 3]])
    shutil.copy(folder / "other.idx", folder / "set.idx")
    return r"set\.bin with 10 bytes; .*set\.idx describes 6"


def cut_idx(folder: Path) -> str:
    data = (folder / "set.idx").read_bytes()
    (folder / "set.idx").write_bytes(data[:-8])
    return rf"set\.idx with {len(data) - 8} bytes; its header asks for {len(data)}"


def cut_header(folder: Path) -> str:
    (folder / "set.idx").write_bytes((folder / "set.idx").read_bytes()[:20])
    return r"set\.idx \(20 bytes\), which is no Megatron index"


def older_writer(folder: Path) -> str:
    (folder / "set.idx").write_bytes(b"TNTIDX\0\0" + bytes(80))
    return "which is no Megatron index"


def other_version(folder: Path) -> str:
    raw = bytearray((folder / "set.idx").read_bytes())
    struct.pack_into("<Q", raw, 9, 2)
    (folder / "set.idx").write_bytes(raw)
    return "version 2"


def wrong_document_end(folder: Path) -> str:
    raw = bytearray((folder / "set.idx").read_bytes())
    struct.pack_into("<q", raw, len(raw) - 8, 7)
    (folder / "set.idx").write_bytes(raw)
    return "documents end at sequence 7 of 2"


def no_idx(folder: Path) -> str:
    (folder / "set.idx").unlink()
    return r"no file .*set\.idx"


def no_documents(folder: Path) -> str:
    header = b"MMIDIDX\0\0" + struct.pack("<QBQQ", 1, 8, 0, 1) + struct.pack("<q", 0)
    (folder / "set.idx").write_bytes(header)
    return "no document"


@pytest.mark.parametrize(
    "damage",
    [
        cut_bin, lengthen_bin, empty_bin, foreign_idx, cut_idx, cut_header, older_writer,
        other_version, wrong_document_end, no_idx, no_documents,
    ],
)  # fmt: skip
def test_damage_is_named_in_one_line(damage, tmp_path: Path) -> None:
    prefix = write(tmp_path / "set", [[1, 2, 3], [4, 5]])
    expected = damage(tmp_path)
    with pytest.raises(BadInput, match=expected) as caught:
        check_dataset(prefix)
    assert str(caught.value).startswith("--data-path: ") and "\n" not in str(caught.value)


def test_prefix_with_a_suffix_is_told_the_prefix(tmp_path: Path) -> None:
    prefix = write(tmp_path / "set", [[1]])
    for suffix in (".bin", ".idx"):
        with pytest.raises(BadInput, match=rf"without suffix, {prefix}$"):
            check_dataset(f"{prefix}{suffix}")
