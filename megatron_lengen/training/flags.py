"""The command line, made from the dataclasses.

Every field of the model, optimizer, data-parallel and training dataclasses is a flag of the same
name; a field's documentation is its help. Where Megatron-LM's flag has another name than the
field, `RENAMED` says so. Of Megatron-Core's many fields, those in `SERVED` are flags.
"""

from __future__ import annotations

import argparse
import ast
import dataclasses
import functools
import inspect
import re
import textwrap
import types
import typing
from collections.abc import Callable
from typing import Any

import torch
from megatron.core.distributed import DistributedDataParallelConfig
from megatron.core.optimizer import OptimizerConfig

from megatron_lengen.config import LengenConfig
from megatron_lengen.config_fields import ARCHITECTURE_FIELDS, MAMBA_ARCHITECTURE_FIELDS
from megatron_lengen.errors import Parser
from megatron_lengen.mamba_config import ENTRIES, MAMBA_FIELDS
from megatron_lengen.ops.mask import MAX_LAYER
from megatron_lengen.training.settings import TrainingSettings

SOURCES: dict[str, type] = {
    "model": LengenConfig,
    "optimizer": OptimizerConfig,
    "data parallelism": DistributedDataParallelConfig,
    "training": TrainingSettings,
}

# field -> Megatron-LM's flag. A flag of a field that is on by default turns it off.
RENAMED = {
    "layernorm_epsilon": "--norm-epsilon",
    "gated_linear_unit": "--swiglu",
    "fp8": "--fp8-format",
    "add_bias_linear": "--disable-bias-linear",
    "grad_reduce_in_fp32": "--accumulate-allreduce-grads-in-fp32",
    "num_layers_in_first_pipeline_stage": "--decoder-first-pipeline-num-layers",
    "num_layers_in_last_pipeline_stage": "--decoder-last-pipeline-num-layers",
    "virtual_pipeline_model_parallel_size": "--num-virtual-stages-per-pipeline-rank",
    "dropout_detach_alpha": "--dropout-no-detach-alpha",
    "dropout_detach_beta": "--dropout-no-detach-beta",
}

# Fields that only mean something with --fp8-format.
FP8 = frozenset(
    re.findall(
        r"\w+",
        """
    fp8 fp8_recipe fp8_margin fp8_amax_history_len fp8_amax_compute_algo first_last_layers_bf16
    num_layers_at_start_in_bf16 num_layers_at_end_in_bf16
    """,
    )
)

# What this package serves of Megatron-Core's own dataclasses; its own fields are all flags.
SERVED = FP8 | frozenset(
    re.findall(
        r"\w+",
        """
    tensor_model_parallel_size pipeline_model_parallel_size virtual_pipeline_model_parallel_size
    sequence_parallel context_parallel_size num_layers_in_first_pipeline_stage
    num_layers_in_last_pipeline_stage num_layers hidden_size ffn_hidden_size num_attention_heads
    num_query_groups kv_channels gated_linear_unit add_bias_linear add_qkv_bias window_size
    window_attn_skip_freq no_rope_freq init_method_std bf16 recompute_granularity
    recompute_method recompute_num_layers recompute_modules lr min_lr weight_decay adam_beta1
    adam_beta2 adam_eps clip_grad use_distributed_optimizer overlap_param_gather
    overlap_grad_reduce grad_reduce_in_fp32
    """,
    )
)
_NO_FLAG = frozenset({"cuda_graph_scope", "decoder"})
# Fields that say nothing about a decoder: its entry script does not have their flags.
_NOT_OF = {
    "transformer": frozenset(MAMBA_FIELDS),
    "mamba2": frozenset(ARCHITECTURE_FIELDS) - frozenset(MAMBA_ARCHITECTURE_FIELDS)
    | {"window_size", "attention_dropout", "attention_dropout_layers", "recompute_modules"}
    | FP8,
}
_PACKAGE = "megatron_lengen."


@dataclasses.dataclass(frozen=True)
class Flag:
    """One flag and the field it sets."""

    name: str
    field: str
    group: str
    kind: Any
    default: Any
    help: str

    @property
    def turns_off(self) -> bool:
        """Whether giving the flag sets a field that is on by default to False."""
        return self.kind is bool and self.default is True


@functools.cache
def all_flags() -> tuple[Flag, ...]:
    """Every flag, in the order of the dataclasses; a field that several share counts once."""
    flags: dict[str, Flag] = {}
    for group, cls in SOURCES.items():
        hints, docs = typing.get_type_hints(cls), _documentation(cls)
        own = _own_fields(cls)
        for field in dataclasses.fields(cls):
            served = field.name in SERVED or field.name in own
            if field.name in flags or field.name in _NO_FLAG or not served:
                continue
            default = field.default
            if default is dataclasses.MISSING:
                default = None
            kind = _plain(hints[field.name])
            name = RENAMED.get(field.name, "--" + field.name.replace("_", "-"))
            if kind is bool and default is True and field.name not in RENAMED:
                name = "--no-" + field.name.replace("_", "-")
            flags[field.name] = Flag(
                name, field.name, group, kind, default, docs.get(field.name, "")
            )
    return tuple(flags.values())


