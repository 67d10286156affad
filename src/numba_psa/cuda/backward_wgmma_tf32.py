"""Attention backward in float32 on Hopper's warpgroup products: the passes of backward.py, three TF32 products for one.

wgmma reads TF32 operands along the summed index only. So a block of columns is split once more in shared memory, while the
products of the block before run: transposed for S and dP, which sum over channels, in a high and a low part; and as it
came for the gradients, which sum over tokens: there it is its own high part, for the hardware cuts off the bits that the
low part holds. Tokens of the transposed parts are permuted within 8, so that P and dS are A operands where they stand.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from numba import float32, uint32

from numba_psa._numba_cuda import cuda
from numba_psa.cuda.backward import BACKWARD_SIGNATURE as BACKWARD_SIGNATURE
from numba_psa.cuda.backward_steps import (
    WITHIN_8,
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
from numba_psa.cuda.backward_wgmma import start_swizzled_columns
from numba_psa.cuda.device import (
    barrier,
    bits_float,
    fence_proxy_async,
    first_lane,
    float_bits,
    ld_global_f32,
    ld_shared_f32,
    ld_shared_v4_f32,
    shared_address,
    st_shared_v4_u32,
    step,
    wait_for_previous_kernel,
    wgmma_tf32,
    wgmma_tf32_shared,
    wgmma_wait,
    wgmma_wait_both,
    wgmma_wait_two,
)
from numba_psa.cuda.fragments import ONE, ZERO, fill
from numba_psa.cuda.fragments_tf32 import HALF, HIGH_BITS, add_part, split, split_probabilities, write_floats
from numba_psa.cuda.heads_backward import pass_of
from numba_psa.cuda.staging import next_stage, place, values_descriptor, wait_for_copies
from numba_psa.cuda.tiles_backward import DKV, DQ


class Registers(NamedTuple):
    """What a lane holds; of a, a_wide and p a high and a low part. `wide` is value_dim wide, the rest key_dim or BN."""

    a_high: Any
    a_low: Any
    a_wide_high: Any
    a_wide_low: Any
    p_high: Any
    p_low: Any
    s: Any
    dp: Any
    acc: Any
    acc_wide: Any
    part: Any
    part_wide: Any
    high: Any
    low: Any
    l: Any
    delta: Any
    kept: Any


@step
def load_rows(high, low, base, channels, row, n_rows, scale, lane):
    """This lane's rows as an A operand of TF32, a negative scale taken in; zeros for what does not exist."""
    for k in range(high.shape[0]):
        for i in range(4):
            channel, at = 8 * k + (lane & 3) + i // 2 * 4, row + i % 2 * 8
            x = ZERO
            if at < n_rows and channel < channels:
                x = ld_global_f32(base + 4 * (channel * n_rows + at))
            x = -x if scale < ZERO else x
            split(True, x, high[k], low[k], i)


@step
def stage_split_rows(tile, high, low, shared, base, first, n_rows, scale, tid):
    """The rows key_dim wide as [row][channel], high and low, 64 of them after the other; a negative scale is taken in."""
    for i in range(tid, 8 * tile.BM, tile.threads):
        row, chunk = i % tile.BM, i // tile.BM  # of 4 channels
        for j in range(4):
            channel, x = 4 * chunk + j, ZERO
            if first + row < n_rows and channel < tile.key_dim:
                x = ld_global_f32(base + 4 * (channel * n_rows + first + row))
            x = -x if scale < ZERO else x
            split(True, x, high, low, j)
        at = shared + row // 64 * 16384 + row % 64 * 128 + 16 * (chunk ^ row & 7)
        st_shared_v4_u32(at, high[0], high[1], high[2], high[3])
        st_shared_v4_u32(at + 8192, low[0], low[1], low[2], low[3])


@step
def split_columns(tile, of_keys, high, low, source, target, tid):
    """A block of columns in its parts, from the block as it came."""
    channels = tile.key_pad + tile.value_pad
    for i in range(tid, 8 * channels, tile.threads):  # 4 channels of a token
        token, four = i & 31, i >> 5
        for j in range(4):
            at = source + (4 * four + j) * 128 + 4 * (token & 3)
            split(True, ld_shared_f32(at + 16 * (token >> 2 ^ 4 * four + j & 7)), high, low, j)
        row = token & 24 | (token & 3) << 1 | token >> 2 & 1
        at = target + (four >> 3) * 4096 + row * 128 + 16 * (four & 7 ^ row & 7)
        st_shared_v4_u32(at, high[0], high[1], high[2], high[3])
        st_shared_v4_u32(at + tile.tile_bytes, low[0], low[1], low[2], low[3])
    for i in range(tid, 8 * (channels if of_keys else tile.key_pad), tile.threads):  # 16 bytes, where they lie
        x = ld_shared_v4_f32(source + 16 * i)
        for j in range(4):
            low[j] = float_bits(x[j] - bits_float(float_bits(x[j]) & HIGH_BITS)) + HALF
        st_shared_v4_u32(target + 2 * tile.tile_bytes + 16 * i, low[0], low[1], low[2], low[3])


