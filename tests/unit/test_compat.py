"""Megatron-Core's fused functions: compiled when they are called, which most processes never do."""

from __future__ import annotations

import subprocess
import sys


def run(script: str) -> str:
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_a_process_that_builds_a_model_does_not_import_the_compiler():
    imported = run(
        "import sys, megatron_lengen.models.build, megatron_lengen.training.loop\n"
        "print([name for name in ('torch._dynamo', 'torch._inductor') if name in sys.modules])"
    )
    assert imported.strip() == "[]"


def test_a_fused_function_is_compiled_at_its_first_call():
    """What it computes is what PyTorch computes; a compiler that counts shows when it is asked."""
    counts = run("""
import megatron_lengen.config, torch
asked = []
compiler = torch.compile
torch.compile = lambda f: asked.append(f.__name__) or compiler(f, backend="eager")
from megatron.core.fusions.fused_bias_swiglu import swiglu
before = len(asked)
x = torch.randn(3, 8)
gate, up = x.chunk(2, -1)
for _ in range(2):
    assert torch.equal(swiglu(x), torch.nn.functional.silu(gate) * up)
print(before, asked)
""")
    assert counts.strip() == "0 ['swiglu']"
