"""Attention backward in float32 on TF32 tensor cores (mma.sync, sm_80 and later): the passes of backward.py.

Three TF32 products for one, and columns permuted within 32, as fragments_tf32.py has them. In shared memory channels always
come first. Rows are split again for every block of columns: both operands in two parts are more than registers hold.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from numba import float32, uint32

from numba_psa._numba_cuda import cuda
from numba_psa.cuda.backward import BACKWARD_SIGNATURE as BACKWARD_SIGNATURE
from numba_psa.cuda.backward import stage_rows_of_pass, start_columns
from numba_psa.cuda.backward_steps import (
    WITHIN_32,
    again_if_not_finite,
    clear_tail,
    columns_address,
    keep_rows,
    load_row_sums,
    multiply,
    score_gradients_by_columns,
    score_gradients_by_rows,
    weights_by_columns,
    weights_by_rows,
)
from numba_psa.cuda.device import barrier, shared_address, step, wait_for_previous_kernel
from numba_psa.cuda.fragments import ONE, ZERO, fill
from numba_psa.cuda.fragments_tf32 import (
    accumulate_values_tf32,
    scores_tf32,
    split_probabilities,
    wide_scores_tf32,
    write_floats,
)
from numba_psa.cuda.heads_backward import pass_of
from numba_psa.cuda.staging import next_stage, place, wait_for_copies
from numba_psa.cuda.tiles_backward import DKV, DQ


class Registers(NamedTuple):
    """What a lane holds; of a, b and p a high and a low part. `wide` is value_dim wide, the rest key_dim or BN."""

    a_high: Any
    a_low: Any
    b_high: Any
    b_low: Any
    p_high: Any
    p_low: Any
    s: Any
    spare: Any
    dp: Any
    acc: Any
    acc_wide: Any
    part: Any
    part_wide: Any
    operand_high: Any
    operand_low: Any
    operand_wide_high: Any
    operand_wide_low: Any
    l: Any
    delta: Any
    kept: Any


@step
def scores_of_rows_tf32(tile, s, part, a_high, a_low, rows, b_high, b_low, columns, scale):
    """s = rows columns^T; both are this lane's addresses. Of wide heads, 32 channels are summed apart."""
    if tile.key_pad > 64:
        wide_scores_tf32(tile, s, part, a_high, a_low, rows, b_high, b_low, columns, scale)
    else:
        scores_tf32(tile, s, a_high, a_low, rows, b_high, b_low, columns, scale)


