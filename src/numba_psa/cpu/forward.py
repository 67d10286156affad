"""The fused attention forward: lanes are queries, and scores exist for LANES queries and KEYS keys at a time.

One work item is LANES queries of one bh. For each chunk of keys it computes the scores in tiles of ROWS keys, raises the
running maximum and rescales what it has (the online softmax), turns the scores into weights, and adds weights · v.
"""

from __future__ import annotations

import math

import numpy as np

from numba_psa.cpu.compiling import kernel
from numba_psa.cpu.tiles import (
    HALF_WAY,
    add_product,
    aligned_pointer,
    clear_tile,
    count_blocks,
    for_tiles,
    inlined,
    load_tile,
    new_scratch,
    operand,
    operand_pointer,
    product,
    scale_tile,
    spare_vectors,
    store_tile,
)
from numba_psa.cpu.vector import (
    advance,
    exp2,
    exp2_each,
    keep,
    lanes,
    load,
    load_rows,
    max_of_rows,
    maximum,
    multiply_each,
    pointer,
    splat,
    store,
    store_rows,
    subtract_each,
    sum_of_rows,
    where_greater,
    zero_rows,
)
from numba_psa.numerics import LOG2E

KEYS = 480
"""Keys in a chunk: their weights (480 vectors of 64 bytes) stay in the L1 or L2 cache; a multiple of every ROWS."""
LN2 = 1.0 / LOG2E
_LOWEST = float(np.finfo(np.float32).min)
"""Running maximum before the first key: finite, so that no difference of maxima is NaN, and below every score."""


@inlined
def _score_rows(zeros, first, k, channel, token, queries, key_dim, scale, scores, m_tile):
    """scores[key] = scale · q·k of the keys from `first` on; m_tile becomes the largest so far."""
    width = lanes(queries)
    rows = multiply_each(product(zeros, k, first * token, token, channel, queries, key_dim), splat(queries, scale))
    store_rows(scores, first * width, width, rows)
    store(m_tile, 0, maximum(max_of_rows(rows), load(m_tile, 0)))


@inlined
def _weigh(weights, keys, m, l_i):
    """weights[key] = 2**(score − m) in place of the scores; l_i plus their sum. Few rows at a time: exp2 needs registers."""
    width = lanes(weights)
    for first in range(0, keys - HALF_WAY + 1, HALF_WAY):
        rows = load_rows(weights, first * width, width, zero_rows(weights, HALF_WAY))
        rows = exp2_each(subtract_each(rows, m))
        store_rows(weights, first * width, width, rows)
        l_i = l_i + sum_of_rows(rows)
    for key in range(keys // HALF_WAY * HALF_WAY, keys):
        weight = exp2(load(weights, key * width) - m)
        store(weights, key * width, weight)
        l_i = l_i + weight
    return l_i


@inlined
def _finish(acc, value_dim):
    """acc / l_i; 0 where no key had a score above -inf."""
    width = lanes(acc)
    l_i = load(acc, value_dim * width)
    inverse = splat(acc, 1.0) / l_i
    for c in range(value_dim):
        store(acc, c * width, where_greater(l_i, splat(acc, 0.0), load(acc, c * width) * inverse))


@inlined
def _log_sum_exp(l, first, count, m_tile, l_i):
    for lane in range(count):
        total = np.float64(l_i[lane])
        l[first + lane] = -np.inf if total == 0 else np.float64(m_tile[lane]) * LN2 + math.log(total)


@kernel
def forward(problem, like, scale, begin, end):
    """o and l of `numba_psa.oracle.flash_attention2_forward`; an item is LANES queries of one bh.

    problem: operands q, k, v, o; the address of l `[BH, n_ctx_q]`, or 0 for no l; n_ctx_q, n_ctx_k, D, Dv.
    """
    q, k, v, o = operand(problem, 0), operand(problem, 1), operand(problem, 2), operand(problem, 3)
    l, n_ctx_q, n_ctx_k, key_dim, value_dim = problem[16], problem[17], problem[18], problem[19], problem[20]
    width, chunk = lanes(like), min(KEYS, n_ctx_k)
    scratch = new_scratch(key_dim + 1 + value_dim + 1 + chunk + spare_vectors(chunk, width))
    queries = aligned_pointer(scratch, like)
    m_tile = advance(queries, key_dim * width)
    acc = advance(m_tile, width)
    l_i = advance(acc, value_dim * width)
    weights = advance(l_i, width)
    spare = advance(weights, chunk * width)
    blocks = count_blocks(n_ctx_q, width)
    for item in range(begin, end):
        bh = item // blocks
        first = (item - bh * blocks) * width
        count = min(width, n_ctx_q - first)
        load_tile(queries, operand_pointer(q, bh, like), q[2], q[3], first, count, key_dim)
        store(m_tile, 0, splat(m_tile, _LOWEST))
        clear_tile(acc, value_dim + 1)
        for key in range(0, n_ctx_k, KEYS):
            keys = min(KEYS, n_ctx_k - key)
            k_chunk = advance(operand_pointer(k, bh, like), key * k[3])
            v_chunk = advance(operand_pointer(v, bh, like), key * v[3])
            m = load(m_tile, 0)
            for_tiles(_score_rows, keys, queries, (k_chunk, k[2], k[3], queries, key_dim, scale * LOG2E, weights, m_tile))
            if key:
                scale_tile(acc, value_dim + 1, exp2(m - load(m_tile, 0)))
            store(l_i, 0, _weigh(weights, keys, load(m_tile, 0), load(l_i, 0)))
            add_product(acc, value_dim, v_chunk, v[2], v[3], weights, keys, spare)
        _finish(acc, value_dim)
        store_tile(operand_pointer(o, bh, like), o[2], o[3], first, count, acc, value_dim)
        if l:
            _log_sum_exp(advance(pointer(l, like), bh * n_ctx_q), first, count, m_tile, l_i)
    keep(scratch)