def make_backward_wgmma_tf32(config):
    """The kernel for one Tf32WarpgroupBackwardConfig. It closes over integers only, so that it can be cached compiled."""
    tile, wide = config.constants(), config.widths_swapped()
    A, A_WIDE, P, S, ACC, ACC_WIDE, WORDS, ROWS = config.fragment_shapes
    PASSES, OVERLAPS = config.passes, config.overlaps
    KEY_PAD, VALUE_PAD, BN, TILE = config.key_pad, config.value_pad, config.BN, config.tile_bytes

    @step
    def bring(of_keys, head, shared, have, j, ahead, next_, tid):
        """Begin to bring block j + 2, split block j + 1."""
        start_swizzled_columns(tile, of_keys, shared + ahead, head, (j + 2) * BN, tid)
        if (j + 1) * BN < head.n_columns:
            target = shared + tile.split_offset + (j + 1 & 1) * tile.split_bytes
            split_columns(tile, of_keys, have.high, have.low, shared + next_, target, tid)

    @step
    def run_pass(of_keys, head, shared, at, have):
        """The rows of one block."""
        first, steepness = cuda.blockIdx.x * tile.BM, abs(head.scale)
        row = first + 16 * at.query_warp + (at.lane >> 2)
        s, dp, acc, acc_wide = have.s, have.dp, have.acc, have.acc_wide
        fill(acc, ZERO)
        fill(acc_wide, ZERO)

        splits, rows = shared + tile.split_offset, shared + tile.query_offset
        if OVERLAPS:
            wait_for_previous_kernel()
        for j in range(2):
            start_swizzled_columns(tile, of_keys, shared + j * tile.stage_bytes, head, j * BN, at.tid)
        load_rows(have.a_wide_high, have.a_wide_low, head.rows_wide, tile.value_dim, row, head.n_rows, ONE, at.lane)
        if of_keys:  # registers cannot keep both
            stage_split_rows(tile, have.high, have.low, rows, head.rows, first, head.n_rows, head.scale, at.tid)
            keep_rows(have.kept)
        else:
            load_rows(have.a_high, have.a_low, head.rows, tile.key_dim, row, head.n_rows, head.scale, at.lane)
            load_row_sums(have.l, have.delta, have.kept, head.sums, row, head.n_rows, ONE)
        wait_for_copies(1)
        barrier()
        split_columns(tile, of_keys, have.high, have.low, shared, splits, at.tid)

        a = values_descriptor(rows + at.query_warp // 4 * 16384)
        whole, parts = values_descriptor(shared), values_descriptor(splits)
        stage, next_, ahead = 0, tile.stage_bytes, 2 * tile.stage_bytes
        n_blocks = (head.n_columns + BN - 1) // BN
        busy = first + at.query_warp // 4 * 64 < head.n_rows  # a warpgroup without rows only helps with the columns
        for j in range(n_blocks):
            wait_for_copies(0)
            fence_proxy_async()
            barrier()
            now = (j & 1) * tile.split_bytes
            b = parts + (now >> 4)
            b_low, b_wide = b + (TILE >> 4), b + (128 * KEY_PAD >> 4)
            if busy:
                if of_keys:
                    wgmma_tf32_shared(s, a, a + (8192 >> 4), b, b_low, BN, KEY_PAD)  # S^T = K Q^T
                else:
                    wgmma_tf32(s, have.a_high, have.a_low, b, b_low, BN, KEY_PAD, 1)  # S = Q K^T
                b_wide_low = b_wide + (TILE >> 4)
                wgmma_tf32(dp, have.a_wide_high, have.a_wide_low, b_wide, b_wide_low, BN, VALUE_PAD, 1)  # dP = dO V^T
                bring(of_keys, head, shared, have, j, ahead, next_, at.tid)
                wgmma_wait(1, s, BN)
                high, low = whole + (stage >> 4), b + (2 * TILE >> 4)
                if of_keys:
                    sums = columns_address(WITHIN_8, shared + stage + tile.sums_offset, at.lane)
                    weights_by_columns(tile, WITHIN_8, s, sums, steepness)  # P = exp(S - l)
                    split_probabilities(True, have.p_high, have.p_low, s)
                    high_wide, low_wide = high + (128 * KEY_PAD >> 4), low + (128 * KEY_PAD >> 4)
                    wgmma_tf32(have.part_wide, have.p_high, have.p_low, high_wide, low_wide, VALUE_PAD, BN, 1)
                    wgmma_wait_two(0, dp, BN, have.part_wide, VALUE_PAD)
                    add_part(acc_wide, have.part_wide)  # dV += P^T dO, summed in float32: tensor cores cut off
                    score_gradients_by_columns(tile, WITHIN_8, dp, s, sums + 4 * tile.BN, ONE)
                else:
                    weights_by_rows(tile, s, have.l, steepness)
                    left = head.n_columns - j * BN
                    if left < BN:
                        clear_tail(WITHIN_8, s, left, at.lane)
                    wgmma_wait_both(dp, BN, s, BN)
                    score_gradients_by_rows(tile, dp, s, have.delta, ONE)
                split_probabilities(True, have.p_high, have.p_low, dp)
                wgmma_tf32(have.part, have.p_high, have.p_low, high, low, KEY_PAD, BN, 1)
                wgmma_wait(0, have.part, KEY_PAD)
                add_part(acc, have.part)  # dQ += dS K, or dK += dS^T Q
            else:
                bring(of_keys, head, shared, have, j, ahead, next_, at.tid)
            stage, next_, ahead = next_stage(tile, stage), next_stage(tile, next_), next_stage(tile, ahead)

        again_if_not_finite(tile, of_keys, True, of_keys, head, acc, acc_wide, row, ONE, at.lane)
        wait_for_copies(0)
        multiply(acc, head.softmax_scale)
        write_floats(wide, acc, have.kept, head.d_rows, head.n_rows, row, at.lane)
        if of_keys:
            write_floats(tile, acc_wide, have.kept, head.d_wide, head.n_rows, row, at.lane)

    def attention_backward_wgmma_tf32_kernel(q, k, v, do, dq, dk, dv, sums, norms, n_queries, n_keys, softmax_scale, scale):
        """Arguments and grid as attention_backward_kernel; float32."""
        shared = shared_address(cuda.shared.array(0, uint32)) + 1023 & ~1023
        at = place(tile, first_lane(cuda.threadIdx.x >> 5), cuda.threadIdx.x)
        a_high, a_low = cuda.local.array(A, uint32), cuda.local.array(A, uint32)
        a_wide_high, a_wide_low = cuda.local.array(A_WIDE, uint32), cuda.local.array(A_WIDE, uint32)
        p_high, p_low = cuda.local.array(P, uint32), cuda.local.array(P, uint32)
        s, dp = cuda.local.array(S, float32), cuda.local.array(S, float32)
        acc, acc_wide = cuda.local.array(ACC, float32), cuda.local.array(ACC_WIDE, float32)
        part, part_wide = cuda.local.array(ACC, float32), cuda.local.array(ACC_WIDE, float32)
        high, low = cuda.local.array(WORDS, uint32), cuda.local.array(WORDS, uint32)
        l, delta, kept = cuda.local.array(ROWS, float32), cuda.local.array(ROWS, float32), cuda.local.array(ROWS, float32)
        products, gradients = (p_high, p_low, s, dp), (acc, acc_wide, part, part_wide)
        have = Registers(a_high, a_low, a_wide_high, a_wide_low, *products, *gradients, high, low, l, delta, kept)
        bh, first = cuda.blockIdx.y, cuda.blockIdx.x * tile.BM
        arrays, scalars = (q, k, v, do, dq, dk, dv, sums), (n_queries, n_keys, softmax_scale, scale, norms)
        if PASSES & DKV and cuda.blockIdx.z == 0 and first < n_keys:
            run_pass(True, pass_of(tile, True, bh, *arrays, *scalars), shared, at, have)
        if PASSES & DQ and cuda.blockIdx.z == PASSES // 2 and first < n_queries:
            run_pass(False, pass_of(tile, False, bh, *arrays, *scalars), shared, at, have)

    return attention_backward_wgmma_tf32_kernel
