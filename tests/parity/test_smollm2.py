"""Real weights, end to end: SmolLM2-135M-Instruct goes in, trains, comes out and scores.

Everything that is compared is compared with transformers on the same weights.
"""

from __future__ import annotations

import argparse
import json
import math
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from real_weights import smollm2_folder
from safetensors.torch import load_file

from megatron_lengen.convert.reader import open_checkpoint
from megatron_lengen.convert.to_hf import checkpoint_to_hf
from megatron_lengen.convert.to_megatron import hf_to_checkpoint
from megatron_lengen.models.build import build_for_inference

ROOT = Path(__file__).parents[2]
QUESTION = "What is the capital of France, and what is it known for?"
STEPS = 20
CAPITALS = {
    "France": "Paris", "Germany": "Berlin", "Italy": "Rome", "Spain": "Madrid", "Japan": "Tokyo",
    "China": "Beijing", "Russia": "Moscow", "Egypt": "Cairo", "Greece": "Athens",
    "India": "New Delhi", "Canada": "Ottawa", "Cuba": "Havana", "Ireland": "Dublin",
    "Austria": "Vienna", "Peru": "Lima", "Portugal": "Lisbon", "Poland": "Warsaw",
    "Norway": "Oslo", "Thailand": "Bangkok", "Argentina": "Buenos Aires",
}  # fmt: skip


def silent(line: str) -> None:
    pass


def run(*arguments: object) -> str:
    """A command of this repository; its output."""
    command = [sys.executable, *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=400, cwd=ROOT)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    return done.stdout


@pytest.fixture(scope="module")
def original() -> Path:
    return smollm2_folder()


