"""Convolutions of whole networks, one image at a time, on maps with a frame of zeros (`frames.py`): lanes are tokens.

    convolve   1×1, and 3×3 of stride 1 or 2, with bias, SiLU and a residual in the same pass
    depthwise  3×3, channel by channel

Stride 1 multiplies what it loads from the map where it stands: the taps of a 3×3 are loads from nine places. Stride 2 first
gathers the taps of a vector of output tokens in a tile. Inputs concatenated along channels are given as pieces.
"""

from __future__ import annotations

from numba_psa.cpu.compiling import kernel
from numba_psa.cpu.convolution import products, silu_rows
from numba_psa.cpu.tiles import aligned_pointer, called, for_tiles, inlined, new_scratch
from numba_psa.cpu.vector import (
    ROWS,
    advance,
    broadcast_rows,
    even_lanes,
    exp2,
    fma,
    fma_rows,
    keep,
    lanes,
    load,
    odd_lanes,
    pointer,
    prefetch,
    splat,
    store,
    store_rows,
    where_greater,
    zero_rows,
)
from numba_psa.numerics import LOG2E

MOST_ROWS = 4 * ROWS
"""Most output channels of a work item of `convolve`."""


@inlined
def _rows_1x1(zeros, first, acc, bias, weights, steps, pieces, count, plane, pitch, token):
    """acc[r] = bias[r] + Σ_c weights[r, c] · x[c]."""
    rows, at = broadcast_rows(bias, first, 1, zeros), first * steps
    for piece in range(count):
        source = advance(pointer(pieces[2 * piece], acc), token)
        for c in range(pieces[2 * piece + 1]):
            rows = fma_rows(rows, weights, at, 1, load(source, c * plane))
            prefetch(source, c * plane + lanes(acc), 0)
            at += len(zeros)
    store_rows(acc, first * lanes(acc), lanes(acc), rows)


@inlined
def _rows_3x3(zeros, first, acc, bias, weights, steps, pieces, count, plane, pitch, token):
    """acc[r] = bias[r] + Σ_{c, ky, kx} weights[r, c, ky, kx] · x[c], moved by (ky − 1, kx − 1)."""
    rows, at, height = broadcast_rows(bias, first, 1, zeros), first * steps, len(zeros)
    for piece in range(count):
        source = advance(pointer(pieces[2 * piece], acc), token - pitch - 1)
        for c in range(pieces[2 * piece + 1]):
            for ky in range(3):
                tap = c * plane + ky * pitch
                rows = fma_rows(rows, weights, at, 1, load(source, tap))
                rows = fma_rows(rows, weights, at + height, 1, load(source, tap + 1))
                rows = fma_rows(rows, weights, at + 2 * height, 1, load(source, tap + 2))
                at += 3 * height
    store_rows(acc, first * lanes(acc), lanes(acc), rows)


@called
def _products_1x1(acc, rows, bias, weights, steps, pieces, count, plane, pitch, token):
    for_tiles(_rows_1x1, rows, acc, (acc, bias, weights, steps, pieces, count, plane, pitch, token))


@called
def _products_3x3(acc, rows, bias, weights, steps, pieces, count, plane, pitch, token):
    for_tiles(_rows_3x3, rows, acc, (acc, bias, weights, steps, pieces, count, plane, pitch, token))


@inlined
def _keep_from(tile, at, lane, begun, x):
    """tile[at] = x from `lane` on; `begun` is 1 there and 0 before."""
    if lane > 0:
        half = splat(tile, 0.5)
        x = where_greater(begun, half, x) + where_greater(half, begun, load(tile, at))
    store(tile, at, x)


@called
def _gather_strided(tile, begins, pieces, count, plane, pitch, out_pitch, out_rows, token):
    """tile[(c·3 + ky)·3 + kx] = x[c, 2y + ky − 1, 2x + kx − 1] of LANES output tokens from `token` on.

    They may be the end of one row and the beginning of the next: each row's part is loaded as if the whole vector were in
    its row, and kept from its first lane on. Lanes after the last row hold anything. `begins` has room for two vectors.
    """
    step = lanes(tile)
    store(begins, 0, splat(tile, 0.0))
    store(begins, step, splat(tile, 1.0))
    row, lane = token // out_pitch, 0
    column = token - row * out_pitch
    while lane < step and row < out_rows:
        begun, t = load(begins, step - lane), 0
        for piece in range(count):
            source = advance(pointer(pieces[2 * piece], tile), (2 * row - 1) * pitch + 2 * (column - lane) - 1)
            for c in range(pieces[2 * piece + 1]):
                for ky in range(3):
                    tap = c * plane + ky * pitch
                    a, b = load(source, tap), load(source, tap + step)
                    _keep_from(tile, t, lane, begun, even_lanes(a, b))
                    _keep_from(tile, t + step, lane, begun, odd_lanes(a, b))
                    prefetch(source, tap + 3 * step, 0)  # the lines that the next vector of tokens adds
                    prefetch(source, tap + 4 * step, 0)
                    right = even_lanes(load(source, tap + 2), load(source, tap + 2 + step))
                    _keep_from(tile, t + 2 * step, lane, begun, right)
                    t += 3 * step
        lane += out_pitch - column
        row, column = row + 1, 0


