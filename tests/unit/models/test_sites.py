"""Which modules of a model draw masks: exactly the named ones, with the right coordinates."""

from __future__ import annotations

import pytest
from tiny_models import tiny_config
from torch import nn

from megatron_lengen.config_checks import DROPOUT_MODULES
from megatron_lengen.layers.dropout import DropoutSite, ResidualAdd, Site
from megatron_lengen.layers.norm import DropoutRMSNorm
from megatron_lengen.layers.projections import MaskedRows, _MaskedColumns
from megatron_lengen.models.build import build_chunks
from megatron_lengen.models.sites import assign_sites
from megatron_lengen.ops import variants

pytestmark = pytest.mark.usefixtures("process_groups")

LAYERS = range(4)
NORMS = ("input_layernorm", "pre_mlp_layernorm")
OUTPUTS = ("self_attn_bda", "mlp_bda")
HOME = {
    "q": "self_attention.linear_qkv",
    "k": "self_attention.linear_qkv",
    "v": "self_attention.linear_qkv",
    "o": "self_attention.linear_proj",
    "g": "mlp.linear_fc1",
    "u": "mlp.linear_fc1",
    "d": "mlp.linear_fc2",
}


def in_layers(names, layers=LAYERS) -> set[str]:
    return {f"decoder.layers.{i}.{name}" for i in layers for name in names}


def sites_of_modules(model: nn.Module) -> dict[str, DropoutSite]:
    """What the modules themselves hold, found by looking at every one of them."""
    found: dict[str, DropoutSite] = {}
    for name, module in model.named_modules():
        if isinstance(module, DropoutRMSNorm | ResidualAdd) and module.site is not None:
            found[name] = module.site
        elif isinstance(module, MaskedRows) and module.site is not None:
            found[f"{name}.{'o' if 'linear_proj' in name else 'd'}"] = module.site
        elif isinstance(module, _MaskedColumns):
            found.update({f"{name}.{p}": s for p, s in module.sites.items() if s is not None})
    return found


CASES = [
    ({}, set()),
    ({"dropout_variant": "vpad"}, set()),
    ({"dropout_variant": "vpad", "dropout_rate": 0.1}, in_layers(NORMS)),
    ({"dropout_variant": "pre_linear", "dropout_rate": 0.1}, in_layers(NORMS)),
    ({"dropout_variant": "pre_norm", "dropout_rate": 0.1}, in_layers(OUTPUTS)),
    ({"dropout_variant": "residual", "dropout_rate": 0.1}, in_layers(OUTPUTS)),
    (
        {"dropout_variant": "vpad", "dropout_rate": 0.1, "dropout_keep_final_norm": True},
        in_layers(NORMS) | {"decoder.final_layernorm"},
    ),
    (
        {"dropout_variant": "vpad", "dropout_rate": 0.1, "dropout_layers": "0,2-3"},
        in_layers(NORMS, (0, 2, 3)),
    ),
    (
        {"dropout_variant": "pre_norm", "dropout_rate": 0.1, "dropout_layers": "1"},
        in_layers(OUTPUTS, (1,)),
    ),
    (
        {
            "dropout_variant": "vpad",
            "dropout_rate": 0.1,
            "dropout_skip_modules": "decoder.layers.0.*, *.pre_mlp_layernorm",
        },
        in_layers(("input_layernorm",), (1, 2, 3)),
    ),
    (
        {
            "dropout_variant": "vpad",
            "dropout_rate": 0.1,
            "dropout_keep_final_norm": True,
            "dropout_skip_modules": "decoder.final_layernorm,decoder.layers.*",
        },
        set(),
    ),
    (
        {"dropout_variant": "vpad", "dropout_rate": 0.1, "dropout_apply_to": "q,k,v,o,g,u,d"},
        in_layers([f"{home}.{letter}" for letter, home in HOME.items()]),
    ),
    (
        {
            "dropout_variant": "vpad",
            "dropout_rate": 0.1,
            "dropout_apply_to": "v,d",
            "dropout_layers": "1-2",
            "dropout_skip_modules": "decoder.layers.2.*.d",
        },
        {
            "decoder.layers.1.self_attention.linear_qkv.v",
            "decoder.layers.1.mlp.linear_fc2.d",
            "decoder.layers.2.self_attention.linear_qkv.v",
        },
    ),
    (
        {
            "dropout_variant": "vpad",
            "dropout_rate": 0.1,
            "dropout_apply_to": "u",
            "gated_linear_unit": False,
        },
        in_layers(("mlp.linear_fc1.u",)),
    ),
]


@pytest.mark.parametrize("changes, expected", CASES, ids=[str(case[0]) for case in CASES])
def test_exactly_the_named_places_draw_masks(changes, expected):
    config = tiny_config(**changes)
    (model,) = build_chunks(config)
    found = sites_of_modules(model)
    assert set(found) == expected
    # What the model says it did is what its modules hold.
    assert assign_sites(model, config) == found
    # The names that --dropout-skip-modules is checked against are these.
    in_a_layer = {name.split(".", 3)[3] for name in found if name.startswith("decoder.layers.")}
    assert in_a_layer <= set(DROPOUT_MODULES)


def test_sites_carry_their_coordinates():
    config = tiny_config(
        dropout_variant="vpad",
        dropout_rate=0.2,
        dropout_keep_final_norm=True,
        dropout_detach_alpha=False,
        seed=99,
    )
    sites = assign_sites(build_chunks(config)[0], config)
    assert sites["decoder.layers.2.pre_mlp_layernorm"] == DropoutSite(
        variant="vpad", rate=0.2, detach_alpha=False, detach_beta=True, seed=99, layer=2,
        site=Site.MLP_NORM, sequence_sharded=False,
    )  # fmt: skip
    assert sites["decoder.final_layernorm"].site is Site.FINAL_NORM
    places = {(s.layer, s.site) for s in sites.values()}
    assert len(places) == len(sites) == 9


def test_site_numbers_are_part_of_every_mask_and_stay():
    assert {site.name: int(site) for site in Site} == {
        "ATTENTION_NORM": 0, "MLP_NORM": 1, "FINAL_NORM": 2, "ATTENTION_OUTPUT": 3,
        "MLP_OUTPUT": 4, "ATTENTION_WEIGHTS": 5, "MIXER_NORM": 6, "GATED_NORM": 7, "Q": 8,
        "K": 9, "V": 10, "O": 11, "G": 12, "U": 13, "D": 14, "MIXER_OUTPUT": 15, "I": 16,
    }  # fmt: skip


@pytest.mark.parametrize(
    "placement, expected", [("after_norm", NORMS), ("before_residual", OUTPUTS)]
)
def test_a_registered_variant_goes_where_it_says(monkeypatch, placement, expected):
    monkeypatch.setattr(variants, "_REGISTRY", dict(variants._REGISTRY))
    variants.register_variant("mine", placement=placement)(lambda mean, variance, rate: (2.0, 0.0))
    (model,) = build_chunks(tiny_config(dropout_variant="mine", dropout_rate=0.1))
    assert set(sites_of_modules(model)) == in_layers(expected)
