"""The steps of attention on register fragments.

A fragment array is [row tile of 16][column tile of 8][4]: this lane's four values of a 16 x 8 tile, the two of row
lane//4 first, then the two of row lane//4 + 8. mma.sync and wgmma share this layout, so all kernels share these steps.
Shapes travel with the arrays: after inlining they are constants and every loop below unrolls.

fastmath assumes that no NaN and no infinity exists, and folds comparisons accordingly. Values may still be either, for
the hardware computes with them as IEEE 754 says; but a decision about them is made on their bits, and masks are finite.
"""

from __future__ import annotations

import numpy as np

from numba_psa.cuda.device import (
    bits_float,
    ex2,
    float_bits,
    ldmatrix_x4,
    ldmatrix_x4_trans,
    logarithm,
    maximum,
    mma_m16n8k16_bf16,
    mma_m16n8k16_f16,
    pack_bf16x2,
    pack_f16x2,
    shfl_xor,
    st_global_f32,
    step,
    vote_any,
)

ZERO = np.float32(0)
ONE = np.float32(1)
MASKED = np.float32(-1e37)  # the score of a key that does not exist: exp2 of it is 0 beside every maximum
LOWEST = np.float32(-1e36)  # the first maximum: finite, so that LOWEST - LOWEST is 0 and not NaN, and above MASKED
SLACK = np.float32(8)  # accumulators may run 2**SLACK ahead of the running maximum before they are rescaled
LN2 = np.float32(0.6931471805599453)
MINUS_INFINITY = 0xFF800000


@step
def fill(fragments, value):
    for t in range(fragments.shape[0]):
        for n in range(fragments.shape[1]):
            for i in range(4):
                fragments[t, n, i] = value


@step
def start(m_i, l_i, acc, scale):
    """Nothing seen yet. The first maximum shrinks with a large scale: times the scale it must not overflow."""
    fill(acc, ZERO)
    for t in range(m_i.shape[0]):
        for r in range(2):
            m_i[t, r] = LOWEST / max(scale, ONE)
            l_i[t, r] = ZERO


@step
def put(fragment, values):
    fragment[0], fragment[1], fragment[2], fragment[3] = values


@step
def pack(bf16, low, high):
    return pack_bf16x2(low, high) if bf16 else pack_f16x2(low, high)


@step
def mma(bf16, c, a, b0, b1):
    """c += a b, one 16 x 8 tile over 16 terms."""
    if bf16:
        put(c, mma_m16n8k16_bf16(a[0], a[1], a[2], a[3], b0, b1, c[0], c[1], c[2], c[3]))
    else:
        put(c, mma_m16n8k16_f16(a[0], a[1], a[2], a[3], b0, b1, c[0], c[1], c[2], c[3]))


# ---- tiles in shared memory: rows are channels (NCHW) or tokens (FlashAttention), `stride` bytes apart ------------------
@step
def block_address(base, stride, lane, down_first):
    """The 8 x 8 row that this lane names to ldmatrix for the 16 x 16 block at base: its tiles go down or across first."""
    first, second = lane >> 3 & 1, lane >> 4
    down, right = (first, second) if down_first else (second, first)
    return base + (8 * down + (lane & 7)) * stride + 16 * right


@step
def channel_step(tile, stride):
    """Bytes from a block of 16 channels to the next."""
    return 32 if tile.tokens_first else 16 * stride


@step
def token_step(tile, stride):
    """Bytes from a block of 16 tokens to the next."""
    return 16 * stride if tile.tokens_first else 32


@step
def load_block(transposed, address):
    return ldmatrix_x4_trans(address) if transposed else ldmatrix_x4(address)


@step
def load_query(tile, q, address, scale):
    """q = the warp's query rows, A operands. A negative scale is taken into q here: the softmax wants a positive one."""
    sign = 0x80008000 if scale < ZERO else 0
    for t in range(q.shape[0]):
        for k in range(q.shape[1]):
            at = address + k * channel_step(tile, tile.query_stride) + t * token_step(tile, tile.query_stride)
            put(q[t, k], load_block(not tile.tokens_first, at))
            for i in range(4):
                q[t, k, i] ^= sign


@step
def scores(tile, s, q, keys):
    """s = q k^T; keys is this lane's address."""
    fill(s, ZERO)
    for k in range(q.shape[1]):
        add_scores(tile, s, q, k, k, keys)


