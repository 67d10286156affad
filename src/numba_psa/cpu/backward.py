"""The fused attention backward, without an N×N matrix and without atomics; weights are recomputed from l.

`backward_dq` has queries as lanes and keys as the rows of a tile, `backward_dkv` the other way round: LANES queries, or
keys, are one item, so that even one head keeps many threads busy. Where there are heads enough, `backward_dkv` takes a
whole head as an item and computes dq as well, in 7 matrix products instead of 10. Each number is the sum of one item, in
the order of the rows: no two threads ever add to it, and either way gives the same bits.
"""

from __future__ import annotations

import numpy as np

from numba_psa.cpu.compiling import kernel
from numba_psa.cpu.tiles import (
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
    broadcast_rows,
    exp2_each,
    fma,
    keep,
    lanes,
    load,
    load_rows,
    multiply_each,
    pointer,
    splat,
    square_rows,
    store,
    store_rows,
    subtract_each,
    transpose_rows,
    where_greater,
)
from numba_psa.numerics import LOG2E

ROWS_IN_CHUNK = 240
"""Keys, or queries, in a chunk: a multiple of every tile height."""


@inlined
def _bias_rows(zeros, bias, first, of_rows):
    """What belongs to a query, l or delta, for each row of a tile: one number a row, or one vector for all of them."""
    if of_rows:
        return broadcast_rows(bias, first, 1, zeros)
    return load_rows(bias, 0, 0, zeros)


@inlined
def _weight_rows(zeros, first, a, channel, token, tile, key_dim, scale, l, of_rows, weights):
    """weights = P = exp(scale · q·k − l). The difference first, then log2(e): it is small wherever P matters."""
    width = lanes(tile)
    rows = product(zeros, a, first * token, token, channel, tile, key_dim)
    bias = _bias_rows(zeros, l, first, of_rows)
    rows = subtract_each(multiply_each(rows, splat(tile, scale)), bias)
    store_rows(weights, first * width, width, exp2_each(multiply_each(rows, splat(tile, LOG2E))))


@inlined
def _score_gradient_rows(zeros, first, a, channel, token, tile, value_dim, delta, of_rows, weights):
    """dS = P ∘ (do·v − delta) in place of P."""
    width = lanes(tile)
    rows = product(zeros, a, first * token, token, channel, tile, value_dim)
    bias = _bias_rows(zeros, delta, first, of_rows)
    weight = load_rows(weights, first * width, width, zeros)
    store_rows(weights, first * width, width, multiply_each(subtract_each(rows, bias), weight))


@inlined
def _load_vector(tile, numbers, first, count):
    """tile[0] = numbers[first : first + count], zeros beyond."""
    load_tile(tile, numbers, 0, 1, first, count, 1)


@kernel
def delta(problem, like, scale, begin, end):
    """delta `[BH, n_ctx_q]` = rowsum(o ∘ do); an item is LANES queries of one bh.

    problem: operands o, do; the address of delta; n_ctx_q, Dv. (scale is not used.)
    """
    o, do = operand(problem, 0), operand(problem, 1)
    delta, n_ctx_q, value_dim = problem[8], problem[9], problem[10]
    scratch = new_scratch(2 * value_dim + 1)
    width = lanes(like)
    o_tile = aligned_pointer(scratch, like)
    do_tile = advance(o_tile, value_dim * width)
    total_tile = advance(do_tile, value_dim * width)
    blocks = count_blocks(n_ctx_q, width)
    for item in range(begin, end):
        bh = item // blocks
        first = (item - bh * blocks) * width
        count = min(width, n_ctx_q - first)
        load_tile(o_tile, operand_pointer(o, bh, like), o[2], o[3], first, count, value_dim)
        load_tile(do_tile, operand_pointer(do, bh, like), do[2], do[3], first, count, value_dim)
        total = splat(like, 0.0)
        for c in range(value_dim):
            total = fma(load(o_tile, c * width), load(do_tile, c * width), total)
        store(total_tile, 0, total)
        store_tile(advance(pointer(delta, like), bh * n_ctx_q), 0, 1, first, count, total_tile, 1)
    keep(scratch)


