"""All that is particular to numba-cuda and to its simulator, so that a move to a successor touches one module.

The simulator runs the same kernels in Python threads: set NUMBA_ENABLE_CUDASIM=1 before anything imports numba.cuda.
"""

from __future__ import annotations

import sys
import warnings
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import numpy as np
from numba import config

from numba_psa.devices import INSTALL, gpu_problem
from numba_psa.errors import BackendUnavailableError
from numba_psa.numerics import BFLOAT16

try:
    from numba import cuda
    from numba.cuda.core.errors import NumbaPerformanceWarning
except ImportError as error:
    raise BackendUnavailableError(f"numba-cuda cannot be imported ({error}): {INSTALL}") from error

SIMULATED = bool(config.ENABLE_CUDASIM)
MAX_GRID_X = 2**31 - 1
MAX_GRID_Y = 65_535
MAX_THREADS = 1024

__all__ = [
    "MAX_GRID_X",
    "MAX_GRID_Y",
    "MAX_THREADS",
    "SIMULATED",
    "add_atomically",
    "compile_ptx",
    "cuda",
    "device_function",
    "flat_copy",
    "is_device_array",
    "require_device",
    "run_kernel",
    "to_device",
    "to_host",
    "to_numba_array",
    "write_back",
]


def require_device(impl: str) -> None:
    """BackendUnavailableError unless kernels can run: on a GPU, or in the simulator."""
    if SIMULATED:
        return
    problem = gpu_problem()
    if problem:
        raise BackendUnavailableError(
            f"impl={impl!r} needs a CUDA GPU, and there is none ({problem}). Set NUMBA_ENABLE_CUDASIM=1 to run its "
            "kernels, slowly, in Numba's simulator, or take impl='cpu' or impl='oracle'"
        )


def compile_ptx(kernel: Any, signature: Any, cc: tuple, *, fastmath: bool = False, launch_bounds: Any = None) -> str:
    """PTX of a kernel function for a compute capability, (8, 0) or (9, 0, "a").

    launch_bounds: threads a block, or that and the blocks that a multiprocessor must have room for. Needs the toolkit
    wheels of the cu12 or cu13 extra, no GPU.
    """
    if SIMULATED:
        raise BackendUnavailableError("the CUDA simulator cannot compile to PTX: unset NUMBA_ENABLE_CUDASIM")
    options = {"device": False, "abi": "numba", "fastmath": fastmath, "launch_bounds": launch_bounds}
    try:
        with _pretend_device(cc[:2]):
            return cuda.compile(kernel, signature, cc=cc, **options)[0]
    except cuda.cudadrv.error.NvvmSupportError as error:
        raise BackendUnavailableError(f"compiling to PTX needs NVVM, which is not installed: {INSTALL}") from error


@contextmanager
def _pretend_device(cc: tuple[int, int]):
    """numba-cuda asks the current device for its architecture when a kernel calls a function, though it was told one."""
    from numba.cuda import dispatcher

    real = dispatcher.get_current_device
    dispatcher.get_current_device = lambda: SimpleNamespace(compute_capability=cc)
    try:
        yield
    finally:
        dispatcher.get_current_device = real


if SIMULATED:
    from numba.core.types import Type
    from numba.cuda.simulator.kernelapi import FakeCUDAAtomic, FakeCUDAShared
    from numba.np.numpy_support import as_dtype

    _shared_array = FakeCUDAShared.array

    def _array_of_block(self, shape, dtype, alignment=None):
        """A block's one array for the line that asks. The simulator's own looks it up and then makes it, so that lanes which
        come at the same moment get one each, and what they write is not shared."""
        if shape == 0 or alignment is not None:
            return _shared_array(self, shape, dtype, alignment)
        line = sys._getframe(1)
        array = np.empty(shape, as_dtype(dtype) if isinstance(dtype, Type) else dtype)
        return self._allocations.setdefault((line.f_code.co_filename, line.f_lineno), array)

    FakeCUDAShared.array = _array_of_block

    def device_function(function):
        """In the simulator a device function is a Python function."""
        return function

    def add_atomically(target, i, x):
        FakeCUDAAtomic().add(target, i, x)  # the simulator swaps the name `cuda` only in the module of the kernel itself
else:

    def device_function(function):
        """A function that kernels can call, and that always dissolves into its caller."""
        return cuda.jit(device=True, forceinline=True)(function)

    @device_function
    def add_atomically(target, i, x):
        """target[i] += x as one indivisible step; not for halves, of which numba-cuda has no atomics."""
        cuda.atomic.add(target, i, x)


def run_kernel(kernel: Any, grid: Any, block: int, *arguments: Any) -> None:
    """Launch on the default stream, without Numba's advice on small grids: here they are no mistake."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", NumbaPerformanceWarning)
        kernel[grid, block](*arguments)


# ---- arrays -----------------------------------------------------------------------------------------------------------
def is_device_array(array: Any) -> bool:
    """Whether `array` lives on a CUDA device (or is the simulator's stand-in for one that does)."""
    return hasattr(array, "__cuda_array_interface__") or hasattr(array, "__cuda_ndarray__")


def to_numba_array(array: Any) -> Any:
    """A device array of any library as Numba's own, sharing memory."""
    return array if hasattr(array, "__cuda_ndarray__") else cuda.as_cuda_array(array)


def flat_copy(array: Any, stream: Any = 0) -> Any:
    """The elements of a Numba device array in C order as a 1-D device array: a view where it is contiguous, else a copy."""
    if array.is_c_contiguous():
        return array.reshape(array.size)
    flat = cuda.device_array(array.shape, array.dtype)
    _copy(array, flat, stream)
    return flat.reshape(array.size)


def write_back(flat: Any, array: Any, stream: Any = 0) -> None:
    """The reverse of `flat_copy`: elements of `flat` into the strided device array `array`."""
    _copy(flat.reshape(array.shape), array, stream)


def _copy(source: Any, target: Any, stream: Any) -> None:
    if source.size:
        blocks = min(-(-source.size // 256), 2**16)
        _copy_kernel[blocks, 256, stream](_four_dimensional(source), _four_dimensional(target))


def _four_dimensional(array: Any) -> Any:
    missing = 4 - array.ndim
    if SIMULATED:
        return array.reshape((1,) * missing + array.shape)
    return cuda.cudadrv.devicearray.DeviceNDArray(
        (1,) * missing + array.shape, (0,) * missing + array.strides, _transport(array.dtype), gpu_data=array.gpu_data
    )


@cuda.jit
def _copy_kernel(source, target):
    """target[...] = source, element by element, whatever their strides."""
    _, d1, d2, d3 = source.shape
    for i in range(cuda.grid(1), source.size, cuda.gridsize(1)):
        x = i % d3
        y = i // d3 % d2
        c = i // (d3 * d2) % d1
        b = i // (d3 * d2 * d1)
        target[b, c, y, x] = source[b, c, y, x]


def to_device(array: np.ndarray, dtype: np.dtype | None = None) -> Any:
    """A copy on the device in C order, seen as elements of `dtype` of the same size. numba-cuda cannot move a bfloat16."""
    flat = np.ascontiguousarray(array).view(_transport(array.dtype)).reshape(-1)
    return cuda.to_device(flat).view(dtype or array.dtype).reshape(array.shape)


def to_host(array: Any) -> np.ndarray:
    """A contiguous Numba device array as a NumPy array."""
    return array.view(_transport(array.dtype)).copy_to_host().view(array.dtype)


def _transport(dtype: np.dtype) -> np.dtype:
    return np.dtype(np.uint16) if dtype == BFLOAT16 else dtype
