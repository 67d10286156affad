"""Convolutions of stride 1 on NCHW, with bias, SiLU and a residual in the same pass: lanes are tokens.

`convolve` treats every convolution as a matrix product of weights `[c_out, c_in*k*k]` with the tile of LANES tokens it has
loaded (k*k shifted copies of each channel; one for 1×1). `depthwise` works channel by channel. Zero padding comes from a
table `padding [k*k, tokens]`, 1 where the shifted token lies in the image and 0 outside: what is loaded there is replaced,
so an array that is read with k > 1 needs `halo(k, W)` readable elements before and after it.
"""

from __future__ import annotations

import numpy as np

from numba_psa.cpu.compiling import call, kernel
from numba_psa.cpu.tiles import (
    HALF_WAY,
    aligned_pointer,
    called,
    count_blocks,
    for_tiles,
    inlined,
    load_tile,
    new_scratch,
    product,
    store_tile,
)
from numba_psa.cpu.vector import (
    ROWS,
    VECTOR_BYTES,
    advance,
    broadcast_rows,
    exp2,
    fma_rows,
    keep,
    lanes,
    load,
    pointer,
    splat,
    store,
    store_rows,
    where_greater,
    zero_rows,
)
from numba_psa.numerics import LOG2E

GROUP = 4 * ROWS
"""Output channels of one work item of `convolve`: a multiple of ROWS, so that items begin where packed blocks do."""


def packed(weight: np.ndarray) -> np.ndarray:
    """`[c_out, steps]` in the order in which `convolve` reads it: for each tile of rows, step by step.

    The heights of the tiles are those of `for_tiles`.
    """
    blocks, first = [], 0
    for height in (ROWS, HALF_WAY, 1):
        while first + height <= len(weight):
            blocks.append(weight[first : first + height].T.ravel())
            first += height
    return np.concatenate(blocks)


