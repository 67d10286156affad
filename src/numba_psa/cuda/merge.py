"""Merging the partial results of warps that shared the keys of one query tile (split-key, as in Flash-Decoding).

All key warps publish, then every thread sums chunks of 4 queries in warp order: the same bits on every run.
"""

from __future__ import annotations

from numba_psa.cuda.device import (
    barrier,
    ex2,
    float_bits,
    funnel_shift,
    ld_shared_f32,
    ld_shared_v4_f32,
    maximum,
    st_global_f32,
    st_global_u16,
    st_global_u32,
    st_global_v2_u32,
    st_global_v4_u32,
    st_shared_f32,
    step,
)
from numba_psa.cuda.fragments import MASKED, ZERO, attends, inverse, log_sum, pack, rescale, weighted


@step
def publish_rows(rows, address, lane):
    """One float a query row, written by the first lane of each quad."""
    if lane & 3 == 0:
        for t in range(rows.shape[0]):
            for r in range(2):
                st_shared_f32(address + 64 * t + 32 * r, rows[t, r])


@step
def agree_on_maximum(tile, m_i, l_i, acc, alpha, maxima, row, scale):
    """Bring m_i, l_i and acc to the largest maximum that any key warp published."""
    for t in range(m_i.shape[0]):
        for r in range(2):
            m = MASKED
            for w in range(tile.key_warps):
                m = maximum(m, ld_shared_f32(maxima + 4 * (w * tile.BM + row + 16 * t + 8 * r)))
            alpha[t, r] = ex2((m_i[t, r] - m) * scale)
            m_i[t, r] = m
            l_i[t, r] *= alpha[t, r]
    rescale(acc, alpha)


@step
def publish_accumulators(acc, address, stride):
    """acc to this warp's [channel][query] floats in shared memory."""
    for t in range(acc.shape[0]):
        for n in range(acc.shape[1]):
            for i in range(4):
                st_shared_f32(address + 8 * n * stride + 64 * t + i % 2 * stride + i // 2 * 32, acc[t, n, i])


@step
def store_four(tile, target, o0, o1, o2, o3, valid):
    """Four queries of a channel, as wide as addresses allow; `valid` of them exist."""
    if tile.item == 4:
        if tile.copy == 16:
            st_global_v4_u32(target, float_bits(o0), float_bits(o1), float_bits(o2), float_bits(o3))
        else:
            st_global_f32(target, o0)
            if valid > 1:
                st_global_f32(target + 4, o1)
            if valid > 2:
                st_global_f32(target + 8, o2)
            if valid > 3:
                st_global_f32(target + 12, o3)
    else:
        low, high = pack(tile.bf16, o0, o1), pack(tile.bf16, o2, o3)
        if tile.copy >= 8:
            st_global_v2_u32(target, low, high)
        elif tile.copy == 4:
            st_global_u32(target, low)
            if valid > 2:
                st_global_u32(target + 4, high)
        elif valid > 3 and target & 2 == 0:
            st_global_u32(target, low)
            st_global_u32(target + 4, high)
        elif valid > 3:
            st_global_u16(target, low)
            st_global_u32(target + 2, funnel_shift(low, high, 16))
            st_global_u16(target + 6, high >> 16)
        else:
            st_global_u16(target, low)
            if valid > 1:
                st_global_u16(target + 2, low >> 16)
            if valid > 2:
                st_global_u16(target + 4, high)
            if valid > 3:
                st_global_u16(target + 6, high >> 16)


@step
def write_sums(tile, out, n_queries, first, shared, tid):
    """out = sum of accumulators / sum of l_i over the key warps; a thread keeps 4 queries and walks down the channels."""
    chunks = tile.BM // 4
    rows_a_pass = tile.threads // chunks
    row, column = tid // chunks, tid % chunks * 4
    valid = n_queries - first - column
    l0 = l1 = l2 = l3 = ZERO
    for w in range(tile.key_warps):
        l = ld_shared_v4_f32(shared + tile.sums_offset + 4 * (w * tile.BM + column))
        l0, l1, l2, l3 = l0 + l[0], l1 + l[1], l2 + l[2], l3 + l[3]
    w0, w1, w2, w3 = inverse(l0), inverse(l1), inverse(l2), inverse(l3)
    e0, e1, e2, e3 = attends(l0), attends(l1), attends(l2), attends(l3)
    for _ in range((tile.value_dim + rows_a_pass - 1) // rows_a_pass):
        if row < tile.value_dim and valid > 0:
            a0 = a1 = a2 = a3 = ZERO
            for w in range(tile.key_warps):
                a = ld_shared_v4_f32(shared + (w * tile.value_pad + row) * tile.merge_stride + 4 * column)
                a0, a1, a2, a3 = a0 + a[0], a1 + a[1], a2 + a[2], a3 + a[3]
            target = out + tile.item * (row * n_queries + first + column)
            store_four(
                tile, target, weighted(a0, w0, e0), weighted(a1, w1, e1), weighted(a2, w2, e2), weighted(a3, w3, e3), valid
            )
        row += rows_a_pass


@step
def write_merged_log_sums(tile, l, n_queries, first, shared, tid, scale):
    """l of the block's rows, from the published maxima (agreed on by now: the largest one) and sums."""
    if tid < tile.BM and first + tid < n_queries:
        m, total = MASKED, ZERO
        for w in range(tile.key_warps):
            m = maximum(m, ld_shared_f32(shared + tile.maxima_offset + 4 * (w * tile.BM + tid)))
            total += ld_shared_f32(shared + tile.sums_offset + 4 * (w * tile.BM + tid))
        st_global_f32(l + 4 * (first + tid), log_sum(m, total, scale))


@step
def merge_key_warps(tile, m_i, l_i, acc, alpha, scale, out, l, n_queries, first, shared, at):
    """Write what the key warps of a query tile have found together."""
    row = 16 * m_i.shape[0] * at.query_warp + (at.lane >> 2)
    mine = 4 * (at.key_warp * tile.BM + row)
    publish_rows(m_i, shared + tile.maxima_offset + mine, at.lane)
    barrier()
    agree_on_maximum(tile, m_i, l_i, acc, alpha, shared + tile.maxima_offset, row, scale)
    publish_rows(l_i, shared + tile.sums_offset + mine, at.lane)
    publish_accumulators(
        acc, shared + (at.key_warp * tile.value_pad + 2 * (at.lane & 3)) * tile.merge_stride + 4 * row, tile.merge_stride
    )
    barrier()
    write_sums(tile, out, n_queries, first, shared, at.tid)
    if tile.saves_l:
        write_merged_log_sums(tile, l, n_queries, first, shared, at.tid, scale)
