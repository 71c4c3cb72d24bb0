"""Checkpoints of every layout become the same Hugging Face model, which every layout loads."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from launcher import Run, curve, train
from safetensors.torch import load_file

from megatron_lengen.convert.to_hf import checkpoint_to_hf
from megatron_lengen.convert.to_megatron import hf_to_checkpoint

PP = "--pipeline-model-parallel-size 2"
# layout -> (processes, flags)
LAYOUTS = {
    "single": (1, ""),
    "tp": (2, "--tensor-model-parallel-size 2 --sequence-parallel"),
    "pp": (2, PP),
    "vpp": (2, f"{PP} --num-virtual-stages-per-pipeline-rank 2"),
    "dp": (2, "--use-distributed-optimizer"),
}
VPAD = "--dropout-variant vpad --dropout-rate 0.2"


def silent(line: str) -> None:
    pass


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """A checkpoint of every layout, its export, and losses of models that began with one."""
    folder = tmp_path_factory.mktemp("converted")

    def runs(processes: int, name: str, flags: str) -> list[Run]:
        return [
            Run(f"{layout}{name}", f"{own} {flags}".replace("LAYOUT", layout))
            for layout, (needed, own) in LAYOUTS.items()
            if needed == processes
        ]

    for processes in (1, 2):
        train(
            folder,
            processes,
            runs(processes, "", f"--train-iters 3 {VPAD} --save FOLDER/LAYOUT.ck --async-save"),
        )
    for layout in LAYOUTS:
        # The logits of both models are compared here, too.
        checkpoint_to_hf(folder / f"{layout}.ck", folder / f"{layout}.hf", report=silent)
    hf_to_checkpoint(folder / "tp.hf", folder / "release", verify=False, report=silent)
    for processes in (1, 2):
        train(folder, processes, runs(processes, "-again", "--train-iters 3 --load FOLDER/release"))
    return folder


def exported(folder: Path, layout: str) -> dict[str, torch.Tensor]:
    return load_file(folder / f"{layout}.hf" / "model.safetensors")


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_export_is_that_of_one_process(folder, layout):
    """Training rounds differently on other layouts; a part in the wrong place is far off."""
    expected, found = exported(folder, "single"), exported(folder, layout)
    assert found.keys() == expected.keys() and len(found["model.embed_tokens.weight"]) == 101
    for name, tensor in expected.items():
        scale = tensor.abs().max().item()
        torch.testing.assert_close(found[name], tensor, rtol=0, atol=1e-3 * scale, msg=name)
        rows = tensor.flip(0)
        assert tensor.dim() == 1 or (tensor - rows).abs().max() > 0.1 * scale


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout_begins_with_a_converted_model(folder, layout):
    found, expected = (curve(folder / f"{name}-again.jsonl") for name in (layout, "single"))
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=0)
    # It is not the model that every run begins with.
    assert abs(found[0] - curve(folder / "single.jsonl")[0]) > 1e-3
