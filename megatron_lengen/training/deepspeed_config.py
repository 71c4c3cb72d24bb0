"""The user's DeepSpeed configuration: read, checked against the run's flags, and completed.

The flags decide batches, clipping, precision, optimizer and schedule; the file decides how state
is partitioned and where it lives. Where the file says what a flag says too, both must agree.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from megatron.core.distributed import DistributedDataParallelConfig
from megatron.core.optimizer import OptimizerConfig

from megatron_lengen.config import LengenConfig
from megatron_lengen.errors import BadInput, require
from megatron_lengen.training import deepspeed_host
from megatron_lengen.training.flags import flag_of
from megatron_lengen.training.settings import TrainingSettings

FLAG = "--deepspeed-config"
# What only the console would show, and what DeepSpeed asks of optimizers that it does not know.
_WITHOUT_EFFECT = ("steps_per_print", "wall_clock_breakdown", "zero_allow_untested_optimizer")
_KEYS = (
    "train_batch_size",
    "train_micro_batch_size_per_gpu",
    "gradient_accumulation_steps",
    "gradient_clipping",
    "bf16",
    "data_types",
    "communication_data_type",
    "optimizer",
    "zero_optimization",
    "zero_force_ds_cpu_optimizer",
    *_WITHOUT_EFFECT,
)
# Of DeepSpeed's zero_optimization: what changes results, or cannot be saved and resumed.
_NOT_IN_ZERO = (
    "compute_grad_norm",
    "cpu_offload",
    "cpu_offload_param",
    "elastic_checkpoint",
    "legacy_stage1",
    "zenflow",
    "zero_hpz_partition_size",
    "zero_quantized_gradients",
    "zero_quantized_nontrainable_weights",
    "zero_quantized_weights",
)
_AUTO = "auto"  # how files written for Hugging Face's Trainer leave a value to the run
Decided = dict[str, tuple[Any, str]]  # key -> the run's value, and the flags that set it


def check_features(
    training: TrainingSettings,
    model: LengenConfig,
    optimizer: OptimizerConfig,
    ddp: DistributedDataParallelConfig,
) -> None:
    """Raise BadInput for what Megatron-Core's engine alone can do."""
    for name, asked in (
        ("pipeline_model_parallel_size", model.pipeline_model_parallel_size > 1),
        ("context_parallel_size", model.context_parallel_size > 1),
        ("use_distributed_optimizer", optimizer.use_distributed_optimizer),
        ("overlap_grad_reduce", ddp.overlap_grad_reduce),
        ("overlap_param_gather", ddp.overlap_param_gather),
        ("rerun_mode", training.rerun_mode != "disabled"),
        ("fp8", model.fp8 is not None),
    ):
        require(
            not asked, f"{flag_of(name)}: not with --engine deepspeed; allowed: --engine megatron"
        )
    require(
        not (model.bf16 and model.decoder == "mamba2"),
        "--bf16: not with --engine deepspeed, which would cast A_log, D and dt_bias too; allowed: "
        "--engine megatron",
    )


def resolve(
    training: TrainingSettings, model: LengenConfig, optimizer: OptimizerConfig, ranks: int
) -> dict[str, Any]:
    """What DeepSpeed is given.

    Args:
        ranks: data-parallel size.

    Raises:
        BadInput: for a file that cannot be read, that asks for what this engine does not do, or
            that contradicts a flag.
    """
    require(training.deepspeed_config is not None, f"--engine deepspeed: needs {FLAG}")
    config = _read(Path(str(training.deepspeed_config)))
    _refuse_others(config, training)
    _fill(config, _batches(training, ranks))
    _fill(config, {"gradient_clipping": (optimizer.clip_grad, "--clip-grad")})
    zero = _zero(_section(config, "zero_optimization"))
    require(
        not (training.torch_compile and zero["stage"] == 3),
        f"--torch-compile: found {FLAG} with zero_optimization.stage 3, whose hooks gather weights "
        "inside the layers; allowed: stages 0 to 2",
    )
    torch_adam = _is_torch_adam(_section(config, "optimizer"), optimizer)
    torch_adam |= not config.get("zero_force_ds_cpu_optimizer", True)
    _precision(config, model.bf16, zero["stage"])
    if zero["offload_optimizer"]["device"] == "cpu" and not torch_adam:
        deepspeed_host.check_build(FLAG)
    config["zero_optimization"] = zero
    config["zero_force_ds_cpu_optimizer"] = not torch_adam
    if zero["stage"] == 0:
        config["gradient_clipping"] = 0.0  # the optimizer clips (see deepspeed_adam.py)
    return config


