"""Mamba2: a run goes on on another layout, and the numbers of each head stay fp32 under bf16."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from launcher import Run, argv, curve, dumps, stored, train

from megatron_lengen.training.arguments import parse_settings

ITERATIONS = "--train-iters 10 --dropout-variant vpad --dropout-rate 0.2"
SP = "--tensor-model-parallel-size 2 --sequence-parallel"
VPP = "--pipeline-model-parallel-size 2 --num-virtual-stages-per-pipeline-rank 2"
KINDS = {
    "one": "",
    "groups": "--mamba-num-groups 2",
    "bf16": "--bf16",
    "bf16-do": "--bf16 --use-distributed-optimizer --mamba-num-groups 2",
}
LAYOUTS = {"1": (1, ""), "dp": (2, ""), "sp": (2, SP), "vpp": (2, VPP)}
MOVES = [
    ("one", "1", "sp"),
    ("one", "vpp", "1"),
    ("groups", "sp", "vpp"),
    ("bf16", "sp", "sp"),
    ("bf16-do", "dp", "sp"),
]
OF_HEADS = ("A_log", "D", "dt_bias")


def first_half(processes: int) -> list[Run]:
    runs = []
    for kind, layout in sorted({(kind, old) for kind, old, _ in MOVES}):
        needed, flags = LAYOUTS[layout]
        if needed == processes:
            name, flags = f"{kind}-{layout}", f"{ITERATIONS} {KINDS[kind]} {flags}"
            save = f"--exit-interval 5 --save FOLDER/{name}.ck"
            runs.append(Run(f"{name}-whole", flags, True, "mamba2"))
            runs.append(Run(f"{name}-half", f"{flags} {save}", False, "mamba2"))
    return runs


def second_half(processes: int) -> list[Run]:
    runs = []
    for kind, old, new in MOVES:
        needed, flags = LAYOUTS[new]
        if needed == processes:
            load = f"--load FOLDER/{kind}-{old}.ck"
            flags = f"{ITERATIONS} {KINDS[kind]} {flags} {load}"
            runs.append(Run(f"{kind}-{old}-to-{new}", flags, False, "mamba2"))
    return runs


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """Metrics, checkpoints and dumps of every run."""
    folder = tmp_path_factory.mktemp("resume")
    for half in (first_half, second_half):
        for processes in (1, 2):
            train(folder, processes, half(processes))
    return folder


@pytest.mark.parametrize("kind, old, new", MOVES)
def test_a_run_goes_on_on_another_layout(folder, kind, old, new):
    resumed = curve(folder / f"{kind}-{old}-to-{new}.jsonl")
    whole = curve(folder / f"{kind}-{old}-whole.jsonl")
    assert len(resumed) == 5
    if old == new:
        assert torch.equal(resumed, whole[5:])
    # bf16 rounds differently on other layouts, as it does without a resume.
    tolerance = 2e-3 if kind.startswith("bf16") else 1e-5
    torch.testing.assert_close(resumed, whole[5:], rtol=tolerance, atol=0)


@pytest.mark.parametrize("kind, layout", [("bf16", "sp"), ("bf16-do", "dp")])
def test_numbers_of_heads_are_fp32_in_model_checkpoint_and_optimizer(folder, kind, layout):
    """Report 12 of the field."""
    for rank in dumps(folder, f"{kind}-{layout}-whole", 2):
        for name, parameter in rank["parameters"].items():
            of_heads = name.endswith(OF_HEADS)
            assert parameter.dtype == (torch.float32 if of_heads else torch.bfloat16), name
    tensors = stored(folder / f"{kind}-{layout}.ck", 5, "decoder.layers.0.mixer.")
    for name in OF_HEADS:
        value = tensors[name]
        assert value.dtype == torch.float32
        assert name == "D" or not torch.equal(value, value.bfloat16().float())
    assert tensors["in_proj.weight.z"].dtype == torch.bfloat16
    for moment in ("exp_avg", "exp_avg_sq"):
        prefix = f"optimizer.state.{moment}."
        states = stored(folder / f"{kind}-{layout}.ck", 5, prefix)
        names = [name for name in states if name.endswith(OF_HEADS)]
        assert len(names) == 12 and all(states[name].dtype == torch.float32 for name in names)


def test_a_converted_model_is_hugging_faces_on_every_layout(tmp_path):
    """Report 14 of the field: the first loss from transformers' weights, by its own forward."""
    from transformers import Mamba2Config, Mamba2ForCausalLM

    from megatron_lengen.convert.to_megatron import hf_to_checkpoint
    from megatron_lengen.data.datasets import build_datasets

    torch.manual_seed(0)
    model = Mamba2ForCausalLM(
        Mamba2Config(vocab_size=101, hidden_size=32, num_heads=8, head_dim=8, state_size=12,
                     n_groups=2, num_hidden_layers=4, chunk_size=16, tie_word_embeddings=True,
                     bos_token_id=None, eos_token_id=None, pad_token_id=None)
    ).eval()  # fmt: skip
    model.save_pretrained(tmp_path / "hf")
    hf_to_checkpoint(tmp_path / "hf", tmp_path / "hf.ck", verify=False, report=lambda _: None)
    flags = "--train-iters 1 --lr-warmup-iters 0 --load FOLDER/hf.ck"
    for processes, layouts in ((1, ("1",)), (2, ("sp", "vpp"))):
        runs = [Run(name, f"{flags} {LAYOUTS[name][1]}", False, "mamba2") for name in layouts]
        train(tmp_path, processes, runs)
    settings = parse_settings(argv(flags.replace("FOLDER", str(tmp_path)), "mamba2"), "", "mamba2")
    rows, _ = build_datasets(settings.tokenizer, 24, settings.model.seed, (8, 0))
    batch = [rows[i] for i in range(8)]
    tokens, labels = (torch.stack([row[key] for row in batch]) for key in ("tokens", "labels"))
    with torch.no_grad():
        logits = model(tokens).logits
    expected = torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten()).double()
    for name in ("1", "sp", "vpp"):
        torch.testing.assert_close(
            curve(tmp_path / f"{name}.jsonl")[0], expected, rtol=1e-5, atol=0, msg=name
        )
