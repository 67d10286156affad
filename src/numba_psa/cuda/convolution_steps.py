"""The steps of a convolution on register fragments: channels of the output are rows, tokens are columns.

A warp reads its operands straight from global memory. Weights lie there as the tensor cores take them (`packed`). Of the
input, a lane reads quads, four tokens of a channel: column c of tile j is token 4c + j, so a quad feeds four tiles, and sums
come out as quads as well. Nothing but the sums of the k_warps passes through shared memory.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numba import uint32

from numba_psa.cuda.device import (
    bits_float,
    ex2,
    fetch_u16,
    fetch_u32,
    fetch_v2_u32,
    fetch_v4_u32,
    float_bits,
    ld_global_f32,
    load_v4_u32,
    st_shared_v4_u32,
    step,
    widen_f16,
)
from numba_psa.cuda.fragments import ONE, ZERO, inverse, mma
from numba_psa.cuda.fragments_tf32 import mma_tf32, split

MINUS_LOG2E = np.float32(-1.4426950408889634)


class Source(NamedTuple):
    """The input of one image: channel k of piece i lies at x_i + k * row_bytes; piece i > 0 begins with channel first_i."""

    x0: int
    x1: int
    x2: int
    x3: int
    first1: int
    first2: int
    first3: int
    row_bytes: int
    channels: int
    tokens: int
    width: int


# ---- elements ---------------------------------------------------------------------------------------------------------
@step
def load_element(tile, address, token, tokens, there):
    """The bits of one token of a channel; 0 if it does not exist or is not wanted."""
    exists = there and token >= 0 and token < tokens
    if tile.item == 4:
        return fetch_u32(address + 4 * token, exists)
    return uint32(fetch_u16(address + 2 * token, exists))


@step
def load_row(tile, edge, row, address, token, tokens, there):
    """row = the bits of a quad, the tokens from `token` on, with `edge` more on each side; 0 as in load_element."""
    if tile.whole:
        exists = there and token >= 0 and token < tokens
        if tile.item == 4:
            row[edge], row[edge + 1], row[edge + 2], row[edge + 3] = fetch_v4_u32(address + 4 * token, exists)
        else:
            low, high = fetch_v2_u32(address + 2 * token, exists)
            row[edge], row[edge + 1] = low & 0xFFFF, low >> 16
            row[edge + 2], row[edge + 3] = high & 0xFFFF, high >> 16
        if edge:
            row[0] = load_element(tile, address, token - 1, tokens, there)
            row[5] = load_element(tile, address, token + 4, tokens, there)
    else:
        for i in range(4 + 2 * edge):
            row[i] = load_element(tile, address, token - edge + i, tokens, there)


@step
def value_of(tile, bits):
    """The float that the bits of an element stand for."""
    if tile.item == 4:
        return bits_float(bits)
    if tile.bf16:
        return bits_float(bits << 16)
    return widen_f16(bits)


@step
def columns_inside(token, width):
    """Bit i: token + i has a left neighbour in its image row; bit 4 + i: a right one."""
    bits = 0
    for i in range(4):
        x = (token + i) % width
        if x > 0:
            bits |= 1 << i
        if x < width - 1:
            bits |= 16 << i
    return bits


@step
def neighbour_exists(tap, i, columns):
    """Whether the token of tap 0, 1 or 2 (left, itself, right) of token i of a quad lies in the same image row."""
    return tap == 1 or columns >> (i + 2 * tap) & 1 != 0


# ---- operands ---------------------------------------------------------------------------------------------------------
@step
def channel_address(tile, source, channel):
    at = source.x0
    if tile.pieces > 1 and channel >= source.first1:
        at = source.x1
    if tile.pieces > 2 and channel >= source.first2:
        at = source.x2
    if tile.pieces > 3 and channel >= source.first3:
        at = source.x3
    return at + channel * source.row_bytes


@step
def load_weights(tile, a, weights, k, last, steps, tiles):
    """a = the operands of k step `k`, zeros from `last` on; weights is this lane's address, `tiles` tiles of 16 exist."""
    for t in range(a.shape[0]):
        for tap in range(tile.taps):
            at = weights + ((t * steps + k) * tile.taps + tap) * 512
            a[t, tap, 0], a[t, tap, 1], a[t, tap, 2], a[t, tap, 3] = load_v4_u32(at, k < last and t < tiles)


