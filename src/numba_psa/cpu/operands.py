"""NumPy arrays as the kernels see them: an address and strides in elements."""

from __future__ import annotations

import numpy as np

from numba_psa.arrays import quiet
from numba_psa.cpu.vector import VECTOR_BYTES
from numba_psa.numerics import FLOAT32, HALVES


def widened(*arrays: np.ndarray) -> list[np.ndarray]:
    """Halves as float32; other arrays as they are, or `addressable`."""
    with quiet():
        return [x.astype(FLOAT32) if x.dtype in HALVES else addressable(x) for x in arrays]


def addressable(x: np.ndarray) -> np.ndarray:
    """x, or a copy where its elements do not stand at multiples of their size."""
    return x if x.flags.aligned and all(stride % x.itemsize == 0 for stride in x.strides) else x.copy()


def address(x: np.ndarray) -> int:
    """Where element 0 is. The caller keeps x alive."""
    return x.__array_interface__["data"][0]


def operand(x: np.ndarray) -> tuple[int, int, int, int]:
    """`[BH, tokens, channels]` of any strides as (address, bh, channel, token)."""
    bh, token, channel = (stride // x.itemsize for stride in x.strides)
    return address(x), bh, channel, token


def tiles(tokens: int, dtype: np.dtype) -> int:
    """Tiles of LANES tokens."""
    return -(-tokens // (VECTOR_BYTES // dtype.itemsize))
