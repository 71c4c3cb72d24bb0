"""Mamba2's recurrence and convolution token by token in float64, and inputs for their tests."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron_lengen.ops.causal_conv import causal_conv1d
from megatron_lengen.ops.ssd import ssd_scan

NAMES = ("x", "dt", "A", "B", "C", "D", "initial_states")
# Relative to the largest value of each tensor.
TOLERANCES = {
    torch.float64: 1e-11,
    torch.float32: 1e-5,
    torch.float16: 3e-3,
    torch.bfloat16: 2e-2,
}


class Scan(NamedTuple):
    """Sizes of a scan: rows, tokens, heads, channels of a head, groups, numbers of state."""

    b: int
    length: int
    h: int
    p: int
    g: int
    n: int

    def inputs(self, dtype: torch.dtype = torch.float32, device: str = "cpu") -> dict[str, Tensor]:
        """Everything that takes gradients; dt, A and D are fp32 unless all is fp64."""
        generator = torch.Generator().manual_seed(self.length + self.h)
        b, length, h, p, g, n = self

        def normal(*shape: int) -> Tensor:
            return torch.randn(shape, generator=generator)

        found = {
            "x": normal(b, length, h, p).to(dtype),
            "dt": F.softplus(normal(b, length, h) - 1),
            "A": -0.1 - 4 * torch.rand(h, generator=generator),
            "B": normal(b, length, g, n).to(dtype),
            "C": normal(b, length, g, n).to(dtype),
            "D": normal(h),
            "initial_states": normal(b, h, p, n),
        }
        wide = torch.promote_types(dtype, torch.float32)
        return {
            name: tensor.to(device, wide if tensor.dtype != dtype else dtype).requires_grad_()
            for name, tensor in found.items()
        }


def loop_scan(
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor,
    initial_states: Tensor,
    seq_idx: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """The recurrence as it is written down."""
    state, outputs = initial_states, []
    heads_of_group = x.shape[2] // B.shape[2]
    for t in range(x.shape[1]):
        own_B, own_C = (z[:, t].repeat_interleave(heads_of_group, dim=1) for z in (B, C))
        if seq_idx is not None and t:
            state = state * (seq_idx[:, t] == seq_idx[:, t - 1])[:, None, None, None]
        decay = torch.exp(dt[:, t] * A)[..., None, None]
        state = decay * state + dt[:, t, :, None, None] * x[:, t, :, :, None] * own_B[:, :, None]
        outputs.append((state * own_C[:, :, None]).sum(-1) + D[:, None] * x[:, t])
    return torch.stack(outputs, dim=1), state


def loop_conv(
    x: Tensor,
    weight: Tensor,
    bias: Tensor,
    initial_state: Tensor,
    seq_idx: Tensor | None = None,
    silu: bool = True,
) -> Tensor:
    """The convolution as it is written down."""
    taps = weight.shape[1]
    outputs = []
    for t in range(x.shape[1]):
        total = bias.expand(x.shape[0], -1)
        for back in range(taps):
            here = x[:, t - back] if t >= back else initial_state[:, :, taps - 1 + t - back]
            if seq_idx is not None:
                numbers = seq_idx[:, max(0, t - back) : t + 1]
                here = here * (numbers == seq_idx[:, t : t + 1]).all(1, keepdim=True)
            total = total + weight[:, taps - 1 - back] * here
        outputs.append(F.silu(total) if silu else total)
    return torch.stack(outputs, dim=1)


def documents(lengths: list[int], rows: int, device: str = "cpu") -> Tensor:
    """[rows, tokens] numbers of documents of these lengths; two numbers take turns."""
    numbers = [i % 2 for i, length in enumerate(lengths) for _ in range(length)]
    return torch.tensor(numbers, device=device).expand(rows, -1)


def boundaries(length: int, *places: int) -> list[int]:
    """Lengths of the documents that start at 0 and at these places."""
    inside = [place for place in places if place < length]
    return [b - a for a, b in zip([0, *inside], [*inside, length], strict=True)]


def assert_scan(scan: Scan, dtype: torch.dtype, device: str = "cpu", **options: Any) -> None:
    """Values, last states and all gradients of `ssd_scan` against the loop."""
    mine, seq_idx = scan.inputs(dtype, device), options.get("seq_idx")
    theirs = {k: v.detach().double().cpu().requires_grad_() for k, v in mine.items()}
    y, last = ssd_scan(**mine, **options, return_final_states=True)
    wanted = loop_scan(**theirs, seq_idx=None if seq_idx is None else seq_idx.cpu())
    assert y.dtype == dtype
    assert last.dtype == torch.promote_types(dtype, torch.float32)
    compare((y, last), wanted, mine, theirs, dtype)


def assert_conv(
    shape: tuple[int, int, int], taps: int, dtype: torch.dtype, device: str = "cpu", **options: Any
) -> None:
    """Values and all gradients of `causal_conv1d` against the loop."""
    generator = torch.Generator().manual_seed(sum(shape))
    b, _, d = shape

    def normal(*sizes: int) -> Tensor:
        return torch.randn(sizes, generator=generator).to(device, dtype).requires_grad_()

    mine = {
        "x": normal(*shape),
        "weight": normal(d, taps),
        "bias": normal(d),
        "initial_state": normal(b, d, taps - 1),
    }
    theirs = {k: v.detach().double().cpu().requires_grad_() for k, v in mine.items()}
    y = causal_conv1d(**mine, **options)
    seq_idx = options.get("seq_idx")
    wanted = loop_conv(
        **theirs,
        seq_idx=None if seq_idx is None else seq_idx.cpu(),
        silu=options.get("activation", "silu") == "silu",
    )
    assert y.dtype == dtype
    compare((y,), (wanted,), mine, theirs, dtype)


def compare(
    found: tuple[Tensor, ...],
    wanted: tuple[Tensor, ...],
    mine: dict[str, Tensor],
    theirs: dict[str, Tensor],
    dtype: torch.dtype,
) -> None:
    """Outputs and the gradients of all inputs, under random gradients of the outputs."""
    generator = torch.Generator().manual_seed(7)
    grads = [torch.randn(y.shape, generator=generator).to(dtype).double() for y in wanted]
    torch.autograd.backward(found, [g.to(y) for g, y in zip(grads, found, strict=True)])
    torch.autograd.backward(wanted, grads)
    for i, (a, b) in enumerate(zip(found, wanted, strict=True)):
        assert_near(a, b, dtype, f"output {i}")
    for name, tensor in mine.items():
        if tensor.numel():
            assert_near(tensor.grad, theirs[name].grad, dtype, f"gradient of {name}")


def assert_near(found: Tensor, wanted: Tensor, dtype: torch.dtype, what: str) -> None:
    """Within the dtype's tolerance, relative to the largest value."""
    found = found.detach().double().cpu()
    error = (found - wanted.detach()).abs().max() / wanted.abs().max().clamp_min(1e-6)
    assert error <= TOLERANCES[dtype], f"{what}: {float(error.detach()):.1e}"