def padding(kernel_size: int, height: int, width: int, dtype: np.dtype) -> np.ndarray:
    """`[k*k, tokens]`: 1 where token n moved by (dy, dx) is inside the image, else 0; tokens rounded up to whole tiles."""
    tile = VECTOR_BYTES // dtype.itemsize
    n = np.arange(-(-height * width // tile) * tile)
    y, x = n // max(width, 1), n % max(width, 1)
    reach = np.arange(kernel_size) - kernel_size // 2
    rows = (y + reach[:, None] >= 0) & (y + reach[:, None] < height)
    columns = (x + reach[:, None] >= 0) & (x + reach[:, None] < width)
    return (rows[:, None] & columns[None, :]).reshape(kernel_size**2, -1).astype(dtype)


def halo(kernel_size: int, width: int) -> int:
    """Elements that must be readable before and after an array `[…, H, W]` for k×k: whole vectors."""
    reach = (kernel_size // 2) * (width + 1)
    return (reach // VECTOR_BYTES + 2) * VECTOR_BYTES if reach else 0


def groups(c_out: int) -> int:
    """Work items of `convolve` for one tile of tokens."""
    return -(-c_out // GROUP)


@inlined
def _product_rows(zeros, first, acc, bias, weights, tile, steps):
    """acc[r] = bias[r] + Σ_t weights[r, t] · tile[t]."""
    rows = product(broadcast_rows(bias, first, 1, zeros), weights, first * steps, 1, len(zeros), tile, steps)
    store_rows(acc, first * lanes(acc), lanes(acc), rows)


@called
def products(acc, count, bias, weights, tile, steps):
    for_tiles(_product_rows, count, acc, (acc, bias, weights, tile, steps))


@inlined
def _shifted(source, first, width, side, ky, kx, padding, padded):
    """LANES tokens from `first` on, moved by (ky, kx) - side//2, 0 outside the image; `padded`: row length of padding."""
    inside = load(padding, (ky * side + kx) * padded + first)
    moved = load(source, first + (ky - side // 2) * width + kx - side // 2)
    return where_greater(inside, splat(padding, 0.0), moved)


@called
def _load_shifted(tile, source, tokens, first, channels, side, width, padding, padded):
    """tile[(c*side + ky)*side + kx] = channel c, `_shifted`."""
    step = lanes(tile)
    for c in range(channels):
        for ky in range(side):
            for kx in range(side):
                moved = _shifted(advance(source, c * tokens), first, width, side, ky, kx, padding, padded)
                store(tile, ((c * side + ky) * side + kx) * step, moved)


@called
def silu_rows(acc, count):
    """x / (1 + exp(-x))."""
    width = lanes(acc)
    for r in range(count):
        x = load(acc, r * width)
        store(acc, r * width, x / (splat(acc, 1.0) + exp2(x * splat(acc, -LOG2E))))


@called
def _add_residual(acc, count, residual, tokens, first, present):
    """acc[r] += residual[r, first : first+present]."""
    width = lanes(acc)
    for r in range(count):
        if present == width:
            store(acc, r * width, load(acc, r * width) + load(residual, r * tokens + first))
        else:
            for lane in range(present):
                acc[r * width + lane] += residual[r * tokens + first + lane]


@kernel
def convolve(problem, like, scale, begin, end):
    """out = act(w * x + bias) + residual; an item is up to GROUP output channels of LANES tokens of one image.

    problem: out (address, batch stride), residual (address or 0, batch stride); addresses of packed weights, of bias, of
    padding; N, W, k, c_out, whether act is SiLU, pieces; for each piece of x, concatenated along channels: address, batch
    stride, channels. Tokens are contiguous and channels N apart everywhere. (scale is not used.)
    """
    out, residual = pointer(problem[0], like), pointer(problem[2], like)
    weights, bias, padding = pointer(problem[4], like), pointer(problem[5], like), pointer(problem[6], like)
    tokens, width, side, c_out, silu, pieces = problem[7], problem[8], problem[9], problem[10], problem[11], problem[12]
    step, steps = lanes(like), 0
    for piece in range(pieces):
        steps += problem[13 + 3 * piece + 2] * side * side
    blocks, per_tile = count_blocks(tokens, step), (c_out + GROUP - 1) // GROUP
    scratch = new_scratch(steps + GROUP)
    acc = aligned_pointer(scratch, like)
    tile = advance(acc, GROUP * step)
    loaded = -1
    for item in range(begin, end):
        group = item % per_tile
        block = item // per_tile
        b = block // blocks
        first = (block - b * blocks) * step
        present = min(step, tokens - first)
        if block != loaded:
            filled = 0
            for piece in range(pieces):
                channels = problem[13 + 3 * piece + 2]
                source = advance(pointer(problem[13 + 3 * piece], like), b * problem[13 + 3 * piece + 1])
                if side == 1:
                    load_tile(advance(tile, filled * step), source, tokens, 1, first, present, channels)
                else:
                    target = advance(tile, filled * step)
                    _load_shifted(target, source, tokens, first, channels, side, width, padding, blocks * step)
                filled += channels * side * side
            loaded = block
        row = group * GROUP
        count = min(GROUP, c_out - row)
        products(acc, count, advance(bias, row), advance(weights, row * steps), tile, steps)
        if silu:
            silu_rows(acc, count)
        if problem[2]:
            _add_residual(acc, count, advance(residual, b * problem[3] + row * tokens), tokens, first, present)
        store_tile(advance(out, b * problem[1] + row * tokens), tokens, 1, first, present, acc, count)
    keep(scratch)


@kernel
def depthwise(problem, like, scale, begin, end):
    """out[c] = w[c] * v[c] + bias[c] + residual[c] for the values of an attention; an item is LANES tokens of one image.

    problem: v (address, stride of a head), channels of a head; addresses of out and residual, both `[B, c, N]` (they may be
    the same), of weights `[c, k*k]`, of bias, of padding; N, W, k, c. (scale is not used.)
    """
    head, head_dim = problem[1], problem[2]
    weights, bias, padding = pointer(problem[5], like), pointer(problem[6], like), pointer(problem[7], like)
    tokens, width, side, channels = problem[8], problem[9], problem[10], problem[11]
    step = lanes(like)
    blocks, heads = count_blocks(tokens, step), channels // head_dim
    scratch = new_scratch(1)
    tile = aligned_pointer(scratch, like)
    for item in range(begin, end):
        b = item // blocks
        first = (item - b * blocks) * step
        present = min(step, tokens - first)
        for c in range(channels):
            h = c // head_dim
            source = advance(pointer(problem[0], like), (b * heads + h) * head + (c - h * head_dim) * tokens)
            total = broadcast_rows(bias, c, 0, zero_rows(like, 1))
            for ky in range(side):
                for kx in range(side):
                    moved = _shifted(source, first, width, side, ky, kx, padding, blocks * step)
                    total = fma_rows(total, weights, (c * side + ky) * side + kx, 0, moved)
            store_rows(tile, 0, step, total)
            at = (b * channels + c) * tokens
            _add_residual(tile, 1, advance(pointer(problem[4], like), at), tokens, first, present)
            store_tile(advance(pointer(problem[3], like), at), tokens, 1, first, present, tile, 1)
    keep(scratch)


@kernel
def in_turn(problem, like, scale, begin, end):
    """Several kernels one after the other on LANES tokens of one image, which are an item: what one writes is still in the
    cache when the next reads it, and threads meet once for all of them.

    None may read other tokens of what another one writes. problem: tiles of an image, kernels; for each kernel: address,
    address of its problem, and rows and items of a tile, where its items are numbered [image, row, tile, item of the tile].
    """
    blocks, kernels = problem[0], problem[1]
    for item in range(begin, end):
        b = item // blocks
        for i in range(kernels):
            rows, count = problem[4 + 4 * i], problem[5 + 4 * i]
            for row in range(rows):
                first = ((b * rows + row) * blocks + item - b * blocks) * count
                call(problem[2 + 4 * i], problem[3 + 4 * i], scale, first, first + count)