@called
def _finish(out, acc, rows, plane, residual, add, inside):
    """out[r] = acc[r] + residual[r] inside the image, 0 in the frame."""
    step, present, zero = lanes(acc), load(inside, 0), splat(acc, 0.0)
    for r in range(rows):
        x = load(acc, r * step)
        if add:
            x = x + load(residual, r * plane)
        store(out, r * plane, where_greater(present, zero, x))


@called
def _add(acc, rows, residual, plane):
    """acc[r] += residual[r]."""
    step = lanes(acc)
    for r in range(rows):
        store(acc, r * step, load(acc, r * step) + load(residual, r * plane))


@kernel
def convolve(problem, like, scale, begin, end):
    """out = act(w * x + bias) + residual, or act(w * x + bias + residual), which is `early`.

    An item is `most` output channels, or those left, of LANES tokens.

    problem: addresses of out and residual (0: none), their channels a plane apart; of packed weights, of bias, of `inside`
    of their frame; that plane, its pitch, c_out, most, whether act is SiLU; k, stride, plane and pitch of x, input channels,
    whether early, rows of out, pieces of x; for each piece: address, channels. `most` is a multiple of ROWS. (scale
    is not used.)
    """
    out, residual, weights = pointer(problem[0], like), pointer(problem[1], like), pointer(problem[2], like)
    bias, inside = pointer(problem[3], like), pointer(problem[4], like)
    out_plane, out_pitch, c_out, most, silu = problem[5], problem[6], problem[7], problem[8], problem[9]
    side, stride, plane, pitch, c_in = problem[10], problem[11], problem[12], problem[13], problem[14]
    early, late = problem[15] != 0, problem[1] != 0 and problem[15] == 0
    out_rows, count, pieces = problem[16], problem[17], advance(problem, 18)
    step, steps = lanes(like), c_in * side * side
    gathered = steps if stride == 2 else 0
    scratch = new_scratch(most + 2 + gathered)
    acc = aligned_pointer(scratch, like)
    begins = advance(acc, most * step)
    tile = advance(begins, 2 * step)
    groups, loaded = (c_out + most - 1) // most, -1
    for item in range(begin, end):
        token, row = item // groups * step, item % groups * most
        rows = min(most, c_out - row)
        row_bias, row_weights = advance(bias, row), advance(weights, row * steps)
        for r in range(rows):
            prefetch(out, (row + r) * out_plane + token, 1)
        if stride == 2:
            if token != loaded:
                _gather_strided(tile, begins, pieces, count, plane, pitch, out_pitch, out_rows, token)
                loaded = token
            products(acc, rows, row_bias, row_weights, tile, steps)
        elif side == 1:
            _products_1x1(acc, rows, row_bias, row_weights, steps, pieces, count, plane, pitch, token)
        else:
            _products_3x3(acc, rows, row_bias, row_weights, steps, pieces, count, plane, pitch, token)
        at = row * out_plane + token
        if early:
            _add(acc, rows, advance(residual, at), out_plane)
        if silu:
            silu_rows(acc, rows)
        _finish(advance(out, at), acc, rows, out_plane, advance(residual, at), late, advance(inside, token))
    keep(scratch)


@kernel
def depthwise(problem, like, scale, begin, end):
    """out[c] = act(w[c] * x[c] + bias[c]) + residual[c], w 3×3; an item is a channel.

    problem: x, channels of x from head to head and how many of each count; addresses of out and residual (0: none; it may be
    out), of weights `[c, 9]`, of bias, of `inside`; plane, pitch, tiles, whether act is SiLU. (scale is not used.)
    """
    head, head_dim = problem[1], problem[2]
    weights, bias, inside = pointer(problem[5], like), pointer(problem[6], like), pointer(problem[7], like)
    plane, pitch, tiles, silu = problem[8], problem[9], problem[10], problem[11]
    step = lanes(like)
    add, zero = problem[4] != 0, splat(like, 0.0)
    for c in range(begin, end):
        w, h = broadcast_rows(weights, 9 * c, 1, zero_rows(like, 9)), c // head_dim
        source = advance(pointer(problem[0], like), (h * head + c - h * head_dim) * plane - pitch - 1)
        out, residual = advance(pointer(problem[3], like), c * plane), advance(pointer(problem[4], like), c * plane)
        b = broadcast_rows(bias, c, 0, zero_rows(like, 1))[0]
        for upper in range(0, tiles * step, step):
            middle, lower = upper + pitch, upper + 2 * pitch
            total = fma(w[0], load(source, upper), b)
            total = fma(w[1], load(source, upper + 1), total)
            total = fma(w[2], load(source, upper + 2), total)
            total = fma(w[3], load(source, middle), total)
            total = fma(w[4], load(source, middle + 1), total)
            total = fma(w[5], load(source, middle + 2), total)
            total = fma(w[6], load(source, lower), total)
            total = fma(w[7], load(source, lower + 1), total)
            total = fma(w[8], load(source, lower + 2), total)
            if silu:
                total = total / (splat(like, 1.0) + exp2(total * splat(like, -LOG2E)))
            if add:
                total = total + load(residual, upper)
            store(out, upper, where_greater(load(inside, upper), zero, total))
