"""Everything that cannot work together is refused in one line, before anything is built."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from runs import MODEL, RUN, cpu_seconds, settings_of

from megatron_lengen.checkpoint_folder import Found
from megatron_lengen.errors import BadInput
from megatron_lengen.training import arguments

PRETRAIN = Path(__file__).parents[3] / "pretrain_gpt.py"

# flags on top of a good run -> what the one line must say
REFUSED = {
    "--train-iters 0": "--train-iters: found 0",
    "--window-size 7,0": "--sliding-window and --window-size: found both",
    "--dropout-variant vpad": "--dropout-rate: not given with --dropout-variant vpad",
    "--dropout-skip-modules decoder.layers.9.*": "'decoder.layers.9.*' matches no module",
    "--micro-batch-size 0": "--micro-batch-size: found 0",
    "--micro-batch-size 3": "--global-batch-size: found 4; .*--micro-batch-size 3",
    "--global-batch-size 0": "--global-batch-size: found 0",
    "--global-batch-size -4": "--global-batch-size: found -4",
    "--eval-iters -1": "--eval-iters: found -1",
    "--eval-interval -1": "--eval-interval: found -1",
    "--num-workers -1": "--num-workers: found -1",
    "--log-interval 0": "--log-interval: found 0",
    "--save-interval 0 --save x": "--save-interval: found 0",
    "--save-interval 5": "--save-interval: needs --save",
    "--exit-interval 0": "--exit-interval: found 0",
    "--lr 0": "--lr: found 0",
    "--lr nan": "--lr: found nan",
    "--lr inf": "--lr: found inf",
    "--min-lr 1": "--min-lr: found 1",
    "--min-lr -1": "--min-lr: found -1",
    "--lr-warmup-init 1": "--lr-warmup-init: found 1",
    "--lr-warmup-iters 12": "--lr-warmup-iters: found 12",
    "--lr-warmup-iters -1": "--lr-warmup-iters: found -1",
    "--lr-warmup-iters 1 --lr-warmup-fraction 0.1": "--lr-warmup-iters and --lr-warmup-fraction",
    "--lr-warmup-fraction 1": "--lr-warmup-fraction: found 1",
    "--lr-decay-iters 0": "--lr-decay-iters: found 0",
    "--lr-decay-style WSD": "--lr-wsd-decay-iters",
    "--lr-decay-style WSD --lr-wsd-decay-iters 13": "--lr-wsd-decay-iters: found 13",
    "--lr-decay-style WSD --lr-wsd-decay-iters 11 --lr-warmup-iters 2": "--lr-wsd-decay-iters",
    "--override-opt-param-scheduler --use-checkpoint-opt-param-scheduler": "found both",
    "--weight-decay -1": "--weight-decay: found -1",
    "--clip-grad -1": "--clip-grad: found -1",
    "--adam-beta1 1": "--adam-beta1: found 1",
    "--adam-beta2 -0.1": "--adam-beta2: found -0.1",
    "--adam-eps -1": "--adam-eps: found -1",
    "--overlap-param-gather": "--overlap-param-gather: needs --use-distributed-optimizer",
    "--cross-entropy-loss-fusion --cross-entropy-fusion-impl none": "with --cross-entropy-fusion",
    "--cross-entropy-fusion-impl te": "--cross-entropy-fusion-impl: found te; it needs",
    "--recompute-method uniform": "--recompute-method: needs --recompute-granularity",
    "--recompute-num-layers 1": "--recompute-num-layers: needs --recompute-granularity",
    "--data-path a": "--data-path and --mock-data",
    "--split 0,1,0": "--split: found 0,1,0",
    "--split a": "--split: found a",
    "--split 1,1,1,1": "--split: found 1,1,1,1",
    "--valid-data-path a": "--valid-data-path",
    "--data-cache-path /etc/hostname/x": "--data-cache-path: cannot write",
    "--metrics-jsonl /tmp": "--metrics-jsonl: found the folder",
    "--save /etc/hostname": "--save: found the file",
    "--load /nonexistent": "--load: found no checkpoint in /nonexistent",
    "--ckpt-step 3": "--ckpt-step: needs --load",
    "--vocab-size 0": "--vocab-size",
    "--tensor-model-parallel-size 2": "--tensor-model-parallel-size 2: found 1 process",
    "--pipeline-model-parallel-size 2": "--pipeline-model-parallel-size 2: found 1 process",
    "--exit-duration-in-mins 0": "--exit-duration-in-mins: found 0",
    "--distributed-timeout-minutes 0": "--distributed-timeout-minutes: found 0",
    "--tensor-model-parallel-size 2 --sequence-parallel --seq-length 63": "--seq-length: found 63",
    "--dropout-variant vpad --dropout-rate 1": "--dropout-rate: found 1",
    "--dropout-variant vpad --dropout-rate -0.1": "--dropout-rate: found -0.1",
    "--sliding-window 0": "--sliding-window: found 0",
    "--num-query-groups 3": "--num-query-groups",
    "--max-skipped-steps -1": "--max-skipped-steps: found -1",
    "--rerun-mode validate_results": "--rerun-mode validate_results: needs --save",
    # numbers that are none, or that nothing can hold
    "--num-layers 4.0": "--num-layers: found '4.0'; allowed: a whole number",
    "--num-layers 1e3": "--num-layers: found '1e3'; allowed: a whole number",
    "--hidden-size 0x20": "--hidden-size: found '0x20'; allowed: a whole number",
    "--seq-length \u00b2": "--seq-length: found '\u00b2'; allowed: a whole number",
    "--lr 1,0": "--lr: found '1,0'; allowed: a number",
    "--lr 1e400": "--lr: found inf; allowed: a rate above 0",
    "--num-layers 4097": "--num-layers: found 4097; allowed: up to 4096",
    "--no-rope-freq [0]*9999999999999": "--no-rope-freq: .*; allowed: up to 4096 layers",
    "--seq-length 9999999999": "--seq-length: found 9999999999; allowed: up to 2147483647",
    "--vocab-size 9999999999": "--vocab-size: found 9999999999; allowed: 1 up to 2147483647",
    "--train-iters 9999999999": "--train-iters: found 9999999999 x .*up to 4294967295 samples",
    "--micro-batch-size 9999999999 --global-batch-size 9999999999": "--train-iters: .*samples",
    "--eval-iters 9999999999": "--eval-iters: found 9999999999 x --global-batch-size 4",
    "--num-workers 100000": "--num-workers: found 100000; allowed: 0 to 1024",
    "--seed -1": "--seed: found -1; allowed: 0 to 4294967295",
    "--seed 4294967296": "--seed: found 4294967296; allowed: 0 to 4294967295",
    "--weight-decay nan": "--weight-decay: found nan; allowed: 0 or more",
    "--weight-decay inf": "--weight-decay: found inf",
    "--clip-grad nan": "--clip-grad: found nan",
    "--adam-beta1 nan": "--adam-beta1: found nan",
    "--adam-eps 0": "--adam-eps: found 0",
    "--adam-eps nan": "--adam-eps: found nan",
    "--lr-warmup-fraction nan": "--lr-warmup-fraction: found nan",
    "--exit-duration-in-mins nan": "--exit-duration-in-mins: found nan",
    "--distributed-timeout-minutes nan": "--distributed-timeout-minutes: found nan",
    "--distributed-timeout-minutes inf": "--distributed-timeout-minutes: found inf",
    "--distributed-timeout-minutes 1e-9": "--distributed-timeout-minutes: found 1e-09",
    "--split inf,1": "--split: found inf,1",
    "--split 1,,1": "--split: found 1,,1",
    # names that are nearly right
    "--num-layrs 4": "--num-layrs: unrecognized; did you mean --num-layers",
    "--batch-size 4": "--batch-size: unrecognized; did you mean --micro-batch-size",
    "--fp16": "--fp16: unrecognized; did you mean --bf16",
    "--dropoutrate=0.1 -lr 3": "--dropoutrate: .* --dropout-rate.*, -lr: .*did you mean --lr",
    "--zzzzzz 3": "--zzzzzz: unrecognized \\(",
    "stray": "stray: found where a flag was expected",
    "--lr -1e-3": "--lr: found no value .*--lr=-1",
    "--lr-decay-style COSINE": "--lr-decay-style: found COSINE; allowed: constant, linear, cosine",
    "--dropout-variant VPAD --dropout-rate 0.1": "--dropout-variant: found VPAD; allowed: .*vpad",
    # what is given twice: the last one counts
    "--train-iters 10 --train-iters 0": "--train-iters: found 0",
    # files
    "--load /etc/hostname": "--load: found no checkpoint in /etc/hostname",
    "--save /etc/hostname/x": "--save: cannot write to /etc/hostname/x",
    "--metrics-jsonl /etc/hostname/x": "--metrics-jsonl: found the file /etc/hostname",
    "--tensorboard-dir /etc/hostname": "--tensorboard-dir: found the file /etc/hostname",
    "--data-cache-path /etc/hostname": "--data-cache-path: found the file /etc/hostname",
    "--tokenizer-type HuggingFaceTokenizer": "--tokenizer-model: not given with --tokenizer-type",
    "--tokenizer-type Bert": "--tokenizer-type: found Bert; allowed: HuggingFaceTokenizer",
    "--transformer-impl transformer_engine": "--transformer-impl: found transformer_engine",
    "--rerun-mode report_stats": "--rerun-mode: found report_stats; allowed: disabled, validate_r",
}
# Empty texts, as a shell makes of a variable that is not set.
EMPTY = ("--save", "--load", "--dropout-layers", "--dropout-apply-to", "--split", "--num-layers")
WITHOUT = {
    "--mock-data": "data: found none; allowed: one of --data-path",
    "--lr": "--lr: not given",
    "--tokenizer-type": "--tokenizer-model: not given",
    "--num-layers": "--num-layers: found 0",
    "--train-iters": "--train-iters: found 0",
}


def without(flag: str) -> str:
    """The good command line but for one flag and its value."""
    words = f"{MODEL} {RUN}".split()
    at = words.index(flag)
    end = at + 1 if flag == "--mock-data" else at + 2
    return " ".join(words[:at] + words[end:])


@pytest.mark.parametrize(
    "flags, impl, megatrons",
    [
        ("", "linear", False),
        ("--cross-entropy-loss-fusion", "linear", False),
        ("--bf16 --cross-entropy-loss-fusion --cross-entropy-fusion-impl native", "native", True),
        ("--bf16 --cross-entropy-fusion-impl native", "native", True),
        ("--cross-entropy-fusion-impl none", "none", False),
    ],
)
def test_one_flag_says_how_losses_are_computed(flags, impl, megatrons):
    """And Megatron-Core's own switch follows."""
    model = settings_of(flags).model
    assert model.cross_entropy_fusion_impl == impl
    assert model.cross_entropy_loss_fusion is megatrons