def make_backward_tf32(config):
    """The kernel for one Tf32BackwardConfig. It closes over integers only, so that its compiled form can be cached."""
    tile, wide = config.constants(), config.widths_swapped()
    A, B, P, S, ACC, ACC_WIDE, PART, OPERAND, PART_WIDE, OPERAND_WIDE, PART_S, ROWS = config.fragment_shapes
    LEAD, PASSES, APART, OVERLAPS = config.stages - 1, config.passes, config.apart, config.overlaps

    @step
    def run_pass(of_keys, narrow, wide_too, head, shared, at, have):
        """The rows of one block: their gradient key_dim wide if narrow, and the one value_dim wide."""
        first = cuda.blockIdx.x * tile.BM
        row_in_block, steepness = 16 * at.query_warp + (at.lane >> 2), abs(head.scale)
        row, column, group = first + row_in_block, at.lane & 3, at.lane >> 2
        s, dp, p_high, p_low, acc, acc_wide = have.s, have.dp, have.p_high, have.p_low, have.acc, have.acc_wide
        a_high, a_low, b_high, b_low = have.a_high, have.a_low, have.b_high, have.b_low
        fill(acc, ZERO)
        fill(acc_wide, ZERO)

        ring = shared + tile.keys_offset
        ring_wide = ring + tile.values_offset
        columns, columns_wide = (
            ring + column * tile.key_stride + 16 * group,
            ring_wide + column * tile.value_stride + 16 * group,
        )
        summed, summed_wide = (
            ring + group * tile.key_stride + 32 * column,
            ring_wide + group * tile.value_stride + 32 * column,
        )
        rows = shared + column * tile.query_stride + 4 * row_in_block
        rows_wide = rows + tile.query_offset
        stage_rows_of_pass(tile, wide, shared, head, first, at.tid)
        if OVERLAPS:
            wait_for_previous_kernel()
        for j in range(LEAD):
            start_columns(tile, of_keys, ring + j * tile.stage_bytes, head, j * tile.BN, at.tid)
        if of_keys:
            keep_rows(have.kept)
        else:
            load_row_sums(have.l, have.delta, have.kept, head.sums, row, head.n_rows, ONE)

        stage, ahead = 0, LEAD * tile.stage_bytes
        for j in range((head.n_columns + tile.BN - 1) // tile.BN):
            wait_for_copies(LEAD - 1)
            barrier()
            start_columns(tile, of_keys, ring + ahead, head, (j + LEAD) * tile.BN, at.tid)
            scores_of_rows_tf32(
                tile, s, have.spare, a_high, a_low, rows, b_high, b_low, columns + stage, head.scale
            )  # S, or its transpose
            sums = columns_address(WITHIN_32, ring + stage + tile.sums_offset, at.lane)
            if of_keys:
                weights_by_columns(tile, WITHIN_32, s, sums, steepness)  # P = exp(S - l)
            else:
                weights_by_rows(tile, s, have.l, steepness)
                left = head.n_columns - j * tile.BN
                if left < tile.BN:
                    clear_tail(WITHIN_32, s, left, at.lane)
            if wide_too:
                split_probabilities(tile.exact, p_high, p_low, s)
                operands = have.operand_wide_high, have.operand_wide_low
                accumulate_values_tf32(tile, acc_wide, have.part_wide, p_high, p_low, *operands, summed_wide + stage)  # dV
            if narrow:
                scores_of_rows_tf32(
                    wide, dp, have.spare, a_high, a_low, rows_wide, b_high, b_low, columns_wide + stage, ONE
                )  # dP, likewise
                if of_keys:
                    score_gradients_by_columns(tile, WITHIN_32, dp, s, sums + 4 * tile.BN, ONE)
                else:
                    score_gradients_by_rows(tile, dp, s, have.delta, ONE)
                split_probabilities(tile.exact, p_high, p_low, dp)
                operands = have.operand_high, have.operand_low
                accumulate_values_tf32(wide, acc, have.part, p_high, p_low, *operands, summed + stage)  # dQ, or dK
            stage, ahead = next_stage(tile, stage), next_stage(tile, ahead)

        again_if_not_finite(tile, of_keys, narrow, wide_too, head, acc, acc_wide, row, ONE, at.lane)
        wait_for_copies(0)
        if narrow:
            multiply(acc, head.softmax_scale)
            write_floats(wide, acc, have.kept, head.d_rows, head.n_rows, row, at.lane)
        if wide_too:
            write_floats(tile, acc_wide, have.kept, head.d_wide, head.n_rows, row, at.lane)

    def attention_backward_tf32_kernel(q, k, v, do, dq, dk, dv, sums, norms, n_queries, n_keys, softmax_scale, scale):
        """Arguments and grid as attention_backward_kernel; float32."""
        shared = shared_address(cuda.shared.array(0, uint32))
        at = place(tile, cuda.threadIdx.x >> 5, cuda.threadIdx.x)
        a_high, a_low = cuda.local.array(A, uint32), cuda.local.array(A, uint32)
        b_high, b_low = cuda.local.array(B, uint32), cuda.local.array(B, uint32)
        p_high, p_low = cuda.local.array(P, uint32), cuda.local.array(P, uint32)
        s, dp, spare = cuda.local.array(S, float32), cuda.local.array(S, float32), cuda.local.array(PART_S, float32)
        acc, acc_wide = cuda.local.array(ACC, float32), cuda.local.array(ACC_WIDE, float32)
        part, part_wide = cuda.local.array(PART, float32), cuda.local.array(PART_WIDE, float32)
        operand_high, operand_low = cuda.local.array(OPERAND, uint32), cuda.local.array(OPERAND, uint32)
        wide_high, wide_low = cuda.local.array(OPERAND_WIDE, uint32), cuda.local.array(OPERAND_WIDE, uint32)
        l, delta, kept = cuda.local.array(ROWS, float32), cuda.local.array(ROWS, float32), cuda.local.array(ROWS, float32)
        have = Registers(
            a_high,
            a_low,
            b_high,
            b_low,
            p_high,
            p_low,
            s,
            spare,
            dp,
            acc,
            acc_wide,
            part,
            part_wide,
            operand_high,
            operand_low,
            wide_high,
            wide_low,
            l,
            delta,
            kept,
        )
        bh, first = cuda.blockIdx.y, cuda.blockIdx.x * tile.BM
        arrays, scalars = (q, k, v, do, dq, dk, dv, sums), (n_queries, n_keys, softmax_scale, scale, norms)
        if PASSES & DKV and cuda.blockIdx.z == 0 and first < n_keys:
            head = pass_of(tile, True, bh, *arrays, *scalars)
            if APART:
                run_pass(True, False, True, head, shared, at, have)
                barrier()  # the last block is read: shared memory is free
                run_pass(True, True, False, head, shared, at, have)
            else:
                run_pass(True, True, True, head, shared, at, have)
        if PASSES & DQ and cuda.blockIdx.z == PASSES // 2 and first < n_queries:
            run_pass(False, True, False, pass_of(tile, False, bh, *arrays, *scalars), shared, at, have)

    return attention_backward_tf32_kernel
