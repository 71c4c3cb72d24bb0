"""Checkpoint folders: found, refused, published so that a kill at any moment does no harm."""

from __future__ import annotations

import builtins
import errno
import io
import json
import logging
import os
import pickle

import pytest
import torch
import torch.distributed.checkpoint as dcp

from megatron_lengen import checkpoint_folder
from megatron_lengen.checkpoint_folder import (
    find,
    find_damage,
    iteration_folder,
    prune,
    publish,
    start_partial,
)
from megatron_lengen.errors import BadInput

TRACKER = "latest_checkpointed_iteration.txt"


def fill(folder, iteration: int, value: float = 0.0) -> None:
    """A complete iteration, as small as can be."""
    folder.mkdir(parents=True, exist_ok=True)
    dcp.save({"decoder.x": torch.full((4,), value)}, checkpoint_id=str(folder), no_dist=True)
    torch.save({"iteration": iteration}, folder / "common.pt")
    (folder / "metadata.json").write_text('{"sharded_backend": "torch_dist"}')
    checkpoint_folder.write_description(folder, {"iteration": iteration, "model": {}})


def save(root, iteration: int, value: float = 0.0) -> None:
    """What training does to save."""
    partial = start_partial(root, iteration)
    fill(partial, iteration, value)
    publish(root, iteration, partial)


def value_of(found) -> float:
    tensors = {"decoder.x": torch.empty(4)}
    dcp.load(tensors, checkpoint_id=str(found.folder), no_dist=True)
    return tensors["decoder.x"][0].item()


def test_save_and_find(tmp_path):
    assert find(tmp_path) is None and find(tmp_path / "none") is None
    for iteration in (5, 10):
        save(tmp_path, iteration)
    assert (tmp_path / TRACKER).read_text() == "10"
    assert checkpoint_folder.iterations(tmp_path) == [5, 10]
    newest, older = find(tmp_path), find(tmp_path, 5)
    assert newest.iteration == 10 and newest.folder == tmp_path / "iter_0000010"
    assert older.iteration == 5 and not older.release
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "iter_0000005",
        "iter_0000010",
        TRACKER,
    ]


def test_a_release_counts_as_iteration_0(tmp_path):
    fill(tmp_path / "release", 0)
    checkpoint_folder.write_tracker(tmp_path, "release")
    found = find(tmp_path)
    assert found.release and found.iteration == 0
    assert find(tmp_path / "release").release


def test_the_same_iteration_again_replaces_it(tmp_path):
    save(tmp_path, 5, 1.0)
    save(tmp_path, 5, 2.0)
    assert value_of(find(tmp_path)) == 2.0
    assert sorted(p.name for p in tmp_path.iterdir()) == ["iter_0000005", TRACKER]


def test_leftovers_of_a_killed_save_are_removed(tmp_path):
    (start_partial(tmp_path, 5) / "half").write_text("x")
    (tmp_path / ".removed_iter_0000003").mkdir()
    (tmp_path / ".partial_notes").mkdir()  # not ours
    again = start_partial(tmp_path, 5)
    assert list(again.iterdir()) == []
    assert sorted(tmp_path.iterdir()) == sorted([again, tmp_path / ".partial_notes"])


def test_a_replaced_checkpoint_whose_successor_got_no_name_comes_back(tmp_path):
    save(tmp_path, 5, 1.0)
    os.replace(tmp_path / "iter_0000005", tmp_path / ".retired_iter_0000005")
    checkpoint_folder.clean(tmp_path)
    assert value_of(find(tmp_path)) == 1.0 and find(tmp_path).folder.name == "iter_0000005"


class Killed(BaseException):
    """The process ends here."""


@pytest.mark.parametrize("again", [False, True], ids=["new", "again"])
@pytest.mark.parametrize("moment", range(6))
def test_killed_at_any_step_of_publishing(tmp_path, monkeypatch, again, moment):
    """Before every change of the file system: what can be loaded is whole, old or new."""
    save(tmp_path, 5, 1.0)
    iteration = 5 if again else 10
    partial = start_partial(tmp_path, iteration)
    fill(partial, iteration, 2.0)
    calls = []

    def stopping(function):
        def call(*args, **kwargs):
            calls.append(function.__name__)
            if len(calls) == moment + 1:
                raise Killed
            return function(*args, **kwargs)

        return call

    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", stopping(os.replace))
        patch.setattr(checkpoint_folder.shutil, "rmtree", stopping(checkpoint_folder.shutil.rmtree))
        try:
            publish(tmp_path, iteration, partial)
        except Killed:
            pass
        else:
            assert moment >= len(calls) >= 2
    found = find(tmp_path)
    assert value_of(found) in (1.0, 2.0)
    save(tmp_path, iteration, 3.0)
    assert value_of(find(tmp_path)) == 3.0
    assert not list(tmp_path.glob(".retired*")) and not list(tmp_path.glob(".partial*"))


