"""Checkpoint folders: found, refused, published so that a kill at any moment does no harm."""

from __future__ import annotations

import json
import logging
import os

import pytest
import torch
import torch.distributed.checkpoint as dcp

from megatron_lengen import checkpoint_folder
from megatron_lengen.checkpoint_folder import find, iteration_folder, partial_folder, publish
from megatron_lengen.errors import BadInput

TRACKER = "latest_checkpointed_iteration.txt"


def fill(folder, iteration: int, value: float = 0.0) -> None:
    """A complete iteration, as small as can be."""
    folder.mkdir(parents=True, exist_ok=True)
    dcp.save({"decoder.x": torch.full((4,), value)}, checkpoint_id=str(folder), no_dist=True)
    checkpoint_folder.write_description(folder, {"iteration": iteration, "model": {}})


def save(root, iteration: int, value: float = 0.0) -> None:
    """What training does to save."""
    checkpoint_folder.start_partial(root, iteration)
    fill(partial_folder(root, iteration), iteration, value)
    publish(root, iteration)


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
    checkpoint_folder.start_partial(tmp_path, 5)
    (partial_folder(tmp_path, 5) / "half").write_text("x")
    checkpoint_folder.start_partial(tmp_path, 5)
    assert list(partial_folder(tmp_path, 5).iterdir()) == []


class Killed(BaseException):
    """The process ends here."""


@pytest.mark.parametrize("again", [False, True], ids=["new", "again"])
@pytest.mark.parametrize("moment", range(6))
def test_killed_at_any_step_of_publishing(tmp_path, monkeypatch, again, moment):
    """Before every change of the file system: what can be loaded is whole, old or new."""
    save(tmp_path, 5, 1.0)
    iteration = 5 if again else 10
    checkpoint_folder.start_partial(tmp_path, iteration)
    fill(partial_folder(tmp_path, iteration), iteration, 2.0)
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
            publish(tmp_path, iteration)
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
    assert found.iteration == (10 if TRACKER in says or "''" in says or "30" in says else 5)
    assert says in caplog.text and f"loading {found.folder} instead" in caplog.text
    save(tmp_path / "one", 10)
    damage(iteration_folder(tmp_path / "one", 10))
    if found.iteration == 5:
        with pytest.raises(BadInput) as caught:
            find(tmp_path / "one")
        assert says in str(caught.value) and "\n" not in str(caught.value)


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
