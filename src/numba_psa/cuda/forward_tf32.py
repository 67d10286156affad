"""Attention forward in float32 on TF32 tensor cores (mma.sync, sm_80 and later): the loop of forward.py."""

from __future__ import annotations

from numba import float32, uint32

from numba_psa._numba_cuda import cuda
from numba_psa.cuda.device import barrier, shared_address
from numba_psa.cuda.forward import SIGNATURE as SIGNATURE
from numba_psa.cuda.fragments import finish_row_sums, online_softmax_step, start, write_log_sums
from numba_psa.cuda.fragments_tf32 import (
    accumulate_values_tf32,
    attend_again_if_nan,
    load_query_tf32,
    mask_tail_permuted,
    scores_tf32,
    split_probabilities,
    wide_scores_tf32,
    write_floats,
)
from numba_psa.cuda.heads import heads_of
from numba_psa.cuda.merge import merge_key_warps
from numba_psa.cuda.realign import start_copy
from numba_psa.cuda.staging import next_stage, place, stage_keys_values, stage_query, wait_for_copies


def make_forward_tf32(config):
    """The kernel for one Tf32TileConfig. It closes over integers only, so that its compiled form can be cached on disk."""
    tile = config.constants()
    Q, K, P, S, V, PART, ACC, ROWS = config.fragment_shapes

    def attention_forward_tf32_kernel(q_base, k_base, v_base, out_base, l_base, n_queries, n_keys, scale):
        """Arguments and grid as attention_forward_kernel; float32. In shared memory channels always come first."""
        shared = shared_address(cuda.shared.array(0, uint32))
        at = place(tile, cuda.threadIdx.x >> 5, cuda.threadIdx.x)
        head = heads_of(tile, cuda.blockIdx.y, q_base, k_base, v_base, out_base, l_base, n_queries, n_keys)
        first_query = cuda.blockIdx.x * tile.BM
        row, column = 16 * at.query_warp + (at.lane >> 2), at.lane & 3
        steepness = abs(scale)

        q_high, q_low = cuda.local.array(Q, uint32), cuda.local.array(Q, uint32)
        k_high, k_low = cuda.local.array(K, uint32), cuda.local.array(K, uint32)
        p_high, p_low = cuda.local.array(P, uint32), cuda.local.array(P, uint32)
        v_high, v_low = cuda.local.array(V, uint32), cuda.local.array(V, uint32)
        s, part, acc = cuda.local.array(S, float32), cuda.local.array(PART, float32), cuda.local.array(ACC, float32)
        s_part = cuda.local.array((4, 4), float32)
        m_i, l_i, alpha = cuda.local.array(ROWS, float32), cuda.local.array(ROWS, float32), cuda.local.array(ROWS, float32)
        start(m_i, l_i, acc, steepness)

        ring = shared + tile.keys_offset  # `stages` blocks of keys and values
        block, mine = tile.BN * tile.key_warps, 4 * tile.BN * at.key_warp
        queries = shared + column * tile.query_stride + 4 * row
        keys = ring + mine + column * tile.key_stride + 16 * (at.lane >> 2)
        values = ring + mine + tile.values_offset + (at.lane >> 2) * tile.value_stride + 32 * column
        stage_query(tile, shared, head.q, n_queries, first_query, at.tid)
        for j in range(tile.stages - 1):
            start_copy(tile, stage_keys_values, ring + j * tile.stage_bytes, head, n_keys, j * block, at.tid)

        stage, ahead = 0, (tile.stages - 1) * tile.stage_bytes  # the stage being read, the stage being filled
        for j in range((n_keys + block - 1) // block):
            wait_for_copies(tile.stages - 2)
            barrier()
            if j == 0:
                load_query_tf32(tile, q_high, q_low, queries, scale)
            start_copy(tile, stage_keys_values, ring + ahead, head, n_keys, (j + tile.stages - 1) * block, at.tid)
            keys_left = n_keys - j * block - at.key_warp * tile.BN
            if keys_left > 0:
                if tile.exact and tile.key_pad > 64:
                    wide_scores_tf32(tile, s, s_part, q_high, q_low, queries, k_high, k_low, keys + stage, scale)
                else:
                    scores_tf32(tile, s, q_high, q_low, queries, k_high, k_low, keys + stage, scale)  # S = Q K^T
                if keys_left < tile.BN:
                    mask_tail_permuted(s, keys_left, at.lane)
                online_softmax_step(s, m_i, l_i, acc, alpha, steepness)  # P = exp(S - m)
                split_probabilities(tile.exact, p_high, p_low, s)
                accumulate_values_tf32(tile, acc, part, p_high, p_low, v_high, v_low, values + stage)  # O += P V
            stage, ahead = next_stage(tile, stage), next_stage(tile, ahead)

        finish_row_sums(l_i)
        if tile.exact:
            attend_again_if_nan(tile, acc, m_i, l_i, head, n_queries, n_keys, first_query + row, at.key_warp, scale, at.lane)
        wait_for_copies(0)
        if tile.key_warps == 1:
            if tile.saves_l:
                write_log_sums(head.l, m_i, l_i, first_query + row, n_queries, steepness, at.lane)
            write_floats(tile, acc, l_i, head.out, n_queries, first_query + row, at.lane)
        else:
            barrier()  # the last tile is read: shared memory is free
            merge_key_warps(tile, m_i, l_i, acc, alpha, steepness, head.out, head.l, n_queries, first_query, shared, at)

    return attention_forward_tf32_kernel
