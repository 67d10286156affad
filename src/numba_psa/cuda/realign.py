"""Rows that begin at odd places.

Where N is no multiple of 8, channel rows of 16-bit values begin at any even address. Then (`tile.realigned`) the aligned
16 bytes that hold them are copied in the background, and operands are built from them as they lie. wgmma cannot: its keys
and values have been aligned before (`tile.packed`, align.py), its queries are read so.
"""

from __future__ import annotations

from typing import NamedTuple

from numba import int32

from numba_psa.cuda.device import (
    cp_async_16,
    cp_async_commit,
    funnel_shift,
    join_u16,
    ld_shared_u16,
    ld_shared_u32,
    st_shared_u32,
    step,
)
from numba_psa.cuda.fragments import ZERO, fill, mma, pack_probabilities


@step
def copy_rows(threads, raw, stride, source, n_tokens, rows, columns, first, gap_at, gap, tid):
    """The aligned chunks that hold `columns` tokens of channel rows, from token `first` on; zeros after the last token.

    From row `gap_at` on they lie `gap` rows further. A row takes columns / 8 chunks, and mostly one more.
    """
    row_bytes, left = 2 * n_tokens, 2 * min(n_tokens - first, columns + 8)
    source += 2 * first
    lanes = columns // 8
    rows_a_pass = threads // lanes if threads > lanes else 1
    lead, chunk = tid // lanes, tid % lanes
    for i in range((rows + rows_a_pass - 1) // rows_a_pass):
        row = lead + i * rows_a_pass
        if (threads % lanes == 0 or lead < rows_a_pass) and (rows % rows_a_pass == 0 or row < rows):
            place = row if row < gap_at else row + gap
            copy_chunk_of(raw + place * stride, source + row * row_bytes, left, chunk)
    for row in range(tid, rows, threads):
        place = row if row < gap_at else row + gap
        copy_chunk_of(raw + place * stride, source + row * row_bytes, left, lanes)


@step
def copy_chunk_of(raw, row, left, chunk):
    """16 aligned bytes of a row that begins at `row` and has `left` bytes."""
    misplaced = row & 15
    count = min(max(int32(left + misplaced - 16 * chunk), 0), 16)
    cp_async_16(raw + 16 * chunk, (row & -16) + 16 * chunk, count)


@step
def copy_queries(tile, shared, q, n_queries, first, tid):
    """staging.stage_query for rows that begin at odd places; shifted."""
    copy_rows(tile.threads, shared, tile.query_stride, q, n_queries, tile.key_dim, tile.BM, first, tile.key_dim, 0, tid)
    clear_rows(tile, shared, tile.query_stride, tid)


@step
def copy_raw(tile, raw, k, n_keys, first, tid):
    """A block of keys and values, whose rows are neighbours in qkv."""
    rows, gap_at, gap = tile.key_dim + tile.value_dim, tile.key_dim, tile.raw_gap
    copy_rows(tile.stagers, raw, tile.raw_stride, k, n_keys, rows, tile.raw_stride // 2 - 8, first, gap_at, gap, tid)


@step
def clear_rows(tile, shared, stride, tid):
    """Zeros into the rows beyond KEY_DIM of [channel][token] queries or keys, which no copy reaches."""
    words = (tile.key_pad - tile.key_dim) * stride // 4
    if words > 0:
        for i in range(tid, words, tile.threads):
            st_shared_u32(shared + tile.key_dim * stride + 4 * i, 0)


@step
def load_query_shifted(tile, q, shared, source, n_queries, first_row, lane, scale):
    """fragments.load_query from shifted rows at `shared`; source is their address in memory."""
    sign = 0x80008000 if scale < ZERO else 0
    row_bytes, even = 2 * n_queries, 2 * (lane & 3)
    first, second = source + even * row_bytes & 15, source + (even + 1) * row_bytes & 15
    at = shared + even * tile.query_stride + 2 * (first_row + (lane >> 2))
    for t in range(q.shape[0]):
        for k in range(q.shape[1]):
            for i in range(4):
                place = at + (16 * k + i // 2 * 8) * tile.query_stride + 32 * t + i % 2 * 16
                q[t, k, i] = sign ^ join_u16(ld_shared_u16(place + first), ld_shared_u16(place + tile.query_stride + second))


# ---- mma.sync: operands from rows as they lie ---------------------------------------------------------------------------
class Shifts(NamedTuple):
    """Where a lane's rows begin: the same for all rows that are eight apart."""

    even: int  # offsets of the lane's two channels of K within eight, for its key
    odd: int
    values: int  # offset of the lane's channel of V, to a whole word
    bits: int  # that are left


@step
def shifts_of(tile, k, v, n_keys, lane):
    """k, v: addresses of the head's rows. Blocks of keys are multiples of 8, so they do not matter."""
    row_bytes, even, row = 2 * n_keys, 2 * (lane & 3), lane >> 2
    first, second = k + even * row_bytes & 15, k + (even + 1) * row_bytes & 15
    misplaced = v + row * row_bytes & 15
    return Shifts(
        even * tile.key_stride + first + 2 * row,
        (even + 1) * tile.key_stride + second + 2 * row,
        row * tile.value_stride + (misplaced & 12) + 4 * (lane & 3),
        8 * (misplaced & 2),
    )


@step
def scores_shifted(tile, s, q, keys, shifts):
    """fragments.scores; keys is the address of the warp's first key, rows shifted."""
    fill(s, ZERO)
    for k in range(q.shape[1]):
        for n in range(s.shape[1]):
            even, odd = keys + 16 * n + shifts.even, keys + 16 * n + shifts.odd
            at, next_ = 16 * k * tile.key_stride, (16 * k + 8) * tile.key_stride
            b0 = join_u16(ld_shared_u16(even + at), ld_shared_u16(odd + at))
            b1 = join_u16(ld_shared_u16(even + next_), ld_shared_u16(odd + next_))
            for t in range(s.shape[0]):
                mma(tile.bf16, s[t, n], q[t, k], b0, b1)


@step
def accumulate_shifted(tile, acc, s, p, values, shifts):
    """fragments.accumulate_values; values is the address of the warp's first key, rows shifted."""
    for k in range(s.shape[1] // 2):
        for t in range(s.shape[0]):
            pack_probabilities(tile.bf16, p[t], s, t, k)
        for n in range(acc.shape[1]):
            at = values + shifts.values + 8 * n * tile.value_stride + 32 * k
            b0 = funnel_shift(ld_shared_u32(at), ld_shared_u32(at + 4), shifts.bits)
            b1 = funnel_shift(ld_shared_u32(at + 16), ld_shared_u32(at + 20), shifts.bits)
            for t in range(s.shape[0]):
                mma(tile.bf16, acc[t, n], p[t], b0, b1)


@step
def clear_stages(tile, ring, tid):
    for stage in range(tile.stages):
        clear_rows(tile, ring + stage * tile.stage_bytes, tile.key_stride, tid)


# ---- either way ---------------------------------------------------------------------------------------------------------
@step
def start_copy(tile, stage_block, shared, head, n_keys, first, tid):
    """Begin to bring a block of keys and values. Always closes a group of copies, even an empty one."""
    if int32(first) < n_keys:
        if tile.realigned:
            copy_raw(tile, shared, head.k, n_keys, first, tid)
        else:
            stage_block(tile, shared, head, n_keys, first, tid)
    cp_async_commit()
