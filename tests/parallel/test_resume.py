"""A resumed run is the unbroken one: on its own layout bitwise, on another to rounding."""

from __future__ import annotations

import json
import shutil
import signal
import time
from pathlib import Path

import pytest
import torch
from launcher import PRETRAIN, Run, argv, curve, dumps, rows, start, stored, tail, train, wait

from megatron_lengen import checkpoint_folder

ITERATIONS = "--train-iters 10"
VPAD = "--dropout-variant vpad --dropout-rate 0.2"
SP = "--tensor-model-parallel-size 2 --sequence-parallel"
PP = "--pipeline-model-parallel-size 2"
VPP = f"{PP} --num-virtual-stages-per-pipeline-rank 2"
CP = "--context-parallel-size 2"
FOURS = "--micro-batch-size 4"
KINDS = {
    "fp32": VPAD,
    "fp32-do": f"{VPAD} --use-distributed-optimizer",
    "bf16": f"{VPAD} --bf16",
    "bf16-do": f"{VPAD} --bf16 --use-distributed-optimizer",
}
# (kind, processes and flags before, processes and flags after)
MOVES = [
    ("fp32", (2, SP), (1, "")),
    ("fp32", (1, ""), (2, "")),
    ("fp32", (2, PP), (1, "")),
    ("fp32", (1, ""), (2, SP)),
    ("fp32", (2, CP), (1, FOURS)),
    ("fp32", (1, ""), (2, CP)),
    ("fp32", (2, VPP), (2, CP)),
    ("fp32-do", (2, SP), (1, "")),
    ("fp32-do", (2, CP), (2, VPP)),
    ("fp32-do", (1, ""), (2, "")),
    ("fp32-do", (2, PP), (1, "")),
    ("bf16-do", (2, SP), (1, "")),
    ("bf16-do", (1, ""), (2, "")),
]
LAYOUTS = {
    (1, ""): "1",
    (1, FOURS): "mbs4",
    (2, ""): "dp",
    (2, SP): "sp",
    (2, PP): "pp",
    (2, VPP): "vpp",
    (2, CP): "cp",
}


def saving(name: str) -> str:
    return f"--save FOLDER/{name}.ck"


def resuming(name: str) -> str:
    return f"--save FOLDER/{name}.ck --load FOLDER/{name}.ck"


def stages(processes: int) -> tuple[list[Run], list[Run]]:
    """What `processes` run first, and what they run once every first half is saved."""
    first, second = [], []
    for layout, short in LAYOUTS.items():
        for kind, flags in KINDS.items() if layout[0] == processes else ():
            moved = [(k, old, new) for k, old, new in MOVES if k == kind]
            same = short in ("1", "sp") or (kind == "fp32" and short != "mbs4")
            name, flags = f"{kind}-{short}", f"{ITERATIONS} {flags} {layout[1]}"
            if same or any(layout == old for _, old, _ in moved):
                first += [
                    Run(f"{name}-whole", flags, dump=True),
                    Run(f"{name}-half", f"{flags} --exit-interval 5 {saving(name)}"),
                ]
            if same:
                second.append(
                    Run(f"{name}-again", f"{flags} {resuming(name + '.same')}", dump=True)
                )
            for _, old, new in moved:
                if new == layout:
                    source = f"{kind}-{LAYOUTS[old]}"
                    name = f"{source}-to-{short}"
                    second.append(Run(name, f"{flags} --load FOLDER/{source}.ck"))
    return first, second


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """Metrics, checkpoints and dumps of every run."""
    folder = tmp_path_factory.mktemp("resume")
    for processes in (1, 2):
        train(folder, processes, stages(processes)[0])
    for saved in sorted(folder.glob("*.ck")):
        shutil.copytree(saved, saved.with_name(f"{saved.stem}.same.ck"))
    for processes in (1, 2):
        train(folder, processes, stages(processes)[1])
    return folder


SAME = [run.name for n in (1, 2) for run in stages(n)[1] if run.name.endswith("-again")]


@pytest.mark.parametrize("name", SAME)
def test_resumed_on_the_same_layout_is_bitwise_the_unbroken_run(folder, name):
    name = name.removesuffix("-again")
    ranks = 1 if name.endswith("-1") else 2
    again = folder / f"{name}-again.jsonl"
    assert [row["iteration"] for row in rows(again)] == [6, 7, 8, 9, 10]
    for key in ("lm_loss", "grad_norm", "learning_rate", "consumed_samples"):
        assert torch.equal(curve(again, key), curve(folder / f"{name}-whole.jsonl", key)[5:]), key
    for whole, resumed in zip(
        dumps(folder, f"{name}-whole", ranks), dumps(folder, f"{name}-again", ranks), strict=True
    ):
        for key, parameter in whole["parameters"].items():
            assert torch.equal(parameter, resumed["parameters"][key]), key


