"""The FlashAttention-2 kernels of vision-rs 0.1.1 (`flash_attn2.rs`, and `psa_fa2_backward` of `psa.rs`) in Numba CUDA.

One block owns one query or key row; lane d owns column d of that row and of every accumulator. The row itself and the rows
it meets lie in shared memory, where every lane reads them whole: each lane computes the same scalar score, as the original's
replicated tensors do. Rows are met in order, one recurrence step each, but fetched ROWS at a time and double-buffered:
while the lanes work on one batch the next is on its way into registers, and one barrier a batch is enough. HEAD_DIM and
VALUE_DIM (equal in the original) are compile-time constants. Pointers are flat arrays in C order with 64-bit offsets.

No fastmath: it would let the compiler assume that neither -inf nor NaN exists.
"""

from __future__ import annotations

import math

from numba_psa._numba_cuda import SIMULATED, cuda, device_function
from numba_psa.mirror.elements import Element

ROWS = 4
"""Rows between two barriers. Their scores do not depend on each other, which hides the latency of each."""

ALIGNMENT = None if SIMULATED else 16
"""Of shared arrays: with it the compiler reads four floats at once. The simulator knows no alignment."""


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


@device_function
def put(rows, shared_rows, width):
    """Lane d's column of the ROWS rows in registers into shared memory."""
    d = cuda.threadIdx.x
    if d < width:
        for r in range(ROWS):
            shared_rows[r, d] = rows[r]


def fetcher(WIDTH: int, element: Element):
    """The device function that loads rows of WIDTH columns; `base` is the offset of the first row of the batch-head."""
    widen = element.widen

    @device_function
    def fetch(rows, pointer, base, first, count):
        """Lane d's column of rows first … first+ROWS−1 into registers; past the last row, that row again (never used)."""
        d = cuda.threadIdx.x
        if d < WIDTH and count > 0:
            for r in range(ROWS):
                row = first + r
                if row >= count:
                    row = count - 1
                rows[r] = widen(pointer[base + row * WIDTH + d])

    return fetch


