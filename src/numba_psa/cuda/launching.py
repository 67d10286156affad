"""Loading compiled kernels onto the current device and launching them with as little host work as there can be."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache, partial
from typing import Any

import numpy as np

from numba_psa._numba_cuda import MAX_GRID_Y, SIMULATED, cuda, require_device
from numba_psa.cuda.compiling import cubin_of, entry_of
from numba_psa.errors import BackendUnavailableError

SMALLEST_ARCH = 80
_CTYPES = {"int64": ctypes.c_int64, "int32": ctypes.c_int32, "float32": ctypes.c_float}
_INVALID_CONTEXT = 201


@cache
def architecture(device: int | None = None) -> int:
    """Compute capability of a device (the current one) as one number, 90 for 9.0; the simulator takes every kernel.

    Raises BackendUnavailableError where there is no GPU or one that these kernels are not made for.
    """
    require_device("cuda")
    if SIMULATED:
        return 90
    major, minor = cuda.get_current_device().compute_capability
    if 10 * major + minor < SMALLEST_ARCH:
        raise BackendUnavailableError(
            f"impl='cuda' needs tensor cores of compute capability 8.0 or later, this GPU has {major}.{minor}: "
            "impl='mirror' runs on it"
        )
    return 10 * major + minor


def current_device() -> int:
    """The ordinal of the device that the calling thread works on."""
    if SIMULATED:
        return 0
    require_device("cuda")
    from cuda.bindings import driver

    status, device = driver.cuCtxGetDevice()
    return cuda.get_current_device().id if status else int(device)  # this thread may not have used CUDA yet


class Kernel:
    """A kernel on one device, ready to launch: `kernel(grid, stream, *arguments)`. Safe to use from several threads."""

    def __init__(self, make: Callable[[Any], Callable], config: Any, signature: Any):
        self.config = config
        self._block = (config.threads, 1, 1)
        self._shared = config.shared_bytes
        self._overlaps = getattr(config, "overlaps", False)
        self._types = tuple(_CTYPES[str(argument)] for argument in signature.args)
        if SIMULATED:
            self._simulated = cuda.jit(make(config))
        else:
            self._load(cubin_of(make, config, signature, architecture(current_device())))

    def _load(self, cubin: bytes) -> None:
        from cuda.bindings import driver

        self._driver = driver
        cuda.current_context()
        self._module = checked(driver.cuModuleLoadData(cubin), "cuModuleLoadData")
        self._function = checked(driver.cuModuleGetFunction(self._module, entry_of(cubin)), "cuModuleGetFunction")
        attribute = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
        checked(driver.cuFuncSetAttribute(self._function, attribute, self._shared), "cuFuncSetAttribute")

    def __call__(self, grid: tuple[int, int, int], stream: int, *arguments: Any, early: bool = False) -> None:
        """early: it may begin before what was launched before it has ended, if it is one that waits for that itself."""
        if SIMULATED:
            self._simulated[grid, self._block, 0, self._shared](*arguments)
            return
        launch, parameters = self._driver.cuLaunchKernel, (arguments, self._types)
        if early and self._overlaps:
            answer = self._driver.cuLaunchKernelEx(self._early(grid, stream), self._function, parameters, 0)
            checked(answer, "cuLaunchKernelEx")
            return
        (status,) = launch(self._function, *grid, *self._block, self._shared, stream, parameters, 0)
        if status == _INVALID_CONTEXT:  # this thread has not used CUDA yet
            cuda.current_context()
            (status,) = launch(self._function, *grid, *self._block, self._shared, stream, parameters, 0)
        if status:
            checked((status,), "cuLaunchKernel")

    def bound(self, grid: tuple[int, int, int], *, early: bool = False) -> Callable[[int, tuple], None]:
        """`launch(stream, arguments)` on one grid, with least host work."""
        if SIMULATED:
            return lambda stream, arguments: self(grid, stream, *arguments)
        if early and self._overlaps:
            launch_of, extended = cache(partial(self._early, grid)), self._driver.cuLaunchKernelEx
            return lambda stream, arguments: checked(
                extended(launch_of(stream), self._function, (arguments, self._types), 0), "cuLaunchKernelEx"
            )
        call = partial(self._driver.cuLaunchKernel, self._function, *grid, *self._block, self._shared)
        types = self._types

        def launch(stream: int, arguments: tuple) -> None:
            if call(stream, (arguments, types), 0)[0]:
                self(grid, stream, *arguments)  # again, from where a thread's first use and errors are seen to

        return launch

    def _early(self, grid: tuple[int, int, int], stream: int) -> Any:
        """The configuration of a launch that may begin early."""
        driver, attribute = self._driver, self._driver.CUlaunchAttribute()
        attribute.id = driver.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
        attribute.value.programmaticStreamSerializationAllowed = 1
        launch = driver.CUlaunchConfig()
        launch.gridDimX, launch.gridDimY, launch.gridDimZ = grid
        launch.blockDimX, launch.blockDimY, launch.blockDimZ = self._block
        launch.sharedMemBytes, launch.hStream = self._shared, driver.CUstream(stream)
        launch.attrs, launch.numAttrs = [attribute], 1
        return launch

    def node(self, grid: tuple[int, int, int], arguments: tuple) -> Any:
        """A launch as the parameters of a node of a CUDA graph."""
        parameters = self._driver.CUDA_KERNEL_NODE_PARAMS()
        parameters.func, parameters.sharedMemBytes = self._function, self._shared
        parameters.gridDimX, parameters.gridDimY, parameters.gridDimZ = grid
        parameters.blockDimX, parameters.blockDimY, parameters.blockDimZ = self._block
        parameters.kernelParams = arguments, self._types
        return parameters


@cache
def _loaded(make: Callable, config: Any, signature: Any, device: int) -> Kernel:
    return Kernel(make, config, signature)


def kernel(make: Callable[[Any], Callable], config: Any, signature: Any) -> Kernel:
    """The kernel of `make(config)` on the current device, compiled and loaded once."""
    return _loaded(make, config, signature, current_device())


def head_runs(heads: int, most: int = MAX_GRID_Y) -> list[tuple[int, int]]:
    """(first, count) of runs of heads that fit the y axis of a grid."""
    return [(first, min(most, heads - first)) for first in range(0, heads, most)]


# ---- memory for the time of a launch ----------------------------------------------------------------------------------
@cache
def memory_pool(device: int) -> Any:
    """A pool of this package's own, which keeps what is given back to it. To be made before a stream is captured."""
    if SIMULATED:
        return None
    from cuda.bindings import driver

    properties = driver.CUmemPoolProps()
    properties.allocType = driver.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
    properties.location.type = driver.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
    properties.location.id = device
    pool = checked(driver.cuMemPoolCreate(properties), "cuMemPoolCreate")
    keep = driver.cuuint64_t(2**64 - 1)
    threshold = driver.CUmemPool_attribute.CU_MEMPOOL_ATTR_RELEASE_THRESHOLD
    checked(driver.cuMemPoolSetAttribute(pool, threshold, keep), "cuMemPoolSetAttribute")
    return pool


@contextmanager
def borrowed(count: int, stream: int, device: int) -> Iterator[int]:
    """The address of `count` bytes for what is launched on a stream meanwhile. Waits for nothing; graphs can capture it."""
    if SIMULATED:
        memory = np.empty(count + 16, np.uint8)
        yield memory.ctypes.data + 15 & ~15
        return
    from cuda.bindings import driver

    pointer = checked(driver.cuMemAllocFromPoolAsync(count, memory_pool(device), stream), "cuMemAllocFromPoolAsync")
    try:
        yield int(pointer)
    finally:
        checked(driver.cuMemFreeAsync(pointer, stream), "cuMemFreeAsync")


def checked(answer: tuple, call: str) -> Any:
    """The result of a driver call, or BackendUnavailableError."""
    status, *results = answer
    if status:
        raise BackendUnavailableError(f"the CUDA driver answers {call} with {status!r}")
    return results[0] if results else None
