"""Scores of the copy task: oracles, errors made by hand, the published formula, the tool."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from evaluation_models import llama
from tiny_models import tiny_mamba

from megatron_lengen.data.copy_task import CopyLengths, CopyTokenizer, evaluation_sources
from megatron_lengen.errors import BadInput
from megatron_lengen.evaluation.copy_task import check_tokenizer, count_right, evaluate_copy
from megatron_lengen.evaluation.model import prepare_model
from megatron_lengen.evaluation.native import NativeModel
from megatron_lengen.models.build import InferenceModel, build_chunks

ROOT = Path(__file__).resolve().parents[3]
END = 28


class Copier:
    """Reads the source out of the prompt and repeats it, with errors at given places.

    Args:
        greedy_errors, forced_errors: places of the answer that are wrong in every row.
        only: the errors are in this row of a batch alone.
    """

    def __init__(self, greedy_errors=(), forced_errors=(), only=None):
        self.greedy_errors, self.forced_errors, self.only = greedy_errors, forced_errors, only
        self.shapes = []

    def greedy(self, ids, new_tokens):
        self.shapes.append(tuple(ids.shape))
        assert (ids[:, 0] == 26).all() and (ids[:, -1] == 27).all()
        answer = torch.cat((ids[:, 1:-1], torch.full((len(ids), 1), END)), dim=1)
        assert new_tokens == answer.shape[1]
        return self.spoilt(answer, self.greedy_errors)

    def forced_tokens(self, ids, last):
        assert ids.shape[1] == 2 * last + 2
        return self.spoilt(ids[:, 1 : last + 1].clone(), self.forced_errors)

    def spoilt(self, answer, places):
        rows = slice(None) if self.only is None else slice(self.only, self.only + 1)
        for place in places:
            answer[rows, place] = (answer[rows, place] + 1) % 26
        return answer


def test_an_oracle_scores_100():
    found = evaluate_copy(Copier(), [4, 11], 7, trained=CopyLengths(2, 8))
    assert found["train_lengths"] == [2, 8]
    for row, length in zip(found["lengths"], (4, 11), strict=True):
        assert row == {
            "length": length,
            "samples": 7,
            "exact_match": 100.0,
            "token_accuracy": 100.0,
            "forced_string_accuracy": 100.0,
            "forced_character_accuracy": 100.0,
        }


@pytest.mark.parametrize(
    ("model", "expected"),
    [  # of 5 examples with 4 letters: sums of exact, tokens, forced strings, forced characters
        (Copier(greedy_errors=[2]), (0, 5 * 3 / 4, 5, 5)),
        (Copier(greedy_errors=[-1]), (0, 5, 5, 5)),  # does not end where it should
        (Copier(forced_errors=[0, 3]), (5, 5, 0, 5 * 2 / 4)),
        (Copier(greedy_errors=[0], forced_errors=[0], only=1), (4, 4 + 3 / 4, 4, 4 + 3 / 4)),
    ],
)
def test_errors_are_counted(model, expected):
    found = count_right(model, 4, range(5))
    assert tuple(found.values()) == pytest.approx(expected)


def test_batches_bound_the_tokens_and_change_nothing():
    whole, parts = Copier(greedy_errors=[1]), Copier(greedy_errors=[1])
    assert count_right(whole, 6, range(9)) == count_right(parts, 6, range(9), batch_tokens=50)
    assert whole.shapes == [(9, 8)]
    assert parts.shapes == [(3, 8)] * 3  # examples of 15 tokens
    one = Copier()
    count_right(one, 6, range(2), batch_tokens=1)
    assert one.shapes == [(1, 8)] * 2


def test_shares_add_up():
    model = Copier(greedy_errors=[0], only=0)
    half = [count_right(model, 5, range(rank, 8, 2), batch_tokens=1) for rank in (0, 1)]
    assert half[0]["token_accuracy"] + half[1]["token_accuracy"] == pytest.approx(8 * 4 / 5)


def jelassi(model, source: list[int]) -> float:
    """Teacher-forced character accuracy as published: argmax over one pass of the gold sequence,
    read from the separator's position on, the end token not scored."""
    gold = [26, *source, 27, *source, END]
    with torch.no_grad():
        predicted = model(input_ids=torch.tensor([gold])).logits[0].argmax(-1).tolist()
    at = gold.index(27)
    pairs = zip(predicted[at : at + len(source)], source, strict=True)
    return sum(a == b for a, b in pairs) / len(source)


def test_forced_accuracy_is_the_published_formula():
    model = llama(vocab=30)
    length, count = 9, 40
    sources = evaluation_sources(42, length, range(count))
    expected = [jelassi(model, source) for source in sources.tolist()]
    found = count_right(prepare_model(model), length, range(count), batch_tokens=200)
    assert 0 < sum(expected) < count  # a random model is right now and then
    assert found["forced_character_accuracy"] == pytest.approx(sum(expected), abs=1e-9)


def test_other_tokenizers_are_refused():
    check_tokenizer(CopyTokenizer())

    class Shifted(CopyTokenizer):
        def encode(self, text):
            return [i + 1 for i in super().encode(text)]

    with pytest.raises(BadInput, match="--model: found a tokenizer"):
        check_tokenizer(Shifted())


def test_the_native_model_answers_as_uncached_forwards_do(process_groups):
    config = tiny_mamba(vocab_size=30, init_method_std=0.5)
    (built,) = build_chunks(config)
    model = NativeModel(InferenceModel(built.eval(), config))
    prompts = torch.cat((torch.full((3, 1), 26), evaluation_sources(1, 6, range(3))), dim=1)
    answers = model.greedy(prompts, 5)
    rows = prompts
    for _ in range(5):
        rows = torch.cat((rows, model.model(rows)[:, -1].argmax(-1)[:, None]), dim=1)
    assert torch.equal(answers, rows[:, 7:])
    # Forced along its own answers it repeats them.
    assert torch.equal(model.forced_tokens(rows, 5), answers)
    assert len(set(answers.flatten().tolist())) > 1


def run_tool(*arguments: str) -> subprocess.CompletedProcess:
    command = [sys.executable, "tools/evaluate/copy_task.py", *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)


def test_tool_on_a_hugging_face_folder(tmp_path):
    llama(vocab=30).save_pretrained(tmp_path / "model")
    CopyTokenizer().save_for_huggingface(tmp_path / "model")
    arguments = ("--model", str(tmp_path / "model"), "--output", str(tmp_path / "out"))
    arguments += ("--samples", "6", "--train-lengths", "2-5")
    done = run_tool(*arguments, "--lengths", "8,5")
    assert done.returncode == 0, done.stderr
    found = json.loads((tmp_path / "out" / "results.json").read_text())
    assert [row["length"] for row in found["lengths"]] == [5, 8]
    assert found["settings"]["samples"] == 6 and found["train_lengths"] == [2, 5]
    assert found["model"]["architecture"] == "LlamaForCausalLM"
    assert (tmp_path / "out" / "copy_task.png").stat().st_size > 5000
    again = run_tool(*arguments, "--lengths", "5,8")
    assert again.returncode == 0 and "already has these results" in again.stdout
    for bad, said in (
        (("--lengths", "5"), "other settings"),
        (("--lengths", "0"), "--lengths"),
        (("--lengths", "5,8", "--seed", "-1"), "--seed"),
    ):
        failed = run_tool(*arguments, *bad)
        assert failed.returncode == 2 and said in failed.stderr, failed.stderr
        assert failed.stderr.count("\n") == 1
