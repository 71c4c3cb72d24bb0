"""From the command line to checked settings: everything that can be wrong is found here.

Nothing is built, no process group is joined and no file is written before `parse_settings` has
returned, so a bad combination costs seconds and one line.
"""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.distributed import DistributedDataParallelConfig
from megatron.core.optimizer import OptimizerConfig
from megatron.core.transformer.utils import is_layer_window_attention

from megatron_lengen import checkpoint_folder
from megatron_lengen.compat import have_transformer_engine, is_installed, versions
from megatron_lengen.config import LengenConfig
from megatron_lengen.config_checks import per_layer
from megatron_lengen.config_fields import (
    ARCHITECTURE_FIELDS,
    MAMBA_ARCHITECTURE_FIELDS,
    METHOD_FIELDS,
)
from megatron_lengen.data.tokenizer import Tokenizer, build_tokenizer, kind_named
from megatron_lengen.errors import BadInput, is_first_rank, missing_package, require
from megatron_lengen.fp8_checks import check_fp8_tokens
from megatron_lengen.mamba_config import ENTRIES
from megatron_lengen.runtime import distributed
from megatron_lengen.training import flags
from megatron_lengen.training.settings import TrainingSettings

logger = logging.getLogger(__name__)

# The shapes of the weights follow from these, so no flag can change them for a checkpoint.
_SHAPES = (
    "num_layers",
    "hidden_size",
    "ffn_hidden_size",
    "num_attention_heads",
    "num_query_groups",
    "kv_channels",
    "gated_linear_unit",
    "add_bias_linear",
    "add_qkv_bias",
    "mamba_state_dim",
    "mamba_head_dim",
    "mamba_num_heads",
    "mamba_num_groups",
    "mamba_conv_kernel",
    "untie_embeddings_and_output_weights",
)


@dataclass
class Settings:
    """A run, fully resolved."""

    model: LengenConfig
    optimizer: OptimizerConfig
    ddp: DistributedDataParallelConfig
    training: TrainingSettings
    tokenizer: Tokenizer
    data_parallel_size: int
    load_from: checkpoint_folder.Found | None
    deepspeed: dict[str, Any] | None = None

    @property
    def micro_batches(self) -> int:
        """Micro-batches of a step on each data-parallel rank."""
        assert self.training.global_batch_size is not None
        step = self.training.micro_batch_size * self.data_parallel_size
        return self.training.global_batch_size // step

    def as_json(self) -> dict[str, Any]:
        """Every setting as JSON values, by flag group."""
        return {
            "model": flags.plain_values(self.model),
            "optimizer": flags.plain_values(self.optimizer),
            "data_parallelism": flags.plain_values(self.ddp),
            "training": flags.plain_values(self.training),
            "deepspeed": self.deepspeed,
        }


def parse_settings(
    argv: Sequence[str] | None, description: str, decoder: str = "transformer"
) -> Settings:
    """Parse and check a command line.

    Args:
        argv: the process's own if None.
        description: for --help.
        decoder: what the model's layers are: `transformer` or `mamba2`.

    Raises:
        BadInput: naming the flag or file, what was found and what is allowed.
    """
    given = vars(flags.build_parser(description, decoder).parse_args(argv))
    given["decoder"] = decoder
    training = TrainingSettings(**flags.dataclass_values(TrainingSettings, given))
    found = _find_checkpoint(training)
    _check_decoder(found, decoder)
    given = _with_checkpoint(given, found, training)
    if training.copy_lengths is not None:
        given.setdefault("seq_length", training.copy_lengths.row)
    tokenizer = _tokenizer(training, given)
    model = _model(given, tokenizer)
    optimizer = _optimizer(given, model)
    data_parallel_size = distributed.check_layout(model, distributed.world_size())
    training.check(data_parallel_size, optimizer.lr, optimizer.min_lr)
    training.check_tasks(model, data_parallel_size)
    check_fp8_tokens(model, training.micro_batch_size)
    require(
        training.rerun_mode == "disabled" or model.fp8 is None or model.fp8_recipe != "delayed",
        f"--rerun-mode {training.rerun_mode}: found with --fp8-recipe delayed, whose scales are "
        "others in every forward; allowed: another recipe",
    )
    _check_data_files(training, tokenizer)
    _check_packages(training, model)
    ddp = _data_parallelism(given)
    return Settings(
        model=model,
        optimizer=optimizer,
        ddp=ddp,
        training=training,
        tokenizer=tokenizer,
        data_parallel_size=data_parallel_size,
        load_from=found,
        deepspeed=_deepspeed(training, model, optimizer, ddp, data_parallel_size),
    )


def print_settings(settings: Settings) -> None:
    """The resolved configuration as JSON, on rank 0."""
    if is_first_rank():
        print(json.dumps({**settings.as_json(), "versions": versions()}, indent=2, sort_keys=True))


