"""Runs the Triton kernels of entmax in Triton's interpreter, and prints what was found as JSON.

A process of its own, since Triton reads TRITON_INTERPRET while it is imported.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))
sys.path.insert(0, str(Path(__file__).parents[3]))

import torch
import triton
import triton.language as tl
from attention_cases import Case, largest_error

from megatron_lengen.ops import entmax_kernels, entmax_triton
from megatron_lengen.ops.entmax_triton import Blocks, entmax_attention
from megatron_lengen.ops.weighting import Weighting, naive_attention

CASES = {
    "one key": (Case("slopes documents", 1.5, 1, 1, 2, heads=2), Blocks(16, 16, 4)),
    "grouped heads": (Case("", 1.5, 63, 63, 1, heads=2), Blocks(32, 32, 4)),
    "slopes": (Case("slopes", 1.5, 65, 65, 2, heads=2), Blocks(32, 32, 4)),
    "slopes and window": (Case("slopes window", 1.3, 65, 65, 1, heads=2), Blocks(32, 16, 4)),
    "documents": (Case("documents scale", 2.0, 65, 65, 1, heads=2), Blocks(16, 32, 4)),
    "window": (Case("window", 1.5, 257, 257, 1, heads=1), Blocks(64, 64, 4)),
    "long": (Case("slopes documents", 1.1, 257, 257, 1, heads=1), Blocks(64, 64, 4)),
    "part of a row": (Case("slopes documents window", 1.5, 40, 65, 1, heads=2), Blocks(16, 32, 4)),
    "narrow heads": (Case("", 1.5, 63, 63, 2, 2, 8, torch.float16), Blocks(32, 32, 4)),
    "odd heads": (Case("slopes", 1.5, 33, 33, 1, 1, 24), Blocks(32, 32, 4)),
    "wide heads": (Case("documents", 1.5, 33, 33, 1, 1, 256), Blocks(32, 32, 4)),
    "bf16": (Case("slopes", 1.5, 65, 65, 1, 2, 16, torch.bfloat16), Blocks(32, 32, 4)),
}


@triton.jit
def dot_in_fp32(a, b):
    """The interpreter multiplies the bits of bf16 numbers as if they were integers."""
    return tl.dot(a.to(tl.float32), b.to(tl.float32), input_precision="ieee")


def error_of(case: Case, blocks: Blocks) -> float:
    """Relative error of values and gradients against the definition."""
    qkv, weighting = case.inputs(), case.weighting()
    found = entmax_attention(*qkv, weighting, blocks)
    return largest_error(qkv, found, naive_attention(*qkv, weighting))


def error_of_strided() -> float:
    """Views as Megatron-Core's [s, b, h, d] tensors give them, channels apart, expanded grads."""
    rows = torch.randn(40, 2, 6, 32, generator=torch.Generator().manual_seed(0)).requires_grad_()
    q, k, v = (x.permute(1, 2, 0, 3) for x in rows.split((2, 2, 2), dim=2))
    q, k = q[..., ::2], k[..., 1::2]
    weighting = Weighting(alpha=1.5)
    gradients, outputs = [], []
    for output in (
        entmax_attention(q, k, v[..., :16], weighting, Blocks(32, 32, 4)),
        naive_attention(q, k, v[..., :16], weighting),
    ):
        outputs.append(output)
        gradients += torch.autograd.grad(output.sum(), rows, retain_graph=True)
    errors = (outputs[0] - outputs[1]).abs().max(), (gradients[0] - gradients[1]).abs().max()
    return float(max(errors))


def error_beyond_32_bits() -> float:
    """Heads and rows 2^27 elements apart, of memory that is never touched in between."""
    apart = 2**27
    memory = torch.empty(17 * apart, dtype=torch.float16)
    q = memory.as_strided((1, 17, 5, 16), (1, apart, 16, 1))
    q.copy_(torch.randn(q.shape, generator=torch.Generator().manual_seed(0)))
    k = memory.as_strided((1, 1, 17, 16), (1, 1, apart, 1))
    qkv = [q.requires_grad_(), k.requires_grad_(), k.detach().requires_grad_()]
    weighting = Weighting(alpha=1.5)
    found = entmax_attention(*qkv, weighting, Blocks(16, 16, 4))
    return largest_error(qkv, found, naive_attention(*qkv, weighting))


def share_of_blocks_with_weight() -> float:
    """Under a steep slope, of the blocks that causality leaves."""
    q, k, v = Case("", 1.5, 128, 128, 1, heads=1).inputs()
    output = entmax_attention(
        q, k, v, Weighting(alpha=1.5, slopes=torch.tensor([4.0])), Blocks(16, 16, 4)
    )
    marks = output.grad_fn.saved_tensors[6]
    return float((marks == entmax_kernels.WITH_WEIGHT.value).sum() / (2 * 8 * 9 / 2))


def other_document_changes_bits() -> bool:
    """Whether the last token of document A moves the outputs of document B."""
    q, k, v = (x.detach() for x in Case("", 1.5, 18, 18, 2).inputs())
    weighting = Weighting(alpha=1.5, documents=torch.arange(18).repeat(2, 1) // 9)
    before = entmax_attention(q, k, v, weighting, Blocks(16, 16, 4))
    k[:, :, 8] += 3
    v[:, :, 8] -= 5
    after = entmax_attention(q, k, v, weighting, Blocks(16, 16, 4))
    return not torch.equal(before[:, :, 9:], after[:, :, 9:])


def main() -> None:
    torch.set_num_threads(1)
    entmax_kernels._dot = dot_in_fp32
    found: dict[str, float | bool] = {name: error_of(*of) for name, of in CASES.items()}
    found["strided"] = error_of_strided()
    found["beyond 32 bits"] = error_beyond_32_bits()
    found["share of blocks"] = share_of_blocks_with_weight()
    found["documents leak"] = other_document_changes_bits()
    entmax_triton.MOST_MARKS = 3
    found["shared marks"] = error_of(Case("", 1.5, 65, 97, 1, heads=1), Blocks(16, 16, 4))
    print(json.dumps(found))


if __name__ == "__main__":
    main()