def _own_fields(cls: type) -> frozenset[str]:
    """Fields that classes of this package declare."""
    bases = (base for base in cls.__mro__ if base.__module__.startswith(_PACKAGE))
    return frozenset(name for base in bases for name in vars(base).get("__annotations__", ()))


def flag_of(field: str) -> str:
    """The flag that sets a field, for messages."""
    return next((flag.name for flag in all_flags() if flag.field == field), field)


def build_parser(description: str, decoder: str = "transformer") -> Parser:
    """A parser whose namespace holds only what was given, by field name."""
    parser = Parser(
        description=description,
        argument_default=argparse.SUPPRESS,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    groups = {name: parser.add_argument_group(name) for name in SOURCES}
    elsewhere = {}
    for flag in all_flags():
        if flag.field not in _NOT_OF[decoder]:
            _add(groups[flag.group], flag)
        else:
            others = (ENTRIES[kind] for kind, left in _NOT_OF.items() if flag.field not in left)
            elsewhere[flag.name] = ", ".join(others)
    parser.elsewhere = elsewhere
    return parser


def _add(group: argparse._ArgumentGroup, flag: Flag) -> None:
    text = " ".join(flag.help.split()).replace("%", "%%")
    if flag.kind is bool:
        prefix = "Turn off: " if flag.turns_off else ""
        action = "store_false" if flag.turns_off else "store_true"
        group.add_argument(flag.name, dest=flag.field, action=action, help=prefix + text)
        return
    if flag.default is not None:
        text += f" (default: {flag.default})"
    options: dict[str, Any] = {"dest": flag.field, "help": text}
    if typing.get_origin(flag.kind) is typing.Literal:
        options["choices"] = typing.get_args(flag.kind)
    elif flag.kind == list[str]:
        options.update(nargs="+", metavar="TEXT", type=_reader(str))
    else:
        options.update(type=_reader(flag.kind), metavar=_metavar(flag.kind))
    group.add_argument(flag.name, **options)


def _plain(hint: Any) -> Any:
    """A field's type without Optional; unions of numbers and lists become a list pattern."""
    if typing.get_origin(hint) in (typing.Union, types.UnionType):
        members = [a for a in typing.get_args(hint) if a is not type(None)]
        if len(members) == 1:
            return _plain(members[0])
        return list[int] if int in members else str
    if typing.get_origin(hint) is tuple or hint in (tuple, typing.List[int]):  # noqa: UP006
        return list[int]
    if hint == typing.List[str]:  # noqa: UP006
        return list[str]
    return hint


def _metavar(kind: Any) -> str:
    return {int: "N", float: "X", str: "TEXT"}.get(kind, "N[,N...]")


def _reader(kind: Any) -> Callable[[str], Any]:
    return _pattern if kind == list[int] else functools.partial(_value, kind)


def _value(kind: Any, text: str) -> Any:
    """A number or a text that says something."""
    try:
        value = kind(text)
    except ValueError:
        value = ""
    if value == "":
        allowed = {int: "a whole number", float: "a number"}.get(kind, "a text")
        raise argparse.ArgumentTypeError(f"found {text!r}; allowed: {allowed}")
    return value


def _pattern(text: str) -> Any:
    """`4`, `0,0,0,1`, or Megatron-LM's `[0,0,0,1]*9`."""
    match = re.fullmatch(r"\[?([\d,\s-]+)\]?(?:\s*\*\s*(\d+))?", text.strip())
    if not match:
        raise argparse.ArgumentTypeError(f"{text!r} is not N, N,N,... or [N,...]*K")
    numbers = [int(part) for part in match[1].split(",") if part.strip()]
    times = int(match[2] or 1)
    if len(numbers) * times > MAX_LAYER:
        raise argparse.ArgumentTypeError(f"found {text}; allowed: up to {MAX_LAYER} layers")
    numbers *= times
    return numbers[0] if len(numbers) == 1 and "[" not in text else numbers


def _documentation(cls: type) -> dict[str, str]:
    """The string below each field, through the base classes."""
    docs: dict[str, str] = {}
    for base in reversed(cls.__mro__):
        if not dataclasses.is_dataclass(base):
            continue
        body = ast.parse(textwrap.dedent(inspect.getsource(base))).body[0]
        assert isinstance(body, ast.ClassDef)
        for statement, following in zip(body.body, body.body[1:], strict=False):
            if (
                isinstance(statement, ast.AnnAssign)
                and isinstance(statement.target, ast.Name)
                and isinstance(following, ast.Expr)
                and isinstance(following.value, ast.Constant)
                and isinstance(following.value.value, str)
            ):
                docs[statement.target.id] = following.value.value
    return docs


def dataclass_values(cls: type, given: dict[str, Any]) -> dict[str, Any]:
    """The part of `given` that are fields of a dataclass."""
    names = {field.name for field in dataclasses.fields(cls)}
    return {name: value for name, value in given.items() if name in names}


def plain_values(settings: Any) -> dict[str, Any]:
    """A dataclass as JSON values, without what JSON cannot say."""
    result: dict[str, Any] = {}
    for field in dataclasses.fields(settings):
        value = getattr(settings, field.name)
        if isinstance(value, torch.dtype):
            value = str(value).removeprefix("torch.")
        if isinstance(value, str | int | float | bool | list | tuple | type(None)):
            result[field.name] = list(value) if isinstance(value, tuple) else value
    return result
