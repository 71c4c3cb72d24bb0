"""What the benchmarks share, the page of their reports, and the check for a GPU."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
import time
import weakref
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
import torch

from megatron_lengen.errors import BadInput, Fault

ROOT = Path(__file__).parents[3]
FOLDER = ROOT / "tools" / "benchmark"
SCRIPTS = sorted(
    path.stem for path in FOLDER.glob("*.py") if "def build_parser" in path.read_text()
)


@pytest.fixture
def load(monkeypatch):
    """Imports a script of the folder in this process."""
    monkeypatch.syspath_prepend(FOLDER)  # what they share

    def load(name: str) -> ModuleType:
        spec = importlib.util.spec_from_file_location(f"{name}_benchmark", FOLDER / f"{name}.py")
        module = importlib.util.module_from_spec(spec)
        monkeypatch.setitem(sys.modules, spec.name, module)
        spec.loader.exec_module(module)
        return module

    return load


@pytest.mark.parametrize("name", SCRIPTS)
def test_every_script_explains_itself(load, name):
    module = load(name)
    text = module.build_parser().format_help()
    assert module.__doc__.splitlines()[0].rstrip(".")[:40] in " ".join(text.split())
    assert f"usage: {name}.py" in text


# ---- what they share -----------------------------------------------------------------------------


def test_limits_are_amounts_over_seconds(load, monkeypatch):
    timing = load("timing")
    monkeypatch.setattr(timing, "MATRIX", {"cpu": 8})
    monkeypatch.setattr(timing, "COPIED", {"cpu": 4096})
    monkeypatch.setattr(timing, "times", lambda forms, repeat, device: [0.5])
    assert timing.copy_bandwidth("cpu") == 2 * 4096 / 0.5
    assert timing.matmul_rate("cpu", torch.float32) == 2 * 8**3 / 0.5


def test_the_shortest_round_counts(load):
    pauses = iter([0.0, 0.03, 0.001, 0.02])  # the first is the warm-up
    (found,) = load("timing").times([lambda: time.sleep(next(pauses))], 3)
    assert 0.001 <= found < 0.02


def test_a_report_names_command_and_machine(load, monkeypatch, tmp_path):
    timing, file = load("timing"), tmp_path / "report.json"
    words = ["--size", "a b", "--json", str(file), "--output=x", "--folder", "y", "--quick"]
    monkeypatch.setattr(sys, "argv", [str(FOLDER / "norm.py"), *words])
    timing.write_report(str(file), {"size": 1, "json": "x"}, results=[])
    report = json.loads(file.read_text())
    assert report["command"] == "python tools/benchmark/norm.py --size 'a b' --quick"
    assert report["settings"] == {"size": 1}
    assert report["machine"]["cores"] >= 1 and report["machine"]["cpu"]
    assert report["versions"]["torch"] == torch.__version__


# ---- preprocessing -------------------------------------------------------------------------------


def test_preprocessing_is_measured_and_cleans_up(tmp_path):
    file, place = tmp_path / "preprocess.json", tmp_path / "place"
    place.mkdir()
    done = subprocess.run(
        [sys.executable, FOLDER / "preprocess.py", "--size", "0.1", "--workers", "1", "--repeat",
         "1", "--vocab-size", "400", "--folder", place, "--json", file],
        capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    rows = {row["form"]: row for row in json.loads(file.read_text())["results"]}
    assert list(rows) == ["ours", "tokenizers", "limit"]
    for row in rows.values():
        assert row["tokens_per_second"] == pytest.approx(row["tokens"] / row["seconds"])
        assert row["ratio"] == pytest.approx(row["seconds"] / rows["ours"]["seconds"])
        assert row["text_bytes"] >= 1e5
    # The library's count lacks the end of each document, of which there is one at least.
    assert 0 < rows["ours"]["tokens"] - rows["tokenizers"]["tokens"] < 20
    assert not any(place.iterdir())


def test_other_bytes_from_other_workers_are_a_fault(load, monkeypatch, tmp_path):
    tool = load("preprocess")

    def ours(inputs, tokenizer, prefix, workers):
        for suffix in tool.SUFFIXES:
            Path(f"{prefix}{suffix}").write_text(str(workers))
        return {"seconds": 1.0, "tokens": 1, "text_bytes": 1}

    monkeypatch.setattr(tool, "ours", ours)
    monkeypatch.setattr(tool, "in_new_process", lambda *_: ours(*_[:2], tmp_path / "other", 0))
    text = tmp_path / "text.txt"
    text.write_text("words")
    args = SimpleNamespace(input=[str(text)], tokenizer="any", repeat=1, workers=[1, 2])
    with pytest.raises(Fault, match="2 workers write other bytes than 1"):
        tool.measure(args, tmp_path)


# ---- the page ------------------------------------------------------------------------------------


def test_the_page_is_that_of_the_stored_reports(load):
    """`bash tools/benchmark/run_all.sh`, or the command in the page, brings it up to date."""
    page = ROOT / "docs" / "performance.md"
    assert load("report").remade(ROOT / "docs" / "performance", page) == page.read_text()


def test_numbers_keep_the_digits_that_say_something(load):
    digits = load("report").three_digits
    values = (0, 1234.5, 56.78, 3.456, 0.1234, 0.00056789, -0.25)
    assert [*map(digits, values)] == ["0", "1234", "56.8", "3.46", "0.123", "0.00057", "-0.250"]


def test_a_report_becomes_a_section(load):
    report = {
        "command": "python tools/benchmark/norm.py --rows 2",
        "settings": {},
        "results": [
            {"form": "ours", "seconds": 0.5, "ratio": 1.0, "peak_bytes": 2_000_000},
            {"form": "a|b", "seconds": 0.25, "ratio": 0.5, "peak_bytes": None},
        ],
        "cost_of_vpad": 0.016,
        "machine": {"cpu": "One", "cores": 2, "memory_gib": 3, "gpu": None},
        "versions": {"torch": "1", "deepspeed": None},
    }
    text = load("report").page([("norm_cpu", report)], "make it", "there")
    assert "| form | ms | ratio | peak MB |\n|---|---|---|---|\n| ours | 500 | 1.00 | 2 |" in text
    assert "| a\\|b | 250 | 0.50 | - |" in text
    assert "### norm_cpu\n\n```bash\npython tools/benchmark/norm.py --rows 2\n```" in text
    assert "One, 2 cores, 3 GiB; torch 1.\n" in text
    assert "cost of vpad: 1.6%." in text


def test_parts_with_other_fields_have_tables_of_their_own(load):
    rows = [{"part": "a", "x": 1}, {"part": "b", "y": 2}, {"part": "a", "x": 3}]
    assert load("report").by_part(rows) == [[rows[0], rows[2]], [rows[1]]]
    assert load("report").by_part([rows[0], rows[2]]) == [[rows[0], rows[2]]]


@pytest.mark.parametrize("content", ["{", "[]", '{"settings": {}}'])
def test_what_no_benchmark_wrote_is_named(load, tmp_path, content):
    (tmp_path / "other.json").write_text(content)
    with pytest.raises(BadInput, match=r"other\.json, which no benchmark wrote"):
        load("report").read(tmp_path)


# ---- the check for a GPU -------------------------------------------------------------------------


def norm_report(vpad: float, plain: float, share: float) -> dict:
    kinds = {"vpad": vpad, "plain": plain}
    rows = [
        {"norm": kind, "form": form, "seconds": seconds, "share_of_copy": share, "ratio": 1.0}
        for kind, seconds in kinds.items()
        for form in ("pytorch", "ours")
    ]
    return {"results": rows}


def step_report(plain: float, vpad: float, mfu: float | None) -> dict:
    rows = {"ours": plain, "ours, vpad": vpad}
    return {"results": [{"form": f, "seconds": s, "mfu": mfu} for f, s in rows.items()]}


@pytest.mark.parametrize(
    "norm, step, outcomes",
    [
        ((1.04, 1.0, 0.85), (1.0, 1.01, 0.45), ["met", "met", "met", "met"]),
        ((1.06, 1.0, 0.84), (1.0, 1.03, 0.44), ["missed"] * 4),
        ((1.0, 1.0, 0.86), (1.0, 0.99, None), ["met", "met", "not measured", "met"]),
    ],
)  # fmt: skip
def test_targets(load, norm, step, outcomes):
    found = {"norm": norm_report(*norm), "step": step_report(*step)}
    assert [aim["outcome"] for aim in load("gpu_stages").targets(found)] == outcomes


def test_targets_without_measurements(load):
    assert {aim["outcome"] for aim in load("gpu_stages").targets({})} == {"not measured"}


def test_a_training_run_must_be_finite(load):
    rows_of = load("gpu_stages").training_rows

    def step(number: int, loss: float | None) -> dict:
        return {
            "iteration": number, "lm_loss": loss, "grad_norm": 1.0, "tokens_per_second": number,
            "skipped": 0,
        }  # fmt: skip

    rows, fault, figures = rows_of([step(i, 3 - i / 10) for i in range(1, 7)])
    assert not fault and figures["tokens_per_second"] == 5  # steps 4, 5, 6
    assert rows == [("training", "6 steps, loss 2.900 to 2.400, 5 tokens/s")]
    assert rows_of([step(1, 2.0), step(2, None)])[1] == (
        "loss or gradient not finite at iteration 2"
    )
    assert rows_of([])[1] == "no step was made"


def test_stages_are_stopped_with_their_children(load, tmp_path):
    check = load("gpu_check")
    alive = tmp_path / "alive"
    script = f"(while true; do date >> {alive}; sleep 0.05; done) & wait"
    outcome = check.run_for(["sh", "-c", script], 0.5, tmp_path / "log")
    assert outcome.reason == "stopped after 0 s" and outcome.seconds < check.TO_LEAVE
    size = alive.stat().st_size
    time.sleep(0.3)
    assert alive.stat().st_size == size > 0


def test_a_failed_stage_says_why(load, tmp_path):
    check = load("gpu_check")
    command = [sys.executable, "-c", "print('early'); raise ValueError('the reason')"]
    outcome = check.run_for(command, 20, tmp_path / "log")
    assert check.why(outcome) == "exit code 1: ValueError: the reason"
    assert check.why(check.run_for(["true"], 20, tmp_path / "log")) == ""


def test_runs_without_time_are_left_out_and_the_rest_is_kept(load, monkeypatch, tmp_path):
    check = load("gpu_check")
    given = []

    def run_for(command: list[str], seconds: float, log: Path):
        given.append(seconds)
        run.end -= seconds  # as if it took all of it
        return check.Outcome(seconds, f"stopped after {seconds:.0f} s", [])

    monkeypatch.setattr(check, "run_for", run_for)
    flags = "--minutes 1.6 --variants none vpad window nape mamba2"
    args = check.build_parser().parse_args(flags.split())
    run = check.Check(args, tmp_path, tmp_path)
    run.training()
    # 91 s: two shares of six for the first, then a quarter of the rest, but 20 at least.
    assert given == pytest.approx([30.3, 20, 20, 20], abs=0.1)
    stages = json.loads((tmp_path / "gpu_check.json").read_text())["stages"]
    assert [stage["status"] for stage in stages] == ["failed"] * 4 + ["left out"]


def test_every_stage_has_commands_that_its_script_knows(load, tmp_path):
    stages = load("gpu_stages")
    for name, stage in stages.BENCHMARKS.items():
        if not (FOLDER / stage.script).exists():
            continue
        parser = load(Path(stage.script).stem).build_parser()
        for flags in (stage.flags, stage.quick):
            parser.parse_args([*flags.format(device="cpu", seconds=1).split(), "--json", name])


@pytest.mark.parametrize("name", ["none", "vpad", "window", "nape", "asentmax", "mamba2"])
@pytest.mark.parametrize("quick", [False, True])
def test_every_variant_has_flags_that_are_known(load, tmp_path, name, quick):
    from megatron_lengen.training.arguments import parse_settings

    script, *flags = load("gpu_stages").training_command(name, quick, tmp_path / "m", tmp_path)
    settings = parse_settings(
        flags, "", **({"decoder": "mamba2"} if "mamba" in Path(script).name else {})
    )
    assert settings.model.seq_length == (128 if quick else 4096)


def test_sides_that_are_measured_apart_are_never_there_together(
    load, process_groups, monkeypatch, tmp_path
):
    step = load("step")
    optimizers = []

    class Noted(step.Ours):
        def __init__(self, *args) -> None:
            assert [optimizer() for optimizer in optimizers] == [None] * len(optimizers)
            super().__init__(*args)
            optimizers.append(weakref.ref(self.engine.optimizer))
            # Of a form that is measured the results are there, whatever becomes of the next.
            stored = json.loads(file.read_text())["results"] if file.exists() else []
            assert [row["form"] for row in stored] == ["ours"][: len(optimizers) - 1]

    monkeypatch.setattr(step, "Ours", Noted)
    file = tmp_path / "step.json"
    args = step.build_parser().parse_args(
        f"--layers 1 --batch 1 --length 8 --repeat 1 --threads 1 --device cpu --json {file}".split()
    )
    found = step._apart(args, *(torch.zeros(1, 8, dtype=torch.int64) for _ in range(2)))
    assert len(optimizers) == 2 and list(found[1]) == ["ours", "ours, vpad"]


def test_tests_of_cuda_take_turns(load):
    turns = load("gpu_tests").InTurn(60)
    items = [SimpleNamespace(nodeid=name) for name in ("f[1]", "f[2]", "g", "h[1]", "h[2]")]
    turns.pytest_collection_modifyitems(items)
    assert [item.nodeid for item in items] == ["f[1]", "g", "h[1]", "f[2]", "h[2]"]
    turns.deadline = 0
    with pytest.raises(pytest.skip.Exception, match="out of time"):
        turns.pytest_runtest_setup(items[0])