@pytest.mark.parametrize(
    "damage, says",
    [
        (lambda folder: (folder.parent / TRACKER).write_text(""), "found ''"),
        (lambda folder: (folder.parent / TRACKER).write_bytes(b"\xff\x00"), "found "),
        (
            lambda folder: (folder.parent / TRACKER).write_text("30"),
            "iter_0000030, which is missing",
        ),
        (lambda folder: (folder.parent / TRACKER).unlink(), f"has no {TRACKER}"),
        (lambda folder: (folder / "lengen.json").unlink(), "lengen.json: missing"),
        (lambda folder: (folder / "lengen.json").write_text("{"), "lengen.json: damaged"),
        (lambda folder: (folder / ".metadata").unlink(), ".metadata: missing or damaged"),
        (lambda folder: (folder / ".metadata").write_bytes(b"x"), ".metadata: missing or damaged"),
        (lambda folder: os.truncate(folder / "__0_0.distcp", 10), "__0_0.distcp: cut short"),
        (lambda folder: (folder / "__0_0.distcp").unlink(), "__0_0.distcp: missing"),
        (lambda folder: (folder / "common.pt").unlink(), "common.pt: missing or damaged"),
        (lambda folder: (folder / "common.pt").write_bytes(b"x"), "common.pt: missing or damaged"),
        (lambda folder: spoil(folder / "common.pt", b"iteration"), "common.pt: damaged"),
        (lambda folder: (folder / "metadata.json").unlink(), "metadata.json: missing or damaged"),
        (lambda folder: (folder / "metadata.json").write_text("[]"), "metadata.json: missing or d"),
    ],
)
def test_damage_falls_back_with_a_warning_or_is_refused(tmp_path, caplog, damage, says):
    """Report 16 of the field."""
    save(tmp_path / "two", 5)
    save(tmp_path / "two", 10)
    damage(iteration_folder(tmp_path / "two", 10))
    with caplog.at_level(logging.WARNING):
        found = find(tmp_path / "two")
    # A spoilt tracker leaves the newest folder whole.
    assert found.iteration == (10 if TRACKER in says or "found" in says or "30" in says else 5)
    assert says in caplog.text and f"loading {found.folder} instead" in caplog.text
    save(tmp_path / "one", 10)
    damage(iteration_folder(tmp_path / "one", 10))
    if found.iteration == 5:
        with pytest.raises(BadInput) as caught:
            find(tmp_path / "one")
        assert says in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize("lost", ["place", "size"])
def test_metadata_that_lost_a_tensors_place_or_size_is_damaged(tmp_path, lost):
    folder = tmp_path / "iter_0000005"
    folder.mkdir()
    dcp.save({"decoder.a": torch.ones(4)}, checkpoint_id=str(folder), no_dist=True)
    checkpoint_folder.write_description(folder, {"iteration": 5, "model": {}})
    metadata = checkpoint_folder.read_metadata(folder)
    if lost == "place":
        metadata.storage_data.clear()
    else:
        metadata.state_dict_metadata["decoder.a"].size = None
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))
    with pytest.raises(BadInput, match=r"\.metadata: missing or damaged"):
        checkpoint_folder.read_metadata(folder)


def spoil(path, where: bytes) -> None:
    """Change one byte, as a bad disk does."""
    content = bytearray(path.read_bytes())
    content[content.index(where)] ^= 1
    path.write_bytes(content)


def test_changed_bytes_are_found_by_the_rank_that_looks_at_them(tmp_path):
    folder = tmp_path / "iter_0000005"
    folder.mkdir()
    tensors = {f"decoder.{i}": torch.full((64,), float(i)) for i in range(4)}
    dcp.save(tensors, checkpoint_id=str(folder), no_dist=True)
    checkpoint_folder.write_description(folder, {"iteration": 5, "model": {}})
    assert find_damage(folder) is None
    spoil(folder / "__0_0.distcp", torch.full((8,), 2.0).numpy().tobytes())
    assert find_damage(folder) == f"{folder / '__0_0.distcp'}: damaged at decoder.2"
    assert [bool(find_damage(folder, rank, 2)) for rank in (0, 1)].count(True) == 1
    (folder / "__0_0.distcp").write_bytes(b"\0" * (folder / "__0_0.distcp").stat().st_size)
    assert "damaged at decoder.0" in find_damage(folder)


