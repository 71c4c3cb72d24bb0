"""Output projection and cross-entropy in one step: no [tokens, vocabulary] tensor.

For a token with features x, output weights W and label y

    loss = log sum_v exp(W_v x) - W_y x,      d loss / d (W_v x) = softmax(W x)_v - [v = y]

Logits exist for a chunk of tokens at a time. Where the tokens' factors in the sum to be minimized
are known (a loss mask), forward turns a chunk's logits into its part of both gradients at once, so
nothing is computed twice: the approach of Hsu et al. 2024 (arXiv:2410.10989), here with factors of
tokens, fp32 sums over chunks, and a vocabulary divided over ranks (Shoeybi et al. 2019).
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from megatron_lengen.compat import optional_module
from megatron_lengen.ops import linear_cross_entropy_native as compiled
from megatron_lengen.ops import native
from megatron_lengen.ops.products import product, serves, transposed_product

# Bytes of logits that exist at a time. Each chunk adds its part to the whole gradient of the
# weight, which passes through memory for that, so few large chunks are faster than many small ones.
CHUNK_BYTES = {"cpu": 96 * 2**20, "cuda": 512 * 2**20}
_MULTIPLE = 32  # of tokens: matrices of odd sizes are multiplied at a lower speed
# Rows of the weight's gradient whose products join the fp32 sum at a time: few enough to be in
# cache, not so few that threads would meet all the time.
ROWS_AT_A_TIME = 8192


def linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    factors: Tensor | None = None,
    *,
    vocabulary: int | None = None,
    group: dist.ProcessGroup | None = None,
    chunk: int | None = None,
) -> Tensor:
    """Cross-entropy of the logits `hidden @ weight.T`, times `factors`.

    With factors, forward finds the gradients of the sum of what it returns, and backward multiplies
    them by a number. Where the incoming gradient is not the same number for all tokens, and always
    without factors, backward computes the logits again, a chunk at a time.

    Args:
        hidden: [t, h] features of tokens, the same on all ranks of the group.
        weight: [v, h] this rank's rows of the output weights, in the dtype of `hidden`.
        labels: [t] ids in the whole vocabulary; the logit of a label outside of it counts as 0.
        factors: [t] what each loss is multiplied by: a loss mask, or weights. They get no gradient.
        vocabulary: rows of `weight` that are tokens, the first ones; the others, padding, get no
            probability (default: all).
        group: ranks that hold the vocabulary in equal parts, in order. The gradient of `hidden` is
            this rank's part of a sum over them, which is left to the caller.
        chunk: tokens whose logits exist at a time, equal on all ranks (default: what CHUNK_BYTES
            allows).

    Returns:
        [t], fp32 (fp64 for fp64). Softmax and sums over chunks are in that dtype, too; matrices are
        multiplied in their own.

    Raises:
        ValueError: where shapes or dtypes do not belong together.
    """
    if group is not None and group.size() == 1:
        group = None
    vocabulary = weight.shape[0] if vocabulary is None else vocabulary
    _check(hidden, weight, labels, factors, vocabulary)
    if factors is not None:
        factors = factors.detach().to(_wide(hidden.dtype))
        if hidden.device.type == "cpu":  # a GPU would have to be waited for
            counted = factors.nonzero().flatten()
            if len(counted) < len(factors):
                chosen, few = hidden.index_select(0, counted), factors[counted]
                losses = _losses(chosen, weight, labels[counted], few, vocabulary, group, chunk)
                return losses.new_zeros(len(factors)).index_copy(0, counted, losses)
    return _losses(hidden, weight, labels, factors, vocabulary, group, chunk)


def _check(
    hidden: Tensor, weight: Tensor, labels: Tensor, factors: Tensor | None, vocabulary: int
) -> None:
    shapes = {"labels": labels.shape, "factors": labels.shape if factors is None else factors.shape}
    for name, shape in shapes.items():
        if hidden.dim() != 2 or shape != hidden.shape[:1]:
            raise ValueError(f"hidden {tuple(hidden.shape)} with {name} {tuple(shape)}")
    if weight.dim() != 2 or weight.shape[1] != hidden.shape[1] or weight.dtype != hidden.dtype:
        raise ValueError(
            f"hidden {tuple(hidden.shape)} {hidden.dtype} with weight {tuple(weight.shape)} "
            f"{weight.dtype}"
        )
    if not 0 <= vocabulary <= weight.shape[0]:
        raise ValueError(f"vocabulary {vocabulary} with {weight.shape[0]} rows of weight")


def _losses(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    factors: Tensor | None,
    vocabulary: int,
    group: dist.ProcessGroup | None,
    chunk: int | None,
) -> Tensor:
    first = 0 if group is None else group.rank() * weight.shape[0]
    if chunk is None:
        # By all rows, padding or not: ranks exchange messages for every chunk.
        size = weight.shape[0] * hidden.element_size()
        chunk = tokens_of_chunk(len(hidden), size, hidden.device.type)
    work = _Work((labels - first).contiguous(), vocabulary, group, chunk)
    if torch.is_grad_enabled() and (hidden.requires_grad or weight.requires_grad):
        return _LinearCrossEntropy.apply(hidden, weight, factors, work)
    statistics = _no_statistics(hidden)
    _pass(hidden, weight, work, statistics)
    return _from_statistics(statistics, factors)


def tokens_of_chunk(tokens: int, logits: int, device: str) -> int:
    """Tokens whose logits exist at a time: what CHUNK_BYTES allow, in parts as good as equal.

    Args:
        logits: bytes of a token's, of padded rows, too.
        device: `cpu` or a kind of GPU.
    """
    most = max(1, CHUNK_BYTES.get(device, CHUNK_BYTES["cuda"]) // max(1, logits))
    if most >= tokens:
        return max(1, tokens)
    multiple = _MULTIPLE if most >= _MULTIPLE else 1
    most -= most % multiple
    part = -(-tokens // -(-tokens // most))
    return -(-part // multiple) * multiple


def _wide(dtype: torch.dtype) -> torch.dtype:
    """Of statistics, losses and sums over chunks."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def _no_statistics(hidden: Tensor) -> Tensor:
    return hidden.new_empty(3, len(hidden), dtype=_wide(hidden.dtype))


