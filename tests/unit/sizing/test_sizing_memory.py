"""Parameters, states and micro-batches in flight: against built models, Hugging Face, formulas."""

from __future__ import annotations

import pytest
import torch
from tiny_models import tiny_config

from megatron_lengen.models.build import build_chunks
from megatron_lengen.sizing.activations import Step
from megatron_lengen.sizing.layouts import size
from megatron_lengen.sizing.memory import (
    backward_moments,
    chunk_parameters,
    chunks_of_stage,
    state_bytes,
    step_memory,
)
from megatron_lengen.sizing.presets import PRESETS


@pytest.mark.usefixtures("process_groups")
@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"untie_embeddings_and_output_weights": True},
        {"add_bias_linear": True},
        {"add_qkv_bias": True},
        {"gated_linear_unit": False, "num_query_groups": 4},
        {"kv_channels": 16, "num_layers": 3},
    ],
)
def test_parameters_of_the_built_model(changes):
    config = tiny_config(**changes)
    (model,), (chunk,) = build_chunks(config), chunks_of_stage(config, 0)
    assert chunk_parameters(config, chunk) == sum(p.numel() for p in model.parameters())


@pytest.mark.parametrize("name", PRESETS)
def test_parameters_of_hugging_faces_models(name):
    transformers = pytest.importorskip("transformers")
    preset = PRESETS[name]
    if name == "smollm3-3b":
        model_type = transformers.SmolLM3ForCausalLM
        config = transformers.SmolLM3Config(vocab_size=128256, tie_word_embeddings=True)
    elif name == "nape-400m":
        model_type = transformers.LlamaForCausalLM
        config = transformers.LlamaConfig(
            vocab_size=128256,
            num_hidden_layers=24,
            hidden_size=768,
            intermediate_size=3072,
            num_attention_heads=12,
            tie_word_embeddings=False,
        )
    else:
        model_type, shape = transformers.Mamba2ForCausalLM, preset.mamba2
        config = transformers.Mamba2Config(
            num_hidden_layers=shape.layers,
            hidden_size=shape.hidden,
            num_heads=shape.heads,
            head_dim=shape.head_dim,
            state_size=shape.state,
            n_groups=shape.groups,
            conv_kernel=shape.kernel,
            vocab_size=shape.vocab,
            tie_word_embeddings=True,
        )
    with torch.device("meta"):
        model = model_type(config)
    model.tie_weights()
    wanted = sum(p.numel() for p in {id(p): p for p in model.parameters()}.values())
    head, embedding = model.get_output_embeddings(), model.get_input_embeddings()
    if config.tie_word_embeddings and head.weight is not embedding.weight:
        wanted -= head.weight.numel()  # transformers leaves Mamba2's head untied
    (memory,) = size(preset.flags.split(), 1, preset.mamba2).stages
    assert memory.parameters == wanted


def test_bytes_between_steps():
    plain = Step(4, 1, 1)
    assert state_bytes(1000, True, 4, plain) == (2000, 4000, 12000)
    assert state_bytes(1000, False, 4, plain) == (4000, 4000, 8000)
    shared = Step(4, 1, 1, distributed_optimizer=True)
    assert state_bytes(1000, True, 4, shared) == (2000, 4000, 3000)
    for stage, wanted in {
        1: (2000, 4000, 3000),
        2: (2000, 1000, 3000),
        3: (500, 1000, 3000),
    }.items():
        assert state_bytes(1000, True, 4, Step(4, 1, 1, zero_stage=stage)) == wanted


def in_flight(stages: int, chunks: int, stage: int, micro_batches: int) -> int:
    virtual = {"virtual_pipeline_model_parallel_size": chunks} if chunks > 1 else {}
    config = tiny_config(num_layers=stages * chunks, pipeline_model_parallel_size=stages, **virtual)
    moments = list(backward_moments(config, stage, micro_batches))
    return max(sum(alive.values()) for alive, _ in moments)


@pytest.mark.parametrize("stages", [2, 4, 8])
@pytest.mark.parametrize("chunks", [1, 2, 3])
def test_micro_batches_in_flight(stages, chunks):
    """Stage i holds P - i micro-batches, or 2 (P - 1 - i) + (v - 1) P + 1 chunks of them."""
    many = 5 * stages
    for stage in range(stages):
        wanted = stages - stage
        if chunks > 1:
            wanted = 2 * (stages - 1 - stage) + (chunks - 1) * stages + 1
        assert in_flight(stages, chunks, stage, many) == wanted
    # With fewer micro-batches than that, all of them.
    assert in_flight(stages, chunks, 0, stages) <= stages * chunks
    assert in_flight(stages, 1, 0, 1) == 1


def test_every_chunk_of_a_micro_batch_is_differentiated_once():
    config = tiny_config(
        num_layers=8, pipeline_model_parallel_size=4, virtual_pipeline_model_parallel_size=2
    )
    turns = [chunk for _, chunk in backward_moments(config, 1, 8)]
    assert turns.count(0) == turns.count(1) == 8


def test_first_stage_is_the_fullest_of_a_pipeline():
    config = tiny_config(num_layers=8, pipeline_model_parallel_size=4, num_query_groups=4)
    stages = step_memory(config, Step(1, 2, 16))
    kept = [stage.activations for stage in stages[:-1]]  # the last one has the loss
    assert kept == sorted(kept, reverse=True)
    assert sum(stage.parameters for stage in stages) > 0