@pytest.mark.parametrize("flags", REFUSED)
def test_refused_in_one_line(flags, monkeypatch):
    monkeypatch.setattr(arguments, "have_transformer_engine", lambda: False)
    with pytest.raises(BadInput, match=REFUSED[flags]) as caught:
        settings_of(flags)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("flag", EMPTY)
def test_an_empty_value_is_refused(flag):
    with pytest.raises(BadInput, match=f"{flag}: found ''; allowed: a "):
        arguments.parse_settings([*f"{MODEL} {RUN}".split(), flag, ""], "test")


@pytest.mark.parametrize("flag", WITHOUT)
def test_what_is_needed_is_named(flag):
    with pytest.raises(BadInput, match=WITHOUT[flag]):
        settings_of(base=without(flag))


@pytest.mark.parametrize(
    "flags, processes, message",
    [
        ("--tensor-model-parallel-size 2", 3, "found 3 processes; allowed: multiples of 2"),
        ("--global-batch-size 6 --micro-batch-size 2", 2, "--global-batch-size: found 6"),
    ],
)
def test_processes_are_counted(monkeypatch, flags, processes, message):
    monkeypatch.setenv("WORLD_SIZE", str(processes))
    with pytest.raises(BadInput, match=message):
        settings_of(flags)


@pytest.mark.parametrize("text, shares", [("99,1,0", 3), ("1", 1), ("0.5,0.5", 2)])
def test_good_splits(text, shares):
    assert settings_of(f"--split {text}").training.split.count(",") == shares - 1