def _from_statistics(statistics: Tensor, factors: Tensor | None) -> Tensor:
    largest, total, label = statistics
    losses = total.log() + (largest - label)
    return losses if factors is None else losses * factors


class _Work(NamedTuple):
    """What both passes share.

    Args:
        labels: [t] ids among this rank's rows; numbers outside of 0 .. vocabulary - 1 are no label
            here.
        vocabulary, group, chunk: as in `linear_cross_entropy`, settled; no group for one rank.
    """

    labels: Tensor
    vocabulary: int
    group: dist.ProcessGroup | None
    chunk: int

    def chunks(self) -> Iterator[slice]:
        """Parts of the tokens."""
        for first in range(0, len(self.labels), self.chunk):
            yield slice(first, min(first + self.chunk, len(self.labels)))


class _LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, factors: Tensor | None, work: _Work
    ) -> Tensor:
        statistics = _no_statistics(hidden)
        wanted = (ctx.needs_input_grad[0], ctx.needs_input_grad[1])
        found = _pass(hidden, weight, work, statistics, factors, wanted)
        ctx.save_for_backward(hidden, weight, statistics, factors)
        ctx.work = work
        ctx.found = None if factors is None else found
        return _from_statistics(statistics, factors)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, None, None]:
        hidden, weight, statistics, factors = ctx.saved_tensors
        found, ctx.found = ctx.found, None  # handed over: nobody else holds them
        number = None if found is None else _one_number(grad)
        if found is None or number is None:
            grad = grad if factors is None else grad * factors
            wanted = (ctx.needs_input_grad[0], ctx.needs_input_grad[1])
            found = _pass(hidden, weight, ctx.work, statistics, grad, wanted, measured=True)
        elif number.is_cuda or float(number) != 1:
            for gradient in found:
                if gradient is not None:
                    gradient.mul_(number)
        return *found, None, None