@step
def load_inputs(tile, b, row, source, k, last, token, column):
    """b = the operands of k step `k` around the quad at `token`, zeros from `last` on; column: lane % 4."""
    chunk, shifted = k // tile.taps, token + (k % tile.taps - tile.edge) * source.width
    for h in range(2):
        if tile.item == 4:
            channel = 8 * chunk + 4 * h + column
            there = k < last and channel < source.channels
            load_row(tile, tile.edge, b[h], channel_address(tile, source, channel), shifted, source.tokens, there)
        else:
            channel = 16 * chunk + 8 * h + 2 * column
            there = k < last and channel < source.channels
            load_row(tile, tile.edge, b[h], channel_address(tile, source, channel), shifted, source.tokens, there)
            there = k < last and channel + 1 < source.channels
            load_row(tile, tile.edge, row, channel_address(tile, source, channel + 1), shifted, source.tokens, there)
            for i in range(tile.row):
                b[h, i] |= row[i] << 16


# ---- products ---------------------------------------------------------------------------------------------------------
@step
def multiply(tile, acc, a, b, group, columns):
    """acc += a b for the group's tokens, in 16 bits."""
    for tap in range(tile.taps):
        for j in range(4):
            exists = tile.taps == 1 or neighbour_exists(tap, j, columns)
            b0 = b[0, j + tap] if exists else uint32(0)
            b1 = b[1, j + tap] if exists else uint32(0)
            for t in range(a.shape[0]):
                mma(tile.bf16, acc[t, 4 * group + j], a[t, tap], b0, b1)


@step
def multiply_tf32(tile, acc, a, b, group, columns, a_high, a_low, b_high, b_low):
    """acc += a b for the group's tokens, in float32 by three products of TF32."""
    for tap in range(tile.taps):
        for h in range(2):
            for j in range(4):
                exists = tile.taps == 1 or neighbour_exists(tap, j, columns)
                split(tile.exact, bits_float(b[h, j + tap] if exists else uint32(0)), b_high[h], b_low[h], j)
        for t in range(a.shape[0]):
            for i in range(4):
                split(tile.exact, bits_float(a[t, tap, i]), a_high, a_low, i)
            for j in range(4):
                mma_tf32(acc[t, 4 * group + j], a_low, b_high[0, j], b_high[1, j])
            for j in range(4):
                mma_tf32(acc[t, 4 * group + j], a_high, b_low[0, j], b_low[1, j])
            for j in range(4):
                mma_tf32(acc[t, 4 * group + j], a_high, b_high[0, j], b_high[1, j])


# ---- the end of a sum -------------------------------------------------------------------------------------------------
@step
def publish_sums(tile, acc, sums, lane):
    """acc to this warp's [channel][token] floats in shared memory, a quad at a time."""
    for t in range(acc.shape[0]):
        for h in range(2):
            at = sums + (16 * t + 8 * h + (lane >> 2)) * tile.sum_stride + 32 * (lane & 3)
            for group in range(tile.token_groups):
                for q in range(2):
                    st_shared_v4_u32(
                        at + 128 * group + 16 * q,
                        float_bits(acc[t, 4 * group, 2 * h + q]),
                        float_bits(acc[t, 4 * group + 1, 2 * h + q]),
                        float_bits(acc[t, 4 * group + 2, 2 * h + q]),
                        float_bits(acc[t, 4 * group + 3, 2 * h + q]),
                    )


@step
def load_bias(bias, channel, channels):
    value = ZERO
    if channel < channels:
        value = ld_global_f32(bias + 4 * channel)
    return value


@step
def silu(x):
    """x / (1 + exp(-x))"""
    return x * inverse(ONE + ex2(x * MINUS_LOG2E))
