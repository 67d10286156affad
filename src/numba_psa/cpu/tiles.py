"""What the fused kernels share: strided operands, tiles of LANES tokens, and the matrix product of a tile.

An *operand* is `(address, bh, channel, token)`: where an array `[BH, tokens, channels]` of any strides begins, and the
strides in elements. NCHW has token stride 1, FlashAttention's layout has channel stride 1; nothing is copied for either.
A *tile* holds the channels of LANES neighbouring tokens, one vector a channel: `tile[c*LANES + lane]`.
"""

from __future__ import annotations

from functools import partial

import numpy as np
from numba import njit

from numba_psa.cpu.vector import (
    ROWS,
    VECTOR_BYTES,
    advance,
    fma_rows,
    lanes,
    load,
    load_rows,
    pointer,
    splat,
    store,
    store_rows,
    zero_rows,
)

called = partial(njit, error_model="numpy", no_cpython_wrapper=True, no_cfunc_wrapper=True)
"""Decorator of what kernels call: compiled once, not at each call, where only pointers and numbers are passed."""
inlined = partial(called, forceinline=True)
"""Decorator of what takes or returns vectors, which must stay in the caller's registers."""

HALF_WAY = 4
"""Height of the tiles between full ones and single rows."""


@inlined
def operand(problem, number):
    """The operand that stands as four numbers in `problem`."""
    return problem[4 * number], problem[4 * number + 1], problem[4 * number + 2], problem[4 * number + 3]


@inlined
def operand_pointer(operand, bh, like):
    """Pointer to element [bh, 0, 0]."""
    return advance(pointer(operand[0], like), bh * operand[1])


@inlined
def count_blocks(tokens, width):
    """Tiles that `tokens` tokens fill."""
    return (tokens + width - 1) // width


@inlined
def new_scratch(vectors):
    """Memory for so many vectors."""
    return np.empty((vectors + 1) * VECTOR_BYTES, np.uint8)


@inlined
def spare_vectors(steps, width):
    """Size of the spare of `add_product`."""
    return (ROWS * steps + width - 1) // width


@inlined
def aligned_pointer(scratch, like):
    """Pointer to its first whole vector. `keep(scratch)` after its last use: Numba frees an array after its last mention."""
    return pointer((scratch.ctypes.data + VECTOR_BYTES - 1) // VECTOR_BYTES * VECTOR_BYTES, like)


@inlined
def product(rows, a, index, row, step, tile, steps):
    """rows[r] + Σ_t a[index + r*row + t*step] · tile[t], t = 0 … steps-1 in this order whatever the height of the tile."""
    width = lanes(tile)
    for t in range(steps):
        rows = fma_rows(rows, a, index + t * step, row, load(tile, t * width))
    return rows


@inlined
def for_tiles(body, count, p, arguments):
    """body(zeros, first, *arguments) over rows 0 … count-1 in tiles of len(zeros) = ROWS, then HALF_WAY, then 1."""
    first = 0
    while first + ROWS <= count:
        body(zero_rows(p, ROWS), first, *arguments)
        first += ROWS
    while first + HALF_WAY <= count:
        body(zero_rows(p, HALF_WAY), first, *arguments)
        first += HALF_WAY
    while first < count:
        body(zero_rows(p, 1), first, *arguments)
        first += 1


@inlined
def _add_product_rows(zeros, first, out, a, row, step, tile, steps):
    width = lanes(out)
    rows = load_rows(out, first * width, width, zeros)
    store_rows(out, first * width, width, product(rows, a, first * row, row, step, tile, steps))


@inlined
def _crowded(row, step, width):
    """Whether rows begin almost a multiple of 2048 bytes apart: then all rows of a tile want the same lines of the L1."""
    return step == 1 and (row * (VECTOR_BYTES // width) + 64) % 2048 < 128


@called
def add_product(out, count, a, row, step, tile, steps, spare):
    """out[r] += Σ_t a[r*row + t*step] · tile[t] for `count` rows; spare has room for ROWS rows of a.

    N = 1024, the 32×32 tokens of a 1024 px image, would be half as fast without the copy.
    """
    width = lanes(out)
    crowded = _crowded(row, step, width)
    for first in range(0, count, ROWS):
        rows = min(ROWS, count - first)
        source, stride = advance(a, first * row), row
        if crowded:
            _copy_rows(spare, source, row, rows, steps)
            source, stride = spare, steps
        for_tiles(_add_product_rows, rows, out, (advance(out, first * width), source, stride, step, tile, steps))


@inlined
def _copy_rows(target, source, row, rows, steps):
    """target[r*steps + t] = source[r*row + t]."""
    width = lanes(target)
    for r in range(rows):
        for t in range(0, steps - width + 1, width):
            store(target, r * steps + t, load(source, r * row + t))
        for t in range(steps // width * width, steps):
            target[r * steps + t] = source[r * row + t]


# ---- between tiles and memory -----------------------------------------------------------------------------------------
@inlined
def clear_tile(tile, channels):
    """Zeros."""
    width = lanes(tile)
    for c in range(channels):
        store(tile, c * width, splat(tile, 0.0))


@inlined
def scale_tile(tile, channels, factor):
    """tile[c] *= factor, a vector."""
    width = lanes(tile)
    for c in range(channels):
        store(tile, c * width, load(tile, c * width) * factor)


@called
def load_tile(tile, source, channel, token, first, count, channels):
    """Tokens first … first+count-1, zeros in the lanes beyond."""
    width = lanes(tile)
    if token == 1 and count == width:
        for c in range(channels):
            store(tile, c * width, load(source, first + c * channel))
        return
    for c in range(channels):
        for lane in range(count):
            tile[c * width + lane] = source[(first + lane) * token + c * channel]
        for lane in range(count, width):
            tile[c * width + lane] = 0


@called
def store_tile(target, channel, token, first, count, tile, channels):
    """The first `count` lanes into tokens first … first+count-1."""
    width = lanes(tile)
    if token == 1 and count == width:
        for c in range(channels):
            store(target, first + c * channel, load(tile, c * width))
        return
    for c in range(channels):
        for lane in range(count):
            target[(first + lane) * token + c * channel] = tile[c * width + lane]
