"""What the backward kernels need to know of each query, and of each head: one pass over o, do and v.

delta = rowsum(o ∘ do), and l as the exponent wants it. A row that attends to nothing (l = -inf) gets l = +inf and delta = 0,
so that all its weights are 0. For float16 also how long the longest row of do and of v is: dS is no larger than twice their
product, and often so small that float16 would lose it.
"""

from __future__ import annotations

import numpy as np
from numba import types, uint32

from numba_psa._numba_cuda import cuda
from numba_psa.cuda.device import (
    barrier,
    bits_float,
    float_bits,
    ld_global_f32,
    ld_global_u16,
    ld_global_u32,
    ld_shared_f32,
    maximum,
    shared_address,
    shfl_xor,
    st_global_f32,
    st_shared_f32,
    step,
    widen_f16,
)
from numba_psa.cuda.fragments import MINUS_INFINITY, ZERO
from numba_psa.cuda.tiles_backward import SUMS_PAD

LOG2E = np.float32(1.4426950408889634)
INFINITY = 0x7F800000
PROBABILITY_BITS = np.float32(8)
"""float16 weights are carried 2**8 times as large: the smallest of many keys would lose bits. They are 1 at most."""


@step
def widened(bf16, bits):
    """The float of a 16-bit value; bits above are ignored."""
    return bits_float(uint32(bits) << 16) if bf16 else widen_f16(bits)


@step
def value_at(tile, base, offset):
    """Element number `offset` behind an address, as a float."""
    if tile.item == 4:
        return ld_global_f32(base + 4 * offset)
    return widened(tile.bf16, ld_global_u16(base + 2 * offset))


@step
def warp_maximum(x):
    for i in range(5):
        x = maximum(x, shfl_xor(x, 1 << i))
    return x


@step
def finite(x):
    """x, or 0 for infinities and NaN."""
    return ZERO if float_bits(x) & INFINITY == INFINITY else x


@step
def offset_of(tile, channel, token, channels, n_tokens):
    return token * channels + channel if tile.tokens_first else channel * n_tokens + token


@step
def load_tokens(tile, x, base, channel, token, channels, n_tokens):
    """x = `tile.tokens` neighbours, zeros from the last token on."""
    for i in range(x.shape[0]):
        x[i] = ZERO
    if token < n_tokens:
        offset = offset_of(tile, channel, token, channels, n_tokens)
        if tile.tokens == 2:
            word = ld_global_u32(base + 2 * offset)
            x[0], x[1] = widened(tile.bf16, word), widened(tile.bf16, word >> 16)
        else:
            x[0] = value_at(tile, base, offset)


@step
def exponent_of(tile, l):
    """l as `weight` takes it."""
    if float_bits(l) == MINUS_INFINITY:
        return bits_float(INFINITY)
    if tile.item == 4:
        return l
    return l * LOG2E - PROBABILITY_BITS if tile.scales_gradients else l * LOG2E


def make_backward_sums(config):
    """The kernel for one SumsConfig."""
    tile = config.constants()
    TOKENS, PAD = config.tokens, SUMS_PAD

    def attention_backward_sums_kernel(v_base, o_base, do_base, l_base, sums, norms, n_queries, n_keys):
        """Addresses laid out as `heads_backward` says. Grid (ceil(max(n_queries, n_keys) / 64), heads)."""
        shared = shared_address(cuda.shared.array(0, uint32))
        x, y = cuda.local.array(TOKENS, types.float32), cuda.local.array(TOKENS, types.float32)
        delta, do_norm, v_norm = (
            cuda.local.array(TOKENS, types.float32),
            cuda.local.array(TOKENS, types.float32),
            cuda.local.array(TOKENS, types.float32),
        )
        head, tid, first = cuda.blockIdx.y, cuda.threadIdx.x, cuda.blockIdx.x * PAD
        size = n_queries * tile.value_dim * tile.item
        o, do, l = o_base + head * size, do_base + head * size, l_base + head * n_queries * 4
        v_channels = tile.value_dim if tile.tokens_first else 2 * tile.key_dim + tile.value_dim
        v = v_base + head * n_keys * (v_channels * tile.item)

        lanes = PAD // tile.tokens
        groups = tile.threads // lanes  # of threads, which share the channels
        group, mine = tid // lanes, tid % lanes * tile.tokens
        for i in range(tile.tokens):
            delta[i] = do_norm[i] = v_norm[i] = ZERO
        for i in range((tile.value_dim + groups - 1) // groups):
            channel = group + i * groups
            if channel < tile.value_dim:
                load_tokens(tile, x, o, channel, first + mine, tile.value_dim, n_queries)
                load_tokens(tile, y, do, channel, first + mine, tile.value_dim, n_queries)
                for j in range(tile.tokens):
                    delta[j] += x[j] * y[j]
                    do_norm[j] += y[j] * y[j]
                if tile.scales_gradients:
                    load_tokens(tile, x, v, channel, first + mine, tile.value_dim, n_keys)
                    for j in range(tile.tokens):
                        v_norm[j] += x[j] * x[j]
        for j in range(tile.tokens):
            at = shared + 4 * (group * PAD + mine + j)
            st_shared_f32(at, delta[j])
            if tile.scales_gradients:
                st_shared_f32(at + 4 * groups * PAD, do_norm[j])
                st_shared_f32(at + 8 * groups * PAD, v_norm[j])
        barrier()

        if tid < PAD:
            query, padded = first + tid, (n_queries + PAD - 1) // PAD * PAD
            total = norm_do = norm_v = ZERO
            for i in range(groups):
                at = shared + 4 * (i * PAD + tid)
                total += ld_shared_f32(at)
                if tile.scales_gradients:
                    norm_do += ld_shared_f32(at + 4 * groups * PAD)
                    norm_v += ld_shared_f32(at + 8 * groups * PAD)
            l_row = ZERO
            if query < n_queries:
                l_row = exponent_of(tile, ld_global_f32(l + 4 * query))
                if float_bits(l_row) == INFINITY:
                    total = ZERO
            if query < padded:
                at = sums + 4 * (2 * head * padded + query)
                st_global_f32(at, l_row)
                st_global_f32(at + 4 * padded, total)
            if tile.scales_gradients:
                norm_do, norm_v = warp_maximum(finite(norm_do)), warp_maximum(finite(norm_v))
                if tid & 31 == 0:
                    warp = 2 * cuda.gridDim.x * head + 2 * cuda.blockIdx.x + (tid >> 5)
                    st_global_f32(norms + 8 * warp, norm_do)
                    st_global_f32(norms + 8 * warp + 4, norm_v)

    return attention_backward_sums_kernel


SUMS_SIGNATURE = types.void(*(types.int64,) * 6, types.int32, types.int32)
