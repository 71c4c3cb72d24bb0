"""Process groups: one process or many, gloo or NCCL, laid out by Megatron-Core."""

from __future__ import annotations

import datetime
import math
import os

import torch
import torch.distributed as dist
from megatron.core import parallel_state, tensor_parallel

from megatron_lengen.config import LengenConfig
from megatron_lengen.errors import Fault, require
from megatron_lengen.runtime import affinity, host


def world_size() -> int:
    """Number of processes, from the launcher's environment before the groups exist."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def start_process_group(timeout_minutes: float = 10.0) -> None:
    """Join the launcher's process group, or make one of a single process.

    Raises:
        Fault: if the processes do not find each other.
    """
    host.adapt_to_host()
    if dist.is_initialized():
        return
    if host.has_cuda():
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")) % torch.cuda.device_count())
    timeout = datetime.timedelta(minutes=timeout_minutes)
    backend = host.communication_backend()
    if "RANK" in os.environ and "MASTER_ADDR" in os.environ:
        try:
            dist.init_process_group(backend, timeout=timeout)
        except dist.DistError as error:
            raise Fault(
                f"{world_size()} processes did not meet at {os.environ['MASTER_ADDR']}:"
                f"{os.environ.get('MASTER_PORT')} within --distributed-timeout-minutes "
                f"({timeout_minutes:g}): {str(error).splitlines()[0]}"
            ) from error
        if not host.has_cuda():
            affinity.share_cores()
    else:
        dist.init_process_group(
            backend, rank=0, world_size=1, store=dist.HashStore(), timeout=timeout
        )


def check_layout(config: LengenConfig, processes: int) -> int:
    """The data-parallel size; BadInput where the processes do not fit the layout."""
    sizes = {
        "--tensor-model-parallel-size": config.tensor_model_parallel_size,
        "--pipeline-model-parallel-size": config.pipeline_model_parallel_size,
        "--context-parallel-size": config.context_parallel_size,
    }
    model_size = math.prod(sizes.values())
    asked = [f"{flag} {size}" for flag, size in sizes.items() if size > 1]
    require(
        processes % model_size == 0,
        f"{' x '.join(asked)}: found {processes} process{'es' if processes > 1 else ''}; "
        f"allowed: multiples of {model_size} processes",
    )
    return processes // model_size


def start(config: LengenConfig, timeout_minutes: float = 10.0) -> None:
    """Process groups of every kind for `config`'s layout, and seeded generators."""
    start_process_group(timeout_minutes)
    check_layout(config, dist.get_world_size())
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=config.tensor_model_parallel_size,
        pipeline_model_parallel_size=config.pipeline_model_parallel_size,
        virtual_pipeline_model_parallel_size=config.virtual_pipeline_model_parallel_size,
        context_parallel_size=config.context_parallel_size,
        create_gloo_process_groups=True,
        distributed_timeout_minutes=timeout_minutes,
    )
    seed_everything(config.seed)


def seed_everything(seed: int) -> None:
    """Seed PyTorch and Megatron's generators (masks and weights do not depend on them)."""
    torch.manual_seed(seed)
    tensor_parallel.model_parallel_cuda_manual_seed(seed)


def stop() -> None:
    """Leave the process groups."""
    if parallel_state.model_parallel_is_initialized():
        parallel_state.destroy_model_parallel()
    if dist.is_initialized():
        dist.destroy_process_group()
