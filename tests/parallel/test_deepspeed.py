"""DeepSpeed's engine computes what Megatron-Core's does, and each reads the other's checkpoints."""

from __future__ import annotations

import json
import math
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from launcher import (
    PRETRAIN,
    ROOT,
    Run,
    argv,
    curve,
    dumps,
    environment,
    rows,
    start,
    tail,
    wait,
    work,
)

from megatron_lengen import checkpoint_folder
from megatron_lengen.compat import is_installed
from megatron_lengen.convert.reader import open_checkpoint
from megatron_lengen.errors import BadInput
from megatron_lengen.training import checkpoint, deepspeed_state
from megatron_lengen.training.arguments import parse_settings

pytestmark = pytest.mark.skipif(
    not is_installed("deepspeed"), reason="requirements/deepspeed.txt is not installed"
)

LOSS, NORM, BF16 = 1e-5, 1e-4, 2e-3  # relative
STEPS = "--train-iters 20 --eval-interval 10 --eval-iters 1"
VPAD = "--dropout-variant vpad --dropout-rate 0.3"
SP = "--tensor-model-parallel-size 2 --sequence-parallel"

TORCH_ADAM = {"type": "AdamW", "params": {"torch_adam": True}}  # builds nothing
OFF = {"device": "cpu"}
ZERO: dict[str, dict[str, Any]] = {
    "z0": {"stage": 0},
    "z1": {"stage": 1},
    "z2": {"stage": 2},
    # Tiny parameters stay whole otherwise.
    "z3": {"stage": 3, "stage3_param_persistence_threshold": 0},
    "z2off": {"stage": 2, "offload_optimizer": OFF},
    "z3off": {
        "stage": 3,
        "offload_optimizer": OFF,
        "offload_param": OFF,
        "stage3_param_persistence_threshold": 0,
    },
}
LAYOUTS = {"one": (1, ""), "dp": (2, ""), "tp": (2, SP.split(" --seq")[0]), "sp": (2, SP)}
# (layout, configuration): each trains 20 steps in fp32, with dropout.
TRAINED = [("one", "megatron")] + [
    (layout, name)
    for layout, names in {
        "one": ("z0", "z1", "z3", "z2off"),
        "dp": ("z0", "z1", "z2", "z3", "z3off"),
        "tp": ("z2",),
        "sp": ("z0", "z1", "z2", "z3", "z2off"),
    }.items()
    for name in names
]
IN_16_BITS = [("one", "megatron"), ("one", "z2"), ("dp", "z1"), ("dp", "z3"), ("sp", "z2")]
RESUMED = [("one", "z0"), ("dp", "z1"), ("dp", "z3off"), ("sp", "z2"), ("sp", "z3")]
SPOILED = [("one", "megatron"), ("one", "z0"), ("dp", "z1"), ("dp", "z2"), ("dp", "z3")]
SIZES = {"one": (1, 2, 4), "dp": (1, 2)}


def flags_of(layout: str, name: str) -> str:
    engine = f"--engine deepspeed --deepspeed-config FOLDER/{name}.json"
    return f"{LAYOUTS[layout][1]} {'' if name == 'megatron' else engine} {VPAD}"


def all_runs(processes: int) -> list[Run]:
    runs = []

    def add(name: str, layout: str, flags: str) -> None:
        if LAYOUTS[layout][0] == processes:
            runs.append(Run(name, flags))

    for layout, name in TRAINED:
        run = f"{layout}-{name}"
        add(
            run,
            layout,
            f"{flags_of(layout, name)} {STEPS} --save-interval 10 --save FOLDER/{run}.ck",
        )
    for layout, name in IN_16_BITS:
        run = f"{layout}-{name}-bf16"
        save = f"--save-interval 5 --average-last 2 --save FOLDER/{run}.ck"
        add(run, layout, f"{flags_of(layout, name)} --bf16 --train-iters 10 {save}")
    for layout, name in SPOILED:
        flags = f"{flags_of(layout, name)} --train-iters 8 --lr-warmup-iters 0"
        add(f"skips-{layout}-{name}", layout, flags)
    step = "--train-iters 1 --lr-warmup-iters 0 --global-batch-size 4 --clip-grad 0"
    add("rows-one-megatron-4", "one", f"{step} --micro-batch-size 4")
    for layout, sizes in SIZES.items():
        for name in ("z0", "z2", "z3"):
            for size in sizes:
                engine = f"--engine deepspeed --deepspeed-config FOLDER/{name}.json"
                flags = f"{step} {engine} --micro-batch-size {size}"
                add(f"rows-{layout}-{name}-{size}", layout, flags)
    recompute = "--recompute-granularity full --exit-interval 4 --train-iters 20"
    add("one-z3-recomputed", "one", f"{flags_of('one', 'z3')} {recompute}")
    return runs


