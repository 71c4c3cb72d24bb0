"""Memory and messages of a command line, computed: from flags to numbers, and a layout to choose.

Models come as presets or as flags; layouts as the flags of pretrain_gpt.py.
"""

from __future__ import annotations

import math
import os
import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from megatron_lengen.config import LengenConfig
from megatron_lengen.errors import BadInput, require
from megatron_lengen.sizing.activations import Sizes, Step
from megatron_lengen.sizing.mamba2 import Mamba2Shape, mamba2_memory
from megatron_lengen.sizing.memory import StageMemory, step_memory
from megatron_lengen.sizing.presets import Preset
from megatron_lengen.sizing.traffic import (
    Traffic,
    bubble,
    data_traffic,
    repeats,
    stage_traffic,
)
from megatron_lengen.training.arguments import Settings, parse_settings


@dataclass(frozen=True)
class Sizing:
    """A layout's numbers.

    Args:
        settings: the resolved command line.
        step: how data parallelism divides it.
        stages: memory of a rank of each pipeline stage.
        traffic: bytes that a rank of each stage sends in a step.
        bubble: share of a step in which a stage waits for the pipeline.
    """

    settings: Settings
    step: Step
    stages: list[StageMemory]
    traffic: list[Traffic]
    bubble: float

    @property
    def peak(self) -> int:
        """Bytes of the fullest rank."""
        return max(stage.total for stage in self.stages)


def size(
    flags: Sequence[str],
    processes: int,
    mamba2: Mamba2Shape | None = None,
    zero_stage: int = 0,
    device: str = "cuda",
) -> Sizing:
    """The numbers of a run with these flags on so many processes.

    Args:
        flags: those of pretrain_gpt.py.
        mamba2: sizes of a Mamba2 model, of which the flags say only what training shares.
        zero_stage: see `Step`; the configuration of `--engine deepspeed` wins.
        device: what the run computes on.

    Raises:
        BadInput: where pretrain_gpt.py would refuse them, or where they are not computed.
    """
    settings = _settings(flags, processes)
    training, config = settings.training, settings.model
    if settings.deepspeed is not None:
        zero_stage = settings.deepspeed["zero_optimization"]["stage"]
    step = Step(
        settings.data_parallel_size,
        training.micro_batch_size,
        settings.micro_batches,
        settings.ddp.use_distributed_optimizer,
        zero_stage,
        device,
    )
    _check_zero(step, config)
    if mamba2 is None:
        stages = range(config.pipeline_model_parallel_size)
        return Sizing(
            settings,
            step,
            step_memory(config, step),
            [stage_traffic(config, step, stage) for stage in stages],
            bubble(config, step),
        )
    for flag, given, allowed in (
        ("--tensor-model-parallel-size", config.tensor_model_parallel_size, 1),
        ("--pipeline-model-parallel-size", config.pipeline_model_parallel_size, 1),
        ("--context-parallel-size", config.context_parallel_size, 1),
        ("--recompute-granularity", config.recompute_granularity, None),
    ):
        require(given == allowed, f"{flag}: found {given}; not computed for Mamba2")
    memory = mamba2_memory(mamba2, config.seq_length, config.bf16, step)
    sent = data_traffic(memory.parameters, config.bf16, step.data_parallel_size, step)
    return Sizing(settings, step, [memory], [Traffic(0, 0, 0, sent, 0)], 0.0)


def _settings(flags: Sequence[str], processes: int) -> Settings:
    """The flags as pretrain_gpt.py resolves them when a launcher starts `processes` ranks."""
    before = os.environ.get("WORLD_SIZE")
    os.environ["WORLD_SIZE"] = str(processes)
    try:
        return parse_settings([*flags, *_missing(flags)], "")
    finally:
        if before is None:
            del os.environ["WORLD_SIZE"]
        else:
            os.environ["WORLD_SIZE"] = before


def _missing(flags: Sequence[str]) -> list[str]:
    """What a command line must have, though no size depends on it."""
    missing = []
    for given, filling in (
        (("--mock-data", "--data-path", "--train-data-path"), "--mock-data"),
        (("--tokenizer-type", "--tokenizer-model"), "--tokenizer-type NullTokenizer"),
        (("--train-iters",), "--train-iters 1"),
        (("--lr",), "--lr 1e-4 --lr-decay-style constant"),
    ):
        if not set(given) & set(flags):
            missing += filling.split()
    return missing


def _check_zero(step: Step, config: LengenConfig) -> None:
    require(
        step.zero_stage == 0 or not step.distributed_optimizer,
        "--zero-stage: not with --use-distributed-optimizer",
    )
    pipeline = config.pipeline_model_parallel_size
    require(
        step.zero_stage == 0 or (pipeline == 1 and config.context_parallel_size == 1),
        "--zero-stage: allowed with tensor and data parallelism",
    )


# ---- choosing ------------------------------------------------------------------------------------

_RECOMPUTATION = ("", "selective", "selective --recompute-modules core_attn mlp", "full")
# A layout that is simpler is preferred to one that is faster by less than this.
_ABOUT_AS_FAST = 1.15


