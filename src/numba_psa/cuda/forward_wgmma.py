"""Attention forward on Hopper's warpgroup products (wgmma, sm_90a): the algorithm of forward.py, one block behind.

The product P V of block j-1 runs on the tensor cores while the softmax of block j runs on the other units, so acc is
rescaled only once that product has finished (FlashAttention-3's overlap within a warpgroup). Channels first.
"""

from __future__ import annotations

from numba import float32, uint32

from numba_psa._numba_cuda import cuda
from numba_psa.cuda.device import (
    barrier,
    fence_proxy_async,
    first_lane,
    keep_above,
    named_barrier,
    shared_address,
    step,
    wait_for_previous_kernel,
    wgmma_scores,
    wgmma_values,
    wgmma_wait,
    wgmma_wait_both,
)
from numba_psa.cuda.forward import SIGNATURE as SIGNATURE
from numba_psa.cuda.fragments import (
    block_address,
    exponentiate,
    finish_row_sums,
    load_query,
    mask_tail,
    no_probabilities,
    pack_block,
    raise_maximum,
    rescale,
    start,
    write_log_sums,
)
from numba_psa.cuda.heads import heads_of
from numba_psa.cuda.merge import merge_key_warps
from numba_psa.cuda.realign import copy_queries, load_query_shifted, start_copy
from numba_psa.cuda.staging import (
    keys_descriptor,
    next_stage,
    no_values,
    place,
    stage_query,
    stage_swizzled,
    values_descriptor,
    wait_for_copies,
    write_output,
)


@step
def wait_for_stage(tile, group):
    """Until the next block of a key group is in shared memory for all its threads, and the one before is read."""
    wait_for_copies(tile.stages - 3)
    fence_proxy_async()
    if tile.key_warps == 1:
        barrier()
    else:
        named_barrier(1 + group, tile.stagers)


