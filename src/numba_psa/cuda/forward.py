"""Attention forward on tensor cores (mma.sync, sm_80 and later): out = softmax(q k^T * scale) v.

A block owns BM query rows of one head; its warps split those rows, and with key_warps > 1 also the keys.
FlashAttention-2 (Dao 2023, algorithm 1): m_i, l_i and acc stay in registers while keys stream through shared memory.
"""

from __future__ import annotations

from numba import float32, types, uint32

from numba_psa._numba_cuda import cuda
from numba_psa.cuda.device import barrier, shared_address
from numba_psa.cuda.fragments import (
    accumulate_values,
    block_address,
    finish_row_sums,
    load_query,
    mask_tail,
    online_softmax_step,
    scores,
    start,
    token_step,
    write_log_sums,
)
from numba_psa.cuda.heads import heads_of
from numba_psa.cuda.merge import merge_key_warps
from numba_psa.cuda.realign import (
    accumulate_shifted,
    clear_stages,
    copy_queries,
    load_query_shifted,
    scores_shifted,
    shifts_of,
    start_copy,
)
from numba_psa.cuda.staging import (
    next_stage,
    place,
    stage_keys_values,
    stage_query,
    wait_for_copies,
    write_output,
)


def make_forward(config):
    """The kernel for one MmaTileConfig. It closes over integers only, so that its compiled form can be cached on disk."""
    tile = config.constants()
    Q, P, S, ACC, ROWS = config.fragment_shapes
    ROWS_ARE_TOKENS, ROWS_ARE_CHANNELS = config.tokens_first, not config.tokens_first

    def attention_forward_kernel(q_base, k_base, v_base, out_base, l_base, n_queries, n_keys, scale):
        """Addresses of q, k, v, out and l, laid out as `heads.heads_of` says. scale: softmax_scale * log2(e).

        Grid (ceil(n_queries / BM), heads).
        """
        shared = shared_address(cuda.shared.array(0, uint32))
        at = place(tile, cuda.threadIdx.x >> 5, cuda.threadIdx.x)
        head = heads_of(tile, cuda.blockIdx.y, q_base, k_base, v_base, out_base, l_base, n_queries, n_keys)
        first_query = cuda.blockIdx.x * tile.BM
        first_row = tile.BM // tile.query_warps * at.query_warp
        steepness = abs(scale)

        q, p = cuda.local.array(Q, uint32), cuda.local.array(P, uint32)
        s, acc = cuda.local.array(S, float32), cuda.local.array(ACC, float32)
        m_i, l_i, alpha = cuda.local.array(ROWS, float32), cuda.local.array(ROWS, float32), cuda.local.array(ROWS, float32)
        start(m_i, l_i, acc, steepness)

        ring = shared + tile.keys_offset  # `stages` blocks of keys and values
        block = tile.BN * tile.key_warps
        mine = tile.BN // 16 * at.key_warp  # of 16 keys each: where this warp's keys begin in a block
        queries = block_address(
            shared + first_row // 16 * token_step(tile, tile.query_stride), tile.query_stride, at.lane, ROWS_ARE_TOKENS
        )
        keys = block_address(ring + mine * token_step(tile, tile.key_stride), tile.key_stride, at.lane, ROWS_ARE_CHANNELS)
        values = block_address(
            ring + tile.values_offset + mine * token_step(tile, tile.value_stride),
            tile.value_stride,
            at.lane,
            ROWS_ARE_TOKENS,
        )
        shifts, unshifted = shifts_of(tile, head.k, head.v, n_keys, at.lane), ring + 32 * mine
        if tile.realigned:
            clear_stages(tile, ring, at.tid)
            copy_queries(tile, shared, head.q, n_queries, first_query, at.tid)
        else:
            stage_query(tile, shared, head.q, n_queries, first_query, at.tid)
        for j in range(tile.stages - 1):
            start_copy(tile, stage_keys_values, ring + j * tile.stage_bytes, head, n_keys, j * block, at.tid)

        stage, ahead = 0, (tile.stages - 1) * tile.stage_bytes  # the stage being read, the stage being filled
        for j in range((n_keys + block - 1) // block):
            wait_for_copies(tile.stages - 2)
            barrier()
            if j == 0:
                if tile.realigned:
                    load_query_shifted(tile, q, shared, head.q, n_queries, first_row, at.lane, scale)
                else:
                    load_query(tile, q, queries, scale)
            start_copy(tile, stage_keys_values, ring + ahead, head, n_keys, (j + tile.stages - 1) * block, at.tid)
            keys_left = n_keys - j * block - at.key_warp * tile.BN
            if keys_left > 0:
                if tile.realigned:
                    scores_shifted(tile, s, q, unshifted + stage, shifts)
                else:
                    scores(tile, s, q, keys + stage)  # S = Q K^T
                if keys_left < tile.BN:
                    mask_tail(s, keys_left, at.lane)
                online_softmax_step(s, m_i, l_i, acc, alpha, steepness)  # P = exp(S - m)
                if tile.realigned:
                    accumulate_shifted(tile, acc, s, p, unshifted + tile.values_offset + stage, shifts)
                else:
                    accumulate_values(tile, acc, s, p, values + stage)  # O += P V
            stage, ahead = next_stage(tile, stage), next_stage(tile, ahead)

        finish_row_sums(l_i)
        wait_for_copies(0)
        barrier()  # the last tile is read: shared memory is free
        if tile.key_warps == 1:
            if tile.saves_l:
                write_log_sums(head.l, m_i, l_i, first_query + first_row + (at.lane >> 2), n_queries, steepness, at.lane)
            write_output(tile, acc, l_i, head.out, n_queries, first_query, shared, first_row, at.tid)
        else:
            merge_key_warps(tile, m_i, l_i, acc, alpha, steepness, head.out, head.l, n_queries, first_query, shared, at)

    return attention_forward_kernel


SIGNATURE = types.void(*(types.int64,) * 5, types.int32, types.int32, types.float32)
