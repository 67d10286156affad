"""The FlashAttention-2 kernels of vision-rs 0.1.1 (`flash_attn2.rs`, and `psa_fa2_backward` of `psa.rs`) in Numba CUDA.

One block owns one query or key row; lane d owns column d of that row and of every accumulator. The row itself and the rows
it meets lie in shared memory. Rows are met in order, one recurrence step each, but fetched a tile at a time, and the dot
products of a tile, which do not depend on each other, are shared out: lane r computes those of row r whole. (The original
has every row's products reduced across lanes; that is the one thing cut differently here, and what makes it fast without
warp shuffles, which Numba's simulator has not.) HEAD_DIM and VALUE_DIM (equal in the original) are compile-time constants.
Pointers are flat arrays in C order with 64-bit offsets; inner loops count in unsigned integers, because Numba lets signed
indices count from the end, at the price of a test each.

No fastmath: it would let the compiler assume that neither -inf nor NaN exists.
"""

from __future__ import annotations

import math

import numpy as np

from numba_psa._numba_cuda import cuda, device_function
from numba_psa.mirror.elements import Element

MAX_TILE = 32
SHARED_ELEMENTS = 4096
"""What the rows of one tile may take together: 32 KiB of float64, of the 48 KiB that a block has without asking."""


def _tile(*widths: int) -> int:
    """Rows fetched at a time, when a row is as wide as `widths` together: at least one, at most MAX_TILE."""
    return max(1, min(MAX_TILE, SHARED_ELEMENTS // sum(_stride(width) for width in widths)))


def _stride(width: int) -> int:
    """Shared-memory columns of a row: odd, so that lanes reading one column of different rows meet in no bank."""
    return width | 1


def loader(WIDTH: int, element: Element):
    """The device function that fetches rows of WIDTH columns from global into shared memory."""
    widen = element.widen
    STEP = np.uint64(WIDTH)

    @device_function
    def load(rows, pointer, base, count):
        """rows[r, :] = the r-th row after offset `base`, for r < count; lane d fetches column d."""
        d = cuda.threadIdx.x
        if d < WIDTH:
            at = np.uint64(base + d)
            if count == rows.shape[0]:  # a loop of constant length: all its loads are under way at once
                for r in range(rows.shape[0]):
                    rows[r, d] = widen(pointer[at])
                    at += STEP
            else:
                for r in range(count):
                    rows[r, d] = widen(pointer[at])
                    at += STEP

    return load


@device_function
def dot(a, b, width, zero):
    """Sum of a·b over a compile-time width in four interleaved partial sums: a quarter of one chain's latency."""
    s0, s1, s2, s3 = zero, zero, zero, zero
    whole = width - width % 4
    for e in range(0, whole, 4):
        s0 += a[e] * b[e]
        s1 += a[e + 1] * b[e + 1]
        s2 += a[e + 2] * b[e + 2]
        s3 += a[e + 3] * b[e + 3]
    for e in range(whole, width):
        s0 += a[e] * b[e]
    return (s0 + s1) + (s2 + s3)


def flash_attention2_forward_kernel(HEAD_DIM: int, VALUE_DIM: int, element: Element):
    """Grid (n_ctx_q, BH): block (pid_m, pid_bh) owns query row pid_m; lane d owns column d of acc and o."""
    real, shared, narrow = element.real, element.shared, element.narrow
    load_q_or_k, load_v = loader(HEAD_DIM, element), loader(VALUE_DIM, element)
    TILE = _tile(HEAD_DIM, VALUE_DIM)
    Q_SHAPE, K_SHAPE, V_SHAPE = (1, HEAD_DIM), (TILE, _stride(HEAD_DIM)), (TILE, _stride(VALUE_DIM))
    zero = real(0)
    masked = real(-math.inf)

    def kernel(q_ptr, k_ptr, v_ptr, o_ptr, l_ptr, n_ctx_q, n_ctx_k, softmax_scale, neg_inf):
        q_vec = cuda.shared.array(Q_SHAPE, shared)
        k_vec = cuda.shared.array(K_SHAPE, shared)
        v_vec = cuda.shared.array(V_SHAPE, shared)
        qk = cuda.shared.array(TILE, shared)
        pid_m = cuda.blockIdx.x
        pid_bh = cuda.blockIdx.y
        d = cuda.threadIdx.x
        lanes = cuda.blockDim.x

        row = pid_bh * n_ctx_q + pid_m
        column = min(d, VALUE_DIM - 1)  # a lane beyond the values repeats their last column, and stores nothing
        load_q_or_k(q_vec, q_ptr, row * HEAD_DIM, 1)

        acc = zero
        m_i = real(neg_inf)
        l_i = zero
        for first in range(0, n_ctx_k, TILE):
            count = min(TILE, n_ctx_k - first)
            cuda.syncthreads()  # all lanes are done with the tile before
            load_q_or_k(k_vec, k_ptr, (pid_bh * n_ctx_k + first) * HEAD_DIM, count)
            load_v(v_vec, v_ptr, (pid_bh * n_ctx_k + first) * VALUE_DIM, count)
            cuda.syncthreads()
            for r in range(d, count, lanes):
                qk[r] = dot(q_vec[0], k_vec[r], HEAD_DIM, zero) * softmax_scale
            cuda.syncthreads()

            for r in range(np.uint64(count)):
                m_new = qk[r] if qk[r] > m_i else m_i
                m_ref = zero if m_new == masked else m_new  # exp(-inf − -inf) would be NaN; so both factors are 0
                alpha = real(math.exp(m_i - m_ref))
                p = real(math.exp(qk[r] - m_ref))
                l_i = alpha * l_i + p
                acc = alpha * acc + p * v_vec[r, column]
                m_i = m_new

        empty = l_i == zero  # no key, or only keys with score -inf
        if d < VALUE_DIM:
            o = zero if empty else acc / l_i
            o_ptr[row * VALUE_DIM + d] = narrow(o)
        if d == 0:
            l_ptr[row] = masked if empty else m_i + real(math.log(l_i))

    return kernel


def backward_workspace(HEAD_DIM: int, VALUE_DIM: int, element: Element):
    """The device function that allocates the shared memory of a backward kernel, the same for both of its phases."""
    shared = element.shared
    TILE = backward_tile(HEAD_DIM, VALUE_DIM)
    Q_SHAPE, Q_TILE = (1, HEAD_DIM), (TILE, _stride(HEAD_DIM))
    O_SHAPE, O_TILE = (1, VALUE_DIM), (TILE, _stride(VALUE_DIM))

    @device_function
    def allocate():
        """(own q or k, own do or v, tile of k or q, of v or do, of o), then a scalar a row of the tile: p, ds, l."""
        own_qk = cuda.shared.array(Q_SHAPE, shared)
        own_dov = cuda.shared.array(O_SHAPE, shared)
        met_kq = cuda.shared.array(Q_TILE, shared)
        met_vdo = cuda.shared.array(O_TILE, shared)
        met_o = cuda.shared.array(O_TILE, shared)
        p = cuda.shared.array(TILE, shared)
        ds = cuda.shared.array(TILE, shared)
        l = cuda.shared.array(TILE, shared)
        return own_qk, own_dov, met_kq, met_vdo, met_o, p, ds, l

    return allocate


def backward_tile(HEAD_DIM: int, VALUE_DIM: int) -> int:
    """Rows a backward kernel fetches at a time: a query or key row, and two rows as wide as values."""
    return _tile(HEAD_DIM, VALUE_DIM, VALUE_DIM)


def dq_of_row(HEAD_DIM: int, VALUE_DIM: int, element: Element):
    """The device function that computes dq of one query row."""
    real = element.real
    load_q_or_k, load_v_or_o = loader(HEAD_DIM, element), loader(VALUE_DIM, element)
    TILE = backward_tile(HEAD_DIM, VALUE_DIM)
    zero = real(0)
    masked = real(-math.inf)

    @device_function
    def dq_row(workspace, q_ptr, k_ptr, v_ptr, o_ptr, do_ptr, l_ptr, n_ctx_q, n_ctx_k, softmax_scale):
        """Column d of dq of the block's query row: the sum over all keys of ds · k · softmax_scale."""
        q_vec, do_vec, k_vec, v_vec, o_vec, _, ds, _ = workspace
        pid_m = cuda.blockIdx.x
        pid_bh = cuda.blockIdx.y
        d = cuda.threadIdx.x
        lanes = cuda.blockDim.x

        row = pid_bh * n_ctx_q + pid_m
        load_q_or_k(q_vec, q_ptr, row * HEAD_DIM, 1)
        load_v_or_o(o_vec, o_ptr, row * VALUE_DIM, 1)
        load_v_or_o(do_vec, do_ptr, row * VALUE_DIM, 1)
        cuda.syncthreads()
        d_q = dot(o_vec[0], do_vec[0], VALUE_DIM, zero)
        l_q = l_ptr[row]

        dq_acc = zero
        n_keys = 0 if l_q == masked else n_ctx_k  # a masked row attends to nothing
        for first in range(0, n_keys, TILE):
            count = min(TILE, n_keys - first)
            cuda.syncthreads()  # all lanes are done with the tile before
            load_q_or_k(k_vec, k_ptr, (pid_bh * n_ctx_k + first) * HEAD_DIM, count)
            load_v_or_o(v_vec, v_ptr, (pid_bh * n_ctx_k + first) * VALUE_DIM, count)
            cuda.syncthreads()
            for r in range(d, count, lanes):
                qk = dot(q_vec[0], k_vec[r], HEAD_DIM, zero) * softmax_scale
                p = real(math.exp(qk - l_q))
                do_dot_v = dot(do_vec[0], v_vec[r], VALUE_DIM, zero)
                ds[r] = p * (do_dot_v - d_q)
            cuda.syncthreads()

            if d < HEAD_DIM:
                for r in range(np.uint64(count)):
                    dq_acc += ds[r] * k_vec[r, d] * softmax_scale
        return dq_acc

    return dq_row


def dkv_of_row(HEAD_DIM: int, VALUE_DIM: int, element: Element):
    """The device function that computes dk and dv of one key row."""
    real = element.real
    load_q_or_k, load_v_or_o = loader(HEAD_DIM, element), loader(VALUE_DIM, element)
    TILE = backward_tile(HEAD_DIM, VALUE_DIM)
    zero = real(0)
    masked = real(-math.inf)

    @device_function
    def dkv_row(workspace, q_ptr, k_ptr, v_ptr, o_ptr, do_ptr, l_ptr, n_ctx_q, n_ctx_k, softmax_scale):
        """Column d of dk and dv of the block's key row: the sums over all queries of ds · q · softmax_scale and p · do."""
        k_vec, v_vec, q_vec, do_vec, o_vec, p, ds, l_m = workspace
        pid_n = cuda.blockIdx.x
        pid_bh = cuda.blockIdx.y
        d = cuda.threadIdx.x
        lanes = cuda.blockDim.x

        cuda.syncthreads()  # the workspace may still serve the dq of another lane
        row = pid_bh * n_ctx_k + pid_n
        load_q_or_k(k_vec, k_ptr, row * HEAD_DIM, 1)
        load_v_or_o(v_vec, v_ptr, row * VALUE_DIM, 1)

        dk_acc = zero
        dv_acc = zero
        for first in range(0, n_ctx_q, TILE):
            count = min(TILE, n_ctx_q - first)
            cuda.syncthreads()  # all lanes are done with the tile before
            load_q_or_k(q_vec, q_ptr, (pid_bh * n_ctx_q + first) * HEAD_DIM, count)
            load_v_or_o(o_vec, o_ptr, (pid_bh * n_ctx_q + first) * VALUE_DIM, count)
            load_v_or_o(do_vec, do_ptr, (pid_bh * n_ctx_q + first) * VALUE_DIM, count)
            cuda.syncthreads()
            for r in range(d, count, lanes):
                l_m[r] = l_ptr[pid_bh * n_ctx_q + first + r]
                d_m = dot(o_vec[r], do_vec[r], VALUE_DIM, zero)
                qk = dot(q_vec[r], k_vec[0], HEAD_DIM, zero) * softmax_scale
                p[r] = real(math.exp(qk - l_m[r]))
                do_dot_v = dot(do_vec[r], v_vec[0], VALUE_DIM, zero)
                ds[r] = p[r] * (do_dot_v - d_m)
            cuda.syncthreads()

            for r in range(np.uint64(count)):
                if l_m[r] != masked:  # a masked row attends to nothing
                    if d < VALUE_DIM:
                        dv_acc += p[r] * do_vec[r, d]
                    if d < HEAD_DIM:
                        dk_acc += ds[r] * q_vec[r, d] * softmax_scale
        return dk_acc, dv_acc

    return dkv_row


def flash_attention2_backward_dq_kernel(HEAD_DIM: int, VALUE_DIM: int, element: Element):
    """Grid (n_ctx_q, BH): block (pid_m, pid_bh) owns query row pid_m; lane d owns column d of dq."""
    narrow = element.narrow
    allocate = backward_workspace(HEAD_DIM, VALUE_DIM, element)
    dq_row = dq_of_row(HEAD_DIM, VALUE_DIM, element)

    def kernel(q_ptr, k_ptr, v_ptr, o_ptr, do_ptr, l_ptr, dq_ptr, n_ctx_q, n_ctx_k, softmax_scale):
        workspace = allocate()
        dq_acc = dq_row(workspace, q_ptr, k_ptr, v_ptr, o_ptr, do_ptr, l_ptr, n_ctx_q, n_ctx_k, softmax_scale)
        d = cuda.threadIdx.x
        if d < HEAD_DIM:
            dq_ptr[(cuda.blockIdx.y * n_ctx_q + cuda.blockIdx.x) * HEAD_DIM + d] = narrow(dq_acc)

    return kernel


def flash_attention2_backward_dkv_kernel(HEAD_DIM: int, VALUE_DIM: int, element: Element):
    """Grid (n_ctx_k, BH): block (pid_n, pid_bh) owns key row pid_n; lane d owns column d of dk and dv."""
    narrow = element.narrow
    allocate = backward_workspace(HEAD_DIM, VALUE_DIM, element)
    dkv_row = dkv_of_row(HEAD_DIM, VALUE_DIM, element)

    def kernel(q_ptr, k_ptr, v_ptr, o_ptr, do_ptr, l_ptr, dk_ptr, dv_ptr, n_ctx_q, n_ctx_k, softmax_scale):
        workspace = allocate()
        dk_acc, dv_acc = dkv_row(workspace, q_ptr, k_ptr, v_ptr, o_ptr, do_ptr, l_ptr, n_ctx_q, n_ctx_k, softmax_scale)
        row = cuda.blockIdx.y * n_ctx_k + cuda.blockIdx.x
        d = cuda.threadIdx.x
        if d < HEAD_DIM:
            dk_ptr[row * HEAD_DIM + d] = narrow(dk_acc)
        if d < VALUE_DIM:
            dv_ptr[row * VALUE_DIM + d] = narrow(dv_acc)

    return kernel


def psa_fa2_backward_kernel(HEAD_DIM: int, VALUE_DIM: int, element: Element):
    """Grid (N, BH): block (pid_n, pid_bh) computes dq of query row pid_n, then dk and dv of key row pid_n.

    dq and dk are added into their targets, because V_lo and V_hi share Q and K; dv is stored.
    """
    narrow, add = element.narrow, element.add
    allocate = backward_workspace(HEAD_DIM, VALUE_DIM, element)
    dq_row, dkv_row = dq_of_row(HEAD_DIM, VALUE_DIM, element), dkv_of_row(HEAD_DIM, VALUE_DIM, element)

    def kernel(q_ptr, k_ptr, v_ptr, o_ptr, do_ptr, l_ptr, dq_ptr, dk_ptr, dv_ptr, N, softmax_scale):
        row = cuda.blockIdx.y * N + cuda.blockIdx.x
        d = cuda.threadIdx.x
        workspace = allocate()
        dq_acc = dq_row(workspace, q_ptr, k_ptr, v_ptr, o_ptr, do_ptr, l_ptr, N, N, softmax_scale)
        if d < HEAD_DIM:
            add(dq_ptr, row * HEAD_DIM + d, dq_acc)
        dk_acc, dv_acc = dkv_row(workspace, q_ptr, k_ptr, v_ptr, o_ptr, do_ptr, l_ptr, N, N, softmax_scale)
        if d < HEAD_DIM:
            add(dk_ptr, row * HEAD_DIM + d, dk_acc)
        if d < VALUE_DIM:
            dv_ptr[row * VALUE_DIM + d] = narrow(dv_acc)

    return kernel