def later_runs(processes: int) -> list[Run]:
    """What goes on from the checkpoints of `all_runs`."""
    runs = []
    for layout, name in RESUMED:
        if LAYOUTS[layout][0] == processes:
            run = f"{layout}-{name}"
            load = f"--load FOLDER/{run}.ck --ckpt-step 10 --exit-interval 13"
            runs.append(Run(f"{run}-again", f"{flags_of(layout, name)} {STEPS} {load}"))
    if processes == 2:
        flags = f"{flags_of('dp', 'z1')} --bf16 --train-iters 10"
        runs.append(Run("dp-z1-bf16-again", f"{flags} --load FOLDER/dp-z1-bf16.ck --ckpt-step 5"))
    if processes == 1:
        for name in ("megatron", "z1"):
            load = f"--load FOLDER/one-{name}.ck --ckpt-step 10 --exit-interval 13 --clip-grad 0.1"
            runs.append(Run(f"clipped-{name}", f"{flags_of('one', name)} {STEPS} {load}"))
        # Weights go from engine to engine and from layout to layout; the optimizer starts anew.
        load = "--ckpt-step 10 --no-load-optim --exit-interval 11"
        for name, source in (("megatron", "sp-z3"), ("z3off", "one-megatron"), ("z2", "dp-z3")):
            flags = f"{flags_of('one', name)} {STEPS} {load} --load FOLDER/{source}.ck"
            runs.append(Run(f"{name}-from-{source}", flags))
    return runs


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """Metrics, checkpoints and logs of every run."""
    folder = tmp_path_factory.mktemp("deepspeed")
    for name, zero in ZERO.items():
        config = {"zero_optimization": {**zero, "reduce_bucket_size": 20000}}
        if "off" in name:
            config["optimizer"] = TORCH_ADAM
        (folder / f"{name}.json").write_text(json.dumps(config))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TORCH_EXTENSIONS_DIR", str(folder / "extensions"))
        for runs in (all_runs, later_runs):
            for processes in (1, 2):
                work("deepspeed_worker.py", folder, processes, runs(processes))
    return folder


# ---- the same numbers ----------------------------------------------------------------------------


def agree(folder: Path, found: str, expected: str, loss: float, norm: float) -> None:
    for key, tolerance in (("lm_loss", loss), ("grad_norm", norm), ("learning_rate", 0)):
        curves = [curve(folder / f"{name}.jsonl", key) for name in (found, expected)]
        torch.testing.assert_close(*curves, rtol=tolerance, atol=0)


@pytest.mark.parametrize("layout, name", TRAINED[1:])
def test_losses_and_gradient_norms_are_those_of_the_other_engine(folder, layout, name):
    assert len(curve(folder / f"{layout}-{name}.jsonl")) == 20
    agree(folder, f"{layout}-{name}", "one-megatron", LOSS, NORM)
    for run in (f"{layout}-{name}", "one-megatron"):
        assert [r["iteration"] for r in rows(folder / f"{run}.jsonl", validation=True)] == [10, 20]
    found, expected = (
        [r["lm_loss"] for r in rows(folder / f"{run}.jsonl", validation=True)]
        for run in (f"{layout}-{name}", "one-megatron")
    )
    assert found == pytest.approx(expected, rel=LOSS)


@pytest.mark.parametrize("layout, name", IN_16_BITS[1:])
def test_in_16_bits(folder, layout, name):
    """Rounding differs; without fp32 masters or with a wrong norm it would differ far more."""
    agree(folder, f"{layout}-{name}-bf16", "one-megatron-bf16", BF16, 5 * BF16)


def test_recomputation_changes_no_bit(folder):
    for key in ("lm_loss", "grad_norm"):
        found = curve(folder / "one-z3-recomputed.jsonl", key)
        assert torch.equal(found, curve(folder / "one-z3.jsonl", key)[:4])