@pytest.mark.parametrize("name", [TRACKER, "lengen.json", ".metadata", "__0_0.distcp", "common.pt"])
def test_a_file_that_may_not_be_read_counts_as_damaged(monkeypatch, tmp_path, caplog, name):
    """Simulated where the test runs as root, who may read everything."""
    save(tmp_path, 5)
    save(tmp_path, 10)
    path = tmp_path / name if name == TRACKER else tmp_path / "iter_0000010" / name
    path.chmod(0)
    refuse_as_the_system_does(monkeypatch, path)
    with caplog.at_level(logging.WARNING):
        found = find(tmp_path)
    assert found.iteration == (10 if name == TRACKER else 5)
    assert name in caplog.text and f"loading {found.folder} instead" in caplog.text


def refuse_as_the_system_does(monkeypatch, path) -> None:
    real = io.open

    def refusing(file, *args, **kwargs):
        if not isinstance(file, int) and os.fspath(file) == str(path):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))
        return real(file, *args, **kwargs)

    monkeypatch.setattr(io, "open", refusing)
    monkeypatch.setattr(builtins, "open", refusing)


# ---- retention -----------------------------------------------------------------------------------


def kept(root) -> list[int]:
    return checkpoint_folder.iterations(root)


def test_the_newest_and_the_multiples_stay(tmp_path):
    for iteration in range(2, 22, 2):
        save(tmp_path, iteration)
    fill(tmp_path / "release", 0)
    (tmp_path / "iter_notes").mkdir()
    prune(tmp_path, 20, keep_last=3, keep_every=8)
    assert kept(tmp_path) == [8, 16, 18, 20]
    prune(tmp_path, 20, keep_last=1)
    assert kept(tmp_path) == [20]
    assert {path.name for path in tmp_path.iterdir()} == {
        "release",
        "iter_notes",
        "iter_0000020",
        TRACKER,
    }


def test_what_cannot_be_read_does_not_count_as_kept(tmp_path):
    for iteration in (2, 4, 6, 8):
        save(tmp_path, iteration)
    os.truncate(tmp_path / "iter_0000006" / "__0_0.distcp", 10)
    prune(tmp_path, 8, keep_last=2)
    assert kept(tmp_path) == [4, 6, 8]


def test_later_iterations_of_an_abandoned_branch_stay(tmp_path):
    for iteration in (2, 4, 6, 8):
        save(tmp_path, iteration)
    prune(tmp_path, 4, keep_last=1)
    assert kept(tmp_path) == [4, 6, 8]


def test_a_link_is_removed_and_not_what_it_points_to(tmp_path):
    fill(tmp_path / "elsewhere", 2)
    (tmp_path / "ck").mkdir()
    (tmp_path / "ck" / "iter_0000002").symlink_to(tmp_path / "elsewhere")
    save(tmp_path / "ck", 4)
    prune(tmp_path / "ck", 4, keep_last=1)
    assert kept(tmp_path / "ck") == [4] and (tmp_path / "elsewhere" / "lengen.json").exists()


def test_killed_while_removing_leaves_no_half_a_checkpoint(tmp_path, monkeypatch):
    save(tmp_path, 2)
    save(tmp_path, 4)

    def delete_half(folder, ignore_errors):
        if folder.exists():
            (folder / "lengen.json").unlink()
            raise Killed

    with monkeypatch.context() as patch:
        patch.setattr(checkpoint_folder.shutil, "rmtree", delete_half)
        with pytest.raises(Killed):
            prune(tmp_path, 4, keep_last=1)
    assert kept(tmp_path) == [4] and list(tmp_path.glob(".removed_*"))
    save(tmp_path, 6)
    assert not list(tmp_path.glob(".removed_*"))


def test_an_iteration_asked_for_is_not_replaced_by_another(tmp_path):
    save(tmp_path, 5)
    save(tmp_path, 10)
    os.truncate(tmp_path / "iter_0000010" / "__0_0.distcp", 10)
    with pytest.raises(BadInput, match="cut short"):
        find(tmp_path, 10)
    with pytest.raises(BadInput, match=r"--ckpt-step: found 7; .*iter_0000005, iter_0000010"):
        find(tmp_path, 7)


def test_a_foreign_format_is_refused(tmp_path):
    save(tmp_path, 5)
    path = tmp_path / "iter_0000005" / "lengen.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "format": 2}))
    with pytest.raises(BadInput, match="format 2; allowed: 1"):
        find(tmp_path)


def test_only_the_first_rank_warns(tmp_path, monkeypatch, caplog):
    save(tmp_path, 5)
    (tmp_path / TRACKER).write_text("")
    monkeypatch.setenv("RANK", "1")
    assert find(tmp_path).iteration == 5
    assert not [r for r in caplog.records if r.levelno >= logging.WARNING]