@pytest.fixture(scope="module")
def checkpoint(original: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("smollm2") / "checkpoint"
    measured = hf_to_checkpoint(original, folder, report=silent)
    assert measured is not None and measured.worst < 1e-5 and min(measured.scales) > 10
    return folder


@pytest.fixture(scope="module")
def theirs(original: Path) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(original, dtype=torch.float32).eval()


def text_of(original: Path) -> tuple[Any, str]:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(original)
    asked = [{"role": "user", "content": QUESTION}]
    return tokenizer, tokenizer.apply_chat_template(
        asked, tokenize=False, add_generation_prompt=True
    )


def test_logits_are_equal_at_several_lengths(
    original: Path, checkpoint: Path, theirs: Any, own_process_group: None
) -> None:
    opened = open_checkpoint(checkpoint)
    ours = build_for_inference(opened.config(), lambda key: opened.read(key).float())
    tokenizer, _ = text_of(original)
    text = tokenizer(Path(argparse.__file__).read_text(), return_tensors="pt").input_ids
    for length in (1, 33, 600):
        with torch.inference_mode():
            expected = theirs(text[:, :length]).logits
        assert (ours(text[:, :length]) - expected).abs().max() < 1e-4 * expected.abs().max()
        if length > 33:
            loss = torch.nn.functional.cross_entropy(expected[0, :-1], text[0, 1:length])
            assert loss < 4  # chance is 10.8: these are weights that know text


def test_a_question_is_answered_in_the_same_words(
    original: Path, checkpoint: Path, theirs: Any
) -> None:
    tokenizer, prompt = text_of(original)
    ids = tokenizer(prompt, return_tensors="pt").input_ids
    with torch.inference_mode():
        continued = theirs.generate(ids, max_new_tokens=48, do_sample=False)[0, ids.shape[1] :]
    expected = tokenizer.decode(continued, skip_special_tokens=True)
    assert "Paris" in expected and len(continued) >= 32
    found = run(
        "tools/generate.py", "--load", checkpoint, "--prompt", prompt, "--max-new-tokens", 48
    )
    assert found == expected + "\n"


@pytest.fixture(scope="module")
def trained(original: Path, checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Twenty steps with VPAD on modules of this Python's library."""
    folder = tmp_path_factory.mktemp("trained")
    library = Path(argparse.__file__).parent
    modules = [library / f"{name}.py" for name in ("ast", "codecs", "csv", "difflib", "doctest")]
    run(
        "tools/data/preprocess.py", "--input", *modules, "--tokenizer", original,
        "--output-prefix", folder / "text",
    )  # fmt: skip
    flags = f"""
        --seq-length 256 --micro-batch-size 1 --global-batch-size 1 --train-iters {STEPS}
        --lr 2e-5 --lr-decay-style constant --weight-decay 0 --eval-iters 0 --num-workers 0
        --dropout-variant vpad --dropout-rate 0.1 --data-path {folder / "text"}
        --tokenizer-model {original} --pretrained-checkpoint {checkpoint} --load {folder / "run"}
        --save {folder / "run"} --metrics-jsonl {folder / "metrics.jsonl"} --log-interval 1
    """
    processor = Path("/proc/cpuinfo")
    quick = processor.exists() and "bf16" in processor.read_text()
    run("pretrain_gpt.py", *flags.split(), *(["--bf16"] if quick else []))
    return folder


def test_training_goes_on_from_the_real_weights(trained: Path) -> None:
    lines = (trained / "metrics.jsonl").read_text().splitlines()
    losses = [json.loads(line)["lm_loss"] for line in lines]
    assert len(losses) == STEPS and all(math.isfinite(loss) for loss in losses)
    assert losses[0] < 8  # random weights: 10.8
    assert sum(losses[-5:]) < sum(losses[:5]) and max(losses) < losses[0] + 2


@pytest.fixture(scope="module")
def exported(checkpoint: Path, trained: Path) -> dict[str, Path]:
    folders = {}
    for name, source in (("untrained", checkpoint), ("trained", trained / "run")):
        folders[name] = trained / name
        measured = checkpoint_to_hf(source, folders[name], report=silent)
        assert measured is not None and measured.worst < 1e-5
    return folders


def test_what_goes_in_comes_out(original: Path, exported: dict[str, Path]) -> None:
    before, after, trained = (
        load_file(folder / "model.safetensors") for folder in (original, *exported.values())
    )
    assert before.keys() == after.keys() == trained.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)
    name = "model.layers.0.mlp.down_proj.weight"
    assert not torch.equal(before[name], trained[name])
    configs = [json.loads((f / "config.json").read_text()) for f in (original, *exported.values())]
    for config in configs[1:]:
        assert config["architectures"] == ["LlamaForCausalLM"] and config["tie_word_embeddings"]
        shared = configs[0].keys() & config.keys() - {"transformers_version", "head_dim"}
        assert all(config[key] == configs[0][key] for key in shared)


@pytest.fixture(scope="module")
def score(tmp_path_factory: pytest.TempPathFactory) -> Callable[[Path], float]:
    """Accuracy of a folder on capitals, four choices each, by lm-eval with a task of our own."""
    reason = "lm-eval is not installed: pip install lm-eval"
    lm_eval = pytest.importorskip("lm_eval", reason=reason)
    from lm_eval.tasks import TaskManager

    folder = tmp_path_factory.mktemp("task")
    names = list(CAPITALS.values())
    rows = []
    for number, country in enumerate(CAPITALS):
        choices = [names[(number + step) % len(names)] for step in (0, 3, 7, 11)]
        turn = number % 4
        choices = choices[turn:] + choices[:turn]
        question = f"Question: What is the capital of {country}?\nAnswer:"
        answer = choices.index(CAPITALS[country])
        rows.append({"question": question, "choices": choices, "answer": answer})
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    task = {
        "task": "capitals",
        "dataset_path": "json",
        "dataset_kwargs": {
            "data_files": {"test": str(folder / "rows.jsonl")},
            "cache_dir": str(folder / "cache"),
        },
        "output_type": "multiple_choice",
        "test_split": "test",
        "doc_to_text": "{{question}}",
        "doc_to_choice": "{{choices}}",
        "doc_to_target": "{{answer}}",
        "metric_list": [{"metric": "acc", "aggregation": "mean", "higher_is_better": True}],
    }
    (folder / "capitals.yaml").write_text(json.dumps(task))  # JSON is YAML

    def measure(model: Path) -> float:
        results = lm_eval.simple_evaluate(
            model="hf",
            model_args={"pretrained": str(model), "dtype": "float32"},
            tasks=["capitals"],
            device="cpu",
            batch_size=16,
            bootstrap_iters=0,
            task_manager=TaskManager(include_path=str(folder), include_defaults=False),
        )
        return results["results"]["capitals"]["acc,none"]

    return measure


def test_scores_in_lm_eval(
    score: Callable[[Path], float], original: Path, exported: dict[str, Path]
) -> None:
    """Chance is 0.25; the first two are the same weights."""
    first = score(original)
    assert first >= 0.7
    assert score(exported["untrained"]) == first
    assert score(exported["trained"]) >= 0.5
