"""Mamba2: the same numbers on every layout, with one group and with two."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from launcher import Run, curve, dumps, train
from layouts import (
    DISTRIBUTED,
    FEWER,
    FULL,
    LOSS,
    NORM,
    PP,
    SINGLE_STEP,
    SP,
    STEPS,
    TP,
    VPP,
    check_curves,
    check_gradients,
    check_kinds_differ,
    check_recomputed,
    train_all,
)

from megatron_lengen.compat import is_installed

GROUPS = "--mamba-num-groups 2"
KINDS = {
    "vpad": "--dropout-variant vpad --dropout-rate 0.3 --include-mixer-norms",
    "groups": f"{GROUPS} --dropout-variant vpad --dropout-rate 0.2 --include-mixer-norms"
    " --document-boundaries mask",
    "pre_norm": "--dropout-variant pre_norm --dropout-rate 0.1 --mamba-init huggingface",
    "projections": f"{GROUPS} --dropout-variant vpad --dropout-rate 0.2 --dropout-apply-to i,o"
    " --dropout-keep-final-norm --untie-embeddings-and-output-weights",
}

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
    return train_all(tmp_path_factory.mktemp("layouts"), all_runs)


@pytest.mark.parametrize(
    "layout, kind", [(layout, k) for layout, (_, _, kinds) in LAYOUTS.items() for k in kinds]
)
def test_losses_and_gradient_norms_agree(folder, layout, kind):
    check_curves(folder, layout, kind)


def test_the_comparison_can_fail(folder):
    check_kinds_differ(folder, list(KINDS))


@pytest.mark.parametrize("layout", RECOMPUTED)
def test_recomputation_changes_no_bit(folder, layout):
    check_recomputed(folder, f"{layout}-vpad", f"{layout}-vpad-full")


@pytest.mark.parametrize("layout", ["sp", "pp"])
@pytest.mark.parametrize("kind", STEPS_OF)
def test_every_gradient_is_that_of_one_process(folder, layout, kind):
    check_gradients(folder, kind, layout)


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
