"""Text to dataset: what is kept, skipped, or stops the run; the same bytes each time."""

from __future__ import annotations

import gzip
import json
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest
from made_tokenizers import make_hf_folder

from megatron_lengen.data.indexed import check_dataset
from megatron_lengen.data.preprocess import TokenizerSpec, preprocess
from megatron_lengen.errors import BadInput

TOOL = Path(__file__).parents[3] / "tools" / "data" / "preprocess.py"
BYTES = TokenizerSpec("byte")
EOD = 256


@pytest.fixture
def run_tool(tool_runner):
    """Run the tool in this process: Megatron's import takes seconds in each new one."""
    return partial(tool_runner, "preprocess")


def documents(prefix: Path) -> list[str]:
    """The texts of a byte-level dataset; each must end with the only EOD in it."""
    dataset = check_dataset(prefix)
    texts = []
    for i in range(len(dataset)):
        ids = dataset[i].tolist()
        assert ids[-1] == EOD and ids.count(EOD) == 1
        texts.append(bytes(ids[:-1]).decode("utf-8"))
    return texts


def line(text: object) -> bytes:
    return json.dumps({"text": text}).encode() + b"\n"


def test_empty_texts_are_skipped_and_counted(run_tool, tmp_path: Path) -> None:
    """At the first, a middle and the last place, in every form of nothing."""
    empty = [line(""), line(" "), line(None), b'{"other": "x"}\n']
    content = b"".join([*empty, line("one"), *empty, line("two"), *empty])
    (tmp_path / "in.jsonl").write_bytes(content)
    done = run_tool(
        "--input", tmp_path / "in.jsonl", "--tokenizer", "byte", "--output-prefix", tmp_path / "p"
    )
    assert done.code == 0, done.err
    assert documents(tmp_path / "p") == ["one", "two"]
    assert "documents kept:  2" in done.out
    assert "empty, skipped:  9" in done.out
    assert "without the key: 3 skipped" in done.out
    assert "tokens:          8 " in done.out


