"""What the backward kernels need to know of each query, and of each head: one pass over o, do and v.

delta = rowsum(o ∘ do), and l as the exponent wants it. A row that attends to nothing (l = -inf) gets l = +inf and delta = 0,
so that all its weights are 0. For float16 also how long the longest row of do and of v is: dS is no larger than twice their
product, and often so small that float16 would lose it.
"""

from __future__ import annotations

import numpy as np
from numba import float32, types, uint32

from numba_psa._numba_cuda import cuda
from numba_psa.cuda.chunks import load_chunk
from numba_psa.cuda.device import (
    barrier,
    bits_float,
    float_bits,
    ld_global_f32,
    ld_global_u16,
    ld_shared_f32,
    let_next_kernel_start,
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
def load_tokens(tile, x, words, base, channel, token, channels, n_tokens):
    """x = `tile.tokens` neighbours of a channel, zeros from the last token on."""
    offset = offset_of(tile, channel, token, channels, n_tokens)
    if tile.tokens == 1:
        x[0] = value_at(tile, base, offset) if token < n_tokens else ZERO
    else:
        for i in range(4):
            words[i] = 0
        load_chunk(words, tile.item, tile.copy, base + tile.item * offset, n_tokens - token)
        for i in range(4):
            if tile.item == 4:
                x[i] = bits_float(words[i])
            else:
                x[2 * i], x[2 * i + 1] = widened(tile.bf16, words[i]), widened(tile.bf16, words[i] >> 16)


@step
def publish(x, address, lanes, lane):
    """Sums of a warp's threads that have the same tokens, each by the first of them, to shared memory."""
    for i in range(x.shape[0]):
        total = x[i]
        for j in range(5):
            if lanes << j < 32:
                total += shfl_xor(total, lanes << j)
        if lane < lanes:
            st_shared_f32(address + 4 * i, total)


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
    TOKENS, PAD, STARTS_NEXT = config.tokens, SUMS_PAD, config.starts_next

    def attention_backward_sums_kernel(v_base, o_base, do_base, l_base, sums, norms, n_queries, n_keys):
        """Addresses laid out as `heads_backward` says. Grid (ceil(max(n_queries, n_keys) / 64), heads)."""
        if STARTS_NEXT:
            let_next_kernel_start()
        shared = shared_address(cuda.shared.array(0, uint32))
        x, y, words = cuda.local.array(TOKENS, float32), cuda.local.array(TOKENS, float32), cuda.local.array(4, uint32)
        delta, do_norm = cuda.local.array(TOKENS, float32), cuda.local.array(TOKENS, float32)
        v_norm = cuda.local.array(TOKENS, float32)
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
                load_tokens(tile, x, words, o, channel, first + mine, tile.value_dim, n_queries)
                load_tokens(tile, y, words, do, channel, first + mine, tile.value_dim, n_queries)
                for j in range(tile.tokens):
                    delta[j] += x[j] * y[j]
                    do_norm[j] += y[j] * y[j]
                if tile.scales_gradients:
                    load_tokens(tile, x, words, v, channel, first + mine, tile.value_dim, n_keys)
                    for j in range(tile.tokens):
                        v_norm[j] += x[j] * x[j]
        parts = tile.threads // max(lanes, 32)
        at = shared + 4 * (tid // max(lanes, 32) * PAD + mine)
        publish(delta, at, lanes, tid & 31)
        if tile.scales_gradients:
            publish(do_norm, at + 4 * parts * PAD, lanes, tid & 31)
            publish(v_norm, at + 8 * parts * PAD, lanes, tid & 31)
        barrier()

        if tid < PAD:
            query, padded = first + tid, (n_queries + PAD - 1) // PAD * PAD
            total = norm_do = norm_v = ZERO
            for i in range(parts):
                at = shared + 4 * (i * PAD + tid)
                total += ld_shared_f32(at)
                if tile.scales_gradients:
                    norm_do += ld_shared_f32(at + 4 * parts * PAD)
                    norm_v += ld_shared_f32(at + 8 * parts * PAD)
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
