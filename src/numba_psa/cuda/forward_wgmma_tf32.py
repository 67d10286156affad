"""Attention forward in float32 on Hopper's warpgroup products: TF32, three for one where exact. Channels first.

wgmma reads TF32 operands along the summed index only, and split: so each block of keys is brought over once more in shared
memory, K transposed, both in a high and a low part, while the product of the block before runs.
"""

from __future__ import annotations

from numba import float32, uint32

from numba_psa._numba_cuda import cuda
from numba_psa.cuda.device import (
    barrier,
    fence_proxy_async,
    first_lane,
    ld_shared_f32,
    ld_shared_v4_f32,
    named_barrier,
    shared_address,
    st_shared_v4_u32,
    step,
    wgmma_tf32,
    wgmma_wait,
)
from numba_psa.cuda.forward import SIGNATURE as SIGNATURE
from numba_psa.cuda.fragments import finish_row_sums, mask_tail, online_softmax_step, start, write_log_sums
from numba_psa.cuda.fragments_tf32 import (
    add_part,
    attend_again_if_nan,
    load_query_tf32,
    split,
    split_probabilities,
    write_floats,
)
from numba_psa.cuda.heads import heads_of
from numba_psa.cuda.merge import merge_key_warps
from numba_psa.cuda.realign import start_copy
from numba_psa.cuda.staging import place, stage_query, stage_swizzled, values_descriptor, wait_for_copies


@step
def wait_for_block(tile, group):
    """Until all that a key group has copied and split is in shared memory for all its threads."""
    wait_for_copies(0)
    fence_proxy_async()
    if tile.key_warps == 1:
        barrier()
    else:
        named_barrier(1 + group, tile.stagers)


@step
def store_eight(exact, row, low_row, chunk, words, low_words, permuted):
    """Eight words of a 128-byte row as 16-byte chunks `chunk` and `chunk + 1`; permuted: even ones first, then odd ones."""
    a, b, c, d = (1, 2, 3, 4) if not permuted else (2, 4, 6, 1)
    e, f, g = (5, 6, 7) if not permuted else (3, 5, 7)
    st_shared_v4_u32(row + chunk, words[0], words[a], words[b], words[c])
    st_shared_v4_u32(row + (chunk ^ 16), words[d], words[e], words[f], words[g])
    if exact:
        st_shared_v4_u32(low_row + chunk, low_words[0], low_words[a], low_words[b], low_words[c])
        st_shared_v4_u32(low_row + (chunk ^ 16), low_words[d], low_words[e], low_words[f], low_words[g])