@step
def add_scores(tile, s, q, block, k, keys):
    """s += q k^T over channels 16k .. 16k+15, which block number `block` of q holds."""
    for n in range(s.shape[1] // 2):
        at = keys + k * channel_step(tile, tile.key_stride) + n * token_step(tile, tile.key_stride)
        b = load_block(not tile.tokens_first, at)
        for t in range(s.shape[0]):
            mma(tile.bf16, s[t, 2 * n], q[t, block], b[0], b[1])
            mma(tile.bf16, s[t, 2 * n + 1], q[t, block], b[2], b[3])


@step
def accumulate_values(tile, acc, s, p, values):
    """acc += s v; values is this lane's address."""
    for k in range(s.shape[1] // 2):
        for t in range(s.shape[0]):
            pack_probabilities(tile.bf16, p[t], s, t, k)
        for n in range(acc.shape[1] // 2):
            at = values + n * channel_step(tile, tile.value_stride) + k * token_step(tile, tile.value_stride)
            b = load_block(tile.tokens_first, at)
            for t in range(s.shape[0]):
                mma(tile.bf16, acc[t, 2 * n], p[t], b[0], b[1])
                mma(tile.bf16, acc[t, 2 * n + 1], p[t], b[2], b[3])


# ---- the online softmax -----------------------------------------------------------------------------------------------
@step
def mask_tail(s, keys_left, lane):
    """Scores of keys past the last token become MASKED; keys_left counts from the first key of s."""
    for n in range(s.shape[1]):
        for c in range(2):
            if 8 * n + 2 * (lane & 3) + c >= keys_left:
                for t in range(s.shape[0]):
                    s[t, n, c] = MASKED
                    s[t, n, 2 + c] = MASKED


@step
def row_maximum(s, t, r):
    x = maximum(s[t, 0, 2 * r], s[t, 0, 2 * r + 1])
    for n in range(1, s.shape[1]):
        x = maximum(x, maximum(s[t, n, 2 * r], s[t, n, 2 * r + 1]))
    return x


@step
def quad_maximum(x):
    """Over the four lanes that share a row."""
    x = maximum(x, shfl_xor(x, 1))
    return maximum(x, shfl_xor(x, 2))


@step
def quad_sum(x):
    x = x + shfl_xor(x, 1)
    return x + shfl_xor(x, 2)


@step
def raise_maximum(s, m_i, l_i, alpha, scale):
    """m_i = max(m_i, rowmax(s)), alpha = exp(old m_i - m_i), l_i *= alpha: only if some row of the warp outgrew SLACK.

    Returns whether it did; the caller then owes acc *= alpha. Any m_i gives the same o, a far too low one overflows.
    """
    growth = ZERO
    for t in range(s.shape[0]):
        for r in range(2):
            alpha[t, r] = row_maximum(s, t, r)
            growth = maximum(growth, (alpha[t, r] - m_i[t, r]) * scale)
    grown = vote_any(growth > SLACK)
    if grown:
        for t in range(s.shape[0]):
            for r in range(2):
                m = maximum(quad_maximum(alpha[t, r]), m_i[t, r])
                alpha[t, r] = ex2((m_i[t, r] - m) * scale)
                m_i[t, r] = m
                l_i[t, r] *= alpha[t, r]
    return grown


@step
def exponentiate(s, m_i, l_i, scale):
    """s = exp(s - m_i), l_i += this lane's part of rowsum(s)."""
    for t in range(s.shape[0]):
        for n in range(s.shape[1]):
            for r in range(2):
                offset = m_i[t, r] * scale
                p0 = ex2(s[t, n, 2 * r] * scale - offset)
                p1 = ex2(s[t, n, 2 * r + 1] * scale - offset)
                s[t, n, 2 * r] = p0
                s[t, n, 2 * r + 1] = p1
                l_i[t, r] += p0 + p1


@step
def rescale(acc, alpha):
    for t in range(acc.shape[0]):
        for n in range(acc.shape[1]):
            for i in range(4):
                acc[t, n, i] *= alpha[t, i // 2]


@step
def online_softmax_step(s, m_i, l_i, acc, alpha, scale):
    """s = exp(s - m_i) with m_i, l_i and acc brought to the new running maximum (FlashAttention-2, algorithm 1)."""
    if raise_maximum(s, m_i, l_i, alpha, scale):
        rescale(acc, alpha)
    exponentiate(s, m_i, l_i, scale)


@step
def pack_probabilities(bf16, p, s, t, k):
    """p = columns 16k .. 16k+15 of s, as the A operand of the next product: accumulator and operand layouts agree."""
    for half in range(2):
        n = 2 * k + half
        p[2 * half] = pack(bf16, s[t, n, 0], s[t, n, 1])
        p[2 * half + 1] = pack(bf16, s[t, n, 2], s[t, n, 3])


@step
def no_probabilities(p):
    for k in range(p.shape[0]):
        for i in range(4):
            p[k, i] = 0


@step
def pack_block(bf16, p, s):
    """All of s as A operands."""
    for k in range(p.shape[0]):
        pack_probabilities(bf16, p[k], s, 0, k)


# ---- the end of a row -------------------------------------------------------------------------------------------------
@step
def finish_row_sums(l_i):
    for t in range(l_i.shape[0]):
        for r in range(2):
            l_i[t, r] = quad_sum(l_i[t, r])


@step
def attends(total):
    """Whether a row has any key: a sum of 0 means that all its scores are -inf. NaN is not 0."""
    return float_bits(total) != 0


@step
def inverse(total):
    return ONE / total


@step
def weighted(value, weight, attending):
    """value * weight; 0 for a row without keys, whatever value is."""
    product = value * weight
    return product if attending else ZERO


@step
def log_sum(m, total, scale):
    """Natural logarithm of the row's sum of exponentials."""
    value = (m * scale + logarithm(total)) * LN2
    return value if attends(total) else bits_float(MINUS_INFINITY)


@step
def write_log_sums(l, m_i, l_i, row, n_queries, scale, lane):
    """l of this warp's rows, by the first lane of each quad; l is the address of the head's, row the first of this lane."""
    if lane & 3 == 0:
        for t in range(l_i.shape[0]):
            for r in range(2):
                at = row + 16 * t + 8 * r
                if at < n_queries:
                    st_global_f32(l + 4 * at, log_sum(m_i[t, r], l_i[t, r], scale))
