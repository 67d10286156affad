"""Attention backward on tensor cores (mma.sync, sm_80 and later), without an N x N matrix and without atomics.

A block owns BM rows of one head and sums their gradients in registers, in the order of the columns: the same bits on every
run. Rows are queries for dq, keys for dk and dv (FlashAttention-2's two loops of algorithm 2, each on its own), and blocks
of both kinds run side by side. P is computed again from l.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from numba import float32, int32, types, uint32

from numba_psa._numba_cuda import cuda
from numba_psa.cuda.backward_steps import (
    IN_ORDER,
    again_if_not_finite,
    clear_tail,
    columns_address,
    gradient_exponent,
    gradient_factor,
    keep_rows,
    load_row_sums,
    multiply,
    score_gradients_by_columns,
    score_gradients_by_rows,
    unscaled,
    weight_unit,
    weights_by_columns,
    weights_by_rows,
)
from numba_psa.cuda.device import barrier, cp_async_16, cp_async_commit, shared_address, step, wait_for_previous_kernel
from numba_psa.cuda.fragments import (
    ONE,
    ZERO,
    accumulate_values,
    add_scores,
    block_address,
    channel_step,
    fill,
    load_query,
    scores,
    token_step,
)
from numba_psa.cuda.heads_backward import pass_of
from numba_psa.cuda.staging import next_stage, place, stage_tile, wait_for_copies, write_output
from numba_psa.cuda.tiles_backward import DKV, DQ, SUMS_PAD


@step
def stage_rows_of_pass(tile, wide, shared, head, first, tid):
    """The rows of both operands."""
    n = head.n_rows
    stage_tile(tile, shared, tile.query_stride, head.rows, n, first, tile.BM, tile.key_dim, tile.key_pad, tid)
    stage_tile(
        tile,
        shared + tile.query_offset,
        wide.query_stride,
        head.rows_wide,
        n,
        first,
        tile.BM,
        tile.value_dim,
        tile.value_pad,
        tid,
    )


@step
def stage_sums(tile, shared, head, first, tid):
    """l and delta of the columns; the workspace has them in multiples of SUMS_PAD, so a chunk is whole or beyond the end."""
    chunks, padded = tile.BN // 4, (head.n_columns + SUMS_PAD - 1) // SUMS_PAD * SUMS_PAD
    if tid < 2 * chunks:
        row, token = tid // chunks, first + tid % chunks * 4
        count = 16 if token < padded else 0
        cp_async_16(shared + 16 * tid, head.sums + 4 * (row * padded + token), count)


@step
def start_columns(tile, of_keys, shared, head, first, tid):
    """Begin to bring BN columns of both operands, and their l and delta. Always closes a group, even an empty one."""
    n = head.n_columns
    if int32(first) < n:
        stage_tile(tile, shared, tile.key_stride, head.columns, n, first, tile.BN, tile.key_dim, tile.key_pad, tid)
        target = shared + tile.values_offset
        stage_tile(
            tile, target, tile.value_stride, head.columns_wide, n, first, tile.BN, tile.value_dim, tile.value_pad, tid
        )
        if of_keys:
            stage_sums(tile, shared + tile.sums_offset, head, first, tid)
    cp_async_commit()


class Registers(NamedTuple):
    """What a lane holds; `wide` is value_dim wide, the rest key_dim or BN. p, ds: A operands of the gradients."""

    a: Any
    a_wide: Any
    p: Any
    ds: Any
    s: Any
    dp: Any
    acc: Any
    acc_wide: Any
    l: Any
    delta: Any
    kept: Any


@step
def scores_of_rows(tile, s, a, rows, columns, scale):
    """s = rows columns^T; both are this lane's addresses. Rows that registers cannot keep are loaded again."""
    if tile.keeps_query:
        scores(tile, s, a, columns)
    else:
        fill(s, ZERO)
        for k in range(tile.key_pad // 16):
            load_query(tile, a, rows + k * channel_step(tile, tile.query_stride), scale)
            add_scores(tile, s, a, 0, k, columns)


def make_backward(config):
    """The kernel for one MmaBackwardConfig. It closes over integers only, so that its compiled form can be cached."""
    tile, wide = config.constants(), config.widths_swapped()
    A, A_WIDE, P, S, ACC, ACC_WIDE, ROWS = config.fragment_shapes
    LEAD, PASSES, OVERLAPS = config.stages - 1, config.passes, config.overlaps
    ROWS_ARE_TOKENS, ROWS_ARE_CHANNELS = config.tokens_first, not config.tokens_first

    @step
    def run_pass(of_keys, head, shared, at, have):
        """The rows of one block."""
        first = cuda.blockIdx.x * tile.BM
        first_row, steepness = 16 * at.query_warp, abs(head.scale)
        row = first + first_row + (at.lane >> 2)
        s, dp, p, acc, acc_wide = have.s, have.dp, have.p, have.acc, have.acc_wide
        fill(acc, ZERO)
        fill(acc_wide, ZERO)

        ring = shared + tile.keys_offset
        ring_wide = ring + tile.values_offset
        columns = block_address(ring, tile.key_stride, at.lane, ROWS_ARE_CHANNELS)
        columns_wide = block_address(ring_wide, tile.value_stride, at.lane, ROWS_ARE_CHANNELS)
        summed = block_address(ring, tile.key_stride, at.lane, ROWS_ARE_TOKENS)
        summed_wide = block_address(ring_wide, tile.value_stride, at.lane, ROWS_ARE_TOKENS)
        rows = shared + first_row // 16 * token_step(tile, tile.query_stride)
        rows = block_address(rows, tile.query_stride, at.lane, ROWS_ARE_TOKENS)
        rows_wide = shared + tile.query_offset + first_row // 16 * token_step(tile, wide.query_stride)
        rows_wide = block_address(rows_wide, wide.query_stride, at.lane, ROWS_ARE_TOKENS)
        stage_rows_of_pass(tile, wide, shared, head, first, at.tid)
        if OVERLAPS:
            wait_for_previous_kernel()
        exponent = gradient_exponent(tile, head.norms, cuda.blockIdx.y, head.n_rows, head.n_columns, at.lane)
        factor = gradient_factor(tile, exponent)
        for j in range(LEAD):
            start_columns(tile, of_keys, ring + j * tile.stage_bytes, head, j * tile.BN, at.tid)
        if of_keys:
            keep_rows(have.kept)
        else:
            load_row_sums(have.l, have.delta, have.kept, head.sums, row, head.n_rows, factor)

        stage, ahead = 0, LEAD * tile.stage_bytes
        for j in range((head.n_columns + tile.BN - 1) // tile.BN):
            wait_for_copies(LEAD - 1)
            barrier()
            if j == 0 and tile.keeps_query:
                load_query(tile, have.a, rows, head.scale)
                load_query(wide, have.a_wide, rows_wide, ONE)
            start_columns(tile, of_keys, ring + ahead, head, (j + LEAD) * tile.BN, at.tid)
            scores_of_rows(tile, s, have.a, rows, columns + stage, head.scale)  # S = Q K^T, or its transpose
            scores_of_rows(wide, dp, have.a_wide, rows_wide, columns_wide + stage, ONE)  # dP = dO V^T, or its transpose
            if of_keys:
                sums = columns_address(IN_ORDER, ring + stage + tile.sums_offset, at.lane)
                weights_by_columns(tile, IN_ORDER, s, sums, steepness)  # P = exp(S - l)
                accumulate_values(tile, acc_wide, s, p, summed_wide + stage)  # dV += P^T dO
                score_gradients_by_columns(tile, IN_ORDER, dp, s, sums + 4 * tile.BN, factor)
            else:
                weights_by_rows(tile, s, have.l, steepness)
                left = head.n_columns - j * tile.BN
                if left < tile.BN:
                    clear_tail(IN_ORDER, s, left, at.lane)
                score_gradients_by_rows(tile, dp, s, have.delta, factor)
            accumulate_values(wide, acc, dp, p, summed + stage)  # dQ += dS K, or dK += dS^T Q
            stage, ahead = next_stage(tile, stage), next_stage(tile, ahead)

        again_if_not_finite(tile, of_keys, True, of_keys, head, acc, acc_wide, row, factor, at.lane)
        wait_for_copies(0)
        barrier()  # the last tile is read: shared memory is free
        multiply(acc, unscaled(tile, head.softmax_scale, exponent))
        write_output(wide, acc, have.kept, head.d_rows, head.n_rows, first, shared, first_row, at.tid)
        if of_keys:
            barrier()
            multiply(acc_wide, weight_unit(tile))
            write_output(tile, acc_wide, have.kept, head.d_wide, head.n_rows, first, shared, first_row, at.tid)

    def attention_backward_kernel(q, k, v, do, dq, dk, dv, sums, norms, n_queries, n_keys, softmax_scale, scale):
        """Addresses laid out as `heads_backward.pass_of` says; sums and norms are what backward_sums.py wrote.

        scale: softmax_scale, away from 0 (`plans.device_scale`) and times log2(e) unless float32.
        Grid (ceil(max(n_queries, n_keys) / BM), heads, passes), the blocks of dk and dv first: they take longer.
        """
        shared = shared_address(cuda.shared.array(0, uint32))
        at = place(tile, cuda.threadIdx.x >> 5, cuda.threadIdx.x)
        a, a_wide, p = cuda.local.array(A, uint32), cuda.local.array(A_WIDE, uint32), cuda.local.array(P, uint32)
        s, dp = cuda.local.array(S, float32), cuda.local.array(S, float32)
        acc, acc_wide = cuda.local.array(ACC, float32), cuda.local.array(ACC_WIDE, float32)
        l, delta, kept = cuda.local.array(ROWS, float32), cuda.local.array(ROWS, float32), cuda.local.array(ROWS, float32)
        have = Registers(a, a_wide, p, p, s, dp, acc, acc_wide, l, delta, kept)
        bh, first = cuda.blockIdx.y, cuda.blockIdx.x * tile.BM
        arrays, scalars = (q, k, v, do, dq, dk, dv, sums), (n_queries, n_keys, softmax_scale, scale, norms)
        if PASSES & DKV and cuda.blockIdx.z == 0 and first < n_keys:
            run_pass(True, pass_of(tile, True, bh, *arrays, *scalars), shared, at, have)
        if PASSES & DQ and cuda.blockIdx.z == PASSES // 2 and first < n_queries:
            run_pass(False, pass_of(tile, False, bh, *arrays, *scalars), shared, at, have)

    return attention_backward_kernel


BACKWARD_SIGNATURE = types.void(*(types.int64,) * 9, types.int32, types.int32, types.float32, types.float32)