def _padded(width: int) -> int:
    """Columns a row takes in shared memory: a multiple of four, so that each row starts on 16 bytes."""
    return -(-width // 4) * 4


def flash_attention2_forward_kernel(HEAD_DIM: int, VALUE_DIM: int, element: Element):
    """Grid (n_ctx_q, BH): block (pid_m, pid_bh) owns query row pid_m; lane d owns column d of acc and o."""
    real, shared, widen, narrow = element.real, element.shared, element.widen, element.narrow
    fetch_k, fetch_v = fetcher(HEAD_DIM, element), fetcher(VALUE_DIM, element)
    K_ROWS, V_ROWS = (2, ROWS, _padded(HEAD_DIM)), (2, ROWS, _padded(VALUE_DIM))
    zero = real(0)
    masked = real(-math.inf)

    def kernel(q_ptr, k_ptr, v_ptr, o_ptr, l_ptr, n_ctx_q, n_ctx_k, softmax_scale, neg_inf):
        q_vec = cuda.shared.array(HEAD_DIM, shared, alignment=ALIGNMENT)
        k_vec = cuda.shared.array(K_ROWS, shared, alignment=ALIGNMENT)
        v_vec = cuda.shared.array(V_ROWS, shared, alignment=ALIGNMENT)
        k_next = cuda.local.array(ROWS, shared)
        v_next = cuda.local.array(ROWS, shared)
        qk = cuda.local.array(ROWS, shared)
        pid_m = cuda.blockIdx.x
        pid_bh = cuda.blockIdx.y
        d = cuda.threadIdx.x

        if d < HEAD_DIM:
            q_vec[d] = widen(q_ptr[(pid_bh * n_ctx_q + pid_m) * HEAD_DIM + d])
        k_base = pid_bh * n_ctx_k * HEAD_DIM
        v_base = pid_bh * n_ctx_k * VALUE_DIM
        fetch_k(k_next, k_ptr, k_base, 0, n_ctx_k)
        fetch_v(v_next, v_ptr, v_base, 0, n_ctx_k)

        acc = zero
        m_i = real(neg_inf)
        l_i = zero
        for first in range(0, n_ctx_k, ROWS):
            stage = (first // ROWS) & 1
            put(k_next, k_vec[stage], HEAD_DIM)
            put(v_next, v_vec[stage], VALUE_DIM)
            cuda.syncthreads()
            fetch_k(k_next, k_ptr, k_base, first + ROWS, n_ctx_k)
            fetch_v(v_next, v_ptr, v_base, first + ROWS, n_ctx_k)

            for r in range(ROWS):
                qk[r] = dot(q_vec, k_vec[stage, r], HEAD_DIM, zero) * softmax_scale

            for r in range(ROWS):
                if first + r < n_ctx_k:
                    # exp(-inf − -inf) would be NaN: nothing has been added yet, or nothing is now, so the factor is 0.
                    m_new = qk[r] if qk[r] > m_i else m_i
                    alpha = zero if m_i == masked else real(math.exp(m_i - m_new))
                    p = zero if qk[r] == masked else real(math.exp(qk[r] - m_new))
                    l_i = alpha * l_i + p
                    if d < VALUE_DIM:
                        acc = alpha * acc + p * v_vec[stage, r, d]
                    m_i = m_new

        empty = l_i == zero  # no key, or only keys with score -inf
        if d < VALUE_DIM:
            o = zero if empty else acc / l_i
            o_ptr[(pid_bh * n_ctx_q + pid_m) * VALUE_DIM + d] = narrow(o)
        if d == 0:
            l_ptr[pid_bh * n_ctx_q + pid_m] = masked if empty else m_i + real(math.log(l_i))

    return kernel


def flash_attention2_backward_dq_kernel(HEAD_DIM: int, VALUE_DIM: int, element: Element):
    """Grid (n_ctx_q, BH): block (pid_m, pid_bh) owns query row pid_m; lane d owns column d of dq."""
    narrow = element.narrow
    dq_row = _dq_row(HEAD_DIM, VALUE_DIM, element)

    def kernel(q_ptr, k_ptr, v_ptr, o_ptr, do_ptr, l_ptr, dq_ptr, n_ctx_q, n_ctx_k, softmax_scale):
        dq_acc = dq_row(q_ptr, k_ptr, v_ptr, o_ptr, do_ptr, l_ptr, n_ctx_q, n_ctx_k, softmax_scale)
        d = cuda.threadIdx.x
        if d < HEAD_DIM:
            dq_ptr[(cuda.blockIdx.y * n_ctx_q + cuda.blockIdx.x) * HEAD_DIM + d] = narrow(dq_acc)

    return kernel


def flash_attention2_backward_dkv_kernel(HEAD_DIM: int, VALUE_DIM: int, element: Element):
    """Grid (n_ctx_k, BH): block (pid_n, pid_bh) owns key row pid_n; lane d owns column d of dk and dv."""
    narrow = element.narrow
    dkv_row = _dkv_row(HEAD_DIM, VALUE_DIM, element)

    def kernel(q_ptr, k_ptr, v_ptr, o_ptr, do_ptr, l_ptr, dk_ptr, dv_ptr, n_ctx_q, n_ctx_k, softmax_scale):
        dk_acc, dv_acc = dkv_row(q_ptr, k_ptr, v_ptr, o_ptr, do_ptr, l_ptr, n_ctx_q, n_ctx_k, softmax_scale)
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
    dq_row = _dq_row(HEAD_DIM, VALUE_DIM, element)
    dkv_row = _dkv_row(HEAD_DIM, VALUE_DIM, element)

    def kernel(q_ptr, k_ptr, v_ptr, o_ptr, do_ptr, l_ptr, dq_ptr, dk_ptr, dv_ptr, N, softmax_scale):
        row = cuda.blockIdx.y * N + cuda.blockIdx.x
        d = cuda.threadIdx.x
        dq_acc = dq_row(q_ptr, k_ptr, v_ptr, o_ptr, do_ptr, l_ptr, N, N, softmax_scale)
        if d < HEAD_DIM:
            add(dq_ptr, row * HEAD_DIM + d, dq_acc)
        dk_acc, dv_acc = dkv_row(q_ptr, k_ptr, v_ptr, o_ptr, do_ptr, l_ptr, N, N, softmax_scale)
        if d < HEAD_DIM:
            add(dk_ptr, row * HEAD_DIM + d, dk_acc)
        if d < VALUE_DIM:
            dv_ptr[row * VALUE_DIM + d] = narrow(dv_acc)

    return kernel


def _dq_row(HEAD_DIM, VALUE_DIM, element):
    real, shared, widen = element.real, element.shared, element.widen
    fetch_k, fetch_v = fetcher(HEAD_DIM, element), fetcher(VALUE_DIM, element)
    K_ROWS, V_ROWS = (2, ROWS, _padded(HEAD_DIM)), (2, ROWS, _padded(VALUE_DIM))
    zero = real(0)
    masked = real(-math.inf)

    @device_function
    def dq_row(q_ptr, k_ptr, v_ptr, o_ptr, do_ptr, l_ptr, n_ctx_q, n_ctx_k, softmax_scale):
        """Column d of dq of the block's query row: the sum over all keys of ds · k · softmax_scale."""
        q_vec = cuda.shared.array(HEAD_DIM, shared, alignment=ALIGNMENT)
        o_vec = cuda.shared.array(VALUE_DIM, shared, alignment=ALIGNMENT)
        do_vec = cuda.shared.array(VALUE_DIM, shared, alignment=ALIGNMENT)
        k_vec = cuda.shared.array(K_ROWS, shared, alignment=ALIGNMENT)
        v_vec = cuda.shared.array(V_ROWS, shared, alignment=ALIGNMENT)
        k_next = cuda.local.array(ROWS, shared)
        v_next = cuda.local.array(ROWS, shared)
        ds = cuda.local.array(ROWS, shared)
        pid_m = cuda.blockIdx.x
        pid_bh = cuda.blockIdx.y
        d = cuda.threadIdx.x

        row = pid_bh * n_ctx_q + pid_m
        if d < HEAD_DIM:
            q_vec[d] = widen(q_ptr[row * HEAD_DIM + d])
        if d < VALUE_DIM:
            o_vec[d] = widen(o_ptr[row * VALUE_DIM + d])
            do_vec[d] = widen(do_ptr[row * VALUE_DIM + d])
        k_base = pid_bh * n_ctx_k * HEAD_DIM
        v_base = pid_bh * n_ctx_k * VALUE_DIM
        fetch_k(k_next, k_ptr, k_base, 0, n_ctx_k)
        fetch_v(v_next, v_ptr, v_base, 0, n_ctx_k)
        cuda.syncthreads()
        d_q = dot(o_vec, do_vec, VALUE_DIM, zero)
        l_q = l_ptr[row]

        dq_acc = zero
        n_keys = 0 if l_q == masked else n_ctx_k  # a masked row attends to nothing
        for first in range(0, n_keys, ROWS):
            stage = (first // ROWS) & 1
            put(k_next, k_vec[stage], HEAD_DIM)
            put(v_next, v_vec[stage], VALUE_DIM)
            cuda.syncthreads()
            fetch_k(k_next, k_ptr, k_base, first + ROWS, n_ctx_k)
            fetch_v(v_next, v_ptr, v_base, first + ROWS, n_ctx_k)

            for r in range(ROWS):
                qk = dot(q_vec, k_vec[stage, r], HEAD_DIM, zero) * softmax_scale
                p = real(math.exp(qk - l_q))
                do_dot_v = dot(do_vec, v_vec[stage, r], VALUE_DIM, zero)
                ds[r] = p * (do_dot_v - d_q)

            for r in range(ROWS):
                if first + r < n_ctx_k and d < HEAD_DIM:
                    dq_acc += ds[r] * k_vec[stage, r, d] * softmax_scale
        return dq_acc

    return dq_row


def _dkv_row(HEAD_DIM, VALUE_DIM, element):
    real, shared, widen = element.real, element.shared, element.widen
    fetch_q, fetch_o = fetcher(HEAD_DIM, element), fetcher(VALUE_DIM, element)
    Q_ROWS, O_ROWS = (2, ROWS, _padded(HEAD_DIM)), (2, ROWS, _padded(VALUE_DIM))
    zero = real(0)
    masked = real(-math.inf)

    @device_function
    def dkv_row(q_ptr, k_ptr, v_ptr, o_ptr, do_ptr, l_ptr, n_ctx_q, n_ctx_k, softmax_scale):
        """Column d of dk and dv of the block's key row: the sums over all queries of ds · q · softmax_scale and p · do."""
        k_vec = cuda.shared.array(HEAD_DIM, shared, alignment=ALIGNMENT)
        v_vec = cuda.shared.array(VALUE_DIM, shared, alignment=ALIGNMENT)
        q_vec = cuda.shared.array(Q_ROWS, shared, alignment=ALIGNMENT)
        o_vec = cuda.shared.array(O_ROWS, shared, alignment=ALIGNMENT)
        do_vec = cuda.shared.array(O_ROWS, shared, alignment=ALIGNMENT)
        q_next = cuda.local.array(ROWS, shared)
        o_next = cuda.local.array(ROWS, shared)
        do_next = cuda.local.array(ROWS, shared)
        l_m = cuda.local.array(ROWS, shared)
        p = cuda.local.array(ROWS, shared)
        ds = cuda.local.array(ROWS, shared)
        pid_n = cuda.blockIdx.x
        pid_bh = cuda.blockIdx.y
        d = cuda.threadIdx.x

        row = pid_bh * n_ctx_k + pid_n
        if d < HEAD_DIM:
            k_vec[d] = widen(k_ptr[row * HEAD_DIM + d])
        if d < VALUE_DIM:
            v_vec[d] = widen(v_ptr[row * VALUE_DIM + d])
        q_base = pid_bh * n_ctx_q * HEAD_DIM
        o_base = pid_bh * n_ctx_q * VALUE_DIM
        fetch_q(q_next, q_ptr, q_base, 0, n_ctx_q)
        fetch_o(o_next, o_ptr, o_base, 0, n_ctx_q)
        fetch_o(do_next, do_ptr, o_base, 0, n_ctx_q)

        dk_acc = zero
        dv_acc = zero
        for first in range(0, n_ctx_q, ROWS):
            stage = (first // ROWS) & 1
            put(q_next, q_vec[stage], HEAD_DIM)
            put(o_next, o_vec[stage], VALUE_DIM)
            put(do_next, do_vec[stage], VALUE_DIM)
            cuda.syncthreads()
            fetch_q(q_next, q_ptr, q_base, first + ROWS, n_ctx_q)
            fetch_o(o_next, o_ptr, o_base, first + ROWS, n_ctx_q)
            fetch_o(do_next, do_ptr, o_base, first + ROWS, n_ctx_q)

            for r in range(ROWS):
                l_m[r] = masked  # a masked row attends to nothing, and a row past the last does not exist
                if first + r < n_ctx_q:
                    l_m[r] = l_ptr[pid_bh * n_ctx_q + first + r]
                d_m = dot(o_vec[stage, r], do_vec[stage, r], VALUE_DIM, zero)
                qk = dot(q_vec[stage, r], k_vec, HEAD_DIM, zero) * softmax_scale
                p[r] = real(math.exp(qk - l_m[r]))
                do_dot_v = dot(do_vec[stage, r], v_vec, VALUE_DIM, zero)
                ds[r] = p[r] * (do_dot_v - d_m)

            for r in range(ROWS):
                if l_m[r] != masked:
                    if d < VALUE_DIM:
                        dv_acc += p[r] * do_vec[stage, r, d]
                    if d < HEAD_DIM:
                        dk_acc += ds[r] * q_vec[stage, r, d] * softmax_scale
        return dk_acc, dv_acc

    return dkv_row