BROKEN = {
    "invalid-utf8": (b'{"text": "a\xffb"}\n', "invalid UTF-8 byte 0xff at byte 12"),
    "two-objects": (line("a").strip() + line("b"), "invalid JSON: Extra data at column 14"),
    "raw-nul": (b'{"text": "a\0b"}\n', "invalid JSON: Invalid control character at column 12"),
    "lone-surrogate": (b'{"text": "ab\\ud800"}\n', r"lone surrogate U\+D800 at character 3"),
    "number": (line(3), "text is a int, not a string"),
    "array": (b'["text"]\n', "not a JSON object"),
    "deep": (b"[" * 100_000 + b"\n", "invalid JSON"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_broken_line_is_named_or_skipped(name: str, tmp_path: Path) -> None:
    raw, reason = BROKEN[name]
    path = tmp_path / "in.jsonl"
    path.write_bytes(line("first") + b"\n" + raw + line("last"))
    with pytest.raises(BadInput, match=rf"^{path}:3: {reason}"):
        preprocess([str(path)], BYTES, tmp_path / "p")
    assert {p.name for p in tmp_path.iterdir()} == {"in.jsonl"}
    summary = preprocess([str(path)], BYTES, tmp_path / "p", on_error="skip")
    assert documents(tmp_path / "p") == ["first", "last"]
    assert len(summary.broken) == 1 and summary.broken[0].startswith(f"{path}:3: ")
    assert summary.skipped == {"blank line": 1}


def test_truncated_last_line_is_named(run_tool, tmp_path: Path) -> None:
    path = tmp_path / "in.jsonl"
    path.write_bytes(line("first") + line("second")[:-6])
    done = run_tool("--input", path, "--tokenizer", "byte", "--output-prefix", tmp_path / "p")
    assert done.code == 2
    assert done.err.startswith(f"error: {path}:2: invalid JSON: Unterminated string")
    assert done.err.count("\n") == 1
    assert [p.name for p in tmp_path.iterdir()] == ["in.jsonl"]


def test_harmless_oddities_are_kept(tmp_path: Path) -> None:
    """Byte order marks, CRLF, an escaped NUL, surrogate pairs, no newline at the end."""
    content = b"\xef\xbb\xbf" + line("bom").replace(b"\n", b"\r\n") + b"\r\n   \n"
    content += b'{"text": "nul \\u0000 pair \\ud83c\\udf89", "id": 1e999}\n'
    content += b"\xef\xbb\xbf" + line("bom of a joined file") + line("last").rstrip()
    (tmp_path / "in.jsonl").write_bytes(content)
    summary = preprocess([str(tmp_path / "in.jsonl")], BYTES, tmp_path / "p")
    assert documents(tmp_path / "p") == [
        "bom", "nul \0 pair \U0001f389", "bom of a joined file", "last",
    ]  # fmt: skip
    assert summary.skipped == {"blank line": 2} and not summary.broken


@pytest.mark.parametrize("on_error", ["stop", "skip"])
def test_truncated_gzip_stops_always(on_error: str, run_tool, tmp_path: Path) -> None:
    whole = gzip.compress(b"".join(line(f"text {i} " * 50) for i in range(500)))
    path = tmp_path / "in.jsonl.gz"
    path.write_bytes(whole[: len(whole) // 2])
    done = run_tool(
        "--input", path, "--tokenizer", "byte", "--output-prefix", tmp_path / "p",
        "--on-error", on_error,
    )  # fmt: skip
    assert done.code == 2
    assert done.err.startswith(f"error: {path}:") and "cut short" in done.err
    assert not list(tmp_path.glob("p*"))


def make_folder(folder: Path) -> list[str]:
    """A folder with every kind of file, some not to be read; returns its documents in order."""
    import pyarrow
    import pyarrow.parquet

    (folder / "sub" / "__pycache__").mkdir(parents=True)
    (folder / "a.py").write_text("x = 1\n")
    (folder / "b.jsonl").write_bytes(line("json one") + line("json two"))
    (folder / "c.json.gz").write_bytes(gzip.compress(line("zipped json")))
    table = pyarrow.table({"text": ["row one", None, "", "row two"], "n": [1, 2, 3, 4]})
    pyarrow.parquet.write_table(table, folder / "d.parquet")
    (folder / "e.txt.gz").write_bytes(gzip.compress(b"zipped text\n"))
    (folder / "sub" / "f.txt").write_bytes(b"\xef\xbb\xbfcaf\xc3\xa9\r\nline two")
    (folder / "sub" / "picture.png").write_bytes(b"\x89PNG\0\0")
    (folder / "sub" / "set.bin").write_bytes(b"abc")
    (folder / "sub" / "__pycache__" / "g.txt").write_text("cache")
    (folder / ".hidden.txt").write_text("hidden")
    return [
        "x = 1\n", "json one", "json two", "zipped json", "row one", "row two", "zipped text\n",
        "caf\u00e9\r\nline two",
    ]  # fmt: skip


def test_folder_with_every_format(tmp_path: Path) -> None:
    expected = make_folder(tmp_path / "data")
    summary = preprocess([str(tmp_path / "data")], BYTES, tmp_path / "p")
    assert documents(tmp_path / "p") == expected
    assert summary.documents == 8 and summary.skipped["empty"] == 2 and summary.binary_files == 2
    assert summary.tokens == sum(len(text.encode()) + 1 for text in expected)


def test_same_bytes_for_any_number_of_workers(run_tool, tmp_path: Path) -> None:
    make_folder(tmp_path / "data")
    lines = b"".join(line(f"document {i} " * (i % 37)) for i in range(3500))
    (tmp_path / "data" / "many.jsonl").write_bytes(lines)
    arguments = ["--input", tmp_path / "data", "--tokenizer", "byte", "--output-prefix"]
    for workers in (1, 3):
        done = run_tool(*arguments, tmp_path / f"p{workers}", "--workers", workers)
        assert done.code == 0, done.err
    for suffix in (".bin", ".idx"):
        one = (tmp_path / f"p1{suffix}").read_bytes()
        assert one == (tmp_path / f"p3{suffix}").read_bytes() and len(one) > 10_000


def test_first_broken_line_is_named_whatever_the_workers(run_tool, tmp_path: Path) -> None:
    lines = [line(f"document {i}") for i in range(5000)]
    lines[2345] = lines[4321] = b"{broken\n"
    (tmp_path / "in.jsonl").write_bytes(b"".join(lines))
    done = run_tool(
        "--input", tmp_path / "in.jsonl", "--tokenizer", "byte", "--output-prefix", tmp_path / "p",
        "--workers", 2,
    )  # fmt: skip
    assert done.code == 2 and f"{tmp_path / 'in.jsonl'}:2346: " in done.err
    assert done.err.startswith("error: ") and done.err.count("\n") == 1


def test_broken_text_file_is_named_by_line(tmp_path: Path) -> None:
    for name, content in (("utf8", b"one\ntwo \xff\n"), ("nul", b"one\nt\0wo\n")):
        (tmp_path / f"{name}.txt").write_bytes(content)
        with pytest.raises(BadInput, match=rf"{name}\.txt:2: "):
            preprocess([str(tmp_path / f"{name}.txt")], BYTES, tmp_path / "p")


def test_wrong_key_is_said(tmp_path: Path) -> None:
    make_folder(tmp_path / "data")
    with pytest.raises(BadInput, match="--text-key: found no line with the key 'content'"):
        preprocess([str(tmp_path / "data/b.jsonl")], BYTES, tmp_path / "p", text_key="content")
    with pytest.raises(BadInput, match=r"content, which is no column .* allowed: text, n"):
        preprocess([str(tmp_path / "data/d.parquet")], BYTES, tmp_path / "p", text_key="content")


def test_megatron_flags_are_aliases(run_tool, tmp_path: Path) -> None:
    (tmp_path / "in.json").write_bytes(
        b'{"content": "1 2"}\n{"content": "3 x"}\n{"content": "7"}\n'
    )
    done = run_tool(
        "--input", tmp_path / "in.json", "--json-keys", "content", "--tokenizer-type",
        "NullTokenizer", "--vocab-size", 9, "--output-prefix", tmp_path / "p", "--append-eod",
        "--on-error", "skip", "--workers", 1,
    )  # fmt: skip
    assert done.code == 0, done.err
    dataset = check_dataset(tmp_path / "p")
    assert [dataset[i].tolist() for i in range(2)] == [[1, 2, 8], [7, 8]]
    assert f"skipped {tmp_path / 'in.json'}:2: " in done.err


def test_text_that_spells_the_end_token_ends_once(tmp_path: Path) -> None:
    """A Hugging Face tokenizer reads its special tokens from text."""
    folder = make_hf_folder(tmp_path / "hf")
    (tmp_path / "in.jsonl").write_bytes(line("x = 1<|end|>") + line("<|end|>") + line("y = 2"))
    summary = preprocess([str(tmp_path / "in.jsonl")], TokenizerSpec(str(folder)), tmp_path / "p")
    dataset = check_dataset(tmp_path / "p")
    assert (len(dataset), summary.skipped["empty"]) == (2, 1)
    assert all(dataset[i].tolist().count(0) == 1 and dataset[i][-1] == 0 for i in range(2))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--input", "absent", "--tokenizer", "byte"], "--input: found no file or folder absent"),
        (["--input", TOOL], "--tokenizer: found none"),
        (["--input", TOOL, "--tokenizer", "no.model"], "--tokenizer: found no file no.model"),
        (["--input", TOOL, "--tokenizer", "byte", "--workers", 0], "--workers: found 0"),
        (["--input", TOOL, "--tokenizer-type", "Other"], "--tokenizer-type: found Other"),
        (["--tokenizer", "byte"], "--input"),
        (["--input", TOOL, "--tokenizer", "byte", "--on-error", "ask"], "--on-error"),
    ],
)
def test_bad_arguments_are_one_line(
    arguments: list, message: str, run_tool, tmp_path: Path
) -> None:
    done = run_tool(*arguments, "--output-prefix", tmp_path / "p")
    assert done.code == 2
    assert message in done.err and done.err.startswith("error: ")
    assert done.err.count("\n") == 1


def test_existing_output_is_kept_without_force(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("one")
    (tmp_path / "b.txt").write_text("two")
    preprocess([str(tmp_path / "a.txt")], BYTES, tmp_path / "p")
    with pytest.raises(BadInput, match="--force"):
        preprocess([str(tmp_path / "b.txt")], BYTES, tmp_path / "p")
    assert documents(tmp_path / "p") == ["one"]
    preprocess([str(tmp_path / "b.txt")], BYTES, tmp_path / "p", force=True)
    assert documents(tmp_path / "p") == ["two"]


def test_runs_as_a_program(tmp_path: Path) -> None:
    """As a new process with workers of its own, from any folder."""
    (tmp_path / "in.txt").write_text("one")
    done = subprocess.run(
        [sys.executable, str(TOOL), "--input", "in.txt", "--tokenizer", "byte",
         "--output-prefix", "p", "--workers", "2"],
        cwd=tmp_path, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert documents(tmp_path / "p") == ["one"] and "MB/s" in done.stdout
