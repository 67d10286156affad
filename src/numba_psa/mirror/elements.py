"""Element types inside a mirror kernel: how one is stored, widened to what sums are kept in, and narrowed again."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numba
import numpy as np

from numba_psa._numba_cuda import add_atomically, device_function
from numba_psa.numerics import BFLOAT16, FLOAT16, FLOAT32, FLOAT64


@device_function
def _to_float32(x):
    return np.float32(x)


@device_function
def _to_float64(x):
    return np.float64(x)


@device_function
def _as_stored(x):
    return x  # the store converts


@device_function
def _bfloat16_to_float32(bits):
    return np.uint32(np.uint32(bits) << np.uint32(16)).view(np.float32)  # uint32 << uint32 is uint64 in Numba


@device_function
def _float32_to_bfloat16(x):
    """Round to nearest, ties to even; a NaN stays one."""
    bits = np.float32(x).view(np.uint32)
    if x != x:
        return np.uint16((bits >> np.uint32(16)) | np.uint32(0x40))
    return np.uint16((bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16))


@device_function
def _add_float16(target, i, x):
    target[i] = np.float32(target[i]) + x


@device_function
def _add_bfloat16(target, i, x):
    target[i] = _float32_to_bfloat16(_bfloat16_to_float32(target[i]) + x)


@dataclass(frozen=True)
class Element:
    """`dtype` for the caller, `storage` in kernel arguments, `real` for arithmetic and `shared` for its shared arrays."""

    dtype: np.dtype
    storage: np.dtype
    real: type
    shared: numba.types.Type
    widen: Callable
    narrow: Callable
    add: Callable
    """(target, i, x): target[i] += x, atomically as in the original. A GPU has no such atomic for halves in numba-cuda:
    they are added plainly, which is as safe, for within a launch each element has one writer."""


ELEMENTS = {
    element.dtype: element
    for element in (
        Element(FLOAT64, FLOAT64, np.float64, numba.float64, _to_float64, _as_stored, add_atomically),
        Element(FLOAT32, FLOAT32, np.float32, numba.float32, _to_float32, _as_stored, add_atomically),
        Element(FLOAT16, FLOAT16, np.float32, numba.float32, _to_float32, _as_stored, _add_float16),
        # numba-cuda converts bfloat16 by calls into a header compiled at run time; integer operations do it as well
        Element(
            BFLOAT16,
            np.dtype(np.uint16),
            np.float32,
            numba.float32,
            _bfloat16_to_float32,
            _float32_to_bfloat16,
            _add_bfloat16,
        ),
    )
}
