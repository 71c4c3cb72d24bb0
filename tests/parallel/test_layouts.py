"""The same numbers on every layout: parallel sizes, micro-batches, recomputation, optimizer."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from launcher import Run, curve, dumps
from layouts import (
    CP,
    DISTRIBUTED,
    FEWER,
    FULL,
    NORM,
    OVERLAP,
    PP,
    SELECTIVE,
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

# Dropout of each kind: at the norm, on the sublayers' outputs, at every projection, inside the
# attention, with everything that attention and its positions can do.
DROPOUT = {
    "vpad": "--dropout-variant vpad --dropout-rate 0.3",
    "pre_norm": "--dropout-variant pre_norm --dropout-rate 0.1"
    " --use-rope-scaling --original-max-position-embeddings 16",
    "everywhere": "--dropout-variant vpad --dropout-rate 0.2 --dropout-apply-to q,k,v,o,g,u,d"
    " --rotary-seq-len-interpolation-factor 3",
    "attached": "--dropout-variant vpad --dropout-rate 0.2 --dropout-apply-to q,k,v,o,g,u,d"
    " --dropout-no-detach-alpha --dropout-no-detach-beta"
    " --rotary-seq-len-interpolation-factor 3",
    "nape": "--dropout-variant vpad --dropout-rate 0.2 --attention-dropout 0.2"
    " --position-embedding-type nape --query-scaling learned --query-scaling-scope nope"
    " --no-query-scaling-identity-init",
    "entmax": "--position-embedding-type yarn --rotary-scaling-factor 4 --query-scaling ssmax"
    " --attention-function entmax --attention-dropout 0.1 --document-boundaries mask",
}

# layout -> (processes, flags, kinds of dropout to train with)
LAYOUTS = {
    "mbs1": (1, "--micro-batch-size 1", ("vpad",)),
    "mbs4": (1, "--micro-batch-size 4", ("vpad", "attached")),
    "distributed": (1, DISTRIBUTED, ("vpad",)),
    "tp": (2, TP, ("vpad", "pre_norm", "everywhere", "attached", "nape", "entmax")),
    "sp": (2, SP, ("vpad", "pre_norm", "everywhere", "attached", "nape", "entmax")),
    "pp": (2, PP, ("vpad", "pre_norm", "everywhere", "entmax")),
    "vpp": (2, VPP, ("vpad", "pre_norm", "nape")),
    "cp": (2, CP, ("vpad", "pre_norm", "everywhere", "attached", "nape", "entmax")),
    "dp": (2, "", ("vpad", "pre_norm", "everywhere", "nape")),
    "dp-overlap": (2, "--overlap-grad-reduce", ("vpad",)),
    "dp-distributed": (2, DISTRIBUTED, ("vpad", "pre_norm")),
    "dp-distributed-overlap": (2, f"{DISTRIBUTED} {OVERLAP}", ("vpad",)),
    "sp-pp": (4, f"{SP} {PP}", ("vpad", "pre_norm", "attached")),
    "sp-vpp": (4, f"{SP} {VPP}", ("vpad",)),
    "cp-sp": (4, f"{CP} {SP}", ("vpad", "everywhere", "nape", "entmax")),
    "cp-vpp": (4, f"{CP} {VPP}", ("vpad",)),
    "cp-dp": (4, f"{CP} {DISTRIBUTED} {OVERLAP}", ("vpad",)),
    "dp-vpp": (4, f"{VPP} {DISTRIBUTED} {OVERLAP}", ("vpad",)),
    "tp-dp": (4, f"{TP} {DISTRIBUTED}", ("vpad", "everywhere")),
}
# layout -> (processes, flags): each also with recomputation, which must change no bit.
RECOMPUTED_KINDS = ("vpad", "everywhere", "entmax")
RECOMPUTED = {"single": (1, ""), "sp": (2, SP), "pp": (2, PP), "cp": (2, CP)}
# Kinds whose gradients are compared parameter by parameter after one step.
STEPS_OF = {"": "", "vpad-": DROPOUT["vpad"], "nape-": DROPOUT["nape"]}


def all_runs(processes: int) -> list[Run]:
    runs = []
    if processes == 1:
        runs += [Run(f"single-{kind}", f"{STEPS} {flags}") for kind, flags in DROPOUT.items()]
        runs += [
            Run(f"step-{k}single", f"{SINGLE_STEP} {f}", dump=True) for k, f in STEPS_OF.items()
        ]
    for layout, (needed, flags, kinds) in LAYOUTS.items():
        if needed == processes:
            runs += [
                Run(f"{layout}-{k}", f"{STEPS} {flags} {DROPOUT[k]}", dump=k == "vpad")
                for k in kinds
            ]
    for layout, (needed, flags) in RECOMPUTED.items():
        for kind in RECOMPUTED_KINDS if needed == processes else ():
            for how, recompute in (("full", FULL), ("selective", SELECTIVE)):
                name = f"{layout}-{kind}-{how}"
                steps = f"{STEPS} --exit-interval {FEWER}"
                runs.append(Run(name, f"{steps} {flags} {recompute} {DROPOUT[kind]}"))
    if processes == 2:
        for layout, flags in (("tp", TP), ("sp", SP), ("pp", PP), ("cp", CP)):
            for kind, kind_flags in STEPS_OF.items():
                flags_of_step = f"{SINGLE_STEP} {flags} {kind_flags}"
                runs.append(Run(f"step-{kind}{layout}", flags_of_step, dump=True))
    return runs


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
    check_kinds_differ(folder, ["vpad", "pre_norm", "everywhere"])
    norms = [curve(folder / f"single-{kind}.jsonl", "grad_norm") for kind in DROPOUT]
    assert (norms[2] - norms[3]).abs().max() > 100 * NORM  # detached or not


@pytest.mark.parametrize("how", ["full", "selective"])
@pytest.mark.parametrize("kind", RECOMPUTED_KINDS)
@pytest.mark.parametrize("layout", RECOMPUTED)
def test_recomputation_changes_no_bit(folder, layout, kind, how):
    """Report 5 of the field: recomputing must replay the forward's masks."""
    check_recomputed(folder, f"{layout}-{kind}", f"{layout}-{kind}-{how}")


@pytest.mark.parametrize("layout", ["tp", "sp", "pp", "cp"])
@pytest.mark.parametrize("kind", STEPS_OF)
def test_every_gradient_is_that_of_one_process(folder, layout, kind):
    check_gradients(folder, kind, layout)


@pytest.mark.parametrize("layout", ["tp", "sp", "dp", "cp"])
def test_replicas_stay_bitwise_equal(folder, layout):
    """Norm gains and, under data parallelism, everything: after twenty steps with dropout."""
    one, other = dumps(folder, f"{layout}-vpad", 2)
    replicated = [n for n, dim in one["shards"].items() if dim is None or layout in ("dp", "cp")]
    assert any("layernorm" in name for name in replicated)
    for name in replicated:
        assert torch.equal(one["parameters"][name], other["parameters"][name]), name
        assert layout == "dp" or not torch.all(one["parameters"][name] == 1), name


def test_tied_tables_stay_equal_over_pipeline_stages(folder):
    one, other = dumps(folder, "pp-vpad", 2)
    table = "embedding.word_embeddings.weight"
    assert torch.equal(one["parameters"][table], other["parameters"][table])
