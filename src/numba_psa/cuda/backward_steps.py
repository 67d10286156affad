"""The steps of the backward on register fragments, laid out as fragments.py says.

    P = exp(s - l)      dS = P ∘ (dP - delta), dP = do vᵀ      dq = scale dS k      dk = scale dSᵀ q      dv = Pᵀ do

l and delta belong to a query: to a row of the fragment in the pass for dq, to a column in the pass for dk and dv.
Columns lie in one of three orders: as they come; within 32, as fragments_tf32.py has them, where column c of tile 4n + j is
token 32n + 4c + j; within 8, where columns 2i and 2i+1 of a tile are tokens i and i+4, as an A operand of TF32 wants them.
"""

from __future__ import annotations

from numba import int32

from numba_psa.cuda.backward_sums import (
    INFINITY,
    LOG2E,
    PROBABILITY_BITS,
    offset_of,
    value_at,
    warp_maximum,
)
from numba_psa.cuda.device import (
    bits_float,
    ex2,
    float_bits,
    ld_global_f32,
    ld_shared_f32,
    ld_shared_v2_f32,
    maximum,
    step,
    vote_any,
)
from numba_psa.cuda.fragments import ONE, ZERO, fill, quad_sum
from numba_psa.cuda.tiles_backward import SUMS_PAD

LARGEST_SHIFT = 60
IN_ORDER, WITHIN_32, WITHIN_8 = range(3)


# ---- powers of two that keep float16's dS in range --------------------------------------------------------------------
@step
def power_of_two(exponent):
    return bits_float(int32(exponent) + 127 << 23)


