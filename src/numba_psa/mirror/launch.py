"""The host side that all mirror functions share: arrays in, kernels launched, arrays of the caller's kind out."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import numpy as np

from numba_psa._numba_cuda import (
    MAX_GRID_X,
    MAX_GRID_Y,
    MAX_THREADS,
    cuda,
    flat_copy,
    is_device_array,
    require_device,
    run_kernel,
    to_device,
    to_host,
    to_numba_array,
    write_back,
)
from numba_psa.arrays import check_target
from numba_psa.errors import DTypeError, ShapeError
from numba_psa.mirror.elements import ELEMENTS, Element
from numba_psa.numerics import accumulator_dtype, check_dtypes
from numba_psa.shapes import check_shape


class Call:
    """The arrays of one call. All are NumPy arrays or all are device arrays; results are of the same kind.

    Kernels see flat arrays in C order; a strided argument is copied to one, a strided target copied back by `finish`.
    """

    def __init__(self, **arrays: Any):
        on_device = [name for name, x in arrays.items() if is_device_array(x)]
        if on_device and len(on_device) < len(arrays):
            rest = ", ".join(name for name in arrays if name not in on_device)
            raise DTypeError(f"{', '.join(on_device)} lies on the device, but {rest} does not: move one or the other")
        self.on_device = bool(on_device)
        self._arrays = {name: x if self.on_device else np.asarray(x) for name, x in arrays.items()}
        if self.on_device:
            require_device("mirror")
            self._arrays = {name: to_numba_array(x) for name, x in self._arrays.items()}
        self.dtype = check_dtypes(**{name: x.dtype for name, x in self._arrays.items()})
        self.element: Element = ELEMENTS[self.dtype]
        self.real = self.element.real
        self._unfinished: list[Callable[[], None]] = []

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self._arrays[name].shape)

    def flat(self, *names: str) -> list[Any]:
        """The named arguments as flat device arrays."""
        return [self._upload(self._arrays[name], self._storage(name)) for name in names]

    def empty(self, shape: Sequence[int], dtype: np.dtype | None = None) -> Any:
        """A new flat device array for `shape`, of the storage type of the inputs unless `dtype` says otherwise."""
        require_device("mirror")
        return cuda.device_array(int(np.prod(shape)), dtype or self.element.storage)

    def zeros(self, shape: Sequence[int]) -> Any:
        require_device("mirror")
        return cuda.to_device(np.zeros(int(np.prod(shape)), self.element.storage))

    def target(self, name: str, given: Any, shape: Sequence[int], axes: Sequence[str]) -> Any:
        """A flat device array to write into: the caller's array, checked, or zeros."""
        if given is None:
            return self.zeros(shape)
        if self.on_device:
            if not is_device_array(given):
                raise DTypeError(f"{name} must be a device array like the inputs, got {type(given).__name__}")
            array = to_numba_array(given)
            check_shape(name, array.shape, shape, axes)
            if array.dtype != self.dtype:
                raise DTypeError(f"{name} has dtype {array.dtype}, expected {self.dtype}")
        else:
            check_target(name, given, shape, axes, self.dtype)
            array = given
        flat = self._upload(array, self.element.storage)
        if not self.on_device:
            self._unfinished.append(lambda: np.copyto(given, self.result(flat, shape)))
        elif not array.is_c_contiguous():
            self._unfinished.append(lambda: write_back(flat.view(self.dtype), array))
        return flat

    def finish(self, given: Any, flat: Any, shape: Sequence[int]) -> Any:
        """The caller's own target, now holding the result, or a new array if none was given."""
        for write in self._unfinished:
            write()
        self._unfinished.clear()
        return self.result(flat, shape) if given is None else given

    def result(self, flat: Any, shape: Sequence[int], dtype: np.dtype | None = None) -> Any:
        """A flat device array as the caller's kind of array."""
        array = flat.view(dtype or self.dtype).reshape(tuple(shape))
        return array if self.on_device else to_host(array)

    def _storage(self, name: str) -> np.dtype:
        return accumulator_dtype(self.dtype) if name == "l" else self.element.storage

    def _upload(self, array: Any, storage: np.dtype) -> Any:
        require_device("mirror")
        if self.on_device:
            return flat_copy(array).view(storage)
        return to_device(array, storage).reshape(array.size)


@cache
def compiled(factory: Callable, *constants: Any) -> Any:
    """The kernel that `factory` makes for these compile-time constants."""
    return cuda.jit(factory(*constants))


def launch(factory: Callable, constants: tuple, grid: tuple[int, ...], block: int, *arguments: Any) -> None:
    """Run a kernel on `grid` blocks of `block` lanes; nothing to do is done without a launch."""
    if 0 in grid:
        return
    if grid[0] > MAX_GRID_X:
        raise ShapeError(f"{factory.__name__} needs a grid of {grid[0]} blocks on x, CUDA takes at most {MAX_GRID_X}")
    run_kernel(compiled(factory, *constants), grid, block, *arguments)


def batch_head_slices(bh: int) -> list[slice]:
    """BH cut into runs that fit the y axis of a grid."""
    return [slice(first, min(first + MAX_GRID_Y, bh)) for first in range(0, bh, MAX_GRID_Y)]


def check_lanes(name: str, width: int) -> int:
    """`width`, one lane a column, or the ShapeError that says who can."""
    if width > MAX_THREADS:
        raise ShapeError(
            f"{name} = {width} is more than the {MAX_THREADS} threads of a block, one a column: impl='oracle' and "
            "impl='cpu' have no such limit"
        )
    return width
