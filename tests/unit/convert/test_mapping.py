"""Rules between the two layouts, against layouts written out by hand."""

import pytest
import torch

from megatron_lengen.config import config_from_architecture
from megatron_lengen.convert.mapping import (
    direct,
    expand,
    gate_up,
    grouped_qkv,
    pad_vocabulary,
    per_head,
    stacked,
    vocabulary,
)
from megatron_lengen.errors import BadInput


@pytest.fixture
def config():
    return config_from_architecture(
        {
            "num_layers": 2,
            "hidden_size": 8,
            "ffn_hidden_size": 6,
            "num_attention_heads": 4,
            "num_query_groups": 2,
            "kv_channels": 2,
            "gated_linear_unit": True,
            "add_bias_linear": False,
            "vocab_size": 5,
            "make_vocab_size_divisible_by": 4,
            "max_position_embeddings": 16,
        }
    )


RULE = grouped_qkv("ours", "q", "k", "v")


def test_rows_of_qkv_are_grouped_per_key_value_group(config):
    # Rows by hand: group 0 has q heads 0, 1, then its key and value; group 1 has q heads 2, 3.
    ours = torch.tensor([[10.0, 11, 12, 13, 100, 101, 200, 201]])
    ours = torch.cat([ours, ours + 50], 1).T
    parts = RULE.to_theirs([ours], config)
    assert parts["q"].T.tolist() == [[10, 11, 12, 13, 60, 61, 62, 63]]
    assert parts["k"].T.tolist() == [[100, 101, 150, 151]]
    assert parts["v"].T.tolist() == [[200, 201, 250, 251]]
    assert torch.equal(RULE.to_ours(list(parts.values()), config)["ours"], ours)


@pytest.mark.parametrize("shape", [(), (8,)], ids=["bias", "weight"])
def test_qkv_round_trip_is_bitwise(config, shape):
    ours = torch.randn(16, *shape)
    back = RULE.to_ours(list(RULE.to_theirs([ours], config).values()), config)
    assert torch.equal(back["ours"], ours)


def test_gate_rows_come_first(config):
    gate, up = torch.zeros(6, 8), torch.ones(6, 8)
    rule = gate_up("ours", "gate", "up")
    ours = rule.to_ours([gate, up], config)["ours"]
    assert ours[:6].eq(0).all() and ours[6:].eq(1).all()
    parts = rule.to_theirs([ours], config)
    assert torch.equal(parts["gate"], gate) and torch.equal(parts["up"], up)


def test_vocabulary_is_cut_and_padded_with_zeros(config):
    rule = vocabulary("ours", "theirs")
    theirs = torch.randn(5, 8)
    ours = rule.to_ours([theirs], config)["ours"]
    assert ours.shape == (8, 8) and ours[5:].eq(0).all()
    assert torch.equal(rule.to_theirs([ours], config)["theirs"], theirs)
    # A table that was padded for another layout, with anything in its padding.
    other = torch.cat([theirs, torch.randn(11, 8)])
    assert torch.equal(pad_vocabulary(other, config), ours)


def test_rows_that_do_not_fit_are_refused_by_name(config):
    with pytest.raises(BadInput, match=r"ours: found 15 rows; the configuration asks for 16"):
        RULE.to_theirs([torch.zeros(15, 8)], config)
    with pytest.raises(BadInput, match=r"q, k, v: found 3 rows"):
        RULE.to_ours([torch.zeros(8, 8), torch.zeros(3, 8), torch.zeros(4, 8)], config)
    with pytest.raises(BadInput, match=r"found 4 rows; the vocabulary has 5"):
        vocabulary("ours", "theirs").to_theirs([torch.zeros(4, 8)], config)
    for rows in (4, 6):
        with pytest.raises(BadInput, match=rf"theirs: found {rows} rows; the configuration asks"):
            vocabulary("ours", "theirs").to_ours([torch.zeros(rows, 8)], config)
    taps = stacked(["ours"], "theirs", lambda config: [3], lambda config: 4)
    with pytest.raises(BadInput, match=r"theirs: found 3 in the last dimension; .* asks for 4"):
        taps.to_ours([torch.zeros(3, 1, 3)], config)


def test_layers_are_written_out():
    rules = expand([direct("a.{i}.w", "b.{i}.w"), direct("c", "d")], 2)
    assert [(rule.ours, rule.theirs) for rule in rules] == [
        (("a.0.w",), ("b.0.w",)),
        (("a.1.w",), ("b.1.w",)),
        (("c",), ("d",)),
    ]


def test_rows_of_heads_are_counted(config):
    rule, rows = per_head("ours", "theirs"), torch.randn(4, 8)
    assert torch.equal(rule.to_theirs([rows], config)["theirs"], rows)
    assert torch.equal(rule.to_ours([rows], config)["ours"], rows)
    for way in (rule.to_theirs, rule.to_ours):
        with pytest.raises(BadInput, match="found 3 rows; the configuration asks for 4"):
            way([rows[:3]], config)


def test_ours_one_below_the_other(config):
    rule = stacked(["a", "b", "c"], "all", lambda config: [2, config.vocab_size, 1])
    theirs = torch.randn(8, 3)
    ours = rule.to_ours([theirs], config)
    assert torch.equal(ours["a"], theirs[:2]) and torch.equal(ours["b"], theirs[2:7])
    assert torch.equal(rule.to_theirs(list(ours.values()), config)["all"], theirs)
    for name, tensor in ours.items():
        first, last = rule.rows_of(name, config)
        assert torch.equal(theirs[first:last], tensor)
    with pytest.raises(BadInput, match="all: found 7 rows; the configuration asks for 8"):
        rule.to_ours([theirs[:7]], config)
    with pytest.raises(BadInput, match="a, b, c: found 3 rows; the configuration asks for 2"):
        rule.to_theirs([theirs[:3], ours["b"], ours["c"]], config)
    assert RULE.rows_of("ours", config) is None


def test_numbers_that_are_fp32_in_every_model():
    value = torch.randn(3)
    kept, cast = (direct("a", "b", fp32).cast(value, torch.bfloat16) for fp32 in (True, False))
    assert torch.equal(kept, value) and cast.dtype == torch.bfloat16
    assert direct("a", "b", fp32=True).cast(value.bfloat16(), None).dtype == torch.float32