@pytest.mark.parametrize(
    "layout, size", [(layout, size) for layout, sizes in SIZES.items() for size in sizes]
)
@pytest.mark.parametrize("name", ["z0", "z2", "z3"])
def test_tokens_weigh_alike_however_rows_are_split(folder, layout, size, name):
    """Report 45 of the field: rows with 1, 3, 10 and 0 scored tokens."""
    (expected,) = dumps(folder, "rows-one-megatron-4", 1)
    for found in dumps(folder, f"rows-{layout}-{name}-{size}", LAYOUTS[layout][0]):
        assert found["tokens"] == expected["tokens"] == 14
        assert found["loss"] == pytest.approx(expected["loss"], rel=1e-6)
        assert found["grad_norm"] == pytest.approx(expected["grad_norm"], rel=1e-5)


@pytest.mark.parametrize("layout, name", SPOILED)
def test_what_is_not_finite_is_skipped(folder, layout, name):
    """A loss or a gradient that is not finite on one rank changes nothing on any."""
    (expected,) = dumps(folder, "skips-one-megatron", 1)
    found = dumps(folder, f"skips-{layout}-{name}", LAYOUTS[layout][0])
    for rank in found:
        assert rank["skipped"] == [False, True, True, False]
        assert math.isnan(rank["losses"][1]) and math.isnan(rank["norms"][1])
        assert not math.isfinite(rank["norms"][2])
        assert rank["places"][1] and rank["places"][2] == []
        assert rank["rates"] == expected["rates"]
        for step in (0, 2, 3):
            assert rank["losses"][step] == pytest.approx(expected["losses"][step], rel=LOSS)
    assert found[0]["moved"] == [False, False, True]


# ---- checkpoints ---------------------------------------------------------------------------------


@pytest.mark.parametrize("run", [f"{layout}-{name}" for layout, name in RESUMED] + ["dp-z1-bf16"])
def test_resumed_on_the_same_layout_is_bitwise_the_unbroken_run(folder, run):
    first = 5 if run.endswith("bf16") else 10
    again = folder / f"{run}-again.jsonl"
    last = first + len(curve(again))
    assert last > first + 2 and rows(again)[0]["iteration"] == first + 1
    for key in ("lm_loss", "grad_norm", "learning_rate", "consumed_samples"):
        assert torch.equal(curve(again, key), curve(folder / f"{run}.jsonl", key)[first:last]), key


def test_a_resumed_run_clips_as_its_own_flags_say(folder):
    assert (curve(folder / "clipped-z1.jsonl", "grad_norm") > 1).all()
    agree(folder, "clipped-z1", "clipped-megatron", LOSS, NORM)
    unclipped = curve(folder / "one-z1.jsonl")[10:13]
    assert (curve(folder / "clipped-z1.jsonl") - unclipped).abs().max() > 100 * LOSS


@pytest.mark.parametrize("name, source", [("megatron", "sp-z3"), ("z2", "dp-z3")])
def test_weights_go_on_in_another_engine_and_layout(folder, name, source):
    found = curve(folder / f"{name}-from-{source}.jsonl")
    torch.testing.assert_close(found, curve(folder / f"{source}.jsonl")[10:11], rtol=LOSS, atol=0)


def test_a_checkpoint_of_the_other_engine_is_loaded(folder):
    found = curve(folder / "z3off-from-one-megatron.jsonl")
    expected = curve(folder / "one-megatron.jsonl")[10:11]
    torch.testing.assert_close(found, expected, rtol=LOSS, atol=0)


def weights(root: Path) -> dict[str, torch.Tensor]:
    """The model's tensors of the newest checkpoint, as any reader finds them."""
    found = checkpoint_folder.find(root)
    assert found is not None
    tensors = {
        key: torch.empty(entry.size, dtype=entry.properties.dtype)
        for key, entry in checkpoint_folder.read_metadata(found.folder).state_dict_metadata.items()
        if hasattr(entry, "size") and not key.startswith("optimizer")
    }
    dcp.load(tensors, checkpoint_id=str(found.folder), no_dist=True)
    return tensors


@pytest.mark.parametrize("run", ["one-z0", "dp-z3off", "sp-z3"])
def test_weights_are_saved_under_the_same_keys(folder, run):
    expected, found = weights(folder / "one-megatron.ck"), weights(folder / f"{run}.ck")
    assert found.keys() == expected.keys()
    for key, tensor in found.items():
        size = min(len(tensor), len(expected[key]))  # padding of the vocabulary differs
        scale = expected[key].abs().max().item()
        torch.testing.assert_close(
            tensor[:size], expected[key][:size], rtol=0, atol=1e-4 * scale, msg=key
        )


