"""Writes the masks that a rank draws, and a step on rows of unequal length, for each layout."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from groups import leave_layout
from megatron.core import parallel_state
from megatron.core.utils import unwrap_model
from torch import Tensor

from megatron_lengen.layers.coordinates import set_samples
from megatron_lengen.models.build import build_chunks
from megatron_lengen.ops.rmsnorm import affine_dropout
from megatron_lengen.runtime import distributed
from megatron_lengen.training.arguments import Settings, parse_settings
from megatron_lengen.training.loop import Trainer

SCORED = (1, 3, 10, 0)  # scored tokens of each of four rows


def main(folder: Path, runs: list[dict[str, Any]]) -> None:
    """One layout after the other."""
    distributed.start_process_group()
    for run in runs:
        torch.save(result(run), folder / f"{run['name']}.rank{dist.get_rank()}.pt")
        leave_layout()
    dist.destroy_process_group()


def result(run: dict[str, Any]) -> dict[str, Any]:
    """What one run gives: masks where it has dropout, otherwise a step."""
    settings = parse_settings(run["flags"], "test")
    distributed.start(settings.model)
    trainer = Trainer(settings, build_chunks)
    return masks(trainer) if settings.model.dropout_on else step(trainer)


def masks(trainer: Trainer) -> dict[str, Tensor]:
    """Kept elements [s, b, features] of this rank: pre_linear makes ones 0 or 1 / (1 - p)."""
    config = trainer.settings.model
    (model,) = unwrap_model(trainer.engine.chunks)
    rows = trainer.settings.training.micro_batch_size
    tp = config.tensor_model_parallel_size
    held = config.seq_length // config.context_parallel_size
    local = held // (tp if config.sequence_parallel else 1)
    found = {}
    for micro_batch in (0, 1):
        set_samples(trainer.engine.stepper._samples(micro_batch))
        for number, layer in enumerate(model.decoder.layers):
            name = f"{micro_batch}.{number}"
            if not config.dropout_letters:
                ones = torch.ones(local, rows, config.hidden_size)
                found[f"{name}.attention"] = layer.input_layernorm(ones) > 0
                found[f"{name}.mlp"] = layer.pre_mlp_layernorm(ones) > 0
                continue
            ones = torch.ones(held, rows, config.hidden_size)
            for letter, home in (
                ("q", layer.self_attention.linear_qkv),
                ("u", layer.mlp.linear_fc1),
            ):
                found[f"{name}.{letter}"] = (
                    affine_dropout(ones, home.sites[letter].for_tensor(ones)) > 0
                )
            for letter, home in (
                ("o", layer.self_attention.linear_proj),
                ("d", layer.mlp.linear_fc2),
            ):
                width = home.weight.shape[1]
                group = parallel_state.get_tensor_model_parallel_group()
                first = parallel_state.get_tensor_model_parallel_rank() * width
                ones_here = torch.ones(held, rows, width)
                dropout = home.site.for_tensor(ones_here, first, group)
                found[f"{name}.{letter}"] = affine_dropout(ones_here, dropout) > 0
    return found


def step(trainer: Trainer) -> dict[str, Any]:
    """Loss, norm and gradients of a step on four rows of which few tokens count."""
    result = trainer.engine.train(rows_of_rank(trainer.settings), 0)
    (model,) = unwrap_model(trainer.engine.chunks)
    gradients = {name: p.main_grad.clone() for name, p in model.named_parameters()}
    return {"loss": result.loss, "tokens": result.tokens, "gradients": gradients}


def rows_of_rank(settings: Settings) -> Iterator[dict[str, Tensor]]:
    """This rank's micro-batches of the four rows."""
    length, size = settings.model.seq_length, settings.training.micro_batch_size
    generator = torch.Generator().manual_seed(3)
    text = torch.randint(0, settings.model.vocab_size, (4, length + 1), generator=generator)
    mask = torch.zeros(4, length)
    for row, count in enumerate(SCORED):
        mask[row, torch.randperm(length, generator=generator)[:count]] = 1
    rows = {"tokens": text[:, :-1], "labels": text[:, 1:], "loss_mask": mask}
    ranks, rank = (
        parallel_state.get_data_parallel_world_size(),
        parallel_state.get_data_parallel_rank(),
    )
    for first in range(rank * size, 4, size * ranks):
        yield {key: value[first : first + size].contiguous() for key, value in rows.items()}


if __name__ == "__main__":
    main(Path(sys.argv[1]), json.loads(Path(sys.argv[2]).read_text()))
