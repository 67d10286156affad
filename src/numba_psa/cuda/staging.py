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
    cp_async_wait_0,
    cp_async_wait_1,
    cp_async_wait_2,
    join_u16,
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
    stmatrix_x4_trans,
)
from numba_psa.cuda.fragments import attends, block_address, inverse, pack, weighted
from numba_psa.cuda.tiles import Place

SWIZZLE_128B = 1 << 62 | 1024 >> 4 << 32  # matrix descriptor: swizzle, 1024 bytes from 8 rows to the next


@step
def place(tile, warp, tid):
    return Place(tid, tid & 31, warp % tile.query_warps, warp // tile.query_warps)


# ---- global to shared -------------------------------------------------------------------------------------------------
@step
def copy_chunk(tile, shared, source, valid):
    """One access wide, or 8 values if addresses are odd; zeros from `valid` on. In the background unless odd."""
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
def stage_rows(tile, threads, shared, stride, swizzled, source, row_bytes, rows, valid_rows, columns, valid_columns, tid):
    """rows x columns values into shared memory; a thread keeps its chunk of columns and walks down the rows.

    swizzled: rows are 128 bytes and 16 bytes c of row r lie at c ^ (r % 8), as wgmma's descriptors want it.
    """
    chunk = 8 if tile.copy == 2 else tile.copy // tile.item
    lanes = columns // chunk
    rows_a_pass = threads // lanes
    first, column = tid // lanes, tid % lanes * chunk
    source += tile.item * column
    for i in range((rows + rows_a_pass - 1) // rows_a_pass):
        row = first + i * rows_a_pass
        if (threads % lanes == 0 or first < rows_a_pass) and (rows % rows_a_pass == 0 or row < rows):
            offset = tile.item * column
            if swizzled:
                offset ^= 16 * (row & 7)
            valid = valid_columns - column if row < valid_rows else 0
            copy_chunk(tile, shared + row * stride + offset, source + row * row_bytes, valid)


@step
def stage_transposed(tile, shared, stride, source, valid, first, tokens, channels, channels_pad, tid):
    """Floats from [token][channel] to [channel][token]; `valid` tokens exist."""
    end = tokens * channels_pad + min(valid, 0)  # as a constant it would unroll the loop, into the accumulators' registers
    for i in range(tid, end, tile.threads):
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
        stage_rows(
            tile,
            tile.threads,
            shared,
            stride,
            False,
            source + first * row_bytes,
            row_bytes,
            tokens,
            n_tokens - first,
            channels_pad,
            channels,
            tid,
        )
    else:
        stage_rows(
            tile,
            tile.threads,
            shared,
            stride,
            False,
            source + tile.item * first,
            tile.item * n_tokens,
            channels_pad,
            channels,
            tokens,
            n_tokens - first,
            tid,
        )


@step
def stage_query(tile, shared, q, n_queries, first, tid):
    stage_tile(tile, shared, tile.query_stride, q, n_queries, first, tile.BM, tile.key_dim, tile.key_pad, tid)


@step
def stage_keys_values(tile, shared, head, n_keys, first, tid):
    """The keys and values of one turn of all warps."""
    tokens, target = tile.BN * tile.key_warps, shared + tile.values_offset
    stage_tile(tile, shared, tile.key_stride, head.k, n_keys, first, tokens, tile.key_dim, tile.key_pad, tid)
    stage_tile(tile, target, tile.value_stride, head.v, n_keys, first, tokens, tile.value_dim, tile.value_pad, tid)


@step
def stage_swizzled(tile, shared, head, n_keys, first, tid):
    """stage_keys_values for one key group of wgmma: tiles of [key_pad + value_pad rows][128 bytes], swizzled."""
    row_bytes, keys = tile.item * n_keys, 128 // tile.item
    rows, pads, threads = tile.key_dim + tile.value_dim, tile.key_pad + tile.value_pad, tile.stagers
    for b in range(tile.BN // keys):
        target, at = shared + b * tile.tile_bytes, first + keys * b
        k, v, left = head.k + tile.item * at, head.v + tile.item * at, n_keys - at
        if tile.key_dim == tile.key_pad:  # values follow keys without a gap
            stage_rows(tile, threads, target, 128, True, k, row_bytes, pads, rows, keys, left, tid)
        else:
            stage_rows(tile, threads, target, 128, True, k, row_bytes, tile.key_pad, tile.key_dim, keys, left, tid)
            target += tile.values_offset
            stage_rows(tile, threads, target, 128, True, v, row_bytes, tile.value_pad, tile.value_dim, keys, left, tid)


# ---- the ring of stages ------------------------------------------------------------------------------------------------
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

    Every group of 8 channels (stride 0) reads the same 1024 bytes, at one place in each tile of the stage at `shared`, which
    the queries borrow and which the keys do not need yet.
    """
    for b in range(tile.BN // 64):
        if tid < 64:
            st_shared_v4_u32(shared + b * tile.tile_bytes + tile.zeros_offset + 16 * tid, 0, 0, 0, 0)
    return 1 << 62 | 1 << 16 | (shared + tile.zeros_offset & 0x3FFFF) >> 4


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
    block = block_address(shared + 2 * first_row, stride, lane, False)
    for t in range(acc.shape[0]):
        w0, w1 = inverse(l_i[t, 0]), inverse(l_i[t, 1])
        e0, e1 = attends(l_i[t, 0]), attends(l_i[t, 1])
        for n in range(acc.shape[1] // 2):
            c, d = acc[t, 2 * n], acc[t, 2 * n + 1]
            a0 = pack(tile.bf16, weighted(c[0], w0, e0), weighted(c[1], w0, e0))
            a1 = pack(tile.bf16, weighted(c[2], w1, e1), weighted(c[3], w1, e1))
            b0 = pack(tile.bf16, weighted(d[0], w0, e0), weighted(d[1], w0, e0))
            b1 = pack(tile.bf16, weighted(d[2], w1, e1), weighted(d[3], w1, e1))
            row = first_row + 16 * t
            if tile.tokens_first:
                at = address + row * stride + 32 * n
                st_shared_u32(at, a0)
                st_shared_u32(at + 8 * stride, a1)
                st_shared_u32(at + 16, b0)
                st_shared_u32(at + 8 * stride + 16, b1)
            elif tile.stores_matrices:
                stmatrix_x4_trans(block + 16 * n * stride + 32 * t, a0, a1, b0, b1)
            else:
                at = address + 16 * n * stride + 2 * row
                st_shared_u32(at, movmatrix_trans(a0))
                st_shared_u32(at + 16, movmatrix_trans(a1))
                st_shared_u32(at + 8 * stride, movmatrix_trans(b0))
                st_shared_u32(at + 8 * stride + 16, movmatrix_trans(b1))


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
def write_odd_rows(tile, out, row_bytes, shared, rows, columns, valid_columns, tid):
    """write_rows for 16-bit rows that begin at any even address: whole words but at their ends."""
    lanes = columns // 2
    rows_a_pass = tile.threads // lanes
    first, lane = tid // lanes, tid % lanes
    for i in range((rows + rows_a_pass - 1) // rows_a_pass):
        row = first + i * rows_a_pass
        if row < rows:
            target, source = out + row * row_bytes, shared + row * tile.output_stride
            odd = target >> 1 & 1
            column = 2 * lane - odd
            if column < 0:  # the first lane of an odd row: its two ends
                st_global_u16(target, ld_shared_u16(source))
                column = columns - 1
            if column + 1 < min(valid_columns, columns):
                a, b = ld_shared_u16(source + 2 * column), ld_shared_u16(source + 2 * column + 2)
                st_global_u32(target + 2 * column, join_u16(a, b))
            elif column < valid_columns:
                st_global_u16(target + 2 * column, ld_shared_u16(source + 2 * column))


@step
def write_output(tile, acc, l_i, out, n_queries, first, shared, first_row, tid):
    """out = acc / l_i, by way of shared memory (free by now) so that whole rows are stored."""
    normalise_to_shared(tile, acc, l_i, shared, first_row, tid & 31)
    barrier()
    if tile.tokens_first:
        row_bytes = tile.item * tile.value_dim
        write_rows(
            tile, out + first * row_bytes, row_bytes, shared, tile.BM, n_queries - first, tile.value_pad, tile.value_dim, tid
        )
    elif tile.realigned:
        target, row_bytes = out + tile.item * first, tile.item * n_queries
        write_odd_rows(tile, target, row_bytes, shared, tile.value_dim, tile.BM, n_queries - first, tid)
    else:
        write_rows(
            tile,
            out + tile.item * first,
            tile.item * n_queries,
            shared,
            tile.value_pad,
            tile.value_dim,
            tile.BM,
            n_queries - first,
            tid,
        )