def test_a_checkpoint_converts_to_hugging_face(folder, tmp_path):
    """The converter compares the logits of both models before it publishes the folder."""
    tool = [str(ROOT / "tools" / "checkpoint" / "convert.py"), "to-hf"]
    places = ["--load", str(folder / "sp-z3.ck"), "--save", str(tmp_path / "hf")]
    done = subprocess.run(
        [sys.executable, *tool, *places],
        env=environment(),
        capture_output=True,
        text=True,
        timeout=180,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert (tmp_path / "hf" / "model.safetensors").exists()


@pytest.mark.parametrize("run", ["sp-z3", "dp-z1", "dp-z3off"])
def test_the_converter_reads_what_any_reader_does(folder, run):
    expected, opened = weights(folder / f"{run}.ck"), open_checkpoint(folder / f"{run}.ck")
    assert set(opened.model_keys) == expected.keys()
    assert all(torch.equal(opened.read(key), tensor) for key, tensor in expected.items())


@pytest.mark.parametrize(
    "layout, name, flags, says",
    [
        ("one", "megatron", "", r"--engine: not as when .* or --no-load-optim"),
        ("one", "z3", "", r"data-parallel ranks 1 \(checkpoint: 2\); allowed: .*--no-load-optim"),
        ("sp", "z3", "", r"--tensor-model-parallel-size 2 \(checkpoint: 1\), data-parallel ranks"),
        ("dp", "z2", "", r"stage 2 \(checkpoint: 3\)"),
        ("dp", "z3off", "", r"offload_optimizer.device cpu \(checkpoint: none\)"),
        ("dp", "z3", "--decay-all", "--decay-all: not as when"),
        ("dp", "z3", "", None),
    ],
)
def test_the_optimizer_goes_on_only_as_it_was_saved(folder, monkeypatch, layout, name, flags, says):
    monkeypatch.setenv("WORLD_SIZE", str(LAYOUTS[layout][0]))
    given = f"{flags_of(layout, name)} {STEPS} --load FOLDER/dp-z3.ck {flags}"
    settings = parse_settings(argv(given.replace("FOLDER", str(folder))), "test")
    if says is None:
        assert checkpoint.resumes_optimizer(settings)
        deepspeed_state.check(settings)
        return
    with pytest.raises(BadInput, match=says) as caught:
        checkpoint.resumes_optimizer(settings)
        deepspeed_state.check(settings)
    assert "\n" not in str(caught.value)


def test_a_damaged_state_of_the_optimizer_is_one_line(folder, tmp_path):
    copy = shutil.copytree(folder / "one-z0.ck", tmp_path / "copy")
    file = copy / "iter_0000020" / "deepspeed" / "optimizer_tp000_dp00000.pt"
    file.write_bytes(file.read_bytes()[:1000])
    given = f"{flags_of('one', 'z0')} {STEPS} --load {copy}".replace("FOLDER", str(folder))
    (code,) = wait(start([PRETRAIN, *argv(given)], 1, tmp_path), 120)
    said = tail(tmp_path, 0)
    assert code == 2, said
    last = said.splitlines()[-1]
    assert last.startswith("error: --load: ") and "--no-load-optim" in last


# ---- what it leaves on the console and the disk --------------------------------------------------


def test_the_mean_of_checkpoints_under_stage_3(folder):
    root = folder / "dp-z3-bf16.ck"
    mean = open_checkpoint(root / "averaged", 10)
    models = [open_checkpoint(root, iteration) for iteration in (5, 10)]
    assert len(mean.model_keys) == 26
    for key in mean.model_keys:
        expected = torch.stack([model.read(key).double() for model in models]).mean(0)
        assert torch.equal(mean.read(key), expected.bfloat16()), key


def test_deepspeed_keeps_quiet_and_builds_nothing(folder):
    ours = ("iteration", "validation", "saved", "averaged", "1 processes", "2 processes")
    for processes in (1, 2):
        for line in tail(folder / f"logs{processes}", 0, 10**6).splitlines():
            assert line.strip().startswith(ours) or "OVERFLOW" in line, line
    assert tail(folder / "logs2", 1) == ""
    assert not (folder / "extensions").exists()