def _one_number(grad: Tensor) -> Tensor | None:
    """What all elements of a [t] gradient are, if it is one number.

    The gradient of a sum is one number that is only seen as [t]: there is nothing to compare. Only
    for others a GPU is waited for.
    """
    if not len(grad):
        return grad.new_ones(())
    if len(grad) == 1 or grad.stride(0) == 0 or bool((grad == grad[0]).all()):
        return grad[0]
    return None


# ---- chunk by chunk ------------------------------------------------------------------------------


def _pass(
    hidden: Tensor,
    weight: Tensor,
    work: _Work,
    statistics: Tensor,
    factors: Tensor | None = None,
    wanted: tuple[bool, bool] = (True, True),
    measured: bool = False,
) -> tuple[Tensor | None, Tensor | None]:
    """Statistics, or gradients of the sum of factors * losses, or both.

    Args:
        statistics: [3, t] of all ranks: largest logit, sum of exp(logit - largest), label's logit;
            filled unless `measured`.
        factors: [t]; None where no gradients are asked for.
        wanted: gradients of `hidden`, of `weight`.

    Returns:
        Those gradients, or None.
    """
    rows = weight.detach()[: work.vocabulary]
    memory = logits = None
    if not serves(hidden[: work.chunk], rows):  # that library writes to memory of its own
        memory = logits_memory(hidden, min(work.chunk, len(hidden)), work.vocabulary)
    d_hidden = torch.empty_like(hidden) if factors is not None and wanted[0] else None
    d_weight = None
    if factors is not None and wanted[1]:
        d_weight = _WeightGradient(weight, work.vocabulary, len(hidden) <= work.chunk)
    for part in work.chunks():
        x, labels, of_part = hidden.detach()[part], work.labels[part], statistics[:, part]
        logits = None  # its memory goes before the next one's comes
        logits = product(x, rows.t(), None if memory is None else memory[: len(x)])
        if factors is None:
            softmax_step("measure", logits, labels, of_part)
            continue
        if measured:
            softmax_step("differentiate", logits, labels, of_part, factors[part])
        elif work.group is None:
            softmax_step("both", logits, labels, of_part, factors[part])
        else:
            softmax_step("measure", logits, labels, of_part)
            _join(of_part, work.group)
            softmax_step("differentiate", logits, labels, of_part, factors[part])
        if d_hidden is not None:
            d_hidden[part] = product(logits, rows)
        if d_weight is not None:
            d_weight.add(logits, x)
    if factors is None and work.group is not None:
        _join(statistics, work.group)
    del memory, logits  # before the sum is copied
    return d_hidden, None if d_weight is None else d_weight.value()


