"""The DeepSpeed configuration: what the flags put in, and what is refused in one line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from runs import settings_of

from megatron_lengen.compat import is_installed
from megatron_lengen.errors import BadInput
from megatron_lengen.training import deepspeed_config, deepspeed_host

pytestmark = pytest.mark.skipif(
    not is_installed("deepspeed"), reason="requirements/deepspeed.txt is not installed"
)
EXAMPLES = Path(__file__).parents[3] / "examples" / "deepspeed"
TORCH_ADAM = {"type": "AdamW", "params": {"torch_adam": True}}
OFFLOADED = {"stage": 2, "offload_optimizer": {"device": "cpu"}}


@pytest.fixture
def resolve(tmp_path):
    """Settings of a run with a configuration (a dict, or the text of its file)."""

    def of(config: Any, flags: str = ""):
        path = tmp_path / "ds.json"
        path.write_text(config if isinstance(config, str) else json.dumps(config))
        return settings_of(f"--engine deepspeed --deepspeed-config {path} {flags}")

    return of


def refused(resolve, config: Any, flags: str = "") -> str:
    with pytest.raises(BadInput) as caught:
        resolve(config, flags)
    assert "\n" not in str(caught.value)
    return str(caught.value)


# ---- what the flags put in -----------------------------------------------------------------------


def test_an_empty_file_is_completed_from_the_flags(resolve):
    settings = resolve({}, "--micro-batch-size 2 --clip-grad 0.7")
    config = settings.deepspeed
    assert config["train_batch_size"] == 4
    assert config["train_micro_batch_size_per_gpu"] == 2
    assert config["gradient_accumulation_steps"] == 2
    assert config["zero_optimization"]["stage"] == 0
    assert config["bf16"]["enabled"] is False
    assert settings.as_json()["deepspeed"] == config


def test_clipping_is_done_once(resolve):
    """By DeepSpeed where it has an optimizer of its own; in stage 0 by ours."""
    stages = [resolve({"zero_optimization": {"stage": s}}, "--clip-grad 0.7") for s in range(4)]
    assert [s.deepspeed["gradient_clipping"] for s in stages] == [0.0, 0.7, 0.7, 0.7]


def test_data_parallel_ranks_count(resolve, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "4")
    flags = "--tensor-model-parallel-size 2 --global-batch-size 12"
    assert resolve({}, flags).deepspeed["gradient_accumulation_steps"] == 6


def test_16_bits_add_up_in_fp32(resolve):
    config = resolve({"zero_optimization": {"stage": 1}}, "--bf16").deepspeed
    assert config["bf16"]["enabled"] is True
    assert config["data_types"]["grad_accum_dtype"] == "fp32"
    assert config["communication_data_type"] == "fp32"


def test_a_file_may_say_what_the_flags_say(resolve):
    config = {
        "train_batch_size": 4,
        "train_micro_batch_size_per_gpu": "auto",
        "gradient_accumulation_steps": 4,
        "gradient_clipping": 1.0,
        "fp16": {"enabled": False},
        "bf16": {"enabled": "auto"},
        "optimizer": {
            "type": "AdamW",
            "params": {
                "lr": 1e-3,
                "betas": [0.9, 0.999],
                "eps": "auto",
                "weight_decay": 0.01,
                "torch_adam": True,
            },
        },
        "zero_optimization": {"stage": 2, "reduce_bucket_size": "auto", "offload_param": None},
        "steps_per_print": 10,
    }
    resolved = resolve(config).deepspeed
    assert "reduce_bucket_size" not in resolved["zero_optimization"]
    assert not {"optimizer", "fp16", "steps_per_print"} & set(resolved)
    # Both ways of asking for PyTorch's AdamW where DeepSpeed would build its own.
    offloaded = {"zero_optimization": OFFLOADED}
    for asked in ({"optimizer": TORCH_ADAM}, {"zero_force_ds_cpu_optimizer": False}):
        assert resolve({**offloaded, **asked}).deepspeed["zero_force_ds_cpu_optimizer"] is False


@pytest.mark.parametrize("example", sorted(EXAMPLES.glob("*.json")), ids=lambda path: path.stem)
def test_examples(resolve, monkeypatch, example):
    monkeypatch.setattr(deepspeed_host, "check_build", lambda flag: None)
    zero = resolve(example.read_text(), "--bf16").deepspeed["zero_optimization"]
    assert zero["stage"] == {"zero2": 2, "zero3_offload": 3}[example.stem]
    assert (zero["offload_optimizer"]["device"] == "cpu") == ("offload" in example.stem)


# ---- what is refused -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    "config, flags, says",
    [
        ({"train_batch_size": 16}, "", "train_batch_size: found 16; allowed: 4 "),
        ({"train_micro_batch_size_per_gpu": 2}, "", "found 2; allowed: 1 "),
        ({"gradient_accumulation_steps": 2}, "", "found 2; allowed: 4 "),
        ({"gradient_clipping": 0.5}, "", "gradient_clipping: found 0.5; allowed: 1.0 "),
        ({"bf16": {"enabled": True}}, "", "bf16.enabled: found True; allowed: False "),
        ({"bf16": {"enabled": False}}, "--bf16", "bf16.enabled: found False; allowed: True "),
        ({}, "--bf16", "zero_optimization.stage: found 0 with --bf16"),
        ({"bf16": {"bf16_master_weights_and_grads": True}}, "", "found bf16_master_weights_and_"),
        ({"data_types": {"param_dtype": "bf16"}}, "", "found param_dtype"),
        ({"data_types": {"grad_accum_dtype": "fp8"}}, "", "found fp8; allowed: fp32"),
        (
            {"communication_data_type": "fp16", "zero_optimization": {"stage": 1}},
            "--bf16",
            "found fp16; allowed: fp32, bf16",
        ),
        ({"fp16": {"enabled": True}}, "", "fp16.enabled: found True; allowed: false"),
        ({"scheduler": {"type": "WarmupLR"}}, "", "found WarmupLR; allowed: --lr-decay-style lin"),
        ({"optimizer": {"type": "Lamb"}}, "", "optimizer.type: found 'Lamb'; allowed: AdamW"),
        ({"optimizer": {"params": {"lr": 2e-3}}}, "", "lr: found 0.002; allowed: 0.001 (--lr)"),
        ({"optimizer": {"params": {"betas": [0.9, 0.95]}}}, "", "allowed: [0.9, 0.999] "),
        ({"optimizer": {"params": {"weight_decay": 0.1}}}, "", "found 0.1; allowed: 0.01 "),
        ({"optimizer": {"params": {"adam_w_mode": False}}}, "", "found False; allowed: True "),
        ({"optimizer": {"params": {"amsgrad": True}}}, "", "optimizer.params: found amsgrad"),
        ({"zero_optimization": {"stage": 4}}, "", "stage: found 4; allowed: 0, 1, 2, 3"),
        ({"zero_optimization": {"stage": True}}, "", "stage: found True; allowed: 0, 1, 2, 3"),
        ({"zero_optimization": {"stage": "2"}}, "", "stage: found '2'; allowed: 0, 1, 2, 3"),
        ({"zero_optimization": 2}, "", "zero_optimization: found 2; allowed: an object"),
        ({"zero_optimization": {"stages": 2}}, "", "zero_optimization.stages: Extra inputs"),
        (
            {"zero_optimization": {"reduce_bucket_size": -1}},
            "",
            "zero_optimization.reduce_bucket_size: Input should be greater than 0",
        ),
        ({"zero_optimization": {"zenflow": {}}}, "", "zero_optimization: found zenflow"),
        (
            {"zero_optimization": {"stage": 2, "offload_param": {"device": "cpu"}}},
            "",
            "zero_optimization.offload_param: found stage 2; allowed: stage 3",
        ),
        (
            {"zero_optimization": {"offload_optimizer": {"device": "cpu"}}},
            "",
            "zero_optimization.offload_optimizer: found stage 0; allowed: stage 1, 2, 3",
        ),
        (
            {"zero_optimization": {"stage": 3, "offload_optimizer": {"device": "nvme"}}},
            "",
            "offload_optimizer.device: found 'nvme'; allowed: none, cpu",
        ),
        (
            {"zero_optimization": {"stage": 3, "offload_optimizer": {"ratio": 0.5}}},
            "",
            "offload_optimizer: found ratio; allowed: device, pin_memory",
        ),
        ({"zero_optimisation": {"stage": 2}}, "", "found zero_optimisation; allowed: train_batch"),
        ({"activation_checkpointing": {}}, "", "found activation_checkpointing; allowed: "),
        ('{"zero_optimization": {"stage": 1, "stage": 2}}', "", "says stage more than once"),
        ("{", "", "is not JSON (Expecting property name"),
        ("[1]", "", "holds no object in braces"),
    ],
)
def test_refused_in_one_line(resolve, config, flags, says):
    message = refused(resolve, config, flags)
    assert message.startswith("--deepspeed-config: ") and says in message


def test_layers_that_gather_their_weights_are_not_compiled(resolve):
    config = {"zero_optimization": {"stage": 3}}
    message = refused(resolve, config, "--torch-compile")
    assert message.startswith("--torch-compile: ") and "allowed: stages 0 to 2" in message
    resolve({"zero_optimization": {"stage": 2}}, "--torch-compile")


@pytest.mark.parametrize(
    "flags, says",
    [
        ("--pipeline-model-parallel-size 2", "--pipeline-model-parallel-size: not with"),
        ("--context-parallel-size 2", "--context-parallel-size: not with"),
        ("--use-distributed-optimizer", "--use-distributed-optimizer: not with"),
        ("--overlap-grad-reduce", "--overlap-grad-reduce: not with"),
        ("--rerun-mode validate_results --save never", "--rerun-mode: not with"),
    ],
)
def test_what_the_other_engine_does(resolve, monkeypatch, flags, says):
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert refused(resolve, {}, flags).startswith(f"{says} --engine deepspeed")


def test_numbers_that_stay_fp32_are_megatrons(tmp_path):
    (tmp_path / "ds.json").write_text('{"zero_optimization": {"stage": 1}}')
    flags = f"--engine deepspeed --deepspeed-config {tmp_path / 'ds.json'}"
    assert settings_of(flags, decoder="mamba2").deepspeed is not None
    with pytest.raises(BadInput, match="--bf16: not with --engine deepspeed, which would cast"):
        settings_of(f"{flags} --bf16", decoder="mamba2")


def test_the_two_flags_go_together(tmp_path):
    with pytest.raises(BadInput, match="--engine deepspeed: needs --deepspeed-config"):
        settings_of("--engine deepspeed")
    with pytest.raises(BadInput, match="--deepspeed-config: needs --engine deepspeed"):
        settings_of(f"--deepspeed-config {tmp_path / 'ds.json'}")
    with pytest.raises(BadInput, match=r"cannot read .*ds.json \(No such file or directory\)"):
        settings_of(f"--engine deepspeed --deepspeed-config {tmp_path / 'ds.json'}")


def test_without_the_package(resolve, monkeypatch):
    monkeypatch.setattr(deepspeed_host, "is_installed", lambda name: False)
    deepspeed_host.import_deepspeed.cache_clear()
    says = "--engine deepspeed needs deepspeed: pip install deepspeed"
    assert refused(resolve, {}) == says
    deepspeed_host.import_deepspeed.cache_clear()


# ---- the extension for optimizers on the CPU -----------------------------------------------------


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """An empty cache of extensions, and a C++ compiler as far as can be seen."""
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path / "extensions"))
    monkeypatch.setenv("CXX", "true")
    folder = deepspeed_host.build_folder()
    folder.mkdir(parents=True)
    return folder


def test_a_build_needs_a_compiler(resolve, cache, monkeypatch):
    config = {"zero_optimization": OFFLOADED}
    resolve(config)
    monkeypatch.setenv("CXX", "no-such-compiler")
    message = refused(resolve, config)
    assert "no C++ compiler (no-such-compiler)" in message and '"torch_adam": true' in message
    resolve({**config, "optimizer": TORCH_ADAM})
    resolve({"zero_optimization": {"stage": 2}})


def test_the_lock_of_a_build_that_was_killed(resolve, cache):
    config, lock = {"zero_optimization": OFFLOADED}, cache / "lock"
    lock.touch()
    message = refused(resolve, config)
    assert message.startswith("--deepspeed-config: ") and str(lock) in message
    resolve({**config, "optimizer": TORCH_ADAM})
    with open(lock):  # as a process that builds right now has it
        resolve(config)
    lock.unlink()
    resolve(config)


def test_the_folder_is_where_pytorch_builds(monkeypatch, tmp_path):
    from torch.utils import cpp_extension

    name = deepspeed_host.build_folder().name
    for root in (str(tmp_path), None):
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "home"))
        if root is None:
            monkeypatch.delenv("TORCH_EXTENSIONS_DIR", raising=False)
        else:
            monkeypatch.setenv("TORCH_EXTENSIONS_DIR", root)
        theirs = cpp_extension._get_build_directory(name, verbose=False)
        assert str(deepspeed_host.build_folder()) == theirs


def test_keys_are_deepspeeds():
    """What is allowed or refused by name exists, so that a misspelling here would show."""
    import deepspeed

    fields = deepspeed.runtime.zero.config.DeepSpeedZeroConfig.model_fields
    assert set(deepspeed_config._NOT_IN_ZERO) <= set(fields)