def make_forward_wgmma(config):
    """The kernel for one WarpgroupTileConfig. It closes over integers only, so that its compiled form can be cached."""
    tile, aligned = config.constants(), config.aligned().constants()
    Q, P, S, ACC, ROWS, P_TAIL, S_TAIL = config.fragment_shapes
    KEY_PAD, VALUE_PAD, TILE_BYTES, BF16 = config.key_pad, config.value_pad, config.tile_bytes, int(config.bf16)
    LEAD = config.stages - 2  # blocks on their way when a turn begins
    BN, TAIL, GROUPS = config.BN, config.tail, config.key_groups

    @step
    def start_products(s, q, keys, acc, p_before, values_before, BLOCK):
        """S = q k^T of a block of BLOCK keys and acc += p_before v_before of the BN keys before, both in flight."""
        wgmma_scores(s, q, keys, BLOCK, KEY_PAD, BF16)
        wgmma_values(acc, p_before, values_before, VALUE_PAD, BN, TILE_BYTES, BF16)

    @step
    def attend(s, p, m_i, l_i, acc, alpha, scale, shared, lane, valid, BLOCK):
        """p = exp(S - m_i), while the product of the block before runs; then acc is brought to m_i."""
        wgmma_wait(1, s, BLOCK)
        if valid < BLOCK:
            mask_tail(s, valid, lane)
        grown = raise_maximum(s, m_i, l_i, alpha, scale)
        exponentiate(s, m_i, l_i, scale)  # P = exp(S - m)
        keep_above(l_i[0, 0] + l_i[0, 1], shared)
        wgmma_wait_both(acc, VALUE_PAD, s, BLOCK)
        if grown:
            rescale(acc, alpha)
        pack_block(BF16, p, s)

    def attention_forward_wgmma_kernel(q_base, k_base, v_base, out_base, l_base, n_queries, n_keys, scale):
        """Arguments and grid as attention_forward_kernel."""
        shared = shared_address(cuda.shared.array(0, uint32)) + 1023 & ~1023
        at = place(tile, first_lane(cuda.threadIdx.x >> 5), cuda.threadIdx.x)
        head = heads_of(tile, cuda.blockIdx.y, q_base, k_base, v_base, out_base, l_base, n_queries, n_keys)
        first_query, first_row = cuda.blockIdx.x * tile.BM, 16 * at.query_warp
        steepness = abs(scale)

        q, p = cuda.local.array(Q, uint32), cuda.local.array(P, uint32)
        s, acc = cuda.local.array(S, float32), cuda.local.array(ACC, float32)
        m_i, l_i, alpha = cuda.local.array(ROWS, float32), cuda.local.array(ROWS, float32), cuda.local.array(ROWS, float32)
        start(m_i, l_i, acc, steepness)

        ring = shared + tile.group_bytes * at.key_warp  # this key group's own stages
        queries = block_address(shared + tile.query_offset + 2 * first_row, tile.query_stride, at.lane, False)
        keys, values = keys_descriptor(ring, tile.tile_bytes), values_descriptor(ring + tile.values_offset)
        stager = at.tid - tile.stagers * at.key_warp
        pitch = (n_keys + 7) // 8 * 8 if tile.packed else n_keys  # keys from a row to the next
        if tile.packed:
            wait_for_previous_kernel()  # keys and values have been aligned by it
        if tile.realigned:
            copy_queries(tile, shared + tile.query_offset, head.q, n_queries, first_query, at.tid)
        else:
            stage_query(tile, shared + tile.query_offset, head.q, n_queries, first_query, at.tid)
        for j in range(LEAD):
            first = (j * GROUPS + at.key_warp) * BN
            start_copy(aligned, stage_swizzled, ring + j * tile.stage_bytes, head, pitch, first, stager)
        no_probabilities(p)  # block -1 is no special turn: 0 times zeros
        before = no_values(tile, ring + tile.query_offset, stager)
        wait_for_copies(LEAD - 1)
        barrier()
        if tile.realigned:
            load_query_shifted(tile, q, shared + tile.query_offset, head.q, n_queries, first_row, at.lane, scale)
        else:
            load_query(tile, q, queries, scale)
        if GROUPS > 1:
            barrier()  # group 0 may write over the queries from here on

        stage, ahead = 0, (tile.stages - 2) * tile.stage_bytes
        n_blocks = n_keys // BN if GROUPS == 1 else ((n_keys + BN - 1) // BN - at.key_warp + GROUPS - 1) // GROUPS
        for j in range(n_blocks):
            wait_for_stage(tile, at.key_warp)
            first = ((j + LEAD) * GROUPS + at.key_warp) * BN
            start_copy(aligned, stage_swizzled, ring + ahead, head, pitch, first, stager)
            valid = BN if GROUPS == 1 else n_keys - (j * GROUPS + at.key_warp) * BN
            start_products(s, q, keys + (stage >> 4), acc, p, before, BN)
            attend(s, p, m_i, l_i, acc, alpha, steepness, shared, at.lane, valid, BN)
            before = values + (stage >> 4)
            stage, ahead = next_stage(tile, stage), next_stage(tile, ahead)

        if TAIL > 0:  # the last n_keys % BN keys, by the same step on narrower fragments
            p_tail, s_tail = cuda.local.array(P_TAIL, uint32), cuda.local.array(S_TAIL, float32)
            wait_for_stage(tile, at.key_warp)
            start_products(s_tail, q, keys + (stage >> 4), acc, p, before, TAIL)
            attend(s_tail, p_tail, m_i, l_i, acc, alpha, steepness, shared, at.lane, n_keys - n_blocks * BN, TAIL)
            wgmma_values(acc, p_tail, values + (stage >> 4), VALUE_PAD, TAIL, TILE_BYTES, BF16)
        else:
            wgmma_values(acc, p, before, VALUE_PAD, BN, TILE_BYTES, BF16)
        wgmma_wait(0, acc, VALUE_PAD)

        if GROUPS > 1:  # groups that pass through fewer barriers than others look like races to racecheck
            for _ in range(((n_keys + BN - 1) // BN + GROUPS - 1) // GROUPS - n_blocks):
                named_barrier(1 + at.key_warp, tile.stagers)
        finish_row_sums(l_i)
        wait_for_copies(0)
        barrier()  # the last tile is read: shared memory is free
        if GROUPS == 1:
            if tile.saves_l:
                write_log_sums(head.l, m_i, l_i, first_query + first_row + (at.lane >> 2), n_queries, steepness, at.lane)
            write_output(tile, acc, l_i, head.out, n_queries, first_query, shared, first_row, at.tid)
        else:
            merge_key_warps(tile, m_i, l_i, acc, alpha, steepness, head.out, head.l, n_queries, first_query, shared, at)

    return attention_forward_wgmma_kernel
