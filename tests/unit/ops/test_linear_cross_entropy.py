"""Cross-entropy in one step with the output projection, against F.cross_entropy in float64."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from megatron_lengen.ops import linear_cross_entropy as module
from megatron_lengen.ops import native
from megatron_lengen.ops.linear_cross_entropy import linear_cross_entropy, softmax_step

TOKENS, HIDDEN, ROWS = 23, 16, 75
# Largest error over largest value: of losses, of gradients.
TOLERANCES = {
    torch.float64: (1e-12, 1e-12),
    torch.float32: (2e-6, 4e-6),
    torch.bfloat16: (1e-2, 2e-2),
}
MASKS = ("none", "ones", "0 and 1", "fractions", "zeros")
GRADIENTS: dict[str, Callable[[Tensor], Tensor]] = {
    "sum": lambda losses: losses.sum(),
    "five sums": lambda losses: 5 * losses.sum(),
    "mean": lambda losses: losses.mean(),
    "equal numbers": lambda losses: (losses * torch.full_like(losses, 0.3)).sum(),
    "other numbers": lambda losses: (losses * torch.linspace(-1, 2, len(losses)).to(losses)).sum(),
    "squares": lambda losses: losses.square().sum(),
}


def inputs(
    dtype: torch.dtype = torch.float32, tokens: int = TOKENS, scale: float = 0.3
) -> tuple[Tensor, Tensor, Tensor]:
    """hidden, weight, labels; the last row of the weight is a label."""
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(tokens, HIDDEN, generator=generator).to(dtype).requires_grad_()
    weight = (scale * torch.randn(ROWS, HIDDEN, generator=generator)).to(dtype).requires_grad_()
    labels = torch.randint(0, ROWS, (tokens,), generator=generator)
    labels[tokens // 2] = ROWS - 1
    return hidden, weight, labels


def factors_of(mask: str, tokens: int = TOKENS) -> Tensor | None:
    generator = torch.Generator().manual_seed(1)
    if mask == "none":
        return None
    made = {
        "ones": torch.ones(tokens),
        "0 and 1": (torch.rand(tokens, generator=generator) < 0.4).float(),
        "fractions": torch.rand(tokens, generator=generator),
        "zeros": torch.zeros(tokens),
    }
    return made[mask]


def expected_of(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    factors: Tensor | None,
    total: Callable[[Tensor], Tensor] = torch.sum,
) -> tuple[Tensor, ...]:
    """Losses and both gradients in float64, from the same numbers."""
    x, w = (tensor.detach().double().requires_grad_() for tensor in (hidden, weight))
    losses = F.cross_entropy(x @ w.t(), labels, reduction="none")
    if factors is not None:
        losses = losses * factors
    return losses.detach(), *torch.autograd.grad(total(losses), (x, w))


def assert_near(found: Tensor, expected: Tensor, tolerance: float) -> None:
    """By the largest value."""
    assert found.shape == expected.shape
    assert (found.double() - expected).abs().max() <= tolerance * max(expected.abs().max(), 1e-30)


def check(
    of: tuple[Tensor, Tensor, Tensor],
    factors: Tensor | None,
    total: Callable[[Tensor], Tensor] = torch.sum,
    chunk: int | None = 7,
) -> None:
    losses = linear_cross_entropy(*of, factors, chunk=chunk)
    found = (losses, *torch.autograd.grad(total(losses), of[:2]))
    of_losses, of_gradients = TOLERANCES[of[0].dtype]
    expected = expected_of(*of, factors, total)
    for tensor, reference, tolerance in zip(
        found, expected, (of_losses, of_gradients, of_gradients), strict=True
    ):
        assert_near(tensor.detach(), reference, tolerance)
    assert losses.dtype == (torch.float64 if of[0].dtype == torch.float64 else torch.float32)
    assert found[1].dtype == of[0].dtype


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("total", GRADIENTS)
@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
def test_values_and_gradients_are_the_definitions(path, dtype, total, mask):
    check(inputs(dtype), factors_of(mask), GRADIENTS[total])


@pytest.mark.parametrize("chunk", [1, 5, TOKENS - 1, TOKENS, 1000, None])
@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
def test_the_chunks_do_not_matter(path, dtype, chunk):
    check(inputs(dtype), factors_of("fractions"), chunk=chunk)
    check(inputs(dtype), None, chunk=chunk)


@pytest.mark.parametrize("tokens", [0, 1, 2])
def test_few_tokens(path, tokens):
    hidden, weight, labels = inputs(tokens=5)
    few = (hidden.detach()[:tokens].requires_grad_(), weight, labels[:tokens])
    for factors in (None, torch.rand(tokens)):
        losses = linear_cross_entropy(*few, factors)
        gradients = torch.autograd.grad(losses.sum(), few[:2])
        expected = expected_of(*few, factors)
        for tensor, reference in zip((losses.detach(), *gradients), expected, strict=True):
            torch.testing.assert_close(tensor.double(), reference, rtol=1e-5, atol=1e-6)


def test_large_logits_do_not_overflow(path):
    hidden, weight, labels = inputs(scale=1.0)
    with torch.no_grad():
        weight.mul_(1e4 / (hidden @ weight.t()).abs().max())
    expected = expected_of(hidden, weight, labels, None)
    losses = linear_cross_entropy(hidden, weight, labels, torch.ones(TOKENS))
    found = (losses.detach(), *torch.autograd.grad(losses.sum(), (hidden, weight)))
    assert expected[0].max() > 5e3
    # Logits of 1e4 are known to 1e-3 in fp32, probabilities therefore, too.
    for tensor, reference, tolerance in zip(found, expected, (1e-6, 5e-3, 5e-3), strict=True):
        assert_near(tensor, reference, tolerance)


@pytest.mark.parametrize("real", [1, 60, ROWS])
def test_padded_rows_have_no_probability(path, real):
    hidden, weight, labels = inputs()
    labels = labels % real
    losses = linear_cross_entropy(
        hidden, weight, labels, factors_of("fractions"), vocabulary=real, chunk=6
    )
    found = (losses.detach(), *torch.autograd.grad(losses.sum(), (hidden, weight)))
    expected = expected_of(hidden, weight[:real], labels, factors_of("fractions"))
    assert_near(found[0], expected[0], 2e-6)
    assert_near(found[1], expected[1], 4e-6)
    assert_near(found[2][:real], expected[2], 4e-6)
    assert not found[2][real:].any()


def test_what_needs_no_gradient_gets_none(path):
    hidden, weight, labels = inputs()
    mask = factors_of("fractions")
    _, of_hidden, of_weight = expected_of(hidden, weight, labels, mask)
    for factors in (mask, None):
        scale = torch.ones(()) if factors is not None else mask
        losses = linear_cross_entropy(hidden.detach(), weight, labels, factors) * scale
        assert_near(torch.autograd.grad(losses.sum(), weight)[0], of_weight, 4e-6)
        losses = linear_cross_entropy(hidden, weight.detach(), labels, factors) * scale
        assert_near(torch.autograd.grad(losses.sum(), hidden)[0], of_hidden, 4e-6)
    assert not linear_cross_entropy(hidden.detach(), weight.detach(), labels, mask).requires_grad


@pytest.mark.parametrize("mask", ["none", "fractions"])
def test_backward_can_be_run_twice(path, mask):
    hidden, weight, labels = inputs()
    total = 2 * linear_cross_entropy(hidden, weight, labels, factors_of(mask), chunk=4).sum()
    first = torch.autograd.grad(total, (hidden, weight), retain_graph=True)
    kept = [gradient.clone() for gradient in first]
    for gradient, again in zip(kept, torch.autograd.grad(total, (hidden, weight)), strict=True):
        torch.testing.assert_close(again, gradient, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    "mask, total, passes",
    [
        ("ones", "sum", 1),
        ("0 and 1", "mean", 1),
        ("fractions", "five sums", 1),
        ("fractions", "equal numbers", 1),
        ("fractions", "other numbers", 2),
        ("none", "sum", 2),
    ],
)
def test_logits_are_computed_again_only_where_they_must_be(monkeypatch, mask, total, passes):
    steps: list[str] = []

    def counted(step: str, *rest: Tensor) -> None:
        steps.append(step)
        softmax_step(step, *rest)

    monkeypatch.setattr(module, "softmax_step", counted)
    hidden, weight, labels = inputs()
    GRADIENTS[total](linear_cross_entropy(hidden, weight, labels, factors_of(mask))).backward()
    assert len(steps) == passes


def test_without_gradients_there_are_losses_only(path, monkeypatch):
    hidden, weight, labels = inputs()
    mask = factors_of("fractions")
    steps: list[str] = []

    def noted(step: str, *rest: Tensor) -> None:
        steps.append(step)
        softmax_step(step, *rest)

    monkeypatch.setattr(module, "softmax_step", noted)
    with torch.no_grad():
        found = linear_cross_entropy(hidden, weight, labels, mask, chunk=10)
    assert steps == ["measure"] * 3
    assert_near(found, expected_of(hidden, weight, labels, mask)[0], 2e-6)


def test_a_token_that_does_not_count_is_not_computed(path):
    """Whatever stands there: nan would spoil the sum."""
    hidden, weight, labels = inputs()
    mask = factors_of("0 and 1")
    expected = expected_of(hidden, weight, labels, mask)
    with torch.no_grad():
        hidden[mask == 0] = torch.nan
    losses = linear_cross_entropy(hidden, weight, labels, mask)
    found = (losses.detach(), *torch.autograd.grad(losses.sum(), (hidden, weight)))
    for tensor, reference in zip(found, expected, strict=True):
        assert_near(tensor, reference, 4e-6)


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_what_is_not_finite_is_seen(path, value):
    hidden, weight, labels = inputs()
    with torch.no_grad():
        hidden[3, 0] = value
    losses = linear_cross_entropy(hidden, weight, labels, torch.ones(TOKENS))
    finite = losses.isfinite()
    assert not finite[3] and finite[:3].all() and finite[4:].all()


class Largest(TorchDispatchMode):
    """The most elements of a tensor that an operation returns."""

    elements = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        sizes = [leaf.numel() for leaf in tree_leaves(result) if isinstance(leaf, Tensor)]
        self.elements = max([self.elements, *sizes])
        return result


@pytest.mark.parametrize("mask", ["none", "ones", "other numbers"])
def test_no_tensor_of_all_logits(path, mask):
    tokens, chunk = 200, 8
    hidden, weight, labels = inputs(tokens=tokens)
    factors = None if mask == "none" else torch.ones(tokens)
    with Largest() as largest:
        losses = linear_cross_entropy(hidden, weight, labels, factors, chunk=chunk)
        GRADIENTS["other numbers" if mask == "other numbers" else "sum"](losses).backward()
    assert largest.elements == max(tokens * HIDDEN, ROWS * HIDDEN)
    assert largest.elements < tokens * ROWS / 4
    with Largest() as whole:
        F.cross_entropy(hidden @ weight.t(), labels)
    assert whole.elements == tokens * ROWS


@pytest.mark.parametrize("most, chunks, largest", [(10, 11, 10), (70, 4, 64), (500, 1, 201)])
def test_default_chunks_bound_the_logits(monkeypatch, most, chunks, largest):
    tokens = 101 if most == 10 else 201
    monkeypatch.setitem(module.CHUNK_BYTES, "cpu", most * ROWS * 4)
    hidden, weight, labels = inputs(tokens=tokens)
    sizes: list[int] = []

    def noted(step: str, logits: Tensor, *rest: Tensor) -> None:
        sizes.append(len(logits))
        softmax_step(step, logits, *rest)

    monkeypatch.setattr(module, "softmax_step", noted)
    linear_cross_entropy(hidden, weight, labels)
    assert sum(sizes) == tokens and len(sizes) == chunks and max(sizes) == largest


def test_gradients_of_bf16_weights_add_up_in_fp32(path):
    """512 chunks: a sum in bf16 would lose most of what is added to it."""
    tokens = 1024
    generator = torch.Generator().manual_seed(2)
    hidden = (1 + 0.1 * torch.randn(tokens, HIDDEN, generator=generator)).bfloat16()
    weight = torch.zeros(ROWS, HIDDEN, dtype=torch.bfloat16, requires_grad=True)
    labels = torch.zeros(tokens, dtype=torch.int64)
    expected = expected_of(hidden.requires_grad_(), weight, labels, None)[2]
    losses = linear_cross_entropy(hidden, weight, labels, torch.ones(tokens), chunk=2)
    assert_near(torch.autograd.grad(losses.sum(), weight)[0], expected, 1e-2)
    rounded = torch.zeros(HIDDEN, dtype=torch.bfloat16)
    for first in range(0, tokens, 2):
        rounded += (hidden[first : first + 2].detach().double() * (1 - 1 / ROWS)).sum(0).bfloat16()
    error = (rounded.double() + expected[0]).abs().max() / expected.abs().max()
    assert error > 5e-2


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_compiled_softmax_is_exact_to_a_few_units(dtype):
    """Rows of every remainder of the vectors, against float64."""
    if native.load_library() is None:
        pytest.skip("no C++ compiler: the CPU kernels are not built")
    generator = torch.Generator().manual_seed(0)
    for columns in (1, 15, 64, 1000, 1029, 5000):
        logits = (8 * torch.randn(9, columns, generator=generator)).to(dtype)
        labels = torch.randint(0, columns, (9,), generator=generator)
        labels[0], labels[1], labels[2] = columns - 1, -3, columns  # the last two: none here
        factors = torch.linspace(0.5, 2, 9)
        x, statistics = logits.double(), torch.empty(3, 9)
        found = logits.clone()
        softmax_step("both", found, labels, statistics, factors)
        again = logits.clone()
        softmax_step("measure", again, labels, twice := torch.empty(3, 9))
        softmax_step("differentiate", again, labels, twice, factors)
        assert torch.equal(found, again) and torch.equal(statistics, twice)
        here = (labels >= 0) & (labels < columns)
        expected = x.softmax(1)
        expected[here, labels[here]] -= 1
        expected *= factors[:, None]
        # Differences up to 64 are rounded to fp32, by 2^-19, and bf16 to 8 bits.
        unit = 2.0**-18 if dtype == torch.float32 else 2.0**-8
        assert ((found - expected).abs() <= unit * expected.abs() + 1e-7).all()
        assert torch.equal(statistics[0], x.amax(1).float())
        sums = (x - x.amax(1, keepdim=True)).exp().sum(1)
        torch.testing.assert_close(statistics[1].double(), sums, rtol=5e-7, atol=0)
        assert torch.equal(statistics[2][here].to(dtype), logits[here, labels[here]])
        assert not statistics[2][~here].any()


def test_results_do_not_depend_on_the_number_of_threads():
    before, results = torch.get_num_threads(), []
    logits = torch.randn(50, 333, generator=torch.Generator().manual_seed(0))
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            gradient, statistics = logits.clone(), torch.empty(3, 50)
            softmax_step("both", gradient, torch.arange(50), statistics, torch.ones(50))
            results.append((gradient, statistics))
    finally:
        torch.set_num_threads(before)
    for other in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results[0], other, strict=True))


@pytest.mark.parametrize(
    "change, message",
    [
        (lambda x, w, y: (x, w.double(), y, None), "weight"),
        (lambda x, w, y: (x, w[:, 1:], y, None), "weight"),
        (lambda x, w, y: (x, w, y[1:], None), "labels"),
        (lambda x, w, y: (x[None], w, y, None), "hidden"),
        (lambda x, w, y: (x, w, y, torch.ones(3)), "factors"),
    ],
)
def test_what_does_not_belong_together_is_refused(change, message):
    with pytest.raises(ValueError, match=message):
        linear_cross_entropy(*change(*inputs()))


def test_more_tokens_than_rows_of_the_weight_are_refused():
    with pytest.raises(ValueError, match="vocabulary 76 with 75 rows"):
        linear_cross_entropy(*inputs(), vocabulary=ROWS + 1)


def test_on_gpus_rows_of_logits_begin_at_multiples_of_128_bytes():
    hidden = torch.empty(5, 8, dtype=torch.bfloat16, device="meta")
    logits = module.logits_memory(hidden, 5, 50257)
    assert logits.shape == (5, 50257) and logits.stride() == (50304, 1)
    assert module.logits_memory(hidden, 5, 64).is_contiguous()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_rows_of_logits_may_lie_apart(monkeypatch, dtype):
    """As they do on GPUs."""

    def apart(hidden: Tensor, tokens: int, columns: int) -> Tensor:
        return hidden.new_full((tokens, columns + 5), torch.nan)[:, :columns]

    x, w, labels = inputs(dtype)
    results = []
    for memory in (module.logits_memory, apart):
        monkeypatch.setattr(module, "logits_memory", memory)
        losses = linear_cross_entropy(x, w, labels, torch.ones(len(x)), chunk=7)
        results.append((losses, *torch.autograd.grad(losses.sum(), (x, w))))
    for one, other in zip(*results, strict=True):
        torch.testing.assert_close(one, other)