@step
def gradient_exponent(tile, norms, head, n_queries, n_keys, lane):
    """The k for which |dS| 2**k stays below 2**15 in all of a head: |dS| <= |dP - delta| <= 2 max|do row| max|v row|.

    norms: `[BH][32 tokens][2]`, the largest squared lengths of rows of do and of v.
    """
    if not tile.scales_gradients:
        return int32(0)
    count = 2 * ((max(n_queries, n_keys) + SUMS_PAD - 1) // SUMS_PAD)
    do_norm = v_norm = ZERO
    for i in range(lane, count, 32):
        at = norms + 8 * (count * head + i)
        do_norm, v_norm = maximum(do_norm, ld_global_f32(at)), maximum(v_norm, ld_global_f32(at + 4))
    do_norm, v_norm = warp_maximum(do_norm), warp_maximum(v_norm)
    squared = int32(float_bits(do_norm) >> 23) + int32(float_bits(v_norm) >> 23) - 2 * 127 + 2
    return int32(min(max(14 - (squared + 1 >> 1), -LARGEST_SHIFT), LARGEST_SHIFT))


@step
def gradient_factor(tile, exponent):
    """What dP - delta is multiplied by: 2**exponent, less what the weights carry already."""
    return power_of_two(exponent - int32(PROBABILITY_BITS)) if tile.scales_gradients else ONE


@step
def unscaled(tile, factor, exponent):
    """`factor` without 2**exponent."""
    return factor * power_of_two(-exponent) if tile.scales_gradients else factor


@step
def weight_unit(tile):
    """One over what weights are multiplied by."""
    return power_of_two(-int32(PROBABILITY_BITS)) if tile.scales_gradients else ONE


# ---- weights and their gradients --------------------------------------------------------------------------------------
@step
def weight(tile, s, l, steepness):
    """exp(steepness s - l). float32: the difference first, small wherever P matters; halves have log2(e) in both."""
    return ex2((s * steepness - l) * LOG2E) if tile.item == 4 else ex2(s * steepness - l)


@step
def column_of(order, n, c, lane):
    """The column that element c of column tile n is."""
    if order == WITHIN_32:
        return n // 4 * 32 + n % 4 + 8 * (lane & 3) + 4 * c
    return 8 * n + ((lane & 3) + 4 * c if order == WITHIN_8 else 2 * (lane & 3) + c)


@step
def columns_address(order, address, lane):
    """Where this lane's columns begin in a row of floats in shared memory."""
    return address + (32 if order == WITHIN_32 else 4 if order == WITHIN_8 else 8) * (lane & 3)


@step
def two_columns(order, address, n):
    """The numbers of this lane's two columns of tile n."""
    if order == IN_ORDER:
        return ld_shared_v2_f32(address + 32 * n)
    at = address + (128 * (n // 4) + 4 * (n % 4) if order == WITHIN_32 else 32 * n)
    return ld_shared_f32(at), ld_shared_f32(at + 16)


@step
def clear_tail(order, s, columns_left, lane):
    """Weights of columns past the last token become 0."""
    for n in range(s.shape[1]):
        for c in range(2):
            if column_of(order, n, c, lane) >= columns_left:
                s[0, n, c] = ZERO
                s[0, n, 2 + c] = ZERO


@step
def weights_by_rows(tile, s, l, steepness):
    """s = P; l of this lane's two rows."""
    for n in range(s.shape[1]):
        for i in range(4):
            s[0, n, i] = weight(tile, s[0, n, i], l[0, i // 2], steepness)


@step
def weights_by_columns(tile, order, s, l, steepness):
    """s = P; l is the address of this lane's columns."""
    for n in range(s.shape[1]):
        first, second = two_columns(order, l, n)
        for r in range(2):
            s[0, n, 2 * r] = weight(tile, s[0, n, 2 * r], first, steepness)
            s[0, n, 2 * r + 1] = weight(tile, s[0, n, 2 * r + 1], second, steepness)


@step
def score_gradients_by_rows(tile, dp, s, delta, factor):
    """dp = dS; delta of this lane's two rows, times factor."""
    for n in range(s.shape[1]):
        for i in range(4):
            dp[0, n, i] = s[0, n, i] * (dp[0, n, i] * factor - delta[0, i // 2])


@step
def score_gradients_by_columns(tile, order, dp, s, delta, factor):
    """dp = dS; delta is the address of this lane's columns."""
    for n in range(s.shape[1]):
        first, second = two_columns(order, delta, n)
        first, second = first * factor, second * factor
        for r in range(2):
            dp[0, n, 2 * r] = s[0, n, 2 * r] * (dp[0, n, 2 * r] * factor - first)
            dp[0, n, 2 * r + 1] = s[0, n, 2 * r + 1] * (dp[0, n, 2 * r + 1] * factor - second)


@step
def load_row_sums(l, delta, kept, sums, row, n_rows, factor):
    """l and delta of this lane's two rows, and whether they have a gradient: 1, or 0 for rows that attend to nothing."""
    padded = (n_rows + SUMS_PAD - 1) // SUMS_PAD * SUMS_PAD
    for r in range(2):
        at = sums + 4 * min(row + 8 * r, n_rows - 1)
        l[0, r] = ld_global_f32(at)
        delta[0, r] = ld_global_f32(at + 4 * padded) * factor
        kept[0, r] = ZERO if float_bits(l[0, r]) == INFINITY else ONE


@step
def keep_rows(kept):
    kept[0, 0], kept[0, 1] = ONE, ONE


@step
def multiply(acc, factor):
    for n in range(acc.shape[1]):
        for i in range(4):
            acc[0, n, i] *= factor


# ---- infinities and NaN -----------------------------------------------------------------------------------------------
@step
def largest_bits(acc, row, n_rows):
    """The largest magnitude in this lane's rows that exist, as an integer: from INFINITY on it is no finite number."""
    largest = 0
    for n in range(acc.shape[1]):
        for i in range(4):
            bits = float_bits(acc[0, n, i]) & 0x7FFFFFFF
            largest = max(largest, bits if row + i // 2 * 8 < n_rows else 0)
    return largest


@step
def accumulate_column(tile, acc, r, factor, base, column, channels, n_columns, lane):
    """acc += factor times a column's channels, in row r; what acc has beyond them is never stored."""
    width = 1 if tile.tokens_first else n_columns
    for c in range(2):
        channel = 2 * (lane & 3) + c
        at = base + tile.item * offset_of(tile, channel, column, channels, n_columns)
        for n in range(acc.shape[1]):
            if 8 * acc.shape[1] == channels or 8 * n + channel < channels:
                acc[0, n, 2 * r + c] += factor * value_at(tile, at, 0)
            at += 8 * tile.item * width


@step
def dot(tile, a, a_token, a_tokens, b, b_token, b_tokens, channels, lane):
    """The sum over channels, shared among the four lanes of a row."""
    total = ZERO
    for d in range(lane & 3, channels, 4):
        x = value_at(tile, a, offset_of(tile, d, a_token, channels, a_tokens))
        total += x * value_at(tile, b, offset_of(tile, d, b_token, channels, b_tokens))
    return quad_sum(total)


@step
def again_if_not_finite(tile, of_keys, narrow, wide, head, acc, acc_wide, row, factor, lane):
    """If a gradient of the warp came out infinite or NaN, do its rows once more in float32: acc if narrow, and acc_wide.

    Then either the inputs are so, or weights of 0 met infinities that masks are made of, which a query without any key must
    not see, or a split infinity became NaN, or dS outgrew float16. Rare, so slow and short.
    """
    largest = 0
    if narrow:
        largest = largest_bits(acc, row, head.n_rows)
    if wide:
        largest = max(largest, largest_bits(acc_wide, row, head.n_rows))
    if vote_any(largest >= INFINITY):
        n_queries = head.n_columns if of_keys else head.n_rows
        never = int32(head.n_columns) >> 31  # 0; not to the compiler, which would unroll these loops into every register
        key_dim, value_dim = tile.key_dim + never, tile.value_dim + never
        padded = (n_queries + SUMS_PAD - 1) // SUMS_PAD * SUMS_PAD
        if narrow:
            fill(acc, ZERO)
        if wide:
            fill(acc_wide, ZERO)
        for column in range(head.n_columns):
            for r in range(2):
                own = min(row + 8 * r, head.n_rows - 1)
                s = dot(tile, head.rows, own, head.n_rows, head.columns, column, head.n_columns, key_dim, lane)
                dp = dot(tile, head.rows_wide, own, head.n_rows, head.columns_wide, column, head.n_columns, value_dim, lane)
                s = -s if head.scale < ZERO else s
                query = column if of_keys else own
                l, delta = ld_global_f32(head.sums + 4 * query), ld_global_f32(head.sums + 4 * (padded + query))
                if float_bits(l) != INFINITY:
                    p = weight(tile, s, l, abs(head.scale))
                    ds = p * (dp * factor - delta * factor)
                    if narrow:
                        accumulate_column(tile, acc, r, ds, head.columns, column, tile.key_dim, head.n_columns, lane)
                    if wide:
                        accumulate_column(
                            tile, acc_wide, r, p, head.columns_wide, column, tile.value_dim, head.n_columns, lane
                        )