class Machine(NamedTuple):
    """Speeds that order layouts; rough on purpose, and never printed as times.

    Args:
        flops: bf16 operations that a GPU really does in a second (40% of an H100's figure).
        node: GPUs that share the fast links.
        inside, across: bytes a second that a GPU sends to its node and to others.
    """

    flops: float = 4e14
    node: int = 8
    inside: float = 3e11
    across: float = 4e10


def choose(possible: Sequence[Sizing], capacity: int) -> Sizing | None:
    """The simplest layout that fits `capacity` bytes and should be about as fast as any that does;
    None if none fits."""
    machine = Machine()
    seconds = {i: relative_time(s, machine) for i, s in enumerate(possible) if s.peak <= capacity}
    fastest = min(seconds.values(), default=0.0)
    good = [i for i, time in seconds.items() if time <= _ABOUT_AS_FAST * fastest]
    best = min(good, key=lambda i: (_complexity(possible[i]), seconds[i]), default=None)
    return None if best is None else possible[best]


def _complexity(sizing: Sizing) -> tuple[int, int, int]:
    """Ways in which the model is cut, into how many parts, and how much is computed twice."""
    config = sizing.settings.model
    cuts = [
        config.tensor_model_parallel_size,
        config.context_parallel_size,
        config.pipeline_model_parallel_size,
        config.virtual_pipeline_model_parallel_size or 1,
    ]
    again = sum(repeats(config, part) for part in ("core_attn", "mlp", "all"))
    return sum(size > 1 for size in cuts), math.prod(cuts), again


def candidates(preset: Preset, seq_length: int, processes: int) -> Iterator[Sizing]:
    """Every layout worth a look, with one row a micro-batch and the preset's tokens a step."""
    rows = max(1, preset.batch_tokens // seq_length)
    common = f"{preset.flags} --seq-length {seq_length} --global-batch-size {rows}"
    if processes > 1:
        common += " --use-distributed-optimizer"
    if preset.mamba2 is not None:
        yield from _allowed(common, processes, preset)
        return
    powers = [1 << n for n in range(processes.bit_length())]
    for tp in (n for n in powers if n <= Machine().node):
        for cp in (n for n in powers if n * tp <= processes):
            for pp in (n for n in powers if n * tp * cp <= processes):
                layout = (
                    f"{common} --tensor-model-parallel-size {tp} --context-parallel-size {cp} "
                    f"--pipeline-model-parallel-size {pp}"
                    + (" --sequence-parallel" if tp > 1 else "")
                )
                for chunks in (1, 2) if pp > 1 else (1,):
                    virtual = f" --num-virtual-stages-per-pipeline-rank {chunks}"
                    for again in _RECOMPUTATION:
                        repeat = f" --recompute-granularity {again}" if again else ""
                        whole = layout + (virtual if chunks > 1 else "") + repeat
                        yield from _allowed(whole, processes, preset)


def _allowed(flags: str, processes: int, preset: Preset) -> Iterator[Sizing]:
    try:
        yield size(shlex.split(flags), processes, preset.mamba2)
    except BadInput:
        return


def relative_time(sizing: Sizing, machine: Machine) -> float:
    """Seconds of a step under the machine's speeds, to compare layouts of one model.

    Arithmetic over the pipeline's busy share, plus messages; those of data parallelism run beside
    backward and count where they take longer than half of the arithmetic.
    """
    config, step = sizing.settings.model, sizing.step
    tp, cp = config.tensor_model_parallel_size, config.context_parallel_size
    compute = _operations(sizing) / machine.flops / (1 - sizing.bubble)
    ranks = {  # Megatron's order of ranks: tensor, context, data, pipeline
        "tensor": tp,
        "context": tp * cp,
        "data": tp * cp * step.data_parallel_size,
    }
    seconds = {}
    for kind in Traffic._fields:
        sent = max(getattr(traffic, kind) for traffic in sizing.traffic)
        near = ranks.get(kind, machine.node + 1) <= machine.node
        seconds[kind] = sent / (machine.inside if near else machine.across)
    waiting = max(0.0, seconds.pop("data") - compute / 2)
    return compute + waiting + sum(seconds.values())


def _operations(sizing: Sizing) -> float:
    """Multiplications and additions of a step on the busiest rank.

    Each weight of a projection costs 2 a token forward and 4 backward, each pair of query and key
    4 a channel forward and 8 backward; what is recomputed costs its forward twice.
    """
    config, step = sizing.settings.model, sizing.step
    tokens = step.micro_batches * step.micro_batch_size * config.seq_length
    stages = config.pipeline_model_parallel_size
    z = Sizes.of(config, step)
    weights = 6 * max(stage.parameters for stage in sizing.stages)
    if repeats(config, "mlp"):
        weights += 2 * config.num_layers // stages * 3 * z.h * z.f
    if repeats(config, "all"):
        weights += 2 * config.num_layers // stages * z.h * (2 * z.q + 2 * z.k)
    pairs = 0.0
    for kind in config.layer_pattern():
        windowed = kind.windowed and config.sliding_window
        keys = min(config.seq_length / 2, windowed or config.seq_length)
        pairs += (16 if repeats(config, "core_attn") else 12) * keys * z.q / stages
    return tokens / config.context_parallel_size * (weights + pairs)
