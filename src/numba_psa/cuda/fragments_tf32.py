"""The steps of attention in float32 on TF32 tensor cores, for what differs from fragments.py.

A TF32 operand keeps 10 bits of a float's fraction. Exactly: x = high + low, both TF32, and three products of them
(low high, high low, high high; low low is below the last bit) give a product as good as float32's. `exact` is a constant:
without it one product of rounded operands is left.

A warp's keys are permuted within every 32, and need not be put back: the softmax does not care, and P V pairs the same
permutation. Column tile 4n + j, column c of s holds key 32n + 4c + j. So four keys that lie together in a channel's row
feed four tiles, and s is the A operand of the next product where it stands.
"""

from __future__ import annotations

from numba_psa.cuda.device import (
    bits_float,
    ex2,
    float_bits,
    ld_global_f32,
    ld_shared_f32,
    ld_shared_v4_f32,
    maximum,
    mma_m16n8k8_tf32,
    round_tf32,
    st_global_f32,
    step,
    vote_any,
)
from numba_psa.cuda.fragments import LOWEST, MASKED, ONE, ZERO, attends, fill, inverse, put, quad_sum, weighted

HALF = 0x1000  # of the last bit that TF32 keeps
HIGH_BITS = 0xFFFFE000


@step
def mma_tf32(c, a, b0, b1):
    """c += a b, one 16 x 8 tile over 8 terms."""
    put(c, mma_m16n8k8_tf32(a[0], a[1], a[2], a[3], b0, b1, c[0], c[1], c[2], c[3]))


@step
def split(exact, x, high, low, i):
    """high[i] + low[i] = x; an infinity leaves NaN in low.

    high is rounded, not cut off, so that low has either sign and what the hardware cuts off of it averages out.
    """
    if exact:
        high[i] = float_bits(x) + HALF & HIGH_BITS
        low[i] = float_bits(x - bits_float(high[i]))
    else:
        high[i] = round_tf32(x)


