"""The arrays of a plan's call: each kind of array is checked when it is first seen, then only its address is read."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from numba_psa._numba_cuda import SIMULATED
from numba_psa.cuda.views import dtype_of
from numba_psa.errors import DTypeError, ParameterError, ShapeError
from numba_psa.shapes import check_shape

Expected = tuple[Sequence[int], Sequence[str], np.dtype]
"""Shape, the names of its axes, dtype."""


class ArrayCheck:
    """`check(name, array)` is the address of a contiguous device array of the shape and dtype expected under that name.

    Ints are taken for addresses. Raises ShapeError, DTypeError, ParameterError.
    """

    def __init__(self, **expected: Expected):
        self._expected = expected
        self._known: set[tuple] = set()

    def __call__(self, name: str, array: Any) -> int:
        if type(array) is int:
            return array
        pointer, key = self._look_at(name, array)
        if key not in self._known:
            shape, axes, dtype = self._expected[name]
            check_shape(name, tuple(array.shape), shape, axes)
            if dtype_of(array) != dtype:
                raise DTypeError(f"{name} has dtype {dtype_of(array)}, the plan is for {dtype}")
            if not key[3]:
                raise ParameterError(f"{name} is strided: a plan takes contiguous arrays")
            self._known.add(key)
        return pointer

    def room(self, name: str, array: Any, nbytes: int) -> int:
        """The address of a contiguous device array of any dtype with at least `nbytes` bytes."""
        if type(array) is int:
            return array
        pointer, key = self._look_at(name, array)
        if key not in self._known:
            found = int(np.prod(array.shape, dtype=np.int64)) * dtype_size(array)
            if found < nbytes:
                raise ShapeError(f"{name} has {found} bytes, the plan needs {nbytes}")
            if not key[3]:
                raise ParameterError(f"{name} is strided: a plan takes contiguous arrays")
            self._known.add(key)
        return pointer

    def _look_at(self, name: str, array: Any) -> tuple[int, tuple]:
        if not hasattr(array, "shape"):
            raise DTypeError(f"{name} must be a CUDA array or its address, got {type(array).__name__}")
        if hasattr(array, "data_ptr"):  # torch
            return array.data_ptr(), (name, array.shape, array.dtype, array.is_contiguous())
        if SIMULATED:
            return getattr(array, "_ary", array).ctypes.data, (name, array.shape, array.dtype, True)
        interface = getattr(array, "__cuda_array_interface__", None)
        if interface is None:
            raise DTypeError(f"{name} must be a CUDA array or its address, got {type(array).__name__}")
        return interface["data"][0], (name, interface["shape"], interface["typestr"], interface.get("strides") is None)


def dtype_size(array: Any) -> int:
    """Bytes of an element, of torch's dtypes too."""
    return array.element_size() if hasattr(array, "element_size") else array.dtype.itemsize


def check_alignment(alignment: int, dtype: np.dtype) -> None:
    """ParameterError if addresses are no multiples of an element."""
    if alignment < dtype.itemsize:
        raise ParameterError(f"an address is no multiple of the {dtype.itemsize} bytes of {dtype}")
