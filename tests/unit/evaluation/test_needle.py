"""Needle recall: an oracle scores 100, garbage 0; lengths, depths, batches and the tool."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from evaluation_models import llama

from megatron_lengen.errors import BadInput
from megatron_lengen.evaluation.needle import (
    NeedleSample,
    NeedleTask,
    evaluate_needle,
    evaluate_samples,
    is_found,
    make_samples,
    read_lines,
    summarize,
)

ROOT = Path(__file__).resolve().parents[3]
DIGITS = 5
TASK = NeedleTask(digits=DIGITS, seed=1)


class Oracle:
    """Copies the number out of the prompt, without knowing the answer; keeps the shapes it got."""

    def __init__(self, transform=lambda number: number):
        self.transform = transform
        self.shapes = []

    def greedy(self, ids, new_tokens):
        self.shapes.append(tuple(ids.shape))
        rows = []
        for row in ids.tolist():
            numbers = re.findall(rf"(?<!\d)\d{{{DIGITS}}}(?!\d)", "".join(map(chr, row)))
            text = " " + self.transform(numbers[0])
            rows.append(([ord(c) for c in text] + [0] + [ord("9")] * new_tokens)[:new_tokens])
        return torch.tensor(rows)

    def forced_tokens(self, ids, last):
        copied = self.greedy(ids[:, :-last], last + 1)
        self.shapes.pop()
        return copied[:, :last]


def sampled(tokenizer, length, count):
    return {length: make_samples(tokenizer, length, count, TASK)}


@pytest.mark.parametrize("length", [600, 4096])
def test_oracle_scores_100_and_lengths_are_filled(characters, length):
    results, rows = evaluate_needle(Oracle(), characters, sampled(characters, length, 10))
    (scores,) = results["lengths"]
    assert scores["recall"] == 100 and scores["samples"] == 10 and results["truncated"] == 0
    assert 0.9 * length <= scores["tokens_min"] <= scores["tokens_max"] <= length
    assert all(row["found"] and row["output"].strip() in row["answer"] for row in rows)
    assert sum(part["samples"] for part in scores["depths"]) == 10
    if length > 1000:
        assert [part["samples"] for part in scores["depths"]] == [2] * 5
        assert [part["recall"] for part in scores["depths"]] == [100] * 5


def test_wrong_answers_score_0(characters):
    backwards = Oracle(lambda number: str((int(number) + 1) % 10**DIGITS).zfill(DIGITS))
    results, _ = evaluate_needle(backwards, characters, sampled(characters, 512, 8))
    assert results["lengths"][0]["recall"] == 0
    assert results["lengths"][0]["token_accuracy"] < 100


def test_what_follows_the_end_of_the_document_does_not_count(characters):
    class Late(Oracle):
        def greedy(self, ids, new_tokens):
            answer = super().greedy(ids, new_tokens - 1)
            return torch.cat((torch.zeros_like(answer[:, :1]), answer), dim=1)

        def forced_tokens(self, ids, last):
            return ids[:, -last:]

    results, rows = evaluate_needle(Late(), characters, sampled(characters, 512, 4))
    assert results["lengths"][0]["recall"] == 0
    assert results["lengths"][0]["token_accuracy"] == 100
    assert {row["output"] for row in rows} == {""}


def test_samples_do_not_depend_on_other_lengths(characters):
    alone = make_samples(characters, 512, 3, TASK)
    make_samples(characters, 1024, 5, TASK)
    assert make_samples(characters, 512, 3, TASK) == alone
    assert make_samples(characters, 512, 3, replace(TASK, seed=2)) != alone
    assert len({sample.answer_text for sample in alone}) == 3


def test_depth_is_where_the_needle_is(characters):
    for sample in make_samples(characters, 2048, 10, TASK):
        text = characters.decode(sample.prompt)
        assert abs(text.index(sample.answer_text) / len(text) - sample.depth) < 0.15


def test_too_short_lengths_are_refused(characters):
    with pytest.raises(BadInput):
        make_samples(characters, 20, 1, TASK)


@pytest.mark.parametrize("style", ["niah", "pairs"])
def test_haystacks_of_own_text(tmp_path, characters, style):
    lines = [f"line {chr(97 + i)} of a text" for i in range(26)]
    (tmp_path / "h.jsonl").write_text(json.dumps({"text": "\n\n".join(lines)}) + "\n")
    assert read_lines(str(tmp_path / "h.jsonl")) == lines
    task = replace(TASK, style=style, haystack=lines, needles=2)
    samples = make_samples(characters, 700, 6, task)
    texts = [characters.decode(sample.prompt + sample.answer) for sample in samples]
    for sample, text in zip(samples, texts, strict=True):
        assert text.count(sample.answer_text) == 2 and text.endswith(sample.answer_text)
        assert 630 <= len(text) <= 700 and "line " in text
    assert len({text[text.index("line ") :][:6] for text in texts}) > 1


def test_answers_are_divided_where_the_tokens_of_the_prompt_end():
    """A tokenizer that merges two characters: the last one of the prompt goes to the answer."""

    def encode(text):
        ids = []
        while text:
            size = 2 if text[:1] in "s=" and len(text) > 1 else 1
            ids.append(sum(ord(c) << 8 * i for i, c in enumerate(text[:size])))
            text = text[size:]
        return ids

    tokenizer = SimpleNamespace(encode=encode)
    for sample in make_samples(tokenizer, 400, 3, replace(TASK, style="pairs")):
        first = sample.answer[0]
        assert chr(first & 255) == "=" and chr(first >> 8) == sample.answer_text[0]
        assert len(sample.answer) == DIGITS and len(sample.prompt) <= 400 - DIGITS


def test_batches_have_equal_lengths_and_order_is_kept(characters):
    samples = []
    for index, length in enumerate([30, 31, 30, 30, 31, 30]):
        number = str(10000 + index)
        prompt = (number + "x" * length)[:length]
        samples.append(NeedleSample(list(map(ord, prompt)), list(map(ord, number)), number, 0.0))
    oracle = Oracle()
    rows = evaluate_samples(oracle, characters, samples, batch_tokens=110)
    assert oracle.shapes == [(3, 30), (1, 30), (2, 31)]
    assert [row["answer"] for row in rows] == [str(10000 + i) for i in range(6)]
    assert all(row["found"] for row in rows)


def test_scores():
    rows = [
        {"depth": d, "tokens": 90, "found": f, "token_accuracy": a}
        for d, f, a in [(0.0, True, 1.0), (0.1, False, 0.5), (0.5, True, 1.0), (1.0, True, 1.0)]
    ]
    scores = summarize(100, rows)
    assert scores["recall"] == 75 and scores["token_accuracy"] == 87.5
    assert scores["stderr"] == pytest.approx(100 * (0.75 * 0.25 / 4) ** 0.5)
    assert [part["recall"] for part in scores["depths"]] == [50, None, 100, None, 100]
    assert is_found("AbC", "xx aBc.") and not is_found("12345", "1234 5")


def test_model_answers_are_those_of_a_plain_loop(characters):
    """The real model behind the evaluation: greedy text and forced accuracy by hand."""
    from megatron_lengen.evaluation.model import prepare_model

    model = llama(positions=512)
    samples = make_samples(characters, 400, 2, TASK)
    rows = evaluate_samples(prepare_model(model), characters, samples, batch_tokens=1000)
    for sample, row in zip(samples, rows, strict=True):
        ids = list(sample.prompt)
        for _ in range(len(sample.answer) + 8):
            with torch.no_grad():
                ids.append(model(torch.tensor([ids])).logits[0, -1].argmax().item())
        written = ids[len(sample.prompt) :]
        written = written[: written.index(0)] if 0 in written else written
        assert row["output"] == characters.decode(written)
        with torch.no_grad():
            logits = model(torch.tensor([sample.prompt + sample.answer])).logits[0]
        guesses = logits[len(sample.prompt) - 1 : -1].argmax(-1).tolist()
        right = sum(g == a for g, a in zip(guesses, sample.answer, strict=True))
        assert row["token_accuracy"] == pytest.approx(right / len(sample.answer))


def test_tool_writes_and_resumes(tmp_path):
    llama(vocab=300).save_pretrained(tmp_path / "model")
    command = [sys.executable, "tools/evaluate/needle.py", "--model", str(tmp_path / "model")]
    command += ["--tokenizer", "byte", "--lengths", "512,400", "--samples", "4", "--device", "cpu"]
    command += ["--output", str(tmp_path / "out"), "--digits", str(DIGITS)]
    first = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert first.returncode == 0, first.stderr
    results = json.loads((tmp_path / "out" / "results.json").read_text())
    assert [row["length"] for row in results["lengths"]] == [400, 512]
    assert results["truncated"] == 0 and results["bos"] == "none"
    assert results["settings"]["digits"] == DIGITS and results["versions"]["transformers"]
    assert len((tmp_path / "out" / "samples.jsonl").read_text().splitlines()) == 8
    assert (tmp_path / "out" / "needle.png").read_bytes()[:4] == b"\x89PNG"
    again = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert again.returncode == 0 and "already has" in again.stdout