@pytest.mark.parametrize(
    "kind, old, new", [(kind, LAYOUTS[old], LAYOUTS[new]) for kind, old, new in MOVES]
)
def test_resumed_on_another_layout_continues(folder, kind, old, new):
    resumed = folder / f"{kind}-{old}-to-{new}.jsonl"
    whole = folder / f"{kind}-{old}-whole.jsonl"
    assert len(curve(resumed)) == 5
    # bf16 rounds differently on other layouts, as it does without a resume.
    tolerance = 1e-5 if kind.startswith("fp32") else 2e-3
    torch.testing.assert_close(curve(resumed), curve(whole)[5:], rtol=tolerance, atol=0)
    assert torch.equal(curve(resumed, "learning_rate"), curve(whole, "learning_rate")[5:])


@pytest.mark.parametrize("name", ["bf16-1", "bf16-do-1", "bf16-sp", "bf16-do-sp"])
def test_master_weights_are_fp32_and_gains_learn_after_a_resume(folder, name):
    """Report 13 of the field: without masters, gains near 1 stop moving in bf16."""
    ranks = 1 if name.endswith("-1") else 2
    for state in dumps(folder, f"{name}-again", ranks):
        assert set(state["masters"].values()) == {"torch.float32"}
        gains = [key for key in state["parameters"] if "norm" in key]
        assert gains
        for key in gains:
            assert state["parameters"][key].dtype == torch.bfloat16
    # The masters of the gains moved after the resume, in the checkpoints' own numbers.
    prefix = "optimizer.state.param." if "-do" in name else "optimizer.state.fp32_param."
    before = stored(folder / f"{name}.ck", 5, prefix)
    after = stored(folder / f"{name}.same.ck", 10, prefix)
    for key in before:
        if "norm" in key:
            assert before[key].dtype == torch.float32
            assert (before[key] != after[key]).float().mean() > 0.9, key


# ---- schedules (report 43 of the field) ----------------------------------------------------------

STAGE_ONE = "--train-iters 20 --lr 3e-4 --lr-decay-style cosine --min-lr 3e-5 --lr-warmup-iters 4"
STAGE_TWO = "--train-iters 20 --lr 3e-5 --lr-decay-style constant --lr-warmup-iters 0 --min-lr 0"


def test_four_ways_to_continue_a_schedule(tmp_path):
    load = "--load FOLDER/one.ck --exit-interval 12"
    train(
        tmp_path,
        1,
        [
            Run("whole", f"{STAGE_ONE} --exit-interval 12"),
            Run("one", f"{STAGE_ONE} --exit-interval 10 {saving('one')}"),
            Run("plain", f"{STAGE_ONE} {load}"),
            Run("override", f"{STAGE_TWO} {load} --override-opt-param-scheduler"),
            Run("use", f"{STAGE_TWO} {load} --use-checkpoint-opt-param-scheduler"),
            Run("no-optim", f"{STAGE_ONE} {load} --no-load-optim"),
            Run("finetune", f"{STAGE_ONE} --load FOLDER/one.ck --exit-interval 2 --finetune"),
        ],
    )
    rates = {
        name: curve(tmp_path / f"{name}.jsonl", "learning_rate")
        for name in ("whole", "plain", "override", "use", "no-optim", "finetune")
    }
    assert torch.equal(rates["plain"], rates["whole"][10:])
    assert torch.equal(rates["override"], torch.full((2,), 3e-5, dtype=torch.float64))
    assert torch.equal(rates["use"], rates["whole"][10:])
    assert torch.equal(rates["no-optim"], rates["whole"][10:])
    assert torch.equal(rates["finetune"], rates["whole"][:2])
    first = [rows(tmp_path / f"{name}.jsonl")[0]["iteration"] for name in ("no-optim", "finetune")]
    assert first == [11, 1]
    # Without its moments the optimizer takes another step 11, so step 12 sees other weights.
    losses = {name: curve(tmp_path / f"{name}.jsonl") for name in ("whole", "no-optim")}
    assert losses["no-optim"][0] == losses["whole"][10]
    assert losses["no-optim"][1] != losses["whole"][11]


# ---- leaving and coming back through the command line --------------------------------------------


def pretrain(tmp_path: Path, flags: str, timeout: float = 240) -> tuple[int, str]:
    """Exit code and output of `python pretrain_gpt.py`."""
    started = start([PRETRAIN, *argv(flags)], 1, tmp_path)
    (code,) = wait(started, timeout)
    return code, tail(tmp_path, 0)


