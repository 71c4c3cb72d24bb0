"""From flags to numbers, and the layout that is chosen."""

from __future__ import annotations

import os

import pytest

from megatron_lengen.errors import BadInput
from megatron_lengen.sizing.layouts import candidates, choose, size
from megatron_lengen.sizing.presets import PRESETS, Preset

SMALL = Preset(
    "small",
    """--num-layers 4 --hidden-size 512 --ffn-hidden-size 1408 --num-attention-heads 8
    --num-query-groups 2 --swiglu --disable-bias-linear --vocab-size 32000 --bf16""",
    1 << 15,
)


def test_flags_are_those_of_training(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "3")
    flags = f"{SMALL.flags} --seq-length 1024 --tensor-model-parallel-size 2 --data-path"
    with pytest.raises(BadInput, match="--data-path"):
        size([*flags.split(), "no/such/data"], 2)
    with pytest.raises(BadInput, match="--num-query-groups"):
        size(f"{SMALL.flags} --seq-length 1024 --tensor-model-parallel-size 4".split(), 4)
    with pytest.raises(BadInput, match="--pipeline-model-parallel-size 2"):
        size(f"{SMALL.flags} --seq-length 1024 --pipeline-model-parallel-size 2".split(), 3)
    assert os.environ["WORLD_SIZE"] == "3"


def test_zero_goes_with_tensor_and_data_parallelism_only():
    flags = f"{SMALL.flags} --seq-length 1024"
    assert size(flags.split(), 4, zero_stage=3).peak < size(flags.split(), 4).peak
    with pytest.raises(BadInput, match="--zero-stage"):
        size(f"{flags} --use-distributed-optimizer".split(), 4, zero_stage=1)
    with pytest.raises(BadInput, match="--zero-stage"):
        size(f"{flags} --context-parallel-size 2".split(), 4, zero_stage=1)


def test_mamba2_has_data_parallelism_only():
    preset = PRESETS["mamba2-85m"]
    with pytest.raises(BadInput, match="--pipeline-model-parallel-size"):
        size(f"{preset.flags} --pipeline-model-parallel-size 2".split(), 2, preset.mamba2)
    shared = size(f"{preset.flags} --use-distributed-optimizer".split(), 4, preset.mamba2)
    alone = size(preset.flags.split(), 4, preset.mamba2)
    saved = 12 * alone.stages[0].parameters * 3 / 4
    assert alone.peak - shared.peak == pytest.approx(saved, abs=4)


def test_the_choice_fits_and_nothing_is_given_up_without_need():
    everything = list(candidates(SMALL, 4096, 4))
    least = min(sizing.peak for sizing in everything)
    assert choose(everything, least - 1) is None
    tight = choose(everything, least)
    assert tight is not None and tight.peak == least
    roomy = choose(everything, 1 << 40)
    assert roomy is not None
    config = roomy.settings.model
    # Room for everything: copies of the whole model, nothing computed twice.
    assert roomy.step.data_parallel_size == 4 and config.recompute_granularity is None


def test_rows_fewer_than_gpus_need_the_model_or_the_rows_cut():
    # 32768 tokens a step are two rows of 16384: at most two replicas.
    found = list(candidates(SMALL, 16384, 8))
    assert found and all(sizing.step.data_parallel_size <= 2 for sizing in found)
    best = choose(found, 1 << 40)
    assert best is not None and best.settings.model.context_parallel_size > 1
