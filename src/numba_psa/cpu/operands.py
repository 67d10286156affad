"""NumPy arrays as the kernels see them: an address and strides in elements."""

from __future__ import annotations

import numpy as np

from numba_psa.arrays import quiet
from numba_psa.cpu.vector import VECTOR_BYTES
from numba_psa.numerics import FLOAT32, HALVES

Operand = tuple[int, int, int, int]
"""Address, and strides in elements of bh, channel and token."""


def widened(*arrays: np.ndarray) -> list[np.ndarray]:
    """Halves (and l, float32 beside them) as float32; other arrays as they are, or `addressable`."""
    if arrays[0].dtype not in HALVES:
        return [addressable(x) for x in arrays]
    with quiet():
        return [x.astype(FLOAT32, copy=False) for x in arrays]


def addressable(x: np.ndarray) -> np.ndarray:
    """x, or a copy where its elements do not stand at multiples of their size."""
    flags = x.flags
    if flags.aligned and (flags.c_contiguous or all(stride % x.itemsize == 0 for stride in x.strides)):
        return x
    return x.copy()


def address(x: np.ndarray) -> int:
    """Where element 0 is. The caller keeps x alive."""
    return x.__array_interface__["data"][0]


def operand(x: np.ndarray) -> Operand:
    """`[BH, tokens, channels]` of any strides."""
    bh, token, channel = (stride // x.itemsize for stride in x.strides)
    return address(x), bh, channel, token


def tiles(tokens: int, dtype: np.dtype) -> int:
    """Tiles of LANES tokens."""
    return -(-tokens // (VECTOR_BYTES // dtype.itemsize))
