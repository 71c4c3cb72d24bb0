"""Messages and the pipeline's idle share, against sums written out by hand."""

from __future__ import annotations

import pytest

from megatron_lengen.sizing.layouts import size

MODEL = """
    --num-layers 4 --hidden-size 64 --ffn-hidden-size 96 --num-attention-heads 8
    --num-query-groups 4 --swiglu --disable-bias-linear --vocab-size 512 --seq-length 32
    --micro-batch-size 2 --global-batch-size 16
"""
STREAM = 32 * 2 * 64 * 4  # a micro-batch's residual stream in fp32


def traffic(flags: str, processes: int, stage: int = 0):
    return size(f"{MODEL} {flags}".split(), processes).traffic[stage]


def test_tensor_parallelism_sums_twice_a_layer_and_pass():
    # 8 micro-batches; 4 layers x (2 forward + 2 backward), embedding, output layer; 3/4 x 2 sent
    # of each; three numbers a token for the loss, from each rank to 3 others.
    found = traffic("--tensor-model-parallel-size 4", 4)
    assert found.tensor == 8 * (18 * 1.5 * STREAM + 3 * 3 * 4 * 64)
    assert found.context == found.pipeline == found.data == found.embedding == 0
    again = traffic("--tensor-model-parallel-size 4 --recompute-granularity full", 4)
    assert again.tensor - found.tensor == 8 * 4 * 2 * 1.5 * STREAM


def test_sequence_parallelism_adds_the_gathers_for_weight_gradients():
    found = traffic("--tensor-model-parallel-size 4 --sequence-parallel", 4)
    messages = 4 * (4 + 6) + 2 + 2
    gains = 1.5 * (2 * 4 + 1) * 64 * 4
    assert found.tensor == 8 * (messages * 0.75 * STREAM + 3 * 3 * 4 * 64) + gains


def test_losses_from_logits_sum_their_numbers_and_gather_the_features_again():
    flags = "--tensor-model-parallel-size 4 --sequence-parallel"
    fused = traffic(flags, 4).tensor
    unfused = traffic(f"{flags} --cross-entropy-fusion-impl none", 4).tensor
    assert unfused - fused == 8 * (0.75 * STREAM + 3 * (1.5 - 3) * 4 * 64)


def test_context_parallelism_gathers_keys_and_values():
    # 4 groups of 8 channels, keys and values, forward and backward, from 3 other ranks.
    found = traffic("--context-parallel-size 4", 4)
    part = 32 // 4 * 2 * 2 * 32 * 4
    assert found.context == 8 * 4 * 2 * 3 * part
    again = traffic("--context-parallel-size 4 --recompute-granularity selective", 4)
    assert again.context == 1.5 * found.context
    assert found.data == 1.5 * 4 * size(MODEL.split(), 1).stages[0].parameters


def test_pipeline_sends_every_border_both_ways():
    flags = "--pipeline-model-parallel-size 4"
    assert [traffic(flags, 4, stage).pipeline for stage in range(4)] == [
        8 * borders * STREAM for borders in (1, 2, 2, 1)
    ]
    assert traffic(flags, 4, 0).embedding == traffic(flags, 4, 3).embedding == 512 * 64 * 4
    assert traffic(flags, 4, 1).embedding == 0
    assert traffic(flags + " --untie-embeddings-and-output-weights", 4).embedding == 0


@pytest.mark.parametrize(
    "flags, sent",
    [
        ("", 2 * 4),
        ("--use-distributed-optimizer", 4 + 4),
        ("--bf16", 2 * 4),
        ("--bf16 --use-distributed-optimizer", 4 + 2),
    ],
)
def test_replicas_send_gradients_and_weights_once_a_step(flags, sent):
    sizing = size(f"{MODEL} {flags}".split(), 8)
    assert sizing.traffic[0].data == 7 / 8 * sent * sizing.stages[0].parameters


def test_zero_sums_every_micro_batch_from_stage_2_on():
    def sent(stage: int) -> int:
        return size(f"{MODEL} --bf16".split(), 4, zero_stage=stage).traffic[0].data

    parameters = size(MODEL.split(), 1).stages[0].parameters
    assert sent(1) == 0.75 * (8 + 2) * parameters
    assert sent(2) == 0.75 * (2 * 8 + 2) * parameters  # 2 micro-batches on each of 4 replicas
    assert sent(3) == 0.75 * 2 * (4 + 2 * 2) * parameters


@pytest.mark.parametrize("chunks, micro_batches", [(1, 8), (2, 8), (2, 16)])
def test_waiting_share_of_a_pipeline(chunks, micro_batches):
    """Fill and drain take (P - 1) / v micro-batches of the step's m."""
    virtual = f"--num-virtual-stages-per-pipeline-rank {chunks}" if chunks > 1 else ""
    flags = f"--num-layers 8 --pipeline-model-parallel-size 4 {virtual}"
    sizing = size(f"{MODEL} {flags} --global-batch-size {2 * micro_batches}".split(), 4)
    fill = 3 / chunks
    assert sizing.bubble == pytest.approx(fill / (micro_batches + fill))