def _read(path: Path) -> dict[str, Any]:
    def once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        keys = [key for key, _ in pairs]
        repeated = sorted({key for key in keys if keys.count(key) > 1})
        require(not repeated, f"{FLAG}: {path} says {', '.join(repeated)} more than once")
        return dict(pairs)

    try:
        config = json.loads(path.read_text(encoding="utf-8"), object_pairs_hook=once)
    except OSError as error:
        raise BadInput(f"{FLAG}: cannot read {path} ({error.strerror})") from error
    except BadInput:
        raise
    except ValueError as error:
        raise BadInput(f"{FLAG}: {path} is not JSON ({error})") from error
    require(isinstance(config, dict), f"{FLAG}: {path} holds no object in braces")
    return {key: value for key, value in config.items() if value != _AUTO}


def _section(config: dict[str, Any], name: str) -> dict[str, Any]:
    """Take a section out, without what it leaves to the run."""
    section = config.pop(name, None) or {}
    require(isinstance(section, dict), f"{FLAG}: {name}: found {section!r}; allowed: an object")
    return {key: value for key, value in section.items() if value != _AUTO}


def _refuse_others(config: dict[str, Any], training: TrainingSettings) -> None:
    """Raise BadInput for sections on what the flags or this engine decide."""
    fp16 = _section(config, "fp16")
    require(
        not fp16.get("enabled"),
        f"{FLAG}: fp16.enabled: found {fp16.get('enabled')}; allowed: false (--bf16 is the 16-bit "
        "type of a run)",
    )
    schedule = _section(config, "scheduler")
    require(
        not schedule,
        f"{FLAG}: scheduler: found {schedule.get('type')}; allowed: --lr-decay-style "
        f"{training.lr_decay_style} and its flags, without a section in the file",
    )
    unknown = sorted(set(config) - set(_KEYS))
    require(not unknown, f"{FLAG}: found {', '.join(unknown)}; allowed: {', '.join(_KEYS)}")
    for name in _WITHOUT_EFFECT:
        config.pop(name, None)


