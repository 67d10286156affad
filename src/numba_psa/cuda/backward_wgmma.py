"""Attention backward on Hopper's warpgroup products (wgmma, sm_90a): the passes of backward.py, channels first.

Rows are A operands in registers, columns the swizzled slab that the forward reads too: S and dP take it with the columns
side by side, the gradients with the channels side by side, so that nothing is transposed. The last product of a step runs
while the next step begins; its columns stay in shared memory one step longer.
"""

from __future__ import annotations

from numba import float32, int32, uint32

from numba_psa._numba_cuda import cuda
from numba_psa.cuda.backward import BACKWARD_SIGNATURE as BACKWARD_SIGNATURE
from numba_psa.cuda.backward import Registers, stage_rows_of_pass, stage_sums
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
from numba_psa.cuda.device import (
    barrier,
    cp_async_commit,
    fence_proxy_async,
    first_lane,
    shared_address,
    step,
    wait_for_previous_kernel,
    wgmma_scores,
    wgmma_values,
    wgmma_wait_both,
    wgmma_wait_three,
    wgmma_wait_two,
)
from numba_psa.cuda.fragments import ONE, ZERO, block_address, fill, load_query, pack_block
from numba_psa.cuda.heads_backward import pass_of
from numba_psa.cuda.staging import (
    keys_descriptor,
    next_stage,
    place,
    stage_rows,
    values_descriptor,
    wait_for_copies,
    write_output,
)
from numba_psa.cuda.tiles_backward import DKV, DQ


@step
def start_swizzled_columns(tile, of_keys, shared, head, first, tid):
    """backward.start_columns for tiles of [key_pad + value_pad rows][128 bytes], swizzled."""
    n = head.n_columns
    if int32(first) < n:
        row_bytes, left, offset = tile.item * n, n - first, tile.item * first
        narrow, threads, columns = head.columns + offset, tile.threads, 128 // tile.item
        wide, target = head.columns_wide + offset, shared + tile.values_offset
        stage_rows(tile, threads, shared, 128, True, narrow, row_bytes, tile.key_pad, tile.key_dim, columns, left, tid)
        stage_rows(tile, threads, target, 128, True, wide, row_bytes, tile.value_pad, tile.value_dim, columns, left, tid)
        if of_keys:
            stage_sums(tile, shared + tile.sums_offset, head, first, tid)
    cp_async_commit()


