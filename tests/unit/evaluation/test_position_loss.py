"""Loss by position: documents, arithmetic against a naive computation, the tool itself."""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from evaluation_models import llama

from megatron_lengen.errors import BadInput
from megatron_lengen.evaluation.model import EvaluationModel, load_tokenizer, prepare_model
from megatron_lengen.evaluation.position_loss import (
    doubling_spans,
    evaluate_position_loss,
    long_documents,
    read_documents,
    summarize,
    windows,
)
from megatron_lengen.evaluation.results import finished_results
from megatron_lengen.evaluation.sources import find_model

ROOT = Path(__file__).resolve().parents[3]


def write_documents(path: Path, lengths: list[int]) -> list[str]:
    texts = ["".join(chr(97 + (i * i + n) % 26) for i in range(n)) for n in lengths]
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return texts


def test_documents_are_counted_and_cut(tmp_path, characters):
    texts = write_documents(tmp_path / "d.jsonl", [10, 50, 49, 80, 60])
    found = long_documents(read_documents([str(tmp_path / "d.jsonl")]), characters, 50)
    assert found.rows == [[ord(c) for c in texts[n][:50]] for n in (1, 3, 4)]
    assert found.counts() == {
        "read": 5,
        "used": 3,
        "too_short": 2,
        "cut_to_max_length": 2,
        "longest_tokens": 80,
    }
    assert len(long_documents(iter(texts), characters, 50, limit=2).rows) == 2
    with pytest.raises(BadInput, match=r"none of 5 documents.*\(81\).*longest has 80"):
        long_documents(iter(texts), characters, 81)


def test_folders_and_text_files(tmp_path):
    (tmp_path / "in").mkdir()
    write_documents(tmp_path / "b.jsonl", [3])
    (tmp_path / "a.txt").write_text("first\nsecond")
    (tmp_path / "in" / "c.txt").write_text("third")
    assert [t[:5] for t in read_documents([str(tmp_path)])] == ["first", "deh", "third"]


@pytest.mark.parametrize("line", ["not json", '{"body": "x"}', "[1]", '{"text": 3}'])
def test_bad_lines_are_named(tmp_path, line):
    (tmp_path / "d.jsonl").write_text('{"text": "x"}\n' + line + "\n")
    place = "--text-key" if "body" in line else r"d\.jsonl:2"
    with pytest.raises(BadInput, match=place):
        list(read_documents([str(tmp_path / "d.jsonl")]))


def test_ranges():
    assert windows(10, 4) == [(0, 4), (4, 8), (8, 10)]
    assert doubling_spans(39, 8) == [(0, 8), (8, 16), (16, 32), (32, 39)]
    assert doubling_spans(7, 8) == [(0, 7)]


def test_standard_error_is_over_documents():
    losses = torch.tensor([[1.0, 3.0, 9.0], [5.0, 7.0, 9.0], [2.0, 2.0, 9.0]])
    row = summarize(losses, [(0, 2)])[0]
    means = [2.0, 6.0, 2.0]
    assert row["mean"] == pytest.approx(statistics.mean(means))
    assert row["stderr"] == pytest.approx(statistics.stdev(means) / 3**0.5)
    assert summarize(losses[:1], [(0, 2)])[0]["stderr"] is None


def test_windows_equal_a_naive_computation(characters):
    model = llama()
    texts = ["".join(chr(65 + (7 * i * i + k) % 60) for i in range(90)) for k in range(3)]
    model.set_attn_implementation("eager")
    expected = []
    for text in texts:
        ids = torch.tensor([[ord(c) for c in text[:80]]])
        with torch.no_grad():
            expected.append(
                F.cross_entropy(model(ids).logits[0, :-1], ids[0, 1:], reduction="none")
            )
    expected = torch.stack(expected)
    documents = long_documents(iter(texts), characters, 80)
    results = evaluate_position_loss(prepare_model(model), documents, bucket=16, train_length=20)
    assert [(r["start"], r["end"]) for r in results["windows"]][-1] == (64, 79)
    for row in results["windows"] + results["spans"]:
        mean = expected[:, row["start"] : row["end"]].mean().item()
        assert row["mean"] == pytest.approx(mean, rel=1e-5)
    assert results["mean"] == pytest.approx(expected.mean().item(), rel=1e-5)


def test_broken_weights_are_reported(characters):
    model = llama()
    model.model.norm.weight.data[0] = float("nan")
    documents = long_documents(["x" * 20], characters, 20)
    loaded = EvaluationModel(model)
    with pytest.raises(BadInput, match="not finite"):
        evaluate_position_loss(loaded, documents)


def save_with_tokenizer(folder: Path) -> None:
    """A Hugging Face folder with a tokenizer of single letters that likes to add a start token."""
    from tokenizers import Tokenizer, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    vocabulary = {"<unk>": 0, "<eos>": 1, **{chr(97 + i): i + 2 for i in range(26)}}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer.post_processor = processors.TemplateProcessing("<eos> $A", None, [("<eos>", 1)])
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, unk_token="<unk>", eos_token="<eos>"
    ).save_pretrained(folder)
    llama().save_pretrained(folder)


def test_no_start_token_is_added(tmp_path):
    from transformers import AutoTokenizer

    save_with_tokenizer(tmp_path)
    assert AutoTokenizer.from_pretrained(tmp_path)("abc")["input_ids"] == [1, 2, 3, 4]
    tokenizer = load_tokenizer(find_model(str(tmp_path)))
    assert long_documents(["abc" * 5], tokenizer, 4).rows == [[2, 3, 4, 2]]


def run_tool(*arguments: str) -> subprocess.CompletedProcess:
    command = [sys.executable, "tools/evaluate/position_loss.py", *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)


def test_tool_writes_resumes_and_refuses(tmp_path):
    save_with_tokenizer(tmp_path / "model")
    write_documents(tmp_path / "d.jsonl", [100, 30, 120])
    flags = ["--model", str(tmp_path / "model"), "--data", str(tmp_path / "d.jsonl")]
    flags += ["--output", str(tmp_path / "out"), "--train-length", "32", "--device", "cpu"]
    first = run_tool(*flags, "--max-length", "96")
    assert first.returncode == 0, first.stderr
    assert "2 used, 1 too short, 3 read" in first.stdout
    written = (tmp_path / "out" / "results.json").read_text()
    results = json.loads(written)
    assert results["length"] == 96 and results["documents"]["used"] == 2
    assert [row["start"] for row in results["spans"]] == [0, 32, 64]
    assert results["versions"]["torch"] and results["bos"] == "none"
    assert (tmp_path / "out" / "position_loss.png").read_bytes()[:4] == b"\x89PNG"

    again = run_tool(*flags, "--max-length", "96")
    assert again.returncode == 0 and "already has" in again.stdout
    assert (tmp_path / "out" / "results.json").read_text() == written
    other = run_tool(*flags, "--max-length", "64")
    assert other.returncode == 2 and "max_length differ" in other.stderr
    assert other.stderr.count("\n") == 1 and "--force" in other.stderr
    assert finished_results(str(tmp_path / "out"), {"other": 1}, force=True) is None
    assert finished_results(str(tmp_path / "new"), {"other": 1}, force=False) is None
