"""Memory of a training step of a Mamba2 model on one rank, computed.

Parameters are checked against Hugging Face's Mamba2ForCausalLM. Activations are counted for the
fused kernel of mamba_ssm behind Megatron-Core's mixer, from what it hands to backward; no run has
confirmed them.
"""

from __future__ import annotations

from dataclasses import dataclass

from megatron_lengen.sizing.activations import Step, fused_loss_memory
from megatron_lengen.sizing.memory import StageMemory, state_bytes


@dataclass(frozen=True)
class Mamba2Shape:
    """Sizes of a Mamba2 language model without biases in its projections, embeddings tied.

    Args:
        layers, hidden: number of blocks and width of the residual stream.
        heads, head_dim: of the state space; their product is the inner width.
        state, groups, kernel: state size, groups that share B and C, taps of the convolution.
        vocab: rows of the embedding.
    """

    layers: int
    hidden: int
    heads: int
    vocab: int
    head_dim: int = 64
    state: int = 128
    groups: int = 1
    kernel: int = 4

    @property
    def inner(self) -> int:
        """Width of x and z."""
        return self.heads * self.head_dim

    @property
    def convolved(self) -> int:
        """Channels of x, B and C together."""
        return self.inner + 2 * self.groups * self.state

    @property
    def projected(self) -> int:
        """Width of the input projection's output: z, x, B, C, dt."""
        return self.inner + self.convolved + self.heads

    def parameters(self) -> int:
        """Parameters of the whole model."""
        convolution = self.convolved * (self.kernel + 1)
        projections = self.hidden * (self.projected + self.inner)
        # dt_bias, A_log and D of each head; the block's norm and the gated one.
        block = projections + convolution + 3 * self.heads + self.hidden + self.inner
        return self.layers * block + self.hidden + self.vocab * self.hidden


def mamba2_memory(shape: Mamba2Shape, seq_length: int, bf16: bool, step: Step) -> StageMemory:
    """What a rank holds at the highest point of a step: data parallelism only, no recomputation.

    A block keeps its input and the norm's output [h], the input projection's output, and three
    tensors of the inner width: the scan's output, the gated norm's input and its output.
    """
    e = 2 if bf16 else 4
    tokens = seq_length * step.micro_batch_size
    block = e * (2 * shape.hidden + shape.projected + 3 * shape.inner) + 2 * 4
    norm = e * 2 * shape.hidden
    loss = fused_loss_memory(tokens, shape.hidden, shape.vocab, shape.vocab, e, step.device)
    count = shape.parameters()
    states = state_bytes(count, bf16, step.data_parallel_size, step)
    kept = tokens * (shape.layers * block + norm) + loss.kept
    return StageMemory(count, *states, 0, kept, loss.working)
