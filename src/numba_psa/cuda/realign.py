"""Rows that begin at odd places.

Where N is no multiple of 8, channel rows of 16-bit values begin at any even address. Then (`tile.realigned`) the aligned
16 bytes that hold them are copied in the background. The mma.sync kernel builds its operands from them as they lie, for
each of its warps reads them once; for wgmma they are moved to their place a block later, beside the products.
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
    st_shared_v2_u32,
    step,
)
from numba_psa.cuda.fragments import ZERO, fill, mma, pack_probabilities


@step
def rows_a_pass_of(threads, lanes):
    """Rows that `threads` move at once: a multiple of 8 if that can be, for rows 8 apart begin at the same odd place."""
    rows = threads // lanes
    return rows // 8 * 8 if rows >= 8 else rows


@step
def copy_rows(threads, raw, stride, source, n_tokens, rows, columns, first, gap_at, gap, tid):
    """The aligned chunks that hold `columns` tokens of channel rows, from token `first` on; zeros after the last token.

    From row `gap_at` on they lie `gap` rows further. first is a multiple of 8, so that rows begin where they do at token 0.
    """
    chunks, row_bytes = columns // 8 + 1, 2 * n_tokens
    rows_a_pass = rows_a_pass_of(threads, chunks)
    lead, chunk = tid // chunks, tid % chunks
    source += 2 * first
    for i in range((rows + rows_a_pass - 1) // rows_a_pass):
        row = lead + i * rows_a_pass
        if lead < rows_a_pass and row < rows:
            misplaced = source + (row if rows_a_pass % 8 else lead) * row_bytes & 15
            count = min(max(int32(2 * (n_tokens - first) + misplaced - 16 * chunk), 0), 16)
            at = source + row * row_bytes - misplaced + 16 * chunk
            place = row if row < gap_at else row + gap
            cp_async_16(raw + place * stride + 16 * chunk, at, count)


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


# ---- wgmma: rows to their place ------------------------------------------------------------------------------------------
@step
def realign(tile, words, shared, raw, source, n_keys, rows, valid_rows, tid):
    """Swizzled rows of 64 keys from raw to their place, two words a lane, shifted by half a word where a row is odd.

    Several rows are read before any is written: loads and stores of shared memory cannot pass each other.
    """
    row_bytes, together = 2 * n_keys, words.shape[0]
    rows_a_pass = rows_a_pass_of(tile.stagers, 16)
    passes = (rows + rows_a_pass - 1) // rows_a_pass
    first, pair = tid // 16, tid % 16
    for begin in range(0, passes, together):
        for i in range(min(together, passes - begin)):
            row = first + (begin + i) * rows_a_pass
            for w in range(3):
                words[i, w] = 0
            if row < valid_rows:
                misplaced = source + (row if rows_a_pass % 8 else first) * row_bytes & 15
                at = raw + row * tile.raw_stride + (misplaced & 12) + 8 * pair
                for w in range(3):
                    words[i, w] = ld_shared_u32(at + 4 * w)
        for i in range(min(together, passes - begin)):
            row = first + (begin + i) * rows_a_pass
            if rows % rows_a_pass == 0 or row < rows:
                shift = 8 * (source + (row if rows_a_pass % 8 else first) * row_bytes & 2)
                low, high = funnel_shift(words[i, 0], words[i, 1], shift), funnel_shift(words[i, 1], words[i, 2], shift)
                st_shared_v2_u32(shared + row * 128 + (8 * pair ^ 16 * (row & 7)), low, high)


@step
def realign_block(tile, words, shared, raw, k, n_keys, tid):
    """A block of keys and values of a key group."""
    for b in range(tile.BN // 64):
        target, source = shared + b * tile.tile_bytes, raw + 128 * b
        if tile.key_dim == tile.key_pad:  # values follow keys without a gap
            rows = tile.key_dim + tile.value_pad
            realign(tile, words, target, source, k, n_keys, rows, tile.key_dim + tile.value_dim, tid)
        else:
            v, values = k + tile.key_dim * (2 * n_keys), source + tile.key_dim * tile.raw_stride
            realign(tile, words, target, source, k, n_keys, tile.key_pad, tile.key_dim, tid)
            realign(tile, words, target + tile.values_offset, values, v, n_keys, tile.value_pad, tile.value_dim, tid)


@step
def start_copy(tile, stage_block, shared, raw, head, n_keys, first, tid):
    """Begin to bring a block of keys and values, to its place or raw. Always closes a group of copies, even an empty one."""
    if int32(first) < n_keys:
        if tile.realigned:
            copy_raw(tile, raw, head.k, n_keys, first, tid)
        else:
            stage_block(tile, shared, head, n_keys, first, tid)
    cp_async_commit()
