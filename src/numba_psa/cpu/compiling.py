"""How the kernels of the CPU path are compiled, cached and spread over threads.

A kernel is a Python function that computes a range of independent work items, one thread at a time:

    @kernel
    def forward(problem, like, scale, begin, end): ...

`problem` points to int64 numbers (addresses, strides, sizes), `like` is a null pointer that only says which element type.
Numba compiles it to a C function, once for each element type, on the first call, and keeps it on disk for the next
process. One small parallel function, `_share`, deals the items of any kernel to the threads in order; who computes an item
changes nothing about it, so results do not depend on the number of threads. (Were each kernel `parallel=True` itself, Numba
would compile it five times over, for the layers of its parallel launch.)
"""

from __future__ import annotations

import contextlib
import ctypes
import threading
from collections.abc import Callable, Sequence
from pathlib import Path

import numba
import numpy as np
from llvmlite import ir
from numba import prange, types
from numba.core.ccallback import CFunc
from numba.extending import intrinsic

_ELEMENTS = {np.dtype(name): getattr(numba.types, name) for name in ("float32", "float64", "uint16", "uint32", "uint64")}
_SOURCES = tuple((source.stat().st_mtime, source.stat().st_size) for source in sorted(Path(__file__).parent.glob("*.py")))
_PROTOTYPE = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_double, ctypes.c_int64, ctypes.c_int64)
"""A compiled kernel: problem, like, scale, begin, end. Called through ctypes it runs without the GIL."""
_compiling = threading.Lock()


def _keep(cache) -> None:
    """Make every source of this package part of what decides whether a kernel on disk is still good.

    Numba looks only at the file in which the compiled function stands; what the kernels call stands in others.
    """
    cache._cache_file._source_stamp = _SOURCES


class Kernel:
    """A function over work items, compiled for each element type when first run."""

    def __init__(self, function: Callable):
        self.function = function
        self._compiled: dict[np.dtype, CFunc] = {}

    def run(
        self, dtype: np.dtype, items: int, problem: Sequence[int], scale: float = 1.0, *, most_threads: int | None = None
    ) -> None:
        """Compute items 0 … items-1 of `problem` on `numba.get_num_threads()` threads, or on `most_threads` if fewer."""
        if items == 0:
            return
        address = self.address(np.dtype(dtype))
        threads = min(items, numba.get_num_threads(), most_threads or items)
        numbers = np.array(problem, np.int64)
        if threads == 1:  # without a parallel region, whose other threads would have to wake up and be waited for
            run_alone(address, numbers.ctypes.data, scale, items)
            return
        with parallel_region():
            _share(address, numbers, scale, items, threads)

    def address(self, dtype: np.dtype) -> int:
        """Of the function compiled for `dtype`, which is compiled now if it is not yet."""
        if dtype not in self._compiled:
            with _compiling:
                if dtype not in self._compiled:
                    self._compiled[dtype] = self._compile(_ELEMENTS[dtype])
        return self._compiled[dtype].address

    def _compile(self, element) -> CFunc:
        arguments = (types.CPointer(types.int64), types.CPointer(element), types.float64, types.int64, types.int64)
        options = {"nopython": True, "error_model": "numpy"}
        compiled = CFunc(self.function, (arguments, types.void), locals={}, options=options)
        # Without a directory for the cache (a read-only installation and no home) the kernel is compiled in each process.
        with contextlib.suppress(RuntimeError):
            compiled.enable_caching()
            _keep(compiled._cache)
        compiled.compile()
        return compiled


kernel = Kernel


def run_alone(address: int, problem: int, scale: float, items: int) -> None:
    """All items of the kernel at `address` on this thread."""
    _PROTOTYPE(address)(problem, None, scale, 0, items)


@intrinsic
def call(_typing, address, problem, scale, begin, end):
    """The compiled kernel at `address`."""

    def generate(context, builder, sig, arguments):
        i64 = ir.IntType(64)
        function = ir.FunctionType(ir.VoidType(), [i64, i64, ir.DoubleType(), i64, i64])
        target = builder.inttoptr(arguments[0], function.as_pointer())
        builder.call(target, [arguments[1], i64(0), *arguments[2:]])
        return context.get_dummy_value()

    return types.void(types.int64, types.uintp, types.float64, types.int64, types.int64), generate


def parallel(function: Callable) -> Callable:
    """The function compiled for several threads, kept on disk where there is a directory for it."""
    try:
        compiled = numba.njit(parallel=True, nogil=True, cache=True)(function)
    except RuntimeError:
        return numba.njit(parallel=True, nogil=True)(function)
    _keep(compiled._cache)
    return compiled


@parallel
def _share(kernel, problem, scale, items, threads):
    for thread in prange(threads):
        call(kernel, problem.ctypes.data, scale, thread * items // threads, (thread + 1) * items // threads)


# ---- the threading layer ----------------------------------------------------------------------------------------------
_turns = threading.Lock()


def parallel_region() -> contextlib.AbstractContextManager:
    """Numba's own workqueue cannot run two parallel regions at once: callers take turns. OpenMP and TBB can."""
    return _turns if threading_layer() == "workqueue" else contextlib.nullcontext()


def threading_layer() -> str:
    """The layer that spreads work over threads: "tbb" or "omp", else "workqueue".

    Numba chooses it when the first parallel function is loaded, in the order of `numba.config.THREADING_LAYER_PRIORITY`
    (tbb, omp, workqueue), or as the user says in `NUMBA_THREADING_LAYER`; this package changes neither. A parallel region
    costs about 2 µs on OpenMP or TBB and 80 µs on workqueue. OpenMP needs the system's libgomp, TBB `pip install tbb`.
    """
    global _layer
    if _layer is None:
        numba.set_num_threads(numba.get_num_threads())  # starts the threads, so that the layer is known
        _layer = numba.threading_layer()
    return _layer


_layer: str | None = None