def wait_for(condition, seconds: float = 240) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "nothing happened"
        time.sleep(0.01)


@pytest.mark.parametrize("how", ["", "--async-save --save-interval 2"])
def test_sigterm_saves_and_leaves_with_0(tmp_path, how):
    log, save = tmp_path / "rank0.log", tmp_path / "ck"
    (process,) = start([PRETRAIN, *argv(f"--train-iters 100000 --save {save} {how}")], 1, tmp_path)
    wait_for(lambda: "iteration      3/" in log.read_text())
    process.send_signal(signal.SIGTERM)
    assert wait([process], 240) == [0]
    found = checkpoint_folder.find(save)
    assert found is not None and found.iteration >= 3
    assert f"saved {found.folder}" in log.read_text() and not list(save.glob(".*"))


def test_time_is_up(tmp_path):
    code, output = pretrain(
        tmp_path, f"--train-iters 100000 --save {tmp_path / 'ck'} --exit-duration-in-mins 0.01"
    )
    found = checkpoint_folder.find(tmp_path / "ck")
    assert code == 0, output
    assert found is not None and 0 < found.iteration < 100000


def test_load_rules_damage_and_the_end(tmp_path):
    """Missing checkpoints stop the run unless --save is the same empty folder."""
    save, metrics = tmp_path / "ck", tmp_path / "m.jsonl"
    code, output = pretrain(tmp_path, f"--train-iters 4 --load {tmp_path / 'none'}")
    assert code == 2 and output.count("\n") == 1 and "--load: found no checkpoint in" in output
    base = f"--train-iters 4 --save {save} --load {save} --metrics-jsonl {metrics}"
    code, output = pretrain(tmp_path, f"{base} --save-interval 2")
    assert code == 0 and "initial weights; iteration 0 of 4" in output, output
    # All iterations are done: nothing to train, nothing to save.
    code, output = pretrain(tmp_path, base)
    assert code == 0 and "iteration 4 of 4" in output and "saved" not in output, output
    assert [row["iteration"] for row in rows(metrics)] == [1, 2, 3, 4]
    # A longer run continues, the metrics are appended, and the changed length is said.
    code, output = pretrain(
        tmp_path,
        f"{base} --train-iters 6 --override-opt-param-scheduler --num-workers 2 --seed 7",
    )
    assert code == 0, output
    assert "order of the data differs" in output and "--seed 7 (checkpoint: 1234)" in output
    assert [row["iteration"] for row in rows(metrics)] == [1, 2, 3, 4, 5, 6]
    # The newest is cut short: the one before is taken, with a warning.
    shard = next((save / "iter_0000006").glob("*.distcp"))
    shard.write_bytes(shard.read_bytes()[:100])
    code, output = pretrain(tmp_path, f"{base} --train-iters 4")
    assert code == 0 and "cut short" in output, output
    assert f"loading {save / 'iter_0000004'} instead" in output, output
    # An iteration that was asked for is not replaced by another.
    code, output = pretrain(tmp_path, f"{base} --ckpt-step 6")
    assert code == 2 and output.count("\n") == 1 and "cut short" in output, output
    code, output = pretrain(tmp_path, f"{base} --ckpt-step 5")
    assert code == 2 and "iter_0000002, iter_0000004, iter_0000006" in output, output


def test_what_a_checkpoint_says(tmp_path):
    code, output = pretrain(tmp_path, f"--train-iters 3 --save {tmp_path / 'ck'} {VPAD} --lr 2e-3")
    assert code == 0, output
    folder = tmp_path / "ck" / "iter_0000003"
    described = json.loads((folder / "lengen.json").read_text())
    assert described["model"]["sliding_window"] == 8
    assert described["model"]["no_rope_freq"] == [0, 0, 0, 1]
    assert described["arguments"]["optimizer"]["lr"] == 2e-3
    assert described["arguments"]["model"]["dropout_rate"] == 0.2
    assert (tmp_path / "ck" / "latest_checkpointed_iteration.txt").read_text() == "3"
    # The architecture comes from there: no flag of the model is needed to go on.
    flags = "--mock-data --tokenizer-type NullTokenizer --vocab-size 101 --seq-length 24 "
    flags += f"--train-iters 1 --lr 2e-3 --load {tmp_path / 'ck'} --finetune --eval-iters 0"
    command = [PRETRAIN, *flags.split()]
    (code,) = wait(start(command, 1, tmp_path), 240)
    assert code == 0, tail(tmp_path, 0)