@kernel
def backward_dq(problem, like, scale, begin, end):
    """dq of `numba_psa.oracle.flash_attention2_backward_dq`; an item is LANES queries of one bh.

    problem: operands q, k, v, do, dq; the addresses of l and delta `[BH, n_ctx_q]`; n_ctx_q, n_ctx_k, D, Dv.
    """
    q, k, v, do, dq = operand(problem, 0), operand(problem, 1), operand(problem, 2), operand(problem, 3), operand(problem, 4)
    l, delta, n_ctx_q, n_ctx_k = problem[20], problem[21], problem[22], problem[23]
    key_dim, value_dim = problem[24], problem[25]
    width, chunk = lanes(like), min(ROWS_IN_CHUNK, n_ctx_k)
    scratch = new_scratch(2 * key_dim + value_dim + 2 + chunk + spare_vectors(chunk, width))
    q_tile = aligned_pointer(scratch, like)
    do_tile = advance(q_tile, key_dim * width)
    l_tile = advance(do_tile, value_dim * width)
    delta_tile = advance(l_tile, width)
    dq_tile = advance(delta_tile, width)
    weights = advance(dq_tile, key_dim * width)
    spare = advance(weights, chunk * width)
    blocks = count_blocks(n_ctx_q, width)
    for item in range(begin, end):
        bh = item // blocks
        first = (item - bh * blocks) * width
        count = min(width, n_ctx_q - first)
        load_tile(q_tile, operand_pointer(q, bh, like), q[2], q[3], first, count, key_dim)
        load_tile(do_tile, operand_pointer(do, bh, like), do[2], do[3], first, count, value_dim)
        _load_vector(l_tile, advance(pointer(l, like), bh * n_ctx_q), first, count)
        _load_vector(delta_tile, advance(pointer(delta, like), bh * n_ctx_q), first, count)
        clear_tile(dq_tile, key_dim)
        for key in range(0, n_ctx_k, ROWS_IN_CHUNK):
            keys = min(ROWS_IN_CHUNK, n_ctx_k - key)
            k_chunk = advance(operand_pointer(k, bh, like), key * k[3])
            v_chunk = advance(operand_pointer(v, bh, like), key * v[3])
            for_tiles(_weight_rows, keys, like, (k_chunk, k[2], k[3], q_tile, key_dim, scale, l_tile, False, weights))
            for_tiles(
                _score_gradient_rows, keys, like, (v_chunk, v[2], v[3], do_tile, value_dim, delta_tile, False, weights)
            )
            add_product(dq_tile, key_dim, k_chunk, k[2], k[3], weights, keys, spare)
        scale_tile(dq_tile, key_dim, splat(like, scale))
        for c in range(key_dim):  # a masked row has no gradient, whatever the infinities that masked it made of it
            masked_out = where_greater(load(l_tile, 0), splat(like, -np.inf), load(dq_tile, c * width))
            store(dq_tile, c * width, masked_out)
        store_tile(operand_pointer(dq, bh, like), dq[2], dq[3], first, count, dq_tile, key_dim)
    keep(scratch)


@inlined
def _add_transposed(dq_tiles, weights, queries, k, channel, token, key_dim, keys, square, spare):
    """dq += dS k of LANES keys and a chunk of queries: dS has keys as lanes here, and is turned block by block."""
    width = lanes(weights)
    for query in range(0, queries, width):
        store_rows(square, 0, width, transpose_rows(load_rows(weights, query * width, width, square_rows(weights))))
        add_product(advance(dq_tiles, query * key_dim), key_dim, k, channel, token, square, keys, spare)


