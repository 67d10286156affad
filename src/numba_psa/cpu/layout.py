"""Moving tokens between channels-first and tokens-first memory, in blocks of LANES × LANES elements transposed in registers.

A *grid* is `(address, outer, inner, token, channel)`: an array `[outer, inner, tokens, channels]` and its strides in
elements. An item is up to TOKENS tokens of one [outer, inner].
"""

from __future__ import annotations

from numba_psa.cpu.compiling import kernel
from numba_psa.cpu.tiles import inlined
from numba_psa.cpu.vector import advance, lanes, load, load_rows, pointer, square_rows, store, transpose_rows

TOKENS = 64


@inlined
def _put(target, index, x):
    store(target, index, x)


@inlined
def _put_one(target, index, x):
    target[index] = x


@inlined
def _add(target, index, x):
    store(target, index, load(target, index) + x)


@inlined
def _add_one(target, index, x):
    target[index] += x


@inlined
def _transposed(put, source, across, target, row):
    """target[r*row + c] = source[c*across + r] for r, c < LANES."""
    rows = transpose_rows(load_rows(source, 0, across, square_rows(source)))
    for r in range(len(rows)):
        put(target, r * row, rows[r])


@inlined
def _move_block(put, put_one, source, target, s, t, tokens, channels):
    """`tokens` tokens of all channels; s and t are the strides (token, channel) of source and target."""
    width = lanes(source)
    for c in range(0, channels, width):
        for n in range(0, tokens, width):
            from_block, to_block = advance(source, n * s[0] + c * s[1]), advance(target, n * t[0] + c * t[1])
            whole = n + width <= tokens and c + width <= channels
            if whole and s[0] == 1 and t[1] == 1:
                _transposed(put, from_block, s[1], to_block, t[0])
            elif whole and s[1] == 1 and t[0] == 1:
                _transposed(put, from_block, s[0], to_block, t[1])
            else:
                for i in range(min(width, channels - c)):
                    for j in range(min(width, tokens - n)):
                        put_one(to_block, j * t[0] + i * t[1], from_block[j * s[0] + i * s[1]])


@inlined
def _walk(put, put_one, problem, like, begin, end):
    inner, tokens, channels = problem[10], problem[11], problem[12]
    blocks = (tokens + TOKENS - 1) // TOKENS
    for item in range(begin, end):
        group = item // blocks
        first = (item - group * blocks) * TOKENS
        i, j = group // inner, group % inner
        source = advance(pointer(problem[0], like), i * problem[1] + j * problem[2] + first * problem[3])
        target = advance(pointer(problem[5], like), i * problem[6] + j * problem[7] + first * problem[8])
        s, t = (problem[3], problem[4]), (problem[8], problem[9])
        _move_block(put, put_one, source, target, s, t, min(TOKENS, tokens - first), channels)


@kernel
def move(problem, like, scale, begin, end):
    """target = source, bit by bit. problem: grids source, target; inner, tokens, channels. (scale is not used.)"""
    _walk(_put, _put_one, problem, like, begin, end)


@kernel
def add(problem, like, scale, begin, end):
    """target += source, for float32 and float64. As `move`."""
    _walk(_add, _add_one, problem, like, begin, end)