def _find_checkpoint(training: TrainingSettings) -> checkpoint_folder.Found | None:
    if training.load is None:
        require(
            training.pretrained_checkpoint is None,
            f"--pretrained-checkpoint: found {training.pretrained_checkpoint} without --load; "
            "allowed: with --load equal to --save, or --load and --finetune instead",
        )
        return None
    found = checkpoint_folder.find(training.load, training.ckpt_step)
    if found is None and training.pretrained_checkpoint is not None:
        training.finetune = True
        found = checkpoint_folder.find(training.pretrained_checkpoint)
        require(
            found is not None,
            f"--pretrained-checkpoint: found no checkpoint in {training.pretrained_checkpoint}; "
            f"allowed: a folder with {checkpoint_folder.TRACKER}",
        )
    if found is None and not training.saves_here:
        raise BadInput(
            f"--load: found no checkpoint in {training.load}; allowed: a folder with "
            f"{checkpoint_folder.TRACKER}, or the --save folder before its first save"
        )
    return found


def _with_checkpoint(
    given: dict[str, Any], found: checkpoint_folder.Found | None, training: TrainingSettings
) -> dict[str, Any]:
    """The architecture comes from the checkpoint, and for a run that goes on so do the method's
    settings; flags given explicitly win, with one line."""
    if found is None:
        return given
    stored = found.description.get("model", {})
    names = (*ARCHITECTURE_FIELDS, *MAMBA_ARCHITECTURE_FIELDS)
    architecture = {name: stored[name] for name in names if name in stored}
    if not (found.release or training.finetune):
        stored = found.description["arguments"]["model"]
        architecture |= {name: stored[name] for name in METHOD_FIELDS if name in stored}
        if given.get("dropout_variant") == "none":
            architecture.pop("dropout_rate", None)  # turning dropout off needs one flag, not two
    if "window_size" in given:
        architecture.pop("sliding_window", None)
    for name in _SHAPES:
        if name in given and name in architecture and given[name] != architecture[name]:
            raise BadInput(
                f"{flags.flag_of(name)}: found {given[name]}; allowed: the checkpoint's "
                f"{architecture[name]} ({found.folder})"
            )
    changed = [
        f"{flags.flag_of(name)} {given[name]} (checkpoint: {value})"
        for name, value in architecture.items()
        if name in given and not _same(name, given[name], value, architecture["num_layers"])
    ]
    if changed and is_first_rank():
        logger.warning("given flags replace the checkpoint's settings: %s", "; ".join(changed))
    return {**architecture, **given}


def _check_decoder(found: checkpoint_folder.Found | None, decoder: str) -> None:
    if found is None:
        return
    stored = found.description.get("model", {}).get("decoder", "transformer")
    require(
        stored == decoder,
        f"--load: found a {stored} model in {found.folder}; allowed: {decoder} ones, or "
        f"{ENTRIES.get(stored, 'another script')}",
    )


def _same(name: str, given: Any, stored: Any, layers: int) -> bool:
    """Whether two values of a field say the same; layer patterns have several spellings."""
    if name == "no_rope_freq":
        return per_layer(given, layers) == per_layer(stored, layers)
    if name == "window_attn_skip_freq":
        return all(
            is_layer_window_attention((0, 0), given, i)
            == is_layer_window_attention((0, 0), stored, i)
            for i in range(1, layers + 1)
        )
    return given == stored


def _tokenizer(training: TrainingSettings, given: dict[str, Any]) -> Tokenizer:
    name, kind = training.tokenizer_model, training.tokenizer_type
    if training.copy_task is not None:
        for flag, value in (("--tokenizer-model", name), ("--tokenizer-type", kind)):
            require(
                value in (None, "copy"), f"{flag}: found {value}; allowed: copy with --copy-task"
            )
        return build_tokenizer("copy")
    if not (name or kind):
        raise BadInput(
            "--tokenizer-model: not given; allowed: a folder, hub id or .model file, or "
            "--tokenizer-type NullTokenizer --vocab-size N"
        )
    if name is None and kind_named(kind or "") in ("huggingface", "sentencepiece"):
        raise BadInput(
            f"--tokenizer-model: not given with --tokenizer-type {kind}; allowed: a folder, hub id "
            "or .model file"
        )
    return build_tokenizer(name or kind or "", kind=kind, vocab_size=given.get("vocab_size"))


def _model(given: dict[str, Any], tokenizer: Tokenizer) -> LengenConfig:
    values = flags.dataclass_values(LengenConfig, given)
    require("seq_length" in values, "--seq-length: not given; allowed: tokens of a training row")
    vocabulary = values.setdefault("vocab_size", tokenizer.vocab_size)
    require(
        vocabulary >= tokenizer.vocab_size,
        f"--vocab-size: found {vocabulary}; allowed: the tokenizer's {tokenizer.vocab_size} "
        "or more",
    )
    require(
        values.get("dropout_variant", "none") == "none" or "dropout_rate" in values,
        f"--dropout-rate: not given with --dropout-variant {values.get('dropout_variant')}; "
        "allowed: a probability",
    )
    require(
        not {"sliding_window", "window_size"} <= set(values),
        "--sliding-window and --window-size: found both; give one of them",
    )
    dtype = torch.bfloat16 if values.get("bf16") else torch.float32
    values.update(
        params_dtype=dtype,
        pipeline_dtype=dtype,
        activation_func=F.silu if values.get("gated_linear_unit") else F.gelu,
        # Sum of losses over sum of tokens, however rows are split into micro-batches and ranks.
        calculate_per_token_loss=True,
    )
    _recomputation(values)
    return LengenConfig(**values)


