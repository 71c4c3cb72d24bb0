"""Norm, residual addition and coordinates as modules."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from megatron.core.tensor_parallel.random import get_cuda_rng_tracker
from tiny_models import tiny_config

from megatron_lengen.layers.coordinates import current_samples, local_positions, set_samples
from megatron_lengen.layers.dropout import DropoutSite, ResidualAdd, Site
from megatron_lengen.layers.norm import DropoutRMSNorm
from megatron_lengen.ops.mask import MaskCoordinates, keep_mask
from megatron_lengen.ops.rmsnorm import rms_norm

pytestmark = pytest.mark.usefixtures("process_groups")


def site(variant: str = "pre_linear", rate: float = 0.5, where: Site = Site.MLP_NORM, **changes):
    plain = DropoutSite(variant, rate, True, True, 3, 2, where, sequence_sharded=False)
    return dataclasses.replace(plain, **changes)


def mask(samples: list[int], length: int, channels: int, where: Site) -> torch.Tensor:
    coordinates = MaskCoordinates(3, torch.tensor(samples), torch.arange(length), 2, int(where))
    return keep_mask(coordinates, channels, 0.5)


def test_norm_draws_the_mask_of_its_place():
    norm = DropoutRMSNorm(tiny_config(), hidden_size=32, eps=1e-6)
    torch.nn.init.uniform_(norm.weight, 0.5, 1.5)
    x = torch.randn(10, 2, 32)
    plain = rms_norm(x, norm.weight, 1e-6)
    torch.testing.assert_close(norm(x), plain)
    norm.site = site()
    set_samples([40, 2**31 + 1])
    kept = mask([40, 2**31 + 1], 10, 32, Site.MLP_NORM)
    torch.testing.assert_close(norm(x), plain * kept * 2)
    torch.testing.assert_close(norm.eval()(x), plain)


def test_norm_keeps_its_parameter_dtype_and_name():
    norm = DropoutRMSNorm(tiny_config(params_dtype=torch.bfloat16), hidden_size=8)
    assert [(n, p.dtype) for n, p in norm.named_parameters()] == [("weight", torch.bfloat16)]
    assert norm(torch.randn(3, 1, 8).bfloat16()).dtype == torch.bfloat16


@pytest.mark.parametrize("bias", [None, torch.arange(32.0)])
def test_residual_addition_drops_the_output_and_not_the_residual(bias):
    add = ResidualAdd()
    output, residual = torch.randn(6, 2, 32), torch.randn(6, 2, 32)
    whole = output if bias is None else output + bias
    for training in (True, False):
        assert torch.equal(add(training, False)((output, bias), residual, 0.0), residual + whole)
    add.site = site(where=Site.ATTENTION_OUTPUT)
    set_samples([0, 9])
    kept = mask([0, 9], 6, 32, Site.ATTENTION_OUTPUT)
    found = add(True, False)((output, bias), residual, 0.0)
    torch.testing.assert_close(found, residual + 2 * kept * whole)
    assert torch.equal(add(False, True)((output, bias), residual, 0.0), residual + whole)


def test_samples_are_what_was_announced_last():
    set_samples([3, 2**40, 5])
    assert current_samples().tolist() == [3, 2**40, 5]
    set_samples(torch.tensor([7]))
    assert current_samples().tolist() == [7]
    assert current_samples().dtype == torch.int64


def test_samples_travel_with_the_trackers_states():
    """What Megatron's recomputation does around a recomputed layer."""
    tracker = get_cuda_rng_tracker()
    set_samples([1, 2])
    saved = tracker.get_states()
    set_samples([3, 4])
    assert current_samples().tolist() == [3, 4]
    tracker.set_states(saved)
    assert current_samples().tolist() == [1, 2]


def test_samples_leave_the_trackers_own_streams_usable():
    set_samples([1, 2])
    tracker = get_cuda_rng_tracker()
    with tracker.fork():
        torch.rand(1)
    assert current_samples().tolist() == [1, 2]


def test_positions_of_a_single_process():
    assert local_positions(5, sequence_sharded=False).tolist() == [0, 1, 2, 3, 4]
    assert local_positions(5, sequence_sharded=True).tolist() == [0, 1, 2, 3, 4]


def test_site_builds_the_dropout_of_a_tensor():
    set_samples([8, 9])
    dropout = site("vpad", 0.3, Site.O, detach_beta=False).for_tensor(torch.ones(4, 2, 16), 48)
    where = dropout.coordinates
    assert (dropout.variant, dropout.rate) == ("vpad", 0.3)
    assert (dropout.detach_alpha, dropout.detach_beta) == (True, False)
    assert (where.seed, where.layer, where.site, where.first_channel) == (3, 2, 11, 48)
    assert where.samples.tolist() == [8, 9]
    assert where.positions.tolist() == [0, 1, 2, 3]
