"""Layers under PyTorch's compiler compute what they compute without it."""

from __future__ import annotations

import pytest
import torch
from runs import trainer_of
from torch import nn

FLAGS = (
    "--dropout-variant vpad --dropout-rate 0.3 --train-iters 3 --eval-iters 1 --num-layers 4 "
    "--recompute-granularity full"
)


@pytest.fixture
def quick_compiler(monkeypatch) -> list[str]:
    """Tracing and autograd of the compiler without its code generation, and what it traced."""
    compiled: list[str] = []
    compile_module = nn.Module.compile

    def compile_quickly(module: nn.Module) -> None:
        compiled.append(type(module).__name__)
        compile_module(module, backend="aot_eager")

    monkeypatch.setattr(nn.Module, "compile", compile_quickly)
    return compiled


def losses(trainer, steps: int = 3) -> list[float]:
    """Of some steps, and of a validation behind them."""
    data = trainer._train_data()
    found = [trainer.engine.train(data, 4 * step).loss for step in range(steps)]
    return [*found, trainer.engine.evaluate(trainer._valid_data(), 1)]


def test_losses_are_the_same(process_groups, quick_compiler):
    wanted = losses(trainer_of(FLAGS))
    assert not quick_compiler
    found = losses(trainer_of(f"{FLAGS} --torch-compile"))
    assert quick_compiler == ["TransformerLayer"] * 4
    assert torch._dynamo.utils.counters["frames"]["ok"] > 0
    assert found == pytest.approx(wanted, rel=1e-6)


def test_every_layer_may_have_a_version_of_its_own(process_groups, quick_compiler, monkeypatch):
    monkeypatch.setattr(torch._dynamo.config, "recompile_limit", 8)
    trainer_of(f"{FLAGS} --num-layers 12 --torch-compile")
    assert torch._dynamo.config.recompile_limit >= 12