@step
def load_query_block(tile, high, low, address, k, scale):
    """Channels 8k .. 8k+7 of the warp's query rows from [channel][query]; a negative scale is taken into q."""
    for i in range(4):
        x = ld_shared_f32(address + (8 * k + i // 2 * 4) * tile.query_stride + i % 2 * 32)
        x = -x if scale < ZERO else x
        split(tile.exact, x, high, low, i)


@step
def load_query_tf32(tile, q_high, q_low, queries, scale):
    """All of the warp's query rows, if they stay in registers."""
    if tile.keeps_query:
        for k in range(q_high.shape[0]):
            load_query_block(tile, q_high[k], q_low[k], queries, k, scale)


@step
def load_operands(tile, q_high, q_low, queries, k_high, k_low, keys, k, scale):
    """Channels 8k .. 8k+7 of 32 keys, and of the queries if they do not stay in registers."""
    if not tile.keeps_query:
        load_query_block(tile, q_high[0], q_low[0], queries, k, scale)
    for h in range(2):
        x = ld_shared_v4_f32(keys + (8 * k + 4 * h) * tile.key_stride)
        for j in range(4):
            split(tile.exact, x[j], k_high[h], k_low[h], j)


@step
def add_products(exact, tiles, first, q_high, q_low, k_high, k_low):
    """Four column tiles, from `first` on, += q k^T over eight channels."""
    if exact:
        for j in range(4):
            mma_tf32(tiles[first + j], q_low, k_high[0, j], k_high[1, j])
        for j in range(4):
            mma_tf32(tiles[first + j], q_high, k_low[0, j], k_low[1, j])
    for j in range(4):
        mma_tf32(tiles[first + j], q_high, k_high[0, j], k_high[1, j])


@step
def scores_tf32(tile, s, q_high, q_low, queries, k_high, k_low, keys, scale):
    """s = q k^T; queries and keys are this lane's addresses in [channel][token]."""
    fill(s, ZERO)
    for n in range(s.shape[1] // 4):
        for k in range(tile.key_pad // 8):
            load_operands(tile, q_high, q_low, queries, k_high, k_low, keys + 128 * n, k, scale)
            kept = k if tile.keeps_query else 0
            add_products(tile.exact, s[0], 4 * n, q_high[kept], q_low[kept], k_high, k_low)


@step
def wide_scores_tf32(tile, s, part, q_high, q_low, queries, k_high, k_low, keys, scale):
    """scores_tf32 of heads wider than 64: 32 channels are summed apart, then added.

    Tensor cores cut off as they accumulate, which over 128 channels would cost a digit.
    """
    fill(s, ZERO)
    for n in range(s.shape[1] // 4):
        for first in range(0, tile.key_pad // 8, 4):
            for j in range(4):
                put(part[j], (ZERO, ZERO, ZERO, ZERO))
            for k in range(first, min(first + 4, tile.key_pad // 8)):
                load_operands(tile, q_high, q_low, queries, k_high, k_low, keys + 128 * n, k, scale)
                add_products(tile.exact, part, 0, q_high[0], q_low[0], k_high, k_low)
            for j in range(4):
                for i in range(4):
                    s[0, 4 * n + j, i] += part[j, i]


@step
def mask_tail_permuted(s, keys_left, lane):
    """Scores of keys past the last token become MASKED; keys_left counts from the first key of s."""
    for n in range(s.shape[1]):
        for c in range(2):
            if n // 4 * 32 + n % 4 + 8 * (lane & 3) + 4 * c >= keys_left:
                s[0, n, c] = MASKED
                s[0, n, 2 + c] = MASKED


@step
def split_probabilities(exact, p_high, p_low, s):
    """s as A operands: a lane holds columns 2c, 2c+1 of a tile, and the operand wants c, c+4. The keys do not mind."""
    for n in range(s.shape[1]):
        for i in range(4):
            split(exact, s[0, n, i], p_high[n], p_low[n], i % 2 * 2 + i // 2)


@step
def accumulate_values_tf32(tile, acc, part, p_high, p_low, v_high, v_low, values):
    """acc += s v; values is this lane's address in [channel][key].

    Tensor cores truncate as they accumulate: exactly, a block of keys is summed apart and then added in float32.
    """
    together = part.shape[0]  # column tiles of v that are in flight at once
    for first in range(0, acc.shape[1], together):
        for n in range(p_high.shape[0] // 4):
            for i in range(together):
                for h in range(2):
                    x = ld_shared_v4_f32(values + 8 * (first + i) * tile.value_stride + 128 * n + 16 * h)
                    for j in range(4):
                        split(tile.exact, x[j], v_high[i, h], v_low[i, h], j)
            if tile.exact:
                for i in range(together):
                    for c in range(4):
                        part[i, c] = ZERO
                for j in range(4):
                    for i in range(together):
                        mma_tf32(part[i], p_low[4 * n + j], v_high[i, 0, j], v_high[i, 1, j])
                for j in range(4):
                    for i in range(together):
                        mma_tf32(part[i], p_high[4 * n + j], v_low[i, 0, j], v_low[i, 1, j])
                for j in range(4):
                    for i in range(together):
                        mma_tf32(part[i], p_high[4 * n + j], v_high[i, 0, j], v_high[i, 1, j])
                for i in range(together):
                    for c in range(4):
                        acc[0, first + i, c] += part[i, c]
            else:
                for j in range(4):
                    for i in range(together):
                        mma_tf32(acc[0, first + i], p_high[4 * n + j], v_high[i, 0, j], v_high[i, 1, j])


@step
def add_part(acc, part):
    for n in range(acc.shape[1]):
        for i in range(4):
            acc[0, n, i] += part[0, n, i]


@step
def write_floats(tile, acc, l_i, out, n_queries, row, lane):
    """out = acc / l_i, straight from registers: eight lanes fill a 32-byte sector of a channel's row."""
    w0, w1 = inverse(l_i[0, 0]), inverse(l_i[0, 1])
    e0, e1 = attends(l_i[0, 0]), attends(l_i[0, 1])
    for n in range(acc.shape[1]):
        for i in range(4):
            channel, at = 8 * n + 2 * (lane & 3) + i % 2, row + i // 2 * 8
            if at < n_queries and (tile.value_dim == tile.value_pad or channel < tile.value_dim):
                offset = at * tile.value_dim + channel if tile.tokens_first else channel * n_queries + at
                value = weighted(acc[0, n, i], w0, e0) if i < 2 else weighted(acc[0, n, i], w1, e1)
                st_global_f32(out + 4 * offset, value)


# ---- infinities -------------------------------------------------------------------------------------------------------
@step
def is_nan(x):
    return float_bits(x) & 0x7FFFFFFF > 0x7F800000


@step
def element(tile, base, n_tokens, channels, channel, token):
    """One float of a head, in either layout."""
    offset = token * channels + channel if tile.tokens_first else channel * n_tokens + token
    return ld_global_f32(base + 4 * offset)


@step
def attend_again_if_nan(tile, acc, m_i, l_i, head, n_queries, n_keys, row, key_warp, scale, lane):
    """If a row of the warp came out NaN, do the warp's share once more in plain float32; l_i holds whole sums by now.

    A split infinity is inf + NaN, and 0 times inf is NaN: three products cannot tell a score of -inf, which is a mask, from
    NaN. Rare, so slow and short.
    """
    if vote_any(is_nan(l_i[0, 0]) or is_nan(l_i[0, 1])):
        steepness = abs(scale)
        fill(acc, ZERO)
        block = tile.BN * tile.key_warps
        for r in range(2):
            m_i[0, r], l_i[0, r] = LOWEST / max(steepness, ONE), ZERO
        for key in range(key_warp * tile.BN, n_keys):
            if key % block // tile.BN == key_warp:
                for r in range(2):
                    query = min(row + 8 * r, n_queries - 1)
                    s = ZERO
                    for d in range(lane & 3, tile.key_dim, 4):
                        x = element(tile, head.q, n_queries, tile.key_dim, d, query)
                        s += x * element(tile, head.k, n_keys, tile.key_dim, d, key)
                    s = quad_sum(s)
                    s = -s if scale < ZERO else s
                    m = maximum(m_i[0, r], s)
                    alpha, p = ex2((m_i[0, r] - m) * steepness), ex2((s - m) * steepness)
                    m_i[0, r] = m
                    l_i[0, r] = l_i[0, r] * alpha + p
                    for n in range(acc.shape[1]):
                        for c in range(2):
                            channel = min(8 * n + 2 * (lane & 3) + c, tile.value_dim - 1)
                            v = element(tile, head.v, n_keys, tile.value_dim, channel, key)
                            acc[0, n, 2 * r + c] = acc[0, n, 2 * r + c] * alpha + p * v