@step
def split_block(tile, high, low, source, target, tid):
    """A block of keys and values in its two parts: K as [key][channel], V as [channel][key], keys permuted within 8.

    In an accumulator a lane holds columns 2i and 2i+1, in an operand i and i+4: with the keys of V in the order 0 2 4 6 1 3
    5 7 the probabilities need not move.
    """
    key, group = tid & 31, tid >> 5  # of 8 channels
    for i in range(8):
        chunk = (key >> 2 ^ i) << 4
        split(tile.exact, ld_shared_f32(source + (8 * group + i) * 128 + chunk + 4 * (key & 3)), high, low, i)
    row = target + 128 * key
    store_eight(tile.exact, row, row + tile.tile_bytes, (2 * group ^ key & 7) << 4, high, low, False)
    group, first = tid & 3, tid >> 2  # of 8 keys
    for e in range((tile.value_pad + 31) // 32):
        channel = first + 32 * e
        if tile.value_pad % 32 == 0 or channel < tile.value_pad:
            at = tile.values_offset + 128 * channel
            chunk = (2 * group ^ channel & 7) << 4
            for h in range(2):
                x = ld_shared_v4_f32(source + at + (chunk ^ 16 * h))
                for i in range(4):
                    split(tile.exact, x[i], high, low, 4 * h + i)
            store_eight(tile.exact, target + at, target + at + tile.tile_bytes, chunk, high, low, True)


def make_forward_wgmma_tf32(config):
    """The kernel for one Tf32WarpgroupTileConfig. It closes over integers only, so that its compiled form can be cached."""
    tile = config.constants()
    Q, P, S, ACC, ROWS = config.fragment_shapes
    VALUE_PAD, EXACT, GROUPS, BN = config.value_pad, int(config.exact), config.key_groups, config.BN

    def attention_forward_wgmma_tf32_kernel(q_base, k_base, v_base, out_base, l_base, n_queries, n_keys, scale):
        """Arguments and grid as attention_forward_kernel; float32."""
        shared = shared_address(cuda.shared.array(0, uint32)) + 1023 & ~1023
        at = place(tile, first_lane(cuda.threadIdx.x >> 5), cuda.threadIdx.x)
        head = heads_of(tile, cuda.blockIdx.y, q_base, k_base, v_base, out_base, l_base, n_queries, n_keys)
        first_query, row = cuda.blockIdx.x * tile.BM, 16 * at.query_warp + (at.lane >> 2)
        steepness = abs(scale)

        q_high, q_low = cuda.local.array(Q, uint32), cuda.local.array(Q, uint32)
        p_high, p_low = cuda.local.array(P, uint32), cuda.local.array(P, uint32)
        high, low = cuda.local.array(8, uint32), cuda.local.array(8, uint32)
        s, part, acc = cuda.local.array(S, float32), cuda.local.array(ACC, float32), cuda.local.array(ACC, float32)
        m_i, l_i, alpha = cuda.local.array(ROWS, float32), cuda.local.array(ROWS, float32), cuda.local.array(ROWS, float32)
        start(m_i, l_i, acc, steepness)

        blocks = shared + tile.stage_bytes * at.key_warp  # this key group's own
        arriving, split_bytes, tile_bytes = blocks + tile.keys_offset, tile.split_bytes, tile.tile_bytes
        keys, values = values_descriptor(blocks), values_descriptor(blocks + tile.values_offset)
        stager = at.tid - tile.stagers * at.key_warp
        n_blocks = ((n_keys + BN - 1) // BN - at.key_warp + GROUPS - 1) // GROUPS
        stage_query(tile, shared + tile.query_offset, head.q, n_queries, first_query, at.tid)
        for j in range(2):
            first = (j * GROUPS + at.key_warp) * BN
            start_copy(tile, stage_swizzled, arriving + j * tile_bytes, head, n_keys, first, stager)
        wait_for_copies(1)
        barrier()
        queries = shared + tile.query_offset + (at.lane & 3) * tile.query_stride + 4 * row
        load_query_tf32(tile, q_high, q_low, queries, scale)
        split_block(tile, high, low, arriving, blocks, stager)
        if GROUPS > 1:
            barrier()  # group 0 may write over the queries from here on

        for j in range(n_blocks):
            wait_for_block(tile, at.key_warp)
            now, next_ = j & 1, j + 1 & 1
            offset = now * split_bytes >> 4
            wgmma_tf32(s, q_high, q_low, keys + offset, keys + offset + (tile_bytes >> 4), BN, 32, EXACT)  # S = Q K^T
            later = ((j + 2) * GROUPS + at.key_warp) * BN
            start_copy(tile, stage_swizzled, arriving + now * tile_bytes, head, n_keys, later, stager)
            if j + 1 < n_blocks:
                split_block(tile, high, low, arriving + next_ * tile_bytes, blocks + next_ * split_bytes, stager)
            wgmma_wait(0, s, BN)
            keys_left = n_keys - (j * GROUPS + at.key_warp) * BN
            if keys_left < BN:
                mask_tail(s, keys_left, at.lane)
            online_softmax_step(s, m_i, l_i, acc, alpha, steepness)  # P = exp(S - m)
            split_probabilities(tile.exact, p_high, p_low, s)
            wgmma_tf32(part, p_high, p_low, values + offset, values + offset + (tile_bytes >> 4), VALUE_PAD, BN, EXACT)
            wgmma_wait(0, part, VALUE_PAD)
            add_part(acc, part)  # O += P V, summed in float32: tensor cores cut off

        if GROUPS > 1:  # groups that pass through fewer barriers than others look like races to racecheck
            for _ in range(((n_keys + BN - 1) // BN + GROUPS - 1) // GROUPS - n_blocks):
                named_barrier(1 + at.key_warp, tile.stagers)
        finish_row_sums(l_i)
        if tile.exact:
            attend_again_if_nan(tile, acc, m_i, l_i, head, n_queries, n_keys, first_query + row, at.key_warp, scale, at.lane)
        wait_for_copies(0)
        if GROUPS == 1:
            if tile.saves_l:
                write_log_sums(head.l, m_i, l_i, first_query + row, n_queries, steepness, at.lane)
            write_floats(tile, acc, l_i, head.out, n_queries, first_query + row, at.lane)
        else:
            barrier()  # the last block is read: shared memory is free
            merge_key_warps(tile, m_i, l_i, acc, alpha, steepness, head.out, head.l, n_queries, first_query, shared, at)

    return attention_forward_wgmma_tf32_kernel
