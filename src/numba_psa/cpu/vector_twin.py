"""What each building block of `vector` means, in plain Numba on arrays: the tests run the same programs on both.

A pointer is a one-dimensional array here, a vector an array of LANES numbers, rows an array `[rows, LANES]`.
"""

from __future__ import annotations

import numpy as np
from numba import njit

from numba_psa.cpu.vector import VECTOR_BYTES


@njit
def lanes(p):
    return min(VECTOR_BYTES // p.itemsize, 16)


@njit
def advance(p, count):
    return p[count:]


@njit
def load(p, index):
    return p[index : index + lanes(p)].copy()


@njit
def store(p, index, x):
    for lane in range(len(x)):
        p[index + lane] = x[lane]


@njit
def prefetch(p, index, write):
    pass


@njit
def splat(p, scalar):
    return np.full(lanes(p), scalar, p.dtype)


@njit
def fma(a, b, c):
    return a * b + c


@njit
def maximum(a, b):
    result = b.copy()
    for lane in range(len(a)):
        if a[lane] > b[lane]:
            result[lane] = a[lane]
    return result


@njit
def exp2(x):
    return np.exp2(x)


@njit
def even_lanes(a, b):
    return np.concatenate((a, b))[::2].copy()


@njit
def odd_lanes(a, b):
    return np.concatenate((a, b))[1::2].copy()


@njit
def where_greater(a, b, x):
    result = x.copy()
    for lane in range(len(a)):
        if a[lane] <= b[lane]:
            result[lane] = 0
    return result


# ---- rows -------------------------------------------------------------------------------------------------------------
@njit
def zero_rows(p, count):
    return np.zeros((count, lanes(p)), p.dtype)


@njit
def square_rows(p):
    return np.zeros((lanes(p), lanes(p)), p.dtype)


@njit
def load_rows(p, index, stride, like):
    rows = np.empty_like(like)
    for r in range(len(rows)):
        rows[r] = load(p, index + r * stride)
    return rows


@njit
def broadcast_rows(p, index, stride, like):
    rows = np.empty_like(like)
    for r in range(len(rows)):
        rows[r] = p[index + r * stride]
    return rows


@njit
def store_rows(p, index, stride, rows):
    for r in range(len(rows)):
        store(p, index + r * stride, rows[r])


@njit
def transpose_rows(rows):
    return rows.T.copy()


@njit
def fma_rows(rows, a, index, stride, x):
    result = rows.copy()
    for r in range(len(rows)):
        result[r] += a[index + r * stride] * x
    return result


@njit
def exp2_each(rows):
    return np.exp2(rows)


@njit
def subtract_each(rows, b):
    return rows - b


@njit
def multiply_each(rows, b):
    return rows * b


@njit
def max_of_rows(rows):
    largest = rows[0].copy()
    for r in range(1, len(rows)):
        largest = maximum(rows[r], largest)
    return largest


@njit
def sum_of_rows(rows):
    total = rows[0].copy()
    for r in range(1, len(rows)):
        total += rows[r]
    return total
