"""The scan against the recurrence token by token in float64, and against Hugging Face's mixer."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from mamba_cases import Scan, assert_near, assert_scan, boundaries, documents, loop_scan
from torch.utils.checkpoint import checkpoint

from megatron_lengen.ops import ssd_chunks
from megatron_lengen.ops.causal_conv import causal_conv1d
from megatron_lengen.ops.ssd import ssd_scan, ssd_step

CHUNK = ssd_chunks.CHUNK
SCANS = [
    Scan(1, 1, 1, 1, 1, 1),
    Scan(2, 3, 4, 5, 2, 3),
    Scan(1, CHUNK, 3, 4, 3, 17),
    Scan(2, CHUNK + 1, 6, 33, 2, 40),
    Scan(1, 3 * CHUNK - 5, 11, 8, 1, 16),
    Scan(9, 70, 2, 16, 1, 5),
]


@pytest.mark.parametrize("scan", SCANS, ids=str)
def test_values_and_gradients(path, scan):
    assert_scan(scan, torch.float32)


@pytest.mark.parametrize("scan", SCANS[1:5], ids=str)
def test_values_and_gradients_in_double(scan):
    assert_scan(scan, torch.float64)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("scan", SCANS[3:5], ids=str)
def test_values_and_gradients_of_halves(path, scan, dtype):
    assert_scan(scan, dtype)


@pytest.mark.parametrize("chunk_size", [1, 40, 50, 256])
def test_any_chunk_size(chunk_size):
    assert_scan(SCANS[4], torch.float32, chunk_size=chunk_size)


def test_states_that_forward_keeps(path, monkeypatch):
    """More than one piece, and more than one segment, of a row."""
    monkeypatch.setitem(ssd_chunks.PIECE_NUMBERS, "cpu", 1)
    scan = Scan(2, 16 * CHUNK + 70, 2, 4, 1, 3)
    assert_scan(scan, torch.float32, seq_idx=documents(boundaries(scan.length, 700, 1023), 2))


@pytest.mark.parametrize(
    "places", [(1,), (3,), (CHUNK,), (CHUNK + 1,), (5, 6, 20, 50), (CHUNK - 1, CHUNK, 150)]
)
def test_documents(path, places):
    """Equal to the loop, and to each document alone."""
    scan = SCANS[4]
    lengths = boundaries(scan.length, *places)
    assert_scan(scan, torch.float32, seq_idx=documents(lengths, scan.b))
    given = {name: tensor.detach() for name, tensor in scan.inputs().items()}
    first_state = given.pop("initial_states")
    whole, last = ssd_scan(
        **given,
        seq_idx=documents(lengths, scan.b),
        initial_states=first_state,
        return_final_states=True,
    )
    start = 0
    for i, length in enumerate(lengths):
        own = {k: v[:, start : start + length] if v.dim() > 1 else v for k, v in given.items()}
        alone, state = ssd_scan(
            **own, initial_states=first_state if i == 0 else None, return_final_states=True
        )
        found = whole[:, start : start + length]
        assert_near(found, alone.double(), torch.float32, f"document {i}")
        start += length
    assert_near(last, state.double(), torch.float32, "last state")


def test_another_document_changes_no_bit(path):
    scan = SCANS[4]
    seq_idx = documents(boundaries(scan.length, CHUNK + 3), scan.b)
    given = scan.inputs()
    before = ssd_scan(**given, seq_idx=seq_idx)
    with torch.no_grad():
        for name in ("x", "dt", "B", "C"):
            given[name][:, CHUNK + 2] *= 3
    after = ssd_scan(**given, seq_idx=seq_idx)
    assert torch.equal(before[:, CHUNK + 3 :], after[:, CHUNK + 3 :])
    assert not torch.equal(before[:, CHUNK + 2], after[:, CHUNK + 2])


def test_pieces_equal_the_whole_row(path):
    """States carry values and gradients from piece to piece."""
    scan = Scan(2, 200, 4, 8, 2, 16)
    whole, pieces = scan.inputs(), scan.inputs()
    wanted, last = ssd_scan(**whole, return_final_states=True)
    state, found = pieces["initial_states"], []
    for first, end in ((0, 1), (1, 70), (70, 134), (134, 200)):
        own = {k: v[:, first:end] for k, v in pieces.items() if k in ("x", "dt", "B", "C")}
        y, state = ssd_scan(
            **own, A=pieces["A"], D=pieces["D"], initial_states=state, return_final_states=True
        )
        found.append(y)
    assert_near(torch.cat(found, 1), wanted.double(), torch.float32, "y")
    assert_near(state, last.double(), torch.float32, "last state")
    (wanted.square().sum() + last.square().sum()).backward()
    (torch.cat(found, 1).square().sum() + state.square().sum()).backward()
    for name, tensor in pieces.items():
        assert_near(tensor.grad, whole[name].grad.double(), torch.float32, name)


def test_steps_equal_the_scan():
    scan = Scan(2, 7, 4, 8, 2, 16)
    given = {k: v.detach() for k, v in scan.inputs().items()}
    wanted, last = ssd_scan(**given, return_final_states=True)
    state = given["initial_states"]
    for t in range(scan.length):
        own = {k: given[k][:, t] for k in ("x", "dt", "B", "C")}
        y, state = ssd_step(**own, A=given["A"], D=given["D"], state=state)
        assert_near(y, wanted[:, t].double(), torch.float32, f"token {t}")
    assert_near(state, last.double(), torch.float32, "state")


def test_gradients_by_finite_differences(path):
    scan = Scan(1, 5, 2, 2, 1, 2)
    tensors = scan.inputs(torch.float64)

    def function(x, dt, A, B, C, D, state):
        return ssd_scan(
            x, dt, A, B, C, D=D, initial_states=state, return_final_states=True,
            seq_idx=documents([2, 3], 1),
        )  # fmt: skip

    assert torch.autograd.gradcheck(function, tuple(tensors.values()))


@pytest.mark.parametrize("step", [0.0, 1e-7, 60.0, 3000.0])
def test_steps_of_any_size(path, step):
    """Decays from 1 down to 0: nothing overflows, and a long step spoils no later difference."""
    scan = Scan(1, 150, 2, 4, 1, 8)
    given = scan.inputs()
    with torch.no_grad():
        given["dt"][:, 10] = step
        given["dt"][:, 70] = step
    wide = {k: v.detach().double().requires_grad_() for k, v in given.items()}
    y, last = ssd_scan(**given, return_final_states=True)
    wanted, state = loop_scan(**wide)
    (y.sum() + last.sum()).backward()
    (wanted.sum() + state.sum()).backward()
    assert_near(y, wanted, torch.float32, "y")
    for name, tensor in given.items():
        assert_near(tensor.grad, wide[name].grad, torch.float32, name)


@pytest.mark.parametrize("b, length, p", [(0, 5, 4), (2, 0, 4), (2, 5, 0)])
def test_nothing_to_do(b, length, p):
    given = Scan(b, length, 2, p, 1, 3).inputs()
    y, last = ssd_scan(**given, return_final_states=True)
    assert y.shape == (b, length, 2, p)
    assert torch.equal(last, given["initial_states"])


def test_views_of_wider_tensors(path):
    """x, B and C as a projection leaves them: parts of one row of numbers."""
    b, length, h, p, g, n = 2, 90, 3, 8, 1, 16
    row = torch.randn(b, length, 5 + h * p + 2 * g * n)
    _, x, B, C = row.split([5, h * p, g * n, g * n], dim=2)
    given = Scan(b, length, h, p, g, n).inputs()
    x, B, C = x.unflatten(2, (h, p)), B.unflatten(2, (g, n)), C.unflatten(2, (g, n))
    found = ssd_scan(x, given["dt"], given["A"], B, C)
    dense = ssd_scan(x.contiguous(), given["dt"], given["A"], B.contiguous(), C.contiguous())
    assert torch.equal(found, dense)


def test_memory_grows_with_the_length(path):
    def kept(length: int) -> int:
        total = 0

        def pack(tensor: torch.Tensor) -> torch.Tensor:
            nonlocal total
            total += tensor.numel()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            ssd_scan(**Scan(1, length, 4, 16, 1, 16).inputs())
        return total

    inputs = sum(t.numel() for t in Scan(1, 4096, 4, 16, 1, 16).inputs().values())
    assert kept(4096) < 1.6 * inputs
    assert kept(4096) < 4.5 * kept(1024)


def test_recomputation_changes_no_bit(path):
    grads = []
    for again in (False, True):
        given = SCANS[4].inputs()

        def function(*tensors):
            return ssd_scan(**dict(zip(given, tensors, strict=True)))  # noqa: B023

        values = tuple(given.values())
        y = checkpoint(function, *values, use_reentrant=False) if again else function(*values)
        y.square().sum().backward()
        grads.append([tensor.grad for tensor in given.values()])
    assert all(torch.equal(a, b) for a, b in zip(*grads, strict=True))


def test_threads_change_no_bit():
    before, results = torch.get_num_threads(), []
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            given = SCANS[4].inputs()
            y = ssd_scan(**given)
            y.square().sum().backward()
            results.append([y, *(tensor.grad for tensor in given.values())])
    finally:
        torch.set_num_threads(before)
    for other in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results[0], other, strict=True))


@pytest.mark.parametrize("groups", [1, 2])
def test_hugging_faces_mixer(groups):
    from transformers import Mamba2Config
    from transformers.models.mamba2.modeling_mamba2 import Mamba2Mixer

    torch.manual_seed(0)
    h, p, n, d = 4, 16, 8, 32
    config = Mamba2Config(
        num_heads=h, head_dim=p, hidden_size=d, state_size=n, n_groups=groups, chunk_size=64
    )
    mixer = Mamba2Mixer(config, layer_idx=0)
    u = torch.randn(2, 300, d)
    inner, conv = h * p, h * p + 2 * groups * n
    gate, values, steps = mixer.in_proj(u).split([inner, conv, h], dim=2)
    values = causal_conv1d(values, mixer.conv1d.weight[:, 0], mixer.conv1d.bias)
    x, B, C = values.split([inner, groups * n, groups * n], dim=2)
    y = ssd_scan(
        x.unflatten(2, (h, p)),
        F.softplus(steps + mixer.dt_bias),
        -mixer.A_log.exp(),
        B.unflatten(2, (groups, n)),
        C.unflatten(2, (groups, n)),
        D=mixer.D,
    )
    found = mixer.out_proj(mixer.norm(y.flatten(2), gate))
    grads = []
    for output in (mixer(u), found):
        mixer.zero_grad()
        output.square().sum().backward(retain_graph=True)
        grads.append({name: weight.grad for name, weight in mixer.named_parameters()})
    torch.testing.assert_close(found, mixer(u), rtol=1e-4, atol=1e-5)
    for name, grad in grads[0].items():
        torch.testing.assert_close(
            grads[1][name], grad, rtol=1e-3, atol=float(1e-4 * grad.abs().max())
        )


@pytest.mark.parametrize(
    "change, message",
    [
        ({"A": torch.zeros(3)}, "A of"),
        ({"seq_idx": torch.zeros(2, 2)}, "seq_idx of"),
        ({"chunk_size": 0}, "chunks of 0"),
        ({"initial_states": torch.zeros(2, 4, 5, 2)}, "initial_states of"),
    ],
)
def test_what_does_not_fit(change, message):
    with pytest.raises(ValueError, match=message):
        ssd_scan(**{**SCANS[1].inputs(), **change})
    with pytest.raises(ValueError, match="groups"):
        ssd_scan(**Scan(1, 2, 3, 2, 2, 2).inputs())