def logits_memory(hidden: Tensor, tokens: int, columns: int) -> Tensor:
    """Memory for logits [tokens, columns]. On GPUs rows begin at multiples of 64 numbers: tensor
    cores are fed at a fraction of their speed where a vocabulary is odd and rows lie end to end."""
    width = columns if hidden.device.type == "cpu" else -(-columns // 64) * 64
    return hidden.new_empty(tokens, width)[:, :columns]


def _join(statistics: Tensor, group: dist.ProcessGroup) -> None:
    """From this rank's statistics [3, n] to those of the whole vocabulary, with one message."""
    gathered = statistics.new_empty(3 * group.size(), statistics.shape[1])
    dist.all_gather_into_tensor(gathered, statistics.contiguous(), group=group)
    parts = gathered.unflatten(0, (-1, 3))
    largest = parts[:, 0].amax(0)
    # A rank that holds only padding has a largest logit of -inf and a sum of 0.
    total = (parts[:, 1] * (parts[:, 0] - largest).exp()).sum(0)
    statistics.copy_(torch.stack((largest, total, parts[:, 2].sum(0))))


class _WeightGradient:
    """The gradient of a weight [v, h] as a sum over chunks, in fp32 (fp64 for fp64)."""

    def __init__(self, weight: Tensor, vocabulary: int, one_chunk: bool) -> None:
        dtype = weight.dtype if one_chunk else _wide(weight.dtype)
        self._whole = torch.empty(weight.shape, dtype=dtype, device=weight.device)
        self._sum = self._whole[:vocabulary]
        self._dtype, self._empty = weight.dtype, True

    def add(self, d_logits: Tensor, x: Tensor) -> None:
        """d_logits [n, vocabulary], x [n, h]."""
        total, left, first = self._sum, d_logits.t(), self._empty
        self._empty = False
        if total.dtype == x.dtype and not serves(left, x.t()):
            torch.addmm(total, left, x, beta=0 if first else 1, out=total)
        elif x.is_cuda and _adds_in_fp32(x.dtype, x.device):
            _addmm_in_fp32(total, left, x, first)
        else:
            for rows in range(0, len(total), ROWS_AT_A_TIME):
                some = transposed_product(d_logits[:, rows : rows + ROWS_AT_A_TIME], x)
                here = total[rows : rows + ROWS_AT_A_TIME]
                if first:
                    here.copy_(some)
                else:
                    here.add_(some)

    def value(self) -> Tensor:
        """The sum, in the weight's dtype."""
        self._whole[0 if self._empty else len(self._sum) :].zero_()
        return self._whole.to(self._dtype)


@functools.cache
def _adds_in_fp32(dtype: torch.dtype, device: torch.device) -> bool:
    """Whether products of 16-bit matrices can be added to an fp32 one without being rounded."""
    ones = torch.ones(16, 16, dtype=dtype, device=device)
    total = torch.full((16, 16), torch.nan, device=device)
    try:
        _addmm_in_fp32(total, ones, ones, first=True)
        _addmm_in_fp32(total, ones, 2.0**-23 * ones, first=False)
    except (RuntimeError, TypeError):  # a PyTorch or a device without it
        return False
    return bool((total == 16 + 2.0**-19).all())  # which needs all of fp32's bits


def _addmm_in_fp32(total: Tensor, left: Tensor, right: Tensor, first: bool) -> None:
    """total += left @ right; with `first`, total = left @ right."""
    torch.addmm(total, left, right, torch.float32, beta=0 if first else 1, out=total)


# ---- softmax of a chunk --------------------------------------------------------------------------


def softmax_step(
    step: str,
    logits: Tensor,
    labels: Tensor,
    statistics: Tensor,
    factors: Tensor | None = None,
) -> None:
    """Statistics of logits, their gradients in place of them, or both.

    Args:
        step: `measure`, `differentiate` or `both`.
        logits: [n, v], this rank's.
        labels: [n] columns; numbers outside of 0 .. v - 1 are no label.
        statistics: [3, n]: what `measure` writes of this rank and `differentiate` reads of all.
        factors: [n], for gradients, in the dtype of the statistics.
    """
    if not logits.shape[1]:  # a rank with nothing but padding
        if step != "differentiate":
            statistics[0].fill_(-torch.inf)
            statistics[1:].zero_()
        return
    if factors is not None:
        factors = factors.contiguous()
    if native.has_kernels(logits):
        compiled.run(step, logits, labels, statistics, factors)
    elif logits.is_cuda and logits.dtype != torch.float64 and optional_module("triton"):
        from megatron_lengen.ops import linear_cross_entropy_triton

        linear_cross_entropy_triton.run(step, logits, labels, statistics, factors)
    else:
        _by_operations(step, logits, labels, statistics, factors)


def _by_operations(
    step: str, logits: Tensor, labels: Tensor, statistics: Tensor, factors: Tensor | None
) -> None:
    """`softmax_step` with PyTorch's operations."""
    here = (labels >= 0) & (labels < logits.shape[1])
    column = torch.where(here, labels, 0)[:, None]
    x = logits.to(statistics.dtype)
    if step != "differentiate":
        statistics[0] = x.amax(1)
        statistics[1] = (x - statistics[0][:, None]).exp_().sum(1)
        statistics[2] = torch.where(here, x.gather(1, column)[:, 0], 0)
    if step != "measure":
        assert factors is not None
        gradient = (x - statistics[0][:, None]).exp_().mul_((factors / statistics[1])[:, None])
        gradient.scatter_add_(1, column, torch.where(here, -factors, 0)[:, None])
        logits.copy_(gradient)
