"""Moving tiles between global and shared memory.

Rows are channels and columns tokens with channels first (NCHW), the reverse with tokens first. Every access is as wide
as `tile.copy` says that addresses allow; what lies outside the problem becomes zeros on the way in.
"""

from __future__ import annotations

from numba import int32

from numba_psa.cuda.device import (
    barrier,
    cp_async_4,
    cp_async_8,
    cp_async_16,
    cp_async_commit,
    cp_async_wait_0,
    cp_async_wait_1,
    cp_async_wait_2,
    ld_global_8x16,
    ld_global_u16,
    ld_shared_u16,
    ld_shared_u32,
    ld_shared_v2_u32,
    ld_shared_v4_u32,
    movmatrix_trans,
    st_global_u16,
    st_global_u32,
    st_global_v2_u32,
    st_global_v4_u32,
    st_shared_u16,
    st_shared_u32,
    st_shared_v4_u32,
    step,
)
from numba_psa.cuda.fragments import normalised, pack
from numba_psa.cuda.tiles import Place

SWIZZLE_128B = 1 << 62 | 1024 >> 4 << 32  # matrix descriptor: swizzle, 1024 bytes from 8 rows to the next


@step
def place(tile, warp, tid):
    return Place(tid, tid & 31, warp % tile.query_warps, warp // tile.query_warps)


# ---- global to shared -------------------------------------------------------------------------------------------------
@step
def chunk_of(tile):
    """Elements that `copy_chunk` moves: one access, or 8 values whose address is a multiple of 2 only."""
    return 8 if tile.copy == 2 else tile.copy // tile.item


@step
def copy_chunk(tile, shared, source, valid):
    """One chunk into shared memory, zeros from `valid` on; in the background, unless addresses are odd."""
    valid = int32(valid)
    if tile.copy == 2:
        if valid >= 8:
            w0, w1, w2, w3 = ld_global_8x16(source)
            st_shared_v4_u32(shared, w0, w1, w2, w3)
        else:
            for i in range(8):
                value = ld_global_u16(source + 2 * i) if i < valid else 0
                st_shared_u16(shared + 2 * i, value)
    else:
        count = tile.copy if valid > 0 else 0  # named first: Python 3.12 would compile the call twice, once for each value
        if tile.copy == 16:
            cp_async_16(shared, source, count)
        elif tile.copy == 8:
            cp_async_8(shared, source, count)
        else:
            cp_async_4(shared, source, count)


@step
def stage_rows(tile, shared, stride, swizzled, source, row_bytes, rows, valid_rows, columns, valid_columns, tid):
    """rows x columns values into shared memory; a thread keeps its chunk of columns and walks down the rows.

    swizzled: rows are 128 bytes and 16 bytes c of row r lie at c ^ (r % 8), as wgmma's descriptors want it.
    """
    chunk = chunk_of(tile)
    lanes = columns // chunk
    rows_a_pass = tile.threads // lanes
    first, column = tid // lanes, tid % lanes * chunk
    source += tile.item * column
    for i in range((rows + rows_a_pass - 1) // rows_a_pass):
        row = first + i * rows_a_pass
        if (tile.threads % lanes == 0 or first < rows_a_pass) and (rows % rows_a_pass == 0 or row < rows):
            offset = tile.item * column
            if swizzled:
                offset ^= 16 * (row & 7)
            valid = valid_columns - column if row < valid_rows else 0
            copy_chunk(tile, shared + row * stride + offset, source + row * row_bytes, valid)


@step
def stage_transposed(tile, shared, stride, source, valid, first, tokens, channels, channels_pad, tid):
    """Floats from [token][channel] to [channel][token]; `valid` tokens exist."""
    for i in range(tid, tokens * channels_pad, tile.threads):
        token, channel = i // channels_pad, i % channels_pad
        count = 4 if token < valid and channel < channels else 0
        cp_async_4(shared + channel * stride + 4 * token, source + 4 * ((first + token) * channels + channel), count)


@step
def stage_tile(tile, shared, stride, source, n_tokens, first, tokens, channels, channels_pad, tid):
    """`tokens` tokens of a head from token `first` on, in the layout of their memory; floats always channels first."""
    if tile.tokens_first and tile.item == 4:
        stage_transposed(tile, shared, stride, source, n_tokens - first, first, tokens, channels, channels_pad, tid)
    elif tile.tokens_first:
        row_bytes = tile.item * channels
        stage_rows(tile, shared, stride, False, source + first * row_bytes, row_bytes, tokens, n_tokens - first,
                   channels_pad, channels, tid)  # fmt: skip
    else:
        stage_rows(tile, shared, stride, False, source + tile.item * first, tile.item * n_tokens, channels_pad, channels,
                   tokens, n_tokens - first, tid)  # fmt: skip


@step
def stage_query(tile, shared, q, n_queries, first, tid):
    stage_tile(tile, shared, tile.query_stride, q, n_queries, first, tile.BM, tile.key_dim, tile.key_pad, tid)


@step
def stage_keys_values(tile, shared, k, v, n_keys, first, tid):
    """The keys and values of one turn of all warps. Always closes a group of copies, even an empty one."""
    if int32(first) < n_keys:
        tokens = tile.BN * tile.key_warps
        stage_tile(tile, shared, tile.key_stride, k, n_keys, first, tokens, tile.key_dim, tile.key_pad, tid)
        stage_tile(tile, shared + tile.values_offset, tile.value_stride, v, n_keys, first, tokens, tile.value_dim,
                   tile.value_pad, tid)  # fmt: skip
    cp_async_commit()


@step
def stage_swizzled(tile, shared, k, v, n_keys, first, tid):
    """stage_keys_values for wgmma: tiles of 64 keys, [key_pad + value_pad rows][128 bytes], swizzled."""
    if int32(first) < n_keys:
        row_bytes = tile.item * n_keys
        for b in range(tile.BN // 64 * tile.key_warps):
            at = first + 64 * b
            stage_rows(tile, shared + b * tile.tile_bytes, 128, True, k + tile.item * at, row_bytes,
                       tile.key_pad, tile.key_dim, 64, n_keys - at, tid)  # fmt: skip
            stage_rows(tile, shared + b * tile.tile_bytes + tile.values_offset, 128, True, v + tile.item * at, row_bytes,
                       tile.value_pad, tile.value_dim, 64, n_keys - at, tid)  # fmt: skip
    cp_async_commit()


@step
def keys_descriptor(shared, tile_bytes):
    """[channel][64 keys] tiles, tile_bytes apart; add (byte offset >> 4) to move."""
    return SWIZZLE_128B | tile_bytes >> 4 << 16 | (shared & 0x3FFFF) >> 4


@step
def values_descriptor(shared):
    """[channel][64 keys] rows read along the keys; add (byte offset >> 4) to move."""
    return SWIZZLE_128B | 1 << 16 | (shared & 0x3FFFF) >> 4


@step
def no_values(tile, shared, tid):
    """Descriptor of a block of values that is all zeros, to be visible at the next barrier.

    Every group of 8 channels (stride 0) reads the same 1024 bytes, the last of each tile of the stage at `shared`; the
    queries, which borrow that stage, end before them.
    """
    for b in range(tile.BN // 64):
        if tid < 64:
            st_shared_v4_u32(shared + (b + 1) * tile.tile_bytes - 1024 + 16 * tid, 0, 0, 0, 0)
    return 1 << 62 | 1 << 16 | (shared + tile.tile_bytes - 1024 & 0x3FFFF) >> 4


@step
def next_stage(tile, stage):
    """Offset of the stage after `stage`, round the ring (a remainder would cost a multiplication chain a turn)."""
    stage += tile.stage_bytes
    return 0 if stage == tile.stages * tile.stage_bytes else stage


@step
def wait_for_copies(under_way):
    """Until at most `under_way` groups are."""
    if under_way == 0:
        cp_async_wait_0()
    elif under_way == 1:
        cp_async_wait_1()
    else:
        cp_async_wait_2()


# ---- registers to shared to global ------------------------------------------------------------------------------------
@step
def normalise_to_shared(tile, acc, l_i, shared, first_row, lane):
    """acc / l_i, rounded, into rows as they will lie in memory; first_row is the warp's first query in the block."""
    stride = tile.output_stride
    address = shared + (lane >> 2) * stride + 4 * (lane & 3)
    for t in range(acc.shape[0]):
        for n in range(acc.shape[1]):
            for r in range(2):
                word = pack(tile.bf16, normalised(acc[t, n, 2 * r], l_i[t, r]), normalised(acc[t, n, 2 * r + 1], l_i[t, r]))
                row = first_row + 16 * t + 8 * r
                if tile.tokens_first:
                    st_shared_u32(address + row * stride + 16 * n, word)
                else:
                    st_shared_u32(address + 8 * n * stride + 2 * row, movmatrix_trans(word))


@step
def store_chunk(tile, target, source):
    """One access wide, from shared to global memory."""
    if tile.copy == 16:
        a, b, c, d = ld_shared_v4_u32(source)
        st_global_v4_u32(target, a, b, c, d)
    elif tile.copy == 8:
        a, b = ld_shared_v2_u32(source)
        st_global_v2_u32(target, a, b)
    elif tile.copy == 4:
        st_global_u32(target, ld_shared_u32(source))
    else:
        st_global_u16(target, ld_shared_u16(source))


@step
def write_rows(tile, out, row_bytes, shared, rows, valid_rows, columns, valid_columns, tid):
    """The part of rows x columns of shared memory that is valid. Chunks are whole: row_bytes is a multiple of `copy`."""
    chunk = tile.copy // tile.item
    lanes = columns // chunk
    rows_a_pass = tile.threads // lanes if tile.threads > lanes else 1
    first, column = tid // lanes, tid % lanes * chunk
    for i in range((rows + rows_a_pass - 1) // rows_a_pass):
        row = first + i * rows_a_pass
        inside = first < rows_a_pass and row < rows and row < valid_rows and column < valid_columns
        if inside:
            store_chunk(
                tile, out + row * row_bytes + tile.item * column, shared + row * tile.output_stride + tile.item * column
            )


@step
def write_output(tile, acc, l_i, out, n_queries, first, shared, first_row, tid):
    """out = acc / l_i, by way of shared memory (free by now) so that whole rows are stored."""
    normalise_to_shared(tile, acc, l_i, shared, first_row, tid & 31)
    barrier()
    if tile.tokens_first:
        row_bytes = tile.item * tile.value_dim
        write_rows(tile, out + first * row_bytes, row_bytes, shared, tile.BM, n_queries - first, tile.value_pad,
                   tile.value_dim, tid)  # fmt: skip
    else:
        write_rows(tile, out + tile.item * first, tile.item * n_queries, shared, tile.value_pad, tile.value_dim, tile.BM,
                   n_queries - first, tid)  # fmt: skip
