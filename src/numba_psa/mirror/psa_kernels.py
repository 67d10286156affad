"""The six layout kernels of vision-rs 0.1.1 (`psa.rs`) in Numba CUDA, one factory a kernel.

KEY_DIM is a compile-time constant, as in the original. Pointers are flat arrays in C order;
integers arrive as 64-bit, so offsets are 64-bit. A block may have more lanes than KEY_DIM: the rest return at once.
Names are the original's, down to `H` and `W`.
"""

from __future__ import annotations

from numba_psa._numba_cuda import cuda, device_function
from numba_psa.mirror.elements import Element


@device_function
def token_of(pid, N, num_heads):
    """(b, h, n) of block pid when blocks count tokens first, then heads, then pictures."""
    bh = pid // N
    return bh // num_heads, bh % num_heads, pid % N


def psa_pack_qkv_kernel(KEY_DIM: int, element: Element):
    """Grid (4·BH·N): block (section, bh, n) moves one head vector; lane d moves channel d."""

    def kernel(qkv_ptr, out_ptr, qkv_h, H, W, B, num_heads):
        d = cuda.threadIdx.x
        if d >= KEY_DIM:
            return
        N = H * W
        BH = B * num_heads
        section = cuda.blockIdx.x // (BH * N)
        b, h, n = token_of(cuda.blockIdx.x % (BH * N), N, num_heads)

        channel = h * 4 * KEY_DIM + section * KEY_DIM + d
        out_ptr[((section * BH + b * num_heads + h) * N + n) * KEY_DIM + d] = qkv_ptr[(b * qkv_h + channel) * N + n]

    return kernel


def psa_extract_v_nchw_kernel(KEY_DIM: int, element: Element):
    """Grid (BH·N): block (bh, n) moves V_lo and V_hi of one token; lane d moves channel d of each."""

    def kernel(qkv_ptr, v_ptr, qkv_h, c, H, W, num_heads):
        d = cuda.threadIdx.x
        if d >= KEY_DIM:
            return
        N = H * W
        b, h, n = token_of(cuda.blockIdx.x, N, num_heads)

        source = (b * qkv_h + h * 4 * KEY_DIM + 2 * KEY_DIM + d) * N + n
        target = (b * c + h * 2 * KEY_DIM + d) * N + n
        v_ptr[target] = qkv_ptr[source]
        v_ptr[target + KEY_DIM * N] = qkv_ptr[source + KEY_DIM * N]

    return kernel


def psa_merge_attn_nchw_kernel(KEY_DIM: int, element: Element):
    """Grid (BH·N): block (bh, n) places one token of lo and hi; lane d places channel d of each."""

    def kernel(lo_ptr, hi_ptr, out_ptr, c, H, W, num_heads):
        d = cuda.threadIdx.x
        if d >= KEY_DIM:
            return
        N = H * W
        b, h, n = token_of(cuda.blockIdx.x, N, num_heads)

        source = ((b * num_heads + h) * N + n) * KEY_DIM + d
        target = (b * c + h * 2 * KEY_DIM + d) * N + n
        out_ptr[target] = lo_ptr[source]
        out_ptr[target + KEY_DIM * N] = hi_ptr[source]

    return kernel


def psa_pack_qkv_backward_kernel(KEY_DIM: int, element: Element):
    """Grid (4·BH·N): block (section, bh, n) adds one head vector of d_packed into d_qkv; lane d adds channel d."""
    widen, add = element.widen, element.add

    def kernel(d_packed_ptr, d_qkv_ptr, qkv_h, H, W, B, num_heads):
        d = cuda.threadIdx.x
        if d >= KEY_DIM:
            return
        N = H * W
        BH = B * num_heads
        section = cuda.blockIdx.x // (BH * N)
        b, h, n = token_of(cuda.blockIdx.x % (BH * N), N, num_heads)

        channel = h * 4 * KEY_DIM + section * KEY_DIM + d
        dx = d_packed_ptr[((section * BH + b * num_heads + h) * N + n) * KEY_DIM + d]
        add(d_qkv_ptr, (b * qkv_h + channel) * N + n, widen(dx))

    return kernel


def psa_extract_v_backward_kernel(KEY_DIM: int, element: Element):
    """Grid (BH·N): block (bh, n) adds one token of d_v into the V_lo and V_hi channels of d_qkv; lane d one of each."""
    widen, add = element.widen, element.add

    def kernel(d_v_ptr, d_qkv_ptr, qkv_h, c, H, W, num_heads):
        d = cuda.threadIdx.x
        if d >= KEY_DIM:
            return
        N = H * W
        b, h, n = token_of(cuda.blockIdx.x, N, num_heads)

        source = (b * c + h * 2 * KEY_DIM + d) * N + n
        target = (b * qkv_h + h * 4 * KEY_DIM + 2 * KEY_DIM + d) * N + n
        add(d_qkv_ptr, target, widen(d_v_ptr[source]))
        add(d_qkv_ptr, target + KEY_DIM * N, widen(d_v_ptr[source + KEY_DIM * N]))

    return kernel


def psa_merge_attn_backward_kernel(KEY_DIM: int, element: Element):
    """Grid (BH·N): block (bh, n) stores one token of d_merged into d_lo and d_hi; lane d stores channel d of each."""

    def kernel(d_merged_ptr, d_lo_ptr, d_hi_ptr, c, H, W, num_heads):
        d = cuda.threadIdx.x
        if d >= KEY_DIM:
            return
        N = H * W
        b, h, n = token_of(cuda.blockIdx.x, N, num_heads)

        source = (b * c + h * 2 * KEY_DIM + d) * N + n
        target = ((b * num_heads + h) * N + n) * KEY_DIM + d
        d_lo_ptr[target] = d_merged_ptr[source]
        d_hi_ptr[target] = d_merged_ptr[source + KEY_DIM * N]

    return kernel
