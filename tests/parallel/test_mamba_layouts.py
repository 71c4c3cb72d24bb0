"""Mamba2: the same numbers on every layout, with one group and with two."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from launcher import Run, curve, dumps, train

from megatron_lengen.compat import is_installed

STEPS = "--train-iters 20"
FEWER = 6  # enough where nothing is rounded
LOSS, NORM = 1e-5, 1e-4  # relative

GROUPS = "--mamba-num-groups 2"
KINDS = {
    "vpad": "--dropout-variant vpad --dropout-rate 0.3 --include-mixer-norms",
    "groups": f"{GROUPS} --dropout-variant vpad --dropout-rate 0.2 --include-mixer-norms"
    " --document-boundaries mask",
    "pre_norm": "--dropout-variant pre_norm --dropout-rate 0.1 --mamba-init huggingface",
    "projections": f"{GROUPS} --dropout-variant vpad --dropout-rate 0.2 --dropout-apply-to i,o"
    " --dropout-keep-final-norm --untie-embeddings-and-output-weights",
}
TP = "--tensor-model-parallel-size 2"
SP = f"{TP} --sequence-parallel"
PP = "--pipeline-model-parallel-size 2"
VPP = f"{PP} --num-virtual-stages-per-pipeline-rank 2"
FULL = "--recompute-granularity full"
DISTRIBUTED = "--use-distributed-optimizer"

# layout -> (processes, flags, kinds to train)
LAYOUTS = {
    "mbs4": (1, "--micro-batch-size 4", ("groups",)),
    "tp": (2, TP, ("vpad", "projections")),
    "sp": (2, SP, tuple(KINDS)),
    "pp": (2, PP, ("vpad",)),
    "vpp": (2, VPP, ("projections",)),
    "dp-distributed": (2, DISTRIBUTED, ("vpad",)),
    "sp-vpp": (4, f"{SP} {VPP}", ("groups",)),
    "tp-dp": (4, f"{TP} {DISTRIBUTED}", ("vpad",)),
}
RECOMPUTED = {
    "single": (1, f"{FULL}"),
    "sp": (2, f"{SP} {FULL} --recompute-num-layers 2"),
    "pp": (2, f"{PP} {FULL} --recompute-method block --recompute-num-layers 1"),
}
SINGLE_STEP = "--train-iters 1 --lr-warmup-iters 0 --clip-grad 0"
STEPS_OF = {"": "", "groups-": GROUPS}


def all_runs(processes: int) -> list[Run]:
    runs = []
    if processes == 1:
        runs += [(f"single-{kind}", f"{STEPS} {flags}", False) for kind, flags in KINDS.items()]
        runs += [(f"step-{k}single", f"{SINGLE_STEP} {f}", True) for k, f in STEPS_OF.items()]
    for layout, (needed, flags, kinds) in LAYOUTS.items():
        if needed == processes:
            runs += [(f"{layout}-{k}", f"{STEPS} {flags} {KINDS[k]}", True) for k in kinds]
    for layout, (needed, flags) in RECOMPUTED.items():
        if needed == processes:
            steps = f"{STEPS} --exit-interval {FEWER}"
            runs.append((f"{layout}-vpad-full", f"{steps} {flags} {KINDS['vpad']}", False))
    if processes == 2:
        for layout, flags in (("sp", SP), ("pp", PP)):
            runs += [
                (f"step-{kind}{layout}", f"{SINGLE_STEP} {flags} {more}", True)
                for kind, more in STEPS_OF.items()
            ]
    return [Run(name, flags, dump, "mamba2") for name, flags, dump in runs]


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """Metrics and dumps of every run."""
    folder = tmp_path_factory.mktemp("layouts")
    for processes in (1, 2, 4):
        train(folder, processes, all_runs(processes))
    return folder


@pytest.mark.parametrize(
    "layout, kind", [(layout, k) for layout, (_, _, kinds) in LAYOUTS.items() for k in kinds]
)
def test_losses_and_gradient_norms_agree(folder, layout, kind):
    expected, found = folder / f"single-{kind}.jsonl", folder / f"{layout}-{kind}.jsonl"
    assert len(curve(found)) == 20
    torch.testing.assert_close(curve(found), curve(expected), rtol=LOSS, atol=0)
    norms = curve(found, "grad_norm"), curve(expected, "grad_norm")
    torch.testing.assert_close(*norms, rtol=NORM, atol=0)


def test_the_comparison_can_fail(folder):
    """Kinds differ far beyond the tolerance, so equal curves say something."""
    curves = [curve(folder / f"single-{kind}.jsonl") for kind in KINDS]
    for other in curves[1:]:
        assert ((curves[0] - other).abs() / other).max() > 100 * LOSS


@pytest.mark.parametrize("layout", RECOMPUTED)
def test_recomputation_changes_no_bit(folder, layout):
    plain, recomputed = folder / f"{layout}-vpad.jsonl", folder / f"{layout}-vpad-full.jsonl"
    for key in ("lm_loss", "grad_norm"):
        assert torch.equal(curve(plain, key)[:FEWER], curve(recomputed, key))


@pytest.mark.parametrize("layout", ["sp", "pp"])
@pytest.mark.parametrize("kind", STEPS_OF)
def test_every_gradient_is_that_of_one_process(folder, layout, kind):
    (single,) = dumps(folder, f"step-{kind}single", 1)
    ranks = dumps(folder, f"step-{kind}{layout}", 2)
    names = {name for rank in ranks for name in rank["gradients"]}
    assert names == single["gradients"].keys()
    for name, expected in single["gradients"].items():
        pieces = [rank["gradients"][name] for rank in ranks if name in rank["gradients"]]
        dimension = next(rank["shards"][name] for rank in ranks if name in rank["shards"])
        divided = layout != "pp" and dimension is not None
        found = torch.cat(pieces, dimension) if divided else pieces[0]
        rows = min(len(expected), len(found))  # padding of the vocabulary differs
        scale = expected.abs().max().item()
        assert scale > 0, name
        torch.testing.assert_close(
            found[:rows], expected[:rows], rtol=0, atol=5e-6 * scale, msg=name
        )


@pytest.mark.parametrize("layout", ["tp", "sp"])
def test_what_every_rank_holds_stays_bitwise_equal(folder, layout):
    """One group's B and C, and norms: after twenty steps with dropout."""
    one, other = dumps(folder, f"{layout}-vpad", 2)
    replicated = [name for name, dimension in one["shards"].items() if dimension is None]
    assert any(name.endswith("in_proj.weight.B") for name in replicated)
    assert any(name.endswith("conv1d.bias.C") for name in replicated)
    for name in replicated:
        assert torch.equal(one["parameters"][name], other["parameters"][name]), name


@pytest.mark.skipif(
    not is_installed("deepspeed"), reason="requirements/deepspeed.txt is not installed"
)
def test_deepspeed_computes_the_same(folder):
    (folder / "ds.json").write_text('{"zero_optimization": {"stage": 1}}')
    flags = f"{STEPS} {SP} {KINDS['vpad']} --engine deepspeed --deepspeed-config FOLDER/ds.json"
    train(folder, 2, [Run("deepspeed", flags, decoder="mamba2")])
    expected, found = folder / "single-vpad.jsonl", folder / "deepspeed.jsonl"
    torch.testing.assert_close(curve(found), curve(expected), rtol=LOSS, atol=0)
    norms = curve(found, "grad_norm"), curve(expected, "grad_norm")
    torch.testing.assert_close(*norms, rtol=NORM, atol=0)