def test_defaults_that_follow_from_others(monkeypatch):
    settings = settings_of()
    assert settings.training.decay_iters == 12 and settings.training.warmup_iters == 0
    assert settings.model.calculate_per_token_loss
    assert settings.micro_batches == 4
    assert settings.optimizer.min_lr == 0.0
    monkeypatch.setenv("WORLD_SIZE", "2")
    base = without("--global-batch-size")
    assert settings_of("--micro-batch-size 3", base).training.global_batch_size == 6
    full = settings_of("--recompute-granularity full").model
    assert (full.recompute_method, full.recompute_num_layers) == ("uniform", 1)
    assert settings_of("--bf16").ddp.grad_reduce_in_fp32


@pytest.mark.parametrize(
    "flags",
    [
        "--global-batch-size 3 --micro-batch-size 2",
        "--lr-decay-style WSD",
        "--dropout-variant vpad --dropout-rate 1.0",
        "--num-layers x",
        "--hidden-size 200000000",  # more than any machine can address
        "--hidden-size 2147483640",
    ],
)
def test_the_script_leaves_with_2_and_one_line(flags):
    before = cpu_seconds()
    done = subprocess.run(
        [sys.executable, PRETRAIN, *f"{MODEL} {RUN} {flags}".split()],
        capture_output=True,
        text=True,
        timeout=180,
    )
    assert cpu_seconds() - before < 10
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr.startswith("error: --") and done.stderr.count("\n") == 1, done.stderr