def _recomputation(values: dict[str, Any]) -> None:
    granularity = values.get("recompute_granularity")
    if granularity is None:
        for name in ("recompute_method", "recompute_num_layers", "recompute_modules"):
            require(name not in values, f"{flags.flag_of(name)}: needs --recompute-granularity")
    elif granularity == "full":
        values.setdefault("recompute_method", "uniform")
        values.setdefault("recompute_num_layers", 1)


def _optimizer(given: dict[str, Any], model: LengenConfig) -> OptimizerConfig:
    values = flags.dataclass_values(OptimizerConfig, given)
    values.update(optimizer="adam", bf16=model.bf16, params_dtype=model.params_dtype)
    values.setdefault("min_lr", 0.0)
    if model.fp8 is not None:
        values["fp8_recipe"] = model.fp8_recipe
    for name, high, allowed in (
        ("weight_decay", math.inf, "0 or more"),
        ("clip_grad", math.inf, "0 (no clipping) or more"),
        ("adam_beta1", 1.0, "0 to below 1"),
        ("adam_beta2", 1.0, "0 to below 1"),
        ("adam_eps", math.inf, "above 0"),
    ):
        value = values.get(name, 0.5)
        fits = 0 <= value < high and (value > 0 or name != "adam_eps")
        require(fits, f"{flags.flag_of(name)}: found {value}; allowed: {allowed}")
    require(
        not values.get("overlap_param_gather") or bool(values.get("use_distributed_optimizer")),
        "--overlap-param-gather: needs --use-distributed-optimizer",
    )
    return OptimizerConfig(**values)


def _data_parallelism(given: dict[str, Any]) -> DistributedDataParallelConfig:
    values = flags.dataclass_values(DistributedDataParallelConfig, given)
    # Gradients of bf16 weights add up in fp32, as Megatron-LM does for bf16.
    if given.get("bf16"):
        values["grad_reduce_in_fp32"] = True
    # Megatron-Core's data parallelism asks the rerun state machine about each rank's gradients.
    values["check_for_nan_in_grad"] = given.get("rerun_mode", "disabled") != "disabled"
    return DistributedDataParallelConfig(**values)


def _deepspeed(
    training: TrainingSettings,
    model: LengenConfig,
    optimizer: OptimizerConfig,
    ddp: DistributedDataParallelConfig,
    data_parallel_size: int,
) -> dict[str, Any] | None:
    """DeepSpeed's configuration, where DeepSpeed is the engine."""
    if training.engine != "deepspeed":
        require(training.deepspeed_config is None, "--deepspeed-config: needs --engine deepspeed")
        return None
    from megatron_lengen.training import deepspeed_config  # DeepSpeed takes seconds to import

    deepspeed_config.check_features(training, model, optimizer, ddp)
    return deepspeed_config.resolve(training, model, optimizer, data_parallel_size)


def _check_packages(training: TrainingSettings, model: LengenConfig) -> None:
    require(
        model.transformer_impl != "transformer_engine" or have_transformer_engine(),
        "--transformer-impl: found transformer_engine, which cannot be imported; allowed: local",
    )
    if model.fp8 is not None:
        from megatron_lengen.models.backends import why_no_fp8

        reason = why_no_fp8(model.fp8_recipe)
        require(reason is None, f"--fp8-recipe: found {model.fp8_recipe}; {reason}")
    for flag, asked, package in (
        ("--tensorboard-dir", training.tensorboard_dir, "tensorboard"),
        ("--wandb-project", training.wandb_project, "wandb"),
        ("--save", training.save, "psutil"),  # no package asks for it, but Megatron's writer
    ):
        if asked and not is_installed(package):
            raise missing_package(package, flag)


def _check_data_files(training: TrainingSettings, tokenizer: Tokenizer) -> None:
    # Imported here: opening datasets pulls in more of Megatron than most bad flags need.
    from megatron_lengen.data.datasets import blend_of, check_split
    from megatron_lengen.data.indexed import check_dataset

    for flag, paths in (
        ("--data-path", training.data_path),
        ("--train-data-path", training.train_data_path),
        ("--valid-data-path", training.valid_data_path),
    ):
        for prefix in blend_of(paths)[0] if paths else ():
            documents = len(check_dataset(prefix, flag).sequence_lengths)
            if flag == "--data-path":
                check_split(prefix, documents, training.split, training.eval_iters > 0)
    metrics = training.metrics_jsonl
    if metrics is not None and Path(metrics).is_dir():
        raise BadInput(f"--metrics-jsonl: found the folder {metrics}; allowed: a file")
