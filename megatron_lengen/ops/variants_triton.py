"""Coefficients of the package's variants as Triton code: the twins of `ops.variants`.

Mean and variance are fp32 [rows]; so are alpha and beta.
"""

import triton
import triton.language as tl


@triton.jit
def inverted(mean, variance, rate):
    """`variants._inverted`."""
    return tl.zeros_like(mean) + 1.0 / (1.0 - rate), tl.zeros_like(mean)


@triton.jit
def vpad(mean, variance, rate):
    """`variants.vpad`; variances near and below fp32's normal numbers are scaled to be exact."""
    constant, small = variance <= 0, variance < 1e-30
    root = tl.rsqrt(tl.where(small, variance * 2.0**80, variance))
    quotient = tl.where(small, mean * root * 2.0**40, mean * root)
    ratio = 1.0 + rate * (quotient * quotient)
    alpha = tl.where(constant, 0.0, tl.rsqrt((1.0 - rate) * ratio))
    return alpha, mean * (1.0 - alpha * (1.0 - rate))
