"""CUDA, or the CPU host: the only file that adapts `torch.cuda`.

Megatron-Core names CUDA in many places. On a machine without a GPU, `adapt_to_host` answers those
calls with their CPU counterparts; on a CUDA machine it does nothing. The CPU generator then plays
the part of the CUDA one.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

_CPU = torch.device("cpu")

# Megatron modules that create tensors with device="cuda".
_CUDA_LITERALS = (
    "megatron.core.dist_checkpointing.exchange_utils",
    "megatron.core.dist_checkpointing.strategies.state_dict_saver",
    "megatron.core.distributed.param_and_grad_buffer",
    "megatron.core.models.common.embeddings.rope_utils",
    "megatron.core.optimizer.clip_grads",
    "megatron.core.optimizer.grad_scaler",
    "megatron.core.optimizer.optimizer",
    "megatron.core.pipeline_parallel.schedules",
    "megatron.core.rerun_state_machine",
    "megatron.core.tensor_parallel.data",
    "megatron.core.transformer.utils",
    "megatron.core.utils",
)
_RANDOM = "megatron.core.tensor_parallel.random"


def has_cuda() -> bool:
    """Whether this process trains on a GPU."""
    return torch.cuda.is_available()


def device() -> torch.device:
    """The device that this process computes on."""
    return torch.device("cuda", torch.cuda.current_device()) if has_cuda() else _CPU


def communication_backend() -> str:
    """torch.distributed backend for the host."""
    return "nccl" if has_cuda() else "gloo"


def free_memory() -> int:
    """Bytes that this process can still take: of the host, and of the GPU if there is one."""
    import psutil

    free = [psutil.virtual_memory().available, *_free_in_container()]
    if has_cuda():
        free.append(torch.cuda.mem_get_info()[0])
    return min(free)


def _free_in_container() -> list[int]:
    """What limits on this process's control groups (a container, a batch job) leave, if any."""
    root = Path("/sys/fs/cgroup")
    free = []
    try:
        own = root / Path("/proc/self/cgroup").read_text().strip().rpartition("::")[2].lstrip("/")
    except OSError:
        return []
    for group in [own, *own.parents]:
        try:
            limit, used = ((group / f"memory.{name}").read_text() for name in ("max", "current"))
            stat = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
            free.append(int(limit) - int(used) + int(stat["inactive_file"]))
        except (OSError, ValueError, KeyError):
            continue  # no limit here
    return free


@functools.cache
def adapt_to_host() -> None:
    """Let Megatron-Core run here; called once, before anything of it is built."""
    if has_cuda():
        return
    _answer_torch_cuda()
    _answer_tensor_methods()
    for name in _CUDA_LITERALS:
        importlib.import_module(name).torch = _CpuTorch()  # type: ignore[attr-defined]
    random = importlib.import_module(_RANDOM)
    random.torch = _CpuTorchOfTheTracker()  # type: ignore[attr-defined]
    random._get_cuda_rng_state = lambda *args, **kwargs: torch.get_rng_state()  # type: ignore[attr-defined]
    random._set_cuda_rng_state = lambda state, *args, **kwargs: torch.set_rng_state(state)  # type: ignore[attr-defined]


def _answer_torch_cuda() -> None:
    answers: dict[str, Callable[..., Any]] = {
        "current_device": lambda: _CPU,
        # From 0.19 on gradients wait for CUDA graphs' events on it, of which there are none.
        "current_stream": lambda *args, **kwargs: torch.cpu.current_stream(),
        "synchronize": lambda *args, **kwargs: None,
        "empty_cache": lambda: None,
        "manual_seed": torch.manual_seed,
        "get_rng_state": lambda *args, **kwargs: torch.get_rng_state(),
        "set_rng_state": lambda state, *args, **kwargs: torch.set_rng_state(state),
    }
    for name, answer in answers.items():
        setattr(torch.cuda, name, answer)


def _answer_tensor_methods() -> None:
    def stay(self: Any, *args: Any, **kwargs: Any) -> Any:
        return self

    torch.Tensor.cuda = stay  # type: ignore[method-assign]
    torch.nn.Module.cuda = stay  # type: ignore[method-assign]
    type_of = torch.Tensor.type

    def cuda_type(self: Tensor, *args: Any, **kwargs: Any) -> Any:
        # The optimizers sort parameters by comparing names such as 'torch.cuda.FloatTensor'.
        answer = type_of(self, *args, **kwargs)
        asked = not args and not kwargs and isinstance(answer, str)
        return answer.replace("torch.", "torch.cuda.") if asked else answer

    torch.Tensor.type = cuda_type  # type: ignore[method-assign, assignment]


def _on_cpu(factory: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def create(*args: Any, device: Any = None, pin_memory: bool = False, **kwargs: Any) -> Tensor:
        if device is not None:
            kwargs["device"] = _CPU if str(device).startswith("cuda") else device
        return factory(*args, **kwargs)

    return create


class _CpuTorch:
    """`torch` as a Megatron module sees it: factories asked for "cuda" give CPU tensors."""

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)

    tensor = staticmethod(_on_cpu(torch.tensor))
    zeros = staticmethod(_on_cpu(torch.zeros))
    ones = staticmethod(_on_cpu(torch.ones))
    empty = staticmethod(_on_cpu(torch.empty))
    empty_like = staticmethod(_on_cpu(torch.empty_like))


class _CpuTorchOfTheTracker(_CpuTorch):
    """For the RNG tracker, which warns when the CPU generator moves: here it is the only one."""

    @staticmethod
    def get_rng_state() -> Tensor:
        return torch.zeros(1, dtype=torch.uint8)

    @staticmethod
    def set_rng_state(state: Tensor) -> None:
        return None
