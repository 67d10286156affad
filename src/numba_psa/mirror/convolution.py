"""The convolutions around the attention, and its layout in tokens, as plainly as can be: one thread an element."""

from __future__ import annotations

import math
from typing import Any

from numba_psa._numba_cuda import cuda
from numba_psa.mirror.elements import Element
from numba_psa.mirror.launch import launch

THREADS = 128


def convolution_kernel(element: Element):
    """y[b, o, i, j] = act(bias[o] + Σ weight[o, c, dy, dx] · x[b, c', s·i + dy - k//2, s·j + dx - k//2]) + add[b, o, i, j].

    A thread an element of y; c' = c + o // (c_out / groups) * (c_in / groups); s the stride, act SiLU or nothing.
    """
    widen, narrow, real = element.widen, element.narrow, element.real

    def kernel(x, weight, bias, add, y, stride, silu, adds):
        index = cuda.grid(1)
        if index >= y.size:
            return
        _, channels, height, width = y.shape
        j, i = index % width, index // width % height
        o, b = index // (width * height) % channels, index // (width * height * channels)
        c_in, k = weight.shape[1], weight.shape[2]
        group = o // (channels * c_in // x.shape[1])

        total = bias[o]
        for c in range(c_in):
            for dy in range(k):
                for dx in range(k):
                    row, column = stride * i + dy - k // 2, stride * j + dx - k // 2
                    if row >= 0 and row < x.shape[2] and column >= 0 and column < x.shape[3]:
                        total += weight[o, c, dy, dx] * widen(x[b, group * c_in + c, row, column])
        if silu:
            smaller = math.exp(-abs(total))  # exp(-total) would overflow
            total = total * (real(1) if total > real(0) else smaller) / (real(1) + smaller)
        if adds:
            total += widen(add[b, o, i, j])
        y[b, o, i, j] = narrow(total)

    return kernel


def transpose_kernel():
    """y[bh, j, i] = x[bh, first + i, j]: a thread an element of y."""

    def kernel(x, first, y):
        index = cuda.grid(1)
        if index >= y.size:
            return
        _, rows, columns = y.shape
        i, j, bh = index % columns, index // columns % rows, index // (columns * rows)
        y[bh, j, i] = x[bh, first + i, j]

    return kernel


def convolve(element: Element, x: Any, weight: Any, bias: Any, add: Any, y: Any, stride: int, silu: bool) -> None:
    """y = act(weight * x + bias) + add, NCHW device arrays of the storage type; weight and bias in `element.real`."""
    arguments = x, weight, bias, y if add is None else add, y, stride, silu, add is not None
    launch(convolution_kernel, (element,), (-(-y.size // THREADS),), THREADS, *arguments)


def transpose(x: Any, first: int, y: Any) -> None:
    """y[bh, j, i] = x[bh, first + i, j]."""
    launch(transpose_kernel, (), (-(-y.size // THREADS),), THREADS, x, first, y)