def _batches(training: TrainingSettings, ranks: int) -> Decided:
    batch, micro = training.global_batch_size, training.micro_batch_size
    assert batch is not None
    sizes = f"--global-batch-size {batch} by --micro-batch-size {micro} and {ranks} ranks"
    return {
        "train_batch_size": (batch, "--global-batch-size"),
        "train_micro_batch_size_per_gpu": (micro, "--micro-batch-size"),
        "gradient_accumulation_steps": (batch // (micro * ranks), sizes),
    }


def _fill(section: dict[str, Any], decided: Decided, prefix: str = "") -> None:
    """Put the run's values in; what the file gives must be equal."""
    for key, (value, flags) in decided.items():
        found = section.get(key, _AUTO)
        require(
            found in (_AUTO, value),
            f"{FLAG}: {prefix}{key}: found {found}; allowed: {value} ({flags}), or leave it out",
        )
        section[key] = value


def _zero(section: dict[str, Any]) -> dict[str, Any]:
    """The checked section on partitioning, with the stage and every device named."""
    stage, name = section.setdefault("stage", 0), "zero_optimization"
    require(
        stage in (0, 1, 2, 3) and not isinstance(stage, bool),
        f"{FLAG}: {name}.stage: found {stage!r}; allowed: 0, 1, 2, 3",
    )
    refused = [key for key in _NOT_IN_ZERO if key in section]
    require(not refused, f"{FLAG}: {name}: found {', '.join(refused)}; allowed: without it")
    for key, stages in (("offload_optimizer", (1, 2, 3)), ("offload_param", (3,))):
        place = section[key] = {"device": "none", **(_section(section, key))}
        device = place["device"]
        require(
            device in ("none", "cpu"),
            f"{FLAG}: {name}.{key}.device: found {device!r}; allowed: none, cpu",
        )
        require(
            device == "none" or stage in stages,
            f"{FLAG}: {name}.{key}: found stage {stage}; allowed: stage "
            f"{', '.join(map(str, stages))}",
        )
        unknown = sorted(set(place) - {"device", "pin_memory"})
        require(
            not unknown,
            f"{FLAG}: {name}.{key}: found {', '.join(unknown)}; allowed: device, pin_memory",
        )
    _check_with_deepspeed(section)
    return section


def _check_with_deepspeed(section: dict[str, Any]) -> None:
    """Names and types of the section's keys, as DeepSpeed knows them."""
    deepspeed = deepspeed_host.import_deepspeed()
    try:
        deepspeed.runtime.zero.config.DeepSpeedZeroConfig(**section)
    except (ValueError, AssertionError) as error:
        details: list[dict[str, Any]] = getattr(error, "errors", list)()
        place = "".join(f".{part}" for part in details[0]["loc"]) if details else ""
        reason = details[0]["msg"] if details else str(error)
        raise BadInput(f"{FLAG}: zero_optimization{place}: {reason}") from error


def _is_torch_adam(section: dict[str, Any], flags: OptimizerConfig) -> bool:
    """Check the section on the optimizer; returns whether it asks for PyTorch's AdamW."""
    kind = section.get("type", "AdamW")
    require(
        kind in ("AdamW", "Adam"),
        f"{FLAG}: optimizer.type: found {kind!r}; allowed: AdamW, the optimizer of every run",
    )
    params = _section(section, "params")
    torch_adam = bool(params.pop("torch_adam", False))
    decided: Decided = {
        "lr": (flags.lr, "--lr"),
        "betas": ([flags.adam_beta1, flags.adam_beta2], "--adam-beta1, --adam-beta2"),
        "eps": (flags.adam_eps, "--adam-eps"),
        "weight_decay": (flags.weight_decay, "--weight-decay"),
        "adam_w_mode": (True, "decay apart from the gradient"),
    }
    unknown = sorted(set(params) - set(decided))
    require(
        not unknown,
        f"{FLAG}: optimizer.params: found {', '.join(unknown)}; allowed: {', '.join(decided)}, "
        "torch_adam",
    )
    _fill(params, decided, "optimizer.params.")
    return torch_adam


def _precision(config: dict[str, Any], bf16: bool, stage: int) -> None:
    """16 bits where the flags ask for it; sums of gradients in fp32, as in the other engine."""
    section, types = _section(config, "bf16"), _section(config, "data_types")
    unknown = sorted(set(section) - {"enabled", "check_grad_overflow", "immediate_grad_update"})
    unknown += sorted(set(types) - {"grad_accum_dtype"})
    require(
        not unknown,
        f"{FLAG}: bf16, data_types: found {', '.join(unknown)}; allowed: enabled, grad_accum_dtype",
    )
    decided: Decided = {
        "enabled": (bf16, "--bf16" if bf16 else "without --bf16"),
        "check_grad_overflow": (True, "updates that are not finite are left out"),
    }
    _fill(section, decided, "bf16.")
    if bf16:
        require(
            stage > 0,
            f"{FLAG}: zero_optimization.stage: found 0 with --bf16, where DeepSpeed adds gradients "
            "up in 16 bits and takes only a part of their norm under tensor parallelism; allowed: "
            "1, 2, 3",
        )
        types.setdefault("grad_accum_dtype", "fp32")
        config.setdefault("communication_data_type", "fp32")
    allowed = ("fp32", "bf16") if bf16 else ("fp32",)
    for place, name in ((types, "grad_accum_dtype"), (config, "communication_data_type")):
        require(
            place.get(name, "fp32") in allowed,
            f"{FLAG}: {name}: found {place.get(name)}; allowed: {', '.join(allowed)}",
        )
    config["bf16"], config["data_types"] = section, types
