"""NumPy arrays as arguments and as targets: what every implementation that takes them checks alike."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import ArrayLike

from numba_psa.errors import DTypeError, ParameterError
from numba_psa.numerics import check_dtypes
from numba_psa.shapes import check_shape


def as_floats(**arrays: ArrayLike) -> tuple[list[np.ndarray], np.dtype]:
    """The named arrays as NumPy arrays, and the one dtype they share (see `numerics.check_dtypes`)."""
    found = {name: np.asarray(x) for name, x in arrays.items()}
    return list(found.values()), check_dtypes(**{name: x.dtype for name, x in found.items()})


def quiet():
    """NaN, inf and rounding to a smaller range are values here, not accidents."""
    return np.errstate(all="ignore")


def check_target(name: str, target: object, shape: Sequence[int], axes: Sequence[str], dtype: np.dtype) -> None:
    """DTypeError, ShapeError or ParameterError unless `target` is an array that such a result can be written into."""
    if not isinstance(target, np.ndarray):
        raise DTypeError(f"{name} is changed in place: it must be a numpy.ndarray, got {type(target).__name__}")
    check_shape(name, target.shape, shape, axes)
    check_dtypes(**{name: target.dtype})
    if target.dtype != dtype:
        raise DTypeError(f"{name} has dtype {target.dtype}, expected {dtype}")
    if not target.flags.writeable:
        raise ParameterError(f"{name} is read-only, but the result is written into it")


def target_or_zeros(name: str, target: object, shape: Sequence[int], axes: Sequence[str], dtype: np.dtype) -> np.ndarray:
    """The array to add into: the caller's, checked, or zeros."""
    if target is None:
        return np.zeros(shape, dtype)
    check_target(name, target, shape, axes, dtype)
    return target