def make_backward_wgmma(config):
    """The kernel for one WarpgroupBackwardConfig. It closes over integers only, so that its compiled form can be cached."""
    tile, wide = config.constants(), config.widths_swapped()
    A, A_WIDE, P_KEYS, S_KEYS, P_QUERIES, S_QUERIES, ACC, ACC_WIDE, ROWS = config.fragment_shapes
    PASSES, OVERLAPS, LEAD, ROWS_OFFSET = config.passes, config.overlaps, config.stages - 2, config.rows_offset
    KEY_PAD, VALUE_PAD, TILE_BYTES, BF16 = config.key_pad, config.value_pad, config.tile_bytes, int(config.bf16)
    KEY_STEP, QUERY_STEP = config.key_step, config.query_step

    @step
    def meet_keys(have, columns, summed, columns_left, lane, steepness, factor):
        """dQ += dS K for KEY_STEP keys, in flight when this returns."""
        s, dp, acc = have.s, have.dp, have.acc
        wgmma_scores(s, have.a, columns, KEY_STEP, KEY_PAD, BF16)  # S = Q K^T
        wgmma_scores(dp, have.a_wide, columns + (128 * KEY_PAD >> 4), KEY_STEP, VALUE_PAD, BF16)  # dP = dO V^T
        wgmma_wait_two(1, s, KEY_STEP, acc, KEY_PAD)
        weights_by_rows(tile, s, have.l, steepness)  # P = exp(S - l)
        if columns_left < KEY_STEP:
            clear_tail(IN_ORDER, s, columns_left, lane)
        wgmma_wait_both(dp, KEY_STEP, s, KEY_STEP)
        score_gradients_by_rows(tile, dp, s, have.delta, factor)
        pack_block(BF16, have.p, dp)
        wgmma_values(acc, have.p, summed, KEY_PAD, KEY_STEP, TILE_BYTES, BF16)

    @step
    def meet_queries(have, columns, summed, sums, steepness, factor):
        """dV += P^T dO and dK += dS^T Q for QUERY_STEP queries, in flight when this returns."""
        s, dp, acc, acc_wide = have.s, have.dp, have.acc, have.acc_wide
        wgmma_scores(s, have.a, columns, QUERY_STEP, KEY_PAD, BF16)  # S^T = K Q^T
        wgmma_scores(dp, have.a_wide, columns + (128 * KEY_PAD >> 4), QUERY_STEP, VALUE_PAD, BF16)  # dP^T = V dO^T
        wgmma_wait_three(1, s, QUERY_STEP, acc, KEY_PAD, acc_wide, VALUE_PAD)
        weights_by_columns(tile, IN_ORDER, s, sums, steepness)  # P = exp(S - l)
        pack_block(BF16, have.p, s)
        wgmma_values(acc_wide, have.p, summed + (128 * KEY_PAD >> 4), VALUE_PAD, QUERY_STEP, TILE_BYTES, BF16)
        wgmma_wait_two(1, dp, QUERY_STEP, s, QUERY_STEP)
        score_gradients_by_columns(tile, IN_ORDER, dp, s, sums + 4 * tile.BN, factor)
        pack_block(BF16, have.ds, dp)
        wgmma_values(acc, have.ds, summed, KEY_PAD, QUERY_STEP, TILE_BYTES, BF16)

    @step
    def run_pass(of_keys, head, shared, at, have):
        """The rows of one block."""
        first = cuda.blockIdx.x * tile.BM
        first_row, steepness = 16 * at.query_warp, abs(head.scale)
        row = first + first_row + (at.lane >> 2)
        acc, acc_wide = have.acc, have.acc_wide
        fill(acc, ZERO)
        fill(acc_wide, ZERO)

        rows = shared + ROWS_OFFSET
        stage_rows_of_pass(tile, wide, rows, head, first, at.tid)
        if OVERLAPS:
            wait_for_previous_kernel()
        exponent = gradient_exponent(tile, head.norms, cuda.blockIdx.y, head.n_rows, head.n_columns, at.lane)
        factor = gradient_factor(tile, exponent)
        for j in range(LEAD):
            start_swizzled_columns(tile, of_keys, shared + j * tile.stage_bytes, head, j * tile.BN, at.tid)
        if of_keys:
            keep_rows(have.kept)
        else:
            load_row_sums(have.l, have.delta, have.kept, head.sums, row, head.n_rows, factor)
        wait_for_copies(LEAD - 1)
        barrier()
        mine = block_address(rows + 2 * first_row, tile.query_stride, at.lane, False)
        load_query(tile, have.a, mine, head.scale)
        load_query(wide, have.a_wide, mine + tile.query_offset, ONE)

        columns, summed = keys_descriptor(shared, tile.tile_bytes), values_descriptor(shared)
        stage, ahead = 0, LEAD * tile.stage_bytes
        for j in range((head.n_columns + tile.BN - 1) // tile.BN):
            wait_for_copies(LEAD - 1)
            fence_proxy_async()
            barrier()
            start_swizzled_columns(tile, of_keys, shared + ahead, head, (j + LEAD) * tile.BN, at.tid)
            if of_keys:
                for h in range(tile.BN // QUERY_STEP):
                    offset = stage + 2 * QUERY_STEP * h >> 4
                    sums = columns_address(IN_ORDER, shared + stage + tile.sums_offset + 4 * QUERY_STEP * h, at.lane)
                    meet_queries(have, columns + offset, summed + offset, sums, steepness, factor)
            else:
                for h in range(tile.BN // KEY_STEP):
                    offset, left = stage + 2 * KEY_STEP * h >> 4, head.n_columns - j * tile.BN - KEY_STEP * h
                    meet_keys(have, columns + offset, summed + offset, left, at.lane, steepness, factor)
            stage, ahead = next_stage(tile, stage), next_stage(tile, ahead)
        wgmma_wait_two(0, acc, KEY_PAD, acc_wide, VALUE_PAD)

        again_if_not_finite(tile, of_keys, True, of_keys, head, acc, acc_wide, row, factor, at.lane)
        wait_for_copies(0)
        barrier()  # the last tile is read: shared memory is free
        multiply(acc, unscaled(tile, head.softmax_scale, exponent))
        write_output(wide, acc, have.kept, head.d_rows, head.n_rows, first, shared, first_row, at.tid)
        if of_keys:
            barrier()
            multiply(acc_wide, weight_unit(tile))
            write_output(tile, acc_wide, have.kept, head.d_wide, head.n_rows, first, shared, first_row, at.tid)

    def attention_backward_wgmma_kernel(q, k, v, do, dq, dk, dv, sums, norms, n_queries, n_keys, softmax_scale, scale):
        """Arguments and grid as attention_backward_kernel."""
        shared = shared_address(cuda.shared.array(0, uint32)) + 1023 & ~1023
        at = place(tile, first_lane(cuda.threadIdx.x >> 5), cuda.threadIdx.x)
        a, a_wide = cuda.local.array(A, uint32), cuda.local.array(A_WIDE, uint32)
        p, ds = cuda.local.array(P_QUERIES, uint32), cuda.local.array(P_QUERIES, uint32)
        s, dp = cuda.local.array(S_QUERIES, float32), cuda.local.array(S_QUERIES, float32)
        p_keys = cuda.local.array(P_KEYS, uint32)
        s_keys, dp_keys = cuda.local.array(S_KEYS, float32), cuda.local.array(S_KEYS, float32)
        acc, acc_wide = cuda.local.array(ACC, float32), cuda.local.array(ACC_WIDE, float32)
        l, delta, kept = cuda.local.array(ROWS, float32), cuda.local.array(ROWS, float32), cuda.local.array(ROWS, float32)
        for_queries = Registers(a, a_wide, p, ds, s, dp, acc, acc_wide, l, delta, kept)
        for_keys = Registers(a, a_wide, p_keys, p_keys, s_keys, dp_keys, acc, acc_wide, l, delta, kept)
        bh, first = cuda.blockIdx.y, cuda.blockIdx.x * tile.BM
        arrays, scalars = (q, k, v, do, dq, dk, dv, sums), (n_queries, n_keys, softmax_scale, scale, norms)
        if PASSES & DKV and cuda.blockIdx.z == 0 and first < n_keys:
            run_pass(True, pass_of(tile, True, bh, *arrays, *scalars), shared, at, for_queries)
        if PASSES & DQ and cuda.blockIdx.z == PASSES // 2 and first < n_queries:
            run_pass(False, pass_of(tile, False, bh, *arrays, *scalars), shared, at, for_keys)

    return attention_backward_wgmma_kernel
