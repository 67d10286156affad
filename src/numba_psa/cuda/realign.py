"""Rows that begin at odd places.

Where N is no multiple of 8, channel rows of 16-bit values begin at any even address. Then (`tile.realigned`) the aligned
16 bytes that hold them are copied in the background to `raw`, and moved to their place a block later, beside the products.
"""

from __future__ import annotations

from numba import int32, uint32

from numba_psa.cuda.device import cp_async_16, cp_async_commit, funnel_shift, ld_shared_u32, st_shared_v2_u32, step


@step
def rows_a_pass_of(threads, lanes):
    """Rows that `threads` move at once: a multiple of 8 if that can be, for rows 8 apart begin at the same odd place."""
    rows = threads // lanes
    return rows // 8 * 8 if rows >= 8 else rows


@step
def copy_raw(tile, raw, source, n_keys, first_key, tid):
    """The aligned chunks that hold the keys' and values' rows (neighbours in qkv) from a key on, zeros after them."""
    chunks, row_bytes, rows = tile.raw_stride // 16, 2 * n_keys, tile.key_dim + tile.value_dim
    rows_a_pass = rows_a_pass_of(tile.stagers, chunks)
    first, chunk = tid // chunks, tid % chunks
    source += 2 * first_key
    for i in range((rows + rows_a_pass - 1) // rows_a_pass):
        row = first + i * rows_a_pass
        if first < rows_a_pass and row < rows:
            misplaced = source + (row if rows_a_pass % 8 else first) * row_bytes & 15
            count = min(max(int32(2 * (n_keys - first_key) + misplaced - 16 * chunk), 0), 16)
            at = source + row * row_bytes - misplaced + 16 * chunk
            cp_async_16(raw + row * tile.raw_stride + 16 * chunk, at, count)


@step
def realign(tile, shared, stride, swizzled, raw, source, n_keys, rows, valid_rows, keys, tid):
    """Rows of `keys` keys from raw to their place, two words a lane, shifted by half a word where a row is odd."""
    lanes, row_bytes = keys // 4, 2 * n_keys
    rows_a_pass = rows_a_pass_of(tile.stagers, lanes)
    first, pair = tid // lanes, tid % lanes
    for i in range((rows + rows_a_pass - 1) // rows_a_pass):
        row = first + i * rows_a_pass
        if first < rows_a_pass and (rows % rows_a_pass == 0 or row < rows):
            low, high = uint32(0), uint32(0)
            if row < valid_rows:
                misplaced = source + (row if rows_a_pass % 8 else first) * row_bytes & 15
                at = raw + row * tile.raw_stride + (misplaced & 12) + 8 * pair
                shift, middle = 8 * (misplaced & 2), ld_shared_u32(at + 4)
                low = funnel_shift(ld_shared_u32(at), middle, shift)
                high = funnel_shift(middle, ld_shared_u32(at + 8), shift)
            offset = 8 * pair
            if swizzled:
                offset ^= 16 * (row & 7)
            st_shared_v2_u32(shared + row * stride + offset, low, high)


@step
def realign_keys_values(tile, shared, raw, k, n_keys, tid):
    keys = tile.BN * tile.key_warps
    realign(tile, shared, tile.key_stride, False, raw, k, n_keys, tile.key_pad, tile.key_dim, keys, tid)
    realign(
        tile,
        shared + tile.values_offset,
        tile.value_stride,
        False,
        raw + tile.key_dim * tile.raw_stride,
        k + tile.key_dim * (2 * n_keys),
        n_keys,
        tile.value_pad,
        tile.value_dim,
        keys,
        tid,
    )


@step
def realign_swizzled(tile, shared, raw, k, n_keys, tid):
    for b in range(tile.BN // 64):
        target, source = shared + b * tile.tile_bytes, raw + 128 * b
        realign(tile, target, 128, True, source, k, n_keys, tile.key_pad, tile.key_dim, 64, tid)
        realign(
            tile,
            target + tile.values_offset,
            128,
            True,
            source + tile.key_dim * tile.raw_stride,
            k + tile.key_dim * (2 * n_keys),
            n_keys,
            tile.value_pad,
            tile.value_dim,
            64,
            tid,
        )


@step
def start_copy(tile, stage_block, shared, raw, head, n_keys, first, tid):
    """Begin to bring a block of keys and values, to its place or raw. Always closes a group of copies, even an empty one."""
    if int32(first) < n_keys:
        if tile.realigned:
            copy_raw(tile, raw, head.k, n_keys, first, tid)
        else:
            stage_block(tile, shared, head, n_keys, first, tid)
    cp_async_commit()
