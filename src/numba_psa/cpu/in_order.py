"""Many kernels one after the other on several threads, with one call from Python.

Each thread has its share of a kernel's items, the same part in every step, so that it finds in its cache what it wrote
before; when it is done with them it takes from the others. A step is over when its items are done, whoever did them: a
thread that the operating system has put aside for a while is not waited for, unless it holds items. Who computes an item
changes nothing about it.
"""

from __future__ import annotations

import ctypes
import sys

import numba
import numpy as np
from llvmlite import ir
from numba import prange, types
from numba.extending import intrinsic

from numba_psa.cpu.compiling import call, parallel, parallel_region, run_alone

PORTIONS = 8
"""A thread takes this part of a share at a time."""
LINE = 8
"""Counters are this many numbers apart, each in a line of the cache of its own."""
PATIENCE = 4000
"""Looks at a counter before the processor is offered to other threads between looks."""

_I64 = ir.IntType(64)


@intrinsic
def _fetch_add(_typing, address, value):
    """The number at `address`, to which `value` is added in the same moment."""

    def generate(context, builder, sig, arguments):
        return builder.atomic_rmw("add", builder.inttoptr(arguments[0], _I64.as_pointer()), arguments[1], "seq_cst")

    return types.int64(types.int64, types.int64), generate


@intrinsic
def _offer(_typing, function):
    """Call the function at this address, which takes and gives nothing that matters."""

    def generate(context, builder, sig, arguments):
        builder.call(builder.inttoptr(arguments[0], ir.FunctionType(ir.IntType(32), []).as_pointer()), [])
        return context.get_dummy_value()

    return types.void(types.int64), generate


@numba.njit(nogil=True, error_model="numpy")
def _work(thread, threads, steps, scales, counters, offer):
    """A thread's part of all steps; `counters`: of each step, items taken of each share, and items done."""
    for i in range(len(steps)):
        items, first = steps[i, 2], counters + 8 * LINE * i * (threads + 1)
        done = first + 8 * LINE * threads
        for turn in range(threads):
            share = (thread + turn) % threads
            begin, end = share * items // threads, (share + 1) * items // threads
            portion = (end - begin + PORTIONS - 1) // PORTIONS
            while portion:
                at = begin + _fetch_add(first + 8 * LINE * share, portion)
                if at >= end:
                    break
                until = min(at + portion, end)
                call(steps[i, 0], steps[i, 1], scales[i], at, until)
                _fetch_add(done, until - at)
        looks = 0
        while _fetch_add(done, 0) < items:
            looks += 1
            if looks > PATIENCE:
                _offer(offer)


@parallel
def _on_all_threads(steps, scales, counters, threads, offer):
    for thread in prange(threads):
        _work(thread, threads, steps, scales, counters.ctypes.data, offer)


def _yielding() -> int:
    """Address of what offers the processor to other threads."""
    function = ctypes.windll.kernel32.SwitchToThread if sys.platform == "win32" else ctypes.CDLL(None).sched_yield
    return ctypes.cast(function, ctypes.c_void_p).value


_OFFER = _yielding()


def run_in_order(steps: np.ndarray, scales: np.ndarray) -> None:
    """Rows of `steps`: address of a kernel, address of its problem, number of its items (int64); `scales` float64."""
    if not len(steps):
        return
    threads = numba.get_num_threads()
    if threads == 1:
        for (address, problem, items), scale in zip(steps.tolist(), scales.tolist(), strict=True):
            run_alone(address, problem, scale, items)
        return
    counters = np.zeros(len(steps) * (threads + 1) * LINE, np.int64)
    with parallel_region():
        _on_all_threads(steps, scales, counters, threads, _OFFER)