@kernel
def backward_dkv(problem, like, scale, begin, end):
    """dk and dv of `numba_psa.oracle.flash_attention2_backward_dkv`, and dq where it is wanted as well.

    Without dq an item is LANES keys of one bh. With dq it is a whole bh: then weights and dS are computed once for all
    three, and dq comes out bit by bit as `backward_dq` computes it, for its sum has the same order.

    problem: operands q, k, v, do, dk, dv, dq (or address 0); the addresses of l and delta `[BH, n_ctx_q]`, and of int64
    counts `[BH]`: only the first counts[bh] queries exist (all of them, with dq); n_ctx_q, n_ctx_k, D, Dv.
    """
    q, k, v, do = operand(problem, 0), operand(problem, 1), operand(problem, 2), operand(problem, 3)
    dk, dv, dq = operand(problem, 4), operand(problem, 5), operand(problem, 6)
    l, delta, counts = problem[28], problem[29], pointer(problem[30], problem)
    n_ctx_q, n_ctx_k, key_dim, value_dim = problem[31], problem[32], problem[33], problem[34]
    width, whole = lanes(like), dq[0] != 0
    query_tiles, key_tiles = count_blocks(n_ctx_q, width), count_blocks(n_ctx_k, width)
    chunk = min(ROWS_IN_CHUNK, query_tiles * width)
    dq_size = query_tiles * key_dim if whole else 0
    scratch = new_scratch(2 * (key_dim + value_dim) + chunk + width + dq_size + spare_vectors(max(chunk, width), width))
    k_tile = aligned_pointer(scratch, like)
    v_tile = advance(k_tile, key_dim * width)
    dk_tile = advance(v_tile, value_dim * width)
    dv_tile = advance(dk_tile, key_dim * width)
    weights = advance(dv_tile, value_dim * width)
    square = advance(weights, chunk * width)
    dq_tiles = advance(square, width * width)
    spare = advance(dq_tiles, dq_size * width)
    for item in range(begin, end):
        bh = item if whole else item // key_tiles
        clear_tile(dq_tiles, dq_size)
        begin_key = 0 if whole else (item - bh * key_tiles) * width
        end_key = n_ctx_k if whole else min(begin_key + width, n_ctx_k)
        for first in range(begin_key, end_key, width):
            count = min(width, n_ctx_k - first)
            load_tile(k_tile, operand_pointer(k, bh, like), k[2], k[3], first, count, key_dim)
            load_tile(v_tile, operand_pointer(v, bh, like), v[2], v[3], first, count, value_dim)
            clear_tile(dk_tile, key_dim + value_dim)
            for query in range(0, counts[bh], ROWS_IN_CHUNK):
                queries = min(ROWS_IN_CHUNK, counts[bh] - query)
                q_chunk = advance(operand_pointer(q, bh, like), query * q[3])
                do_chunk = advance(operand_pointer(do, bh, like), query * do[3])
                l_chunk = advance(pointer(l, like), bh * n_ctx_q + query)
                delta_chunk = advance(pointer(delta, like), bh * n_ctx_q + query)
                weigh = (q_chunk, q[2], q[3], k_tile, key_dim, scale, l_chunk, True, weights)
                for_tiles(_weight_rows, queries, like, weigh)
                add_product(dv_tile, value_dim, do_chunk, do[2], do[3], weights, queries, spare)
                differentiate = (do_chunk, do[2], do[3], v_tile, value_dim, delta_chunk, True, weights)
                for_tiles(_score_gradient_rows, queries, like, differentiate)
                add_product(dk_tile, key_dim, q_chunk, q[2], q[3], weights, queries, spare)
                if whole:
                    k_first = advance(operand_pointer(k, bh, like), first * k[3])
                    dq_chunk = advance(dq_tiles, query * key_dim)
                    _add_transposed(dq_chunk, weights, queries, k_first, k[2], k[3], key_dim, count, square, spare)
            scale_tile(dk_tile, key_dim, splat(like, scale))
            store_tile(operand_pointer(dk, bh, like), dk[2], dk[3], first, count, dk_tile, key_dim)
            store_tile(operand_pointer(dv, bh, like), dv[2], dv[3], first, count, dv_tile, value_dim)
        if whole:
            scale_tile(dq_tiles, dq_size, splat(like, scale))
            for first in range(0, n_ctx_q, width):
                dq_tile, count = advance(dq_tiles, first * key_dim), min(width, n_ctx_q - first)
                store_tile(operand_pointer(dq, bh, like), dq[2], dq[3], first, count, dq_tile, key_dim)
    keep(scratch)
