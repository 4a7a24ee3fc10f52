"""Makes the first call of torch's mathematical functions in one thread.

On a CPU torch computes them by oneMKL, which chooses the code of each function at the function's
first call. If several threads make that call at once, one of them may compute its part by code of
low precision: oneMKL 2024.2 in torch's wheels, https://github.com/pytorch/pytorch/issues/188792.
Without the calls here, one server in a hundred had errors of 1.5e-4 in a quarter of its rotary
table, and other bits in every answer.
"""

import functools

import torch

FUNCTIONS = (
    "acos", "asin", "atan", "cos", "cosh", "erf", "erfc", "erfinv", "exp", "exp2", "expm1", "lgamma", "log", "log10", "log1p",
    "log2", "sin", "sinh", "sqrt", "tan", "tanh",
)  # fmt: skip
"""Torch's functions of one tensor that it may compute by oneMKL."""


@functools.cache
def call_functions_once() -> None:
    """Call each function with one float32: that is computed by one thread. Models compute with no
    float64."""
    one = torch.full((1,), 0.5)
    for name in FUNCTIONS:
        getattr(torch, name)(one)
