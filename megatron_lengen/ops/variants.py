"""The dropout family: z = alpha * b * x_hat + beta, with b ~ Bernoulli(1 - p).

A variant is a function of the row's mean and variance (over the features, biased) and the rate,
returning the coefficients alpha and beta of every row. Registering one makes it available to
`--dropout-variant`, to both placements and to every layout:

    @register_variant("mean_only")
    def mean_only(mean, variance, rate):
        return 1.0, mean * rate

On GPUs a variant's statistics, coefficients and output then take two kernels with PyTorch between
them. A twin in Triton makes it one kernel: a @triton.jit function of the same numbers, for a tile's
rows, which must return the same. It is asked for when first needed, so that a machine without
Triton can run the file:

    def twin():
        import triton

        @triton.jit
        def mean_only(mean, variance, rate):
            return 1.0, mean * rate

        return mean_only

    @register_variant("mean_only", triton=twin)
    def mean_only(mean, variance, rate):
        return 1.0, mean * rate

`--dropout-variant-file FILE` runs such a file. Placement is part of a variant: "after_norm"
variants act between the normalization (its gain included) and the linear projection;
"before_residual" ones on the sublayer's output.
"""

from __future__ import annotations

import functools
import os
import sys
import types
from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

Coefficients = Callable[[Tensor, Tensor, float], tuple[Tensor, Tensor]]
Placement = Literal["after_norm", "before_residual"]


class Variant(NamedTuple):
    """One member of the family."""

    name: str
    coefficients: Coefficients
    placement: Placement
    triton: Callable[[], Any] | None = None


_REGISTRY: dict[str, Variant] = {}


def register_variant(
    *names: str,
    placement: Placement = "after_norm",
    triton: Callable[[], Any] | None = None,
) -> Callable[[Coefficients], Coefficients]:
    """Register a coefficient function under one or more names.

    Args:
        names: the first is the variant's name, the others are aliases.
        placement: where the variant acts.
        triton: returns the function's twin, a @triton.jit function that gets mean and variance as
            fp32 [rows] and the exact rate, and returns alpha and beta, each [rows] or one number.
            Without one the variant runs on GPUs too, in two kernels instead of one. It serves
            forward alone; derivatives are always the function's.

    The function gets mean and variance as fp32 [s, b] (the statistics of the tensor that is
    masked) and the exact rate, and returns alpha and beta, each [s, b] or one number for all rows.
    It must be differentiable where --dropout-no-detach-alpha or --dropout-no-detach-beta are to be
    used with it.

    Raises:
        ValueError: if a name is taken.
    """

    def register(function: Coefficients) -> Coefficients:
        for name in names:
            if name in _REGISTRY or name == "none":
                raise ValueError(f"dropout variant {name!r} is registered already")
        twin = None if triton is None else functools.cache(triton)
        _REGISTRY.update(dict.fromkeys(names, Variant(names[0], function, placement, twin)))
        return function

    return register


def load_variant_file(path: str) -> None:
    """Run a Python file that registers variants; a file that was run already is not run again.

    Raises:
        OSError: if the file cannot be read.
        Exception: whatever the file itself raises.
    """
    name = f"{__name__}.{os.path.realpath(path)}"
    if name in sys.modules:
        return
    with open(path, encoding="utf-8") as file:
        code = compile(file.read(), path, "exec")
    module = types.ModuleType(name)
    module.__file__ = path
    exec(code, module.__dict__)
    sys.modules[name] = module


def variant_names() -> tuple[str, ...]:
    """Every name that `--dropout-variant` takes besides `none`."""
    return tuple(_REGISTRY)


def get_variant(name: str) -> Variant:
    """The variant registered as `name`; KeyError if there is none."""
    return _REGISTRY[name]


def row_coefficients(
    name: str, mean: Tensor, variance: Tensor, rate: float
) -> tuple[Tensor, Tensor]:
    """alpha and beta of every row under the variant `name`, whatever form it returned them in.

    Args:
        mean, variance: [s, b] statistics of the tensor that is masked, over its features.
        rate: the exact rate.

    Returns:
        alpha and beta, [s, b] each, contiguous, in mean's dtype.

    Raises:
        ValueError: if the variant's coefficients do not fit the rows.
    """
    found = get_variant(name).coefficients(mean, variance, rate)
    try:
        alpha, beta = (
            torch.as_tensor(c, dtype=mean.dtype, device=mean.device).expand_as(mean).contiguous()
            for c in found
        )
    except (RuntimeError, TypeError, ValueError) as error:
        raise ValueError(
            f"dropout variant {name!r} must return alpha and beta, one number or {list(mean.shape)}"
        ) from error
    return alpha, beta


def _inverted(mean: Tensor, variance: Tensor, rate: float) -> tuple[Tensor, Tensor]:
    """alpha = 1 / (1 - p), beta = 0: the mean of the masked tensor is kept."""
    return torch.full_like(mean, 1.0 / (1.0 - rate)), torch.zeros_like(mean)


def _twin(name: str) -> Callable[[], Any]:
    def load() -> Any:
        from megatron_lengen.ops import variants_triton

        return getattr(variants_triton, name)

    return load


# Sec. 4.3, placed as in Eq. 7.
pre_linear = register_variant("pre_linear", triton=_twin("inverted"))(_inverted)
# Eq. 6: the common placement, on the sublayer's output.
pre_norm = register_variant(
    "pre_norm", "residual", placement="before_residual", triton=_twin("inverted")
)(_inverted)


@register_variant("vpad", triton=_twin("vpad"))
def vpad(mean: Tensor, variance: Tensor, rate: float) -> tuple[Tensor, Tensor]:
    """Variance-Preserving Affine Dropout (Eq. 12): keeps mean and variance of the row.

    alpha = sqrt(variance / ((1 - p) (variance + p mean^2))), beta = mean (1 - alpha (1 - p)).
    A constant row (variance 0) has alpha = 0 and becomes its mean; the derivatives of alpha are
    0 there, where the formula's are not finite.
    """
    constant = variance <= 0
    safe = torch.where(constant, torch.ones_like(variance), variance)
    # mean / sigma first: its square and all derivatives then stay finite for rows of any size.
    ratio = 1.0 + rate * (mean / safe.sqrt()).square()
    alpha = torch.where(constant, torch.zeros_like(safe), ((1.0 - rate) * ratio).rsqrt())
    return alpha, mean * (1.0 - alpha * (1.0 - rate))