def test_dry_run_prints_the_configuration_and_builds_nothing(tmp_path):
    flags = f"{MODEL} {RUN} --dry-run --save {tmp_path / 'ck'} --dropout-variant vpad"
    done = subprocess.run(
        [sys.executable, PRETRAIN, *f"{flags} --dropout-rate 0.25".split()],
        capture_output=True,
        text=True,
        timeout=180,
    )
    assert done.returncode == 0, done.stderr
    shown = json.loads(done.stdout)
    assert shown["model"]["dropout_rate"] == 0.25
    assert shown["model"]["window_size"] == [7, 0]
    assert shown["optimizer"]["lr"] == 1e-3
    assert shown["training"]["global_batch_size"] == 4
    assert shown["versions"]["torch"]
    assert not (tmp_path / "ck").exists()


@pytest.mark.parametrize(
    "body, message",
    [("return mean", "must return alpha and beta"), ("return 1.0, rate * men", "NameError")],
)
def test_a_variant_that_cannot_work_is_found_before_the_run(tmp_path, body, message):
    name = f"broken_{len(body)}"
    file = tmp_path / f"{name}.py"
    file.write_text(
        "from megatron_lengen.ops.variants import register_variant\n"
        f'@register_variant("{name}")\ndef {name}(mean, variance, rate):\n    {body}\n'
    )
    with pytest.raises(BadInput, match=f"--dropout-variant-file: .*{message}"):
        settings_of(f"--dropout-variant {name} --dropout-rate 0.1 --dropout-variant-file {file}")


def stored_run(monkeypatch, release=False):
    """Make `--load` find a checkpoint of a run with VPAD."""
    run = settings_of("--dropout-variant vpad --dropout-rate 0.3 --seed 7")
    description = {"model": run.model.architecture(), "arguments": run.as_json()}
    found = Found(Path("run/iter_0000004"), 4, release, description)
    monkeypatch.setattr(arguments, "_find_checkpoint", lambda training: found)


def test_a_resumed_run_keeps_its_dropout(monkeypatch, caplog):
    stored_run(monkeypatch)
    model = settings_of("--load run").model
    assert (model.dropout_variant, model.dropout_rate, model.seed) == ("vpad", 0.3, 7)
    assert "replace" not in caplog.text  # the same layer patterns, in another spelling
    assert settings_of("--load run --dropout-rate 0.2").model.dropout_rate == 0.2
    assert "--dropout-rate 0.2 (checkpoint: 0.3)" in caplog.text
    off = settings_of("--load run --dropout-variant none").model
    assert not off.dropout_on and off.dropout_rate == 0
    assert "--dropout-variant none (checkpoint: vpad)" in caplog.text


@pytest.mark.parametrize("flags, release", [("--finetune", False), ("", True)])
def test_a_run_that_starts_from_weights_does_not(monkeypatch, flags, release):
    stored_run(monkeypatch, release)
    model = settings_of(f"--load run {flags}").model
    assert (model.dropout_variant, model.seed) == ("none", 1234)


@pytest.mark.parametrize("folder, starts_anew", [("run", False), ("new", True)])
def test_a_pretrained_checkpoint_counts_until_the_run_has_one(monkeypatch, folder, starts_anew):
    description = {"model": {}, "arguments": settings_of("").as_json()}
    there = {
        name: Found(Path(name) / "iter_0000004", 4, False, description) for name in ("run", "base")
    }
    monkeypatch.setattr(
        arguments.checkpoint_folder, "find", lambda root, step=None: there.get(root)
    )
    settings = settings_of(f"--load {folder} --save {folder} --pretrained-checkpoint base")
    assert settings.load_from is there["base" if starts_anew else "run"]
    assert settings.training.finetune == starts_anew
    with pytest.raises(BadInput, match="--pretrained-checkpoint: found no checkpoint in none"):
        settings_of("--load new --save new --pretrained-checkpoint none")
    with pytest.raises(BadInput, match="--pretrained-checkpoint: found base without --load"):
        settings_of("--save new --pretrained-checkpoint base")
