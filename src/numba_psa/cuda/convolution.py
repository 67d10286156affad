"""Convolutions of a layer on NCHW, with what follows them: y = act(weight * x + bias) + add.

1×1 and 3×3, stride 1, zero padding, act SiLU or nothing; and the depthwise 3×3 of the attention. On tensor cores, float32
as three TF32 products. A layer at B = 1 is a chain of short kernels: each reads its weights before it waits for the one
before (sm_90), and splits its sums over warps, so that a multiprocessor has many loads under way at once.
"""

from __future__ import annotations

from numba import float32, types, uint32

from numba_psa._numba_cuda import cuda
from numba_psa.cuda.convolution_steps import (
    Source,
    columns_inside,
    load_bias,
    load_inputs,
    load_row,
    load_weights,
    multiply,
    multiply_tf32,
    neighbour_exists,
    publish_sums,
    silu,
    value_of,
)
from numba_psa.cuda.device import (
    barrier,
    ld_global_f32,
    ld_shared_v4_f32,
    let_next_kernel_start,
    shared_address,
    wait_for_previous_kernel,
)
from numba_psa.cuda.fragments import ZERO, fill
from numba_psa.cuda.merge import store_four


def make_convolution(config):
    """The kernel for one ConvolutionConfig; it closes over integers only, so that its compiled form can be cached."""
    tile = config.constants()
    A, B, ACC = config.fragment_shapes
    ROW, GROUPS = config.row, config.token_groups
    KEPT = config.quads if config.prefetches else 1
    QUADS_A_ROW = config.block_tokens // 4

    def convolution_kernel(
        x0,
        x1,
        x2,
        x3,
        stride0,
        stride1,
        stride2,
        stride3,
        first1,
        first2,
        first3,
        weights,
        bias,
        add,
        add_stride,
        y,
        y_stride,
        c_in,
        c_out,
        height,
        width,
        activated,
    ):
        """x0 … x3, add and y: addresses of `[channel][N]`, images *_stride bytes apart; add 0: nothing is added.

        x1 … x3 begin with channel first1 … first3 of the input. weights: `packed`; bias: float32. activated: 1 for SiLU.
        Grid (ceil(N / block_tokens), ceil(c_out / block_channels), B).
        """
        shared = shared_address(cuda.shared.array(0, uint32))
        tid, image = cuda.threadIdx.x, cuda.blockIdx.z
        lane, warp = tid & 31, tid >> 5
        k_warp, channel_warp = warp % tile.k_warps, warp // tile.k_warps
        tokens = height * width
        row_bytes = tile.item * tokens
        first_token, first_channel = cuda.blockIdx.x * tile.block_tokens, cuda.blockIdx.y * tile.block_channels
        token, column = first_token + 4 * (lane >> 2), lane & 3
        source = Source(
            x0 + image * stride0,
            x1 + image * stride1 - first1 * row_bytes,
            x2 + image * stride2 - first2 * row_bytes,
            x3 + image * stride3 - first3 * row_bytes,
            first1,
            first2,
            first3,
            row_bytes,
            c_in,
            tokens,
            width,
        )
        adds = add != 0
        add += image * add_stride
        y += image * y_stride

        a, b, acc = cuda.local.array(A, uint32), cuda.local.array(B, uint32), cuda.local.array(ACC, float32)
        row = cuda.local.array(ROW, uint32)
        a_high, a_low = cuda.local.array(4, uint32), cuda.local.array(4, uint32)
        b_high, b_low = cuda.local.array((2, 4), uint32), cuda.local.array((2, 4), uint32)
        biases, added = cuda.local.array(KEPT, float32), cuda.local.array((KEPT, 4), uint32)
        columns = cuda.local.array(GROUPS, uint32)
        fill(acc, ZERO)
        if tile.overlaps:
            let_next_kernel_start()

        # What no kernel writes comes before the wait: weights of the first steps, biases.
        steps = (c_in + tile.k_step - 1) // tile.k_step * tile.taps
        first, last = k_warp * steps // tile.k_warps, (k_warp + 1) * steps // tile.k_warps
        first_tile = first_channel // 16 + channel_warp * tile.channel_tiles
        tiles = (c_out + 15) // 16 - first_tile
        weights += first_tile * steps * (512 * tile.taps) + 16 * lane
        for u in range(tile.steps):
            load_weights(tile, a[u], weights, first + u, last, steps, tiles)
        if tile.prefetches:
            for i in range(KEPT):
                biases[i] = load_bias(bias, first_channel + (tid + i * tile.threads) // QUADS_A_ROW, c_out)
        if tile.taps > 1:
            for group in range(tile.token_groups):
                columns[group] = columns_inside(token + 32 * group, width)
        if tile.overlaps:
            wait_for_previous_kernel()
        if tile.prefetches:
            for i in range(KEPT):
                index = tid + i * tile.threads
                channel, at = first_channel + index // QUADS_A_ROW, first_token + 4 * (index % QUADS_A_ROW)
                load_row(tile, 0, added[i], add + channel * row_bytes, at, tokens, adds and channel < c_out)

        for k in range(first, last, tile.steps):
            for u in range(tile.steps):
                for group in range(tile.token_groups):
                    load_inputs(tile, b[u, group], row, source, k + u, last, token + 32 * group, column)
            for u in range(tile.steps):
                for group in range(tile.token_groups):
                    if tile.item == 4:
                        multiply_tf32(tile, acc, a[u], b[u, group], group, columns[group], a_high, a_low, b_high, b_low)
                    else:
                        multiply(tile, acc, a[u], b[u, group], group, columns[group])
            for u in range(tile.steps):
                load_weights(tile, a[u], weights, k + tile.steps + u, last, steps, tiles)

        block_bytes = tile.block_channels * tile.sum_stride
        mine = k_warp * block_bytes + channel_warp * (16 * tile.channel_tiles) * tile.sum_stride
        publish_sums(tile, acc, shared + mine, lane)
        barrier()
        for i in range(tile.quads):
            index = tid + i * tile.threads
            channel_here, quad = index // QUADS_A_ROW, index % QUADS_A_ROW
            channel, at = first_channel + channel_here, first_token + 4 * quad
            if channel_here < tile.block_channels and channel < c_out and at < tokens:
                kept = i if tile.prefetches else 0
                if not tile.prefetches:
                    biases[0] = load_bias(bias, channel, c_out)
                    load_row(tile, 0, added[0], add + channel * row_bytes, at, tokens, adds)
                o0 = o1 = o2 = o3 = biases[kept]
                for w in range(tile.k_warps):
                    s = ld_shared_v4_f32(shared + w * block_bytes + channel_here * tile.sum_stride + 16 * quad)
                    o0, o1, o2, o3 = o0 + s[0], o1 + s[1], o2 + s[2], o3 + s[3]
                if activated:
                    o0, o1, o2, o3 = silu(o0), silu(o1), silu(o2), silu(o3)
                o0, o1 = o0 + value_of(tile, added[kept, 0]), o1 + value_of(tile, added[kept, 1])
                o2, o3 = o2 + value_of(tile, added[kept, 2]), o3 + value_of(tile, added[kept, 3])
                store_four(tile, y + channel * row_bytes + tile.item * at, o0, o1, o2, o3, tokens - at)

    return convolution_kernel


SIGNATURE = types.void(*(types.int64,) * 8, *(types.int32,) * 3, *(types.int64,) * 6, *(types.int32,) * 5)


def make_depthwise(config):
    """The kernel for one DepthwiseConfig."""
    tile = config.constants()
    ROW = config.row

    def depthwise_kernel(
        v, head_stride, stride, head_dim, weights, bias, add, add_stride, y, y_stride, channels, height, width
    ):
        """y = weight * v + bias + add; channel h·head_dim + d of v is row d of what begins h·head_stride bytes after v.

        Images lie stride, add_stride and y_stride bytes apart. weights `[channels][9]`, bias: float32. y may be add.
        Grid (ceil(channels * ceil(N / 4) / threads), 1, B).
        """
        if tile.overlaps:
            let_next_kernel_start()
            wait_for_previous_kernel()
        image, tokens = cuda.blockIdx.z, height * width
        quads = (tokens + 3) // 4
        index = cuda.blockIdx.x * tile.threads + cuda.threadIdx.x
        channel, token = index // quads, index % quads * 4
        if channel < channels:
            row, added, sums = cuda.local.array(ROW, uint32), cuda.local.array(4, uint32), cuda.local.array(4, float32)
            row_bytes = tile.item * tokens
            v += image * stride + channel // head_dim * head_stride + channel % head_dim * row_bytes
            load_row(tile, 0, added, add + image * add_stride + channel * row_bytes, token, tokens, True)
            columns = columns_inside(token, width)
            for i in range(4):
                sums[i] = ZERO
            for dy in range(3):
                load_row(tile, 1, row, v, token + (dy - 1) * width, tokens, True)
                for dx in range(3):
                    w = ld_global_f32(weights + 4 * (9 * channel + 3 * dy + dx))
                    for i in range(4):
                        if neighbour_exists(dx, i, columns):
                            sums[i] += w * value_of(tile, row[i + dx])
            b = ld_global_f32(bias + 4 * channel)
            for i in range(4):
                sums[i] = sums[i] + b + value_of(tile, added[i])
            target = y + image * y_stride + channel * row_bytes + tile.item * token
            store_four(tile, target, sums[0], sums[1], sums[2], sums[3], tokens - token)

    return depthwise_kernel


DEPTHWISE_SIGNATURE = types.void(*(types.int64,) * 3, types.int32, *(types.int64,) * 6, *(types.int32,) * 3)
