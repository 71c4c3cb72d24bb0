"""The optimizer's state under DeepSpeed, inside an iteration's folder; and whole weights to save.

Each rank writes its part as DeepSpeed lays it out, so the state goes on only on the layout that
wrote it. The weights of a checkpoint are Megatron's and go anywhere.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from megatron.core import parallel_state
from torch import nn

from megatron_lengen.errors import BadInput, Fault, require
from megatron_lengen.runtime.agreement import first_problem, reason_of
from megatron_lengen.training.arguments import Settings
from megatron_lengen.training.deepspeed_host import import_deepspeed, quiet

_FOLDER = "deepspeed"
# What the layout of the state depends on, besides ranks.
_OF_ZERO = ("stage", "round_robin_gradients", "parameter_alignment", "sub_group_size")


def check(settings: Settings) -> None:
    """Whether the state in `settings.load_from` was written on the layout of this run.

    Raises:
        BadInput: naming what differs.
    """
    found = settings.load_from
    assert found is not None and settings.deepspeed is not None
    stored = found.description["arguments"]
    before = _layout(stored["deepspeed"], stored["model"]["tensor_model_parallel_size"])
    now = _layout(settings.deepspeed, settings.model.tensor_model_parallel_size)
    changed = [
        f"{name} {now.get(name)} (checkpoint: {before.get(name)})"
        for name in {**before, **now}
        if now.get(name) != before.get(name)
    ]
    require(
        not changed,
        f"--load: DeepSpeed's optimizer goes on only as it was saved; found {', '.join(changed)}; "
        "allowed: the same as then, or --no-load-optim",
    )


def _layout(config: dict[str, Any], tensor_parallel: int) -> dict[str, Any]:
    zero = config["zero_optimization"]
    rows = config["train_micro_batch_size_per_gpu"] * config["gradient_accumulation_steps"]
    layout = {
        "--tensor-model-parallel-size": tensor_parallel,
        "data-parallel ranks": config["train_batch_size"] // rows,
        "zero_force_ds_cpu_optimizer": config["zero_force_ds_cpu_optimizer"],
    }
    layout |= {name: zero[name] for name in _OF_ZERO if name in zero}
    for place in ("offload_optimizer", "offload_param"):
        layout[f"{place}.device"] = zero[place]["device"]
    return layout


def save(engine: Any, folder: Path) -> None:
    """Write this rank's part; called by every rank.

    Raises:
        Fault: on every rank, if one of them could not write.
    """
    problem = None
    try:
        path = _file(folder)
        path.parent.mkdir(exist_ok=True)
        with open(path, "wb") as file:
            torch.save(engine.optimizer.state_dict(), file)
            file.flush()
            os.fsync(file.fileno())
    except Exception as error:
        problem = reason_of(error)
    problem = first_problem(problem)
    if problem:
        raise Fault(problem)


def load(settings: Settings, engine: Any) -> None:
    """Give DeepSpeed's optimizer its state back; called by every rank.

    Raises:
        BadInput: on every rank, if one of them cannot read its file.
    """
    found, optimizer = settings.load_from, engine.optimizer
    assert found is not None
    state, problem = None, None
    try:
        # DeepSpeed's own classes are inside, as in the checkpoints that it writes.
        state = torch.load(_file(found.folder), map_location="cpu", weights_only=False)
    except Exception as error:
        problem = reason_of(error)
    problem = first_problem(problem)
    if problem:
        raise BadInput(f"--load: {problem}; allowed: another --ckpt-step, or --no-load-optim")
    if engine.zero_optimization():
        everyones: list[Any] = [None] * settings.data_parallel_size  # it picks its own rank's
        everyones[parallel_state.get_data_parallel_rank()] = state
        with quiet():
            optimizer.load_state_dict(everyones, load_from_fp32_weights=True)
    else:
        optimizer.load_state_dict(state)
    if hasattr(optimizer, "clip_grad"):
        optimizer.clip_grad = settings.optimizer.clip_grad  # the flag's, not the file's


def _file(folder: Path) -> Path:
    tensor = parallel_state.get_tensor_model_parallel_rank()
    data = parallel_state.get_data_parallel_rank()
    return folder / _FOLDER / f"optimizer_tp{tensor:03d}_dp{data:05d}.pt"


@contextlib.contextmanager
def whole_weights(settings: Settings, chunk: nn.Module) -> Iterator[None]:
    """Show stage 3's parameters as whole tensors in host memory, for a checkpoint.

    They are gathered one at a time and kept by the data-parallel rank that writes them; on the
    others, tensors of the same shape take no memory.
    """
    assert settings.deepspeed is not None
    if settings.deepspeed["zero_optimization"]["stage"] < 3:
        yield
        return
    gathered = import_deepspeed().zero.GatheredParameters
    writes = parallel_state.get_data_parallel_rank() == 0
    parameters, whole = list(chunk.parameters()), []
    for parameter in parameters:
        with gathered([parameter]):
            data = parameter.data
            placeholder = torch.empty((), dtype=data.dtype).expand(data.shape)
            whole.append(data.cpu().clone() if writes else placeholder)
    partitioned = [parameter.data for parameter in parameters]
    try:
        for parameter, data in zip(parameters, whole, strict=True):
            parameter.data = data
        yield
    finally:
        for parameter, data in zip(parameters, partitioned, strict=True):
            parameter.data = data
