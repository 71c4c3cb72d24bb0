"""One row an iteration: after kills, resumes and on a full disk."""

from __future__ import annotations

import errno
import json
import logging
import os

import pytest

from megatron_lengen.errors import Fault
from megatron_lengen.training.metrics_file import JsonLines


def iterations(file) -> list[int]:
    return [json.loads(line)["iteration"] for line in file.read_text().splitlines()]


def fill(file, *numbers: int, start: int | None = 0) -> None:
    lines = JsonLines(str(file), start)
    for number in numbers:
        lines.write({"iteration": number, "lm_loss": 1.0 / number})
    lines.close()


def test_rows_that_come_again_are_replaced_and_kept_aside(tmp_path, caplog):
    file = tmp_path / "m.jsonl"
    fill(file, 1, 2, 3, 4, 5)
    before = file.read_text().splitlines()
    fill(file, 4, 5, 6, start=3)
    assert iterations(file) == [1, 2, 3, 4, 5, 6]
    assert file.read_text().splitlines()[:3] == before[:3]
    aside = tmp_path / "m.jsonl.redone"
    assert aside.read_text().splitlines() == before[3:]
    assert "2 rows after iteration 3 come again" in caplog.text and str(aside) in caplog.text
    fill(file, 6, 7, start=5)
    assert iterations(file) == [1, 2, 3, 4, 5, 6, 7] and iterations(aside) == [4, 5, 6]


def test_a_row_that_a_kill_cut_short_is_dropped(tmp_path):
    file = tmp_path / "m.jsonl"
    for start in (2, None):
        fill(file, 1, 2)
        with open(file, "a") as cut:
            cut.write('{"iteration": 3, "lm_lo')
        fill(file, 3, start=start)
        assert iterations(file) == [1, 2, 3]
        file.unlink()
    assert not list(tmp_path.glob("*.redone"))


def test_nothing_to_replace_leaves_the_file_untouched(tmp_path):
    file = tmp_path / "m.jsonl"
    fill(file, 1, 2)
    before = file.stat().st_ino
    fill(file, 3, start=2)
    assert file.stat().st_ino == before and iterations(file) == [1, 2, 3]


def test_what_is_no_row_moves_away_with_the_rows(tmp_path):
    file = tmp_path / "m.jsonl"
    file.write_text('{"iteration": 1}\nnot a row\n[3]\n{"iteration": 2, "validation": true}\n')
    fill(file, 3, start=2)
    assert iterations(file) == [1, 2, 3]
    assert (tmp_path / "m.jsonl.redone").read_text() == "not a row\n[3]\n"


def test_a_new_run_appends_to_a_file_with_rows_and_says_so(tmp_path, caplog):
    file = tmp_path / "m.jsonl"
    fill(file, 1, 2)
    with caplog.at_level(logging.WARNING):
        fill(file, 1, start=None)
    assert iterations(file) == [1, 2, 1] and f"{file} has rows already" in caplog.text


class FullDisk:
    """Takes so many more bytes, then part of a write, then nothing."""

    def __init__(self, file, room: int) -> None:
        self.file, self.room = file, room

    def write(self, data: bytes) -> int:
        if self.room <= 0:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        written = self.file.write(data[: self.room])
        self.room -= written
        return written

    def __getattr__(self, name):
        return getattr(self.file, name)


def test_on_a_full_disk_rows_wait_for_room(tmp_path, caplog):
    file = tmp_path / "m.jsonl"
    lines = JsonLines(str(file))
    lines._file = FullDisk(lines._file, 30)
    for number in (1, 2, 3):
        lines.write({"iteration": number})
    assert iterations(file) == [1]  # nothing of a row that does not fit
    assert caplog.text.count("No space left on device; rows wait for room") == 1
    lines._file = lines._file.file
    lines.write({"iteration": 4})
    assert iterations(file) == [1, 2, 3, 4]
    lines._file = FullDisk(lines._file, 0)
    lines.write({"iteration": 5})
    lines.close()
    assert iterations(file) == [1, 2, 3, 4] and "last 1 rows could not be written" in caplog.text


def test_a_file_that_cannot_be_written_is_one_line(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(Fault, match=r"--metrics-jsonl: .*file.*: (Not a directory|File exists)"):
        JsonLines(str(tmp_path / "file" / "m.jsonl"))
