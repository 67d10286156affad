"""The FlashAttention-2 kernels of vision-rs 0.1.1 (`flash_attn2.rs`, and `psa_fa2_backward` of `psa.rs`) in Numba CUDA.

One block owns one query or key row; lane d owns column d of that row and of every accumulator. The row itself and the row
it meets lie in shared memory, where every lane reads them whole: each lane computes the same scalar score, as the original's
replicated tensors do. Rows that are met are double-buffered, so that one barrier a row is enough: while row j is read from
one buffer, row j+1 is on its way into the other. HEAD_DIM and VALUE_DIM (the original has them equal) are compile-time
constants. Pointers are flat arrays in C order with 64-bit offsets.

No fastmath: it would let the compiler assume that neither -inf nor NaN exists.
"""

from __future__ import annotations

import math

from numba_psa._numba_cuda import cuda, device_function
from numba_psa.mirror.elements import Element


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
    real, shared, widen, narrow = element.real, element.shared, element.widen, element.narrow
    zero = real(0)
    masked = real(-math.inf)

    def kernel(q_ptr, k_ptr, v_ptr, o_ptr, l_ptr, n_ctx_q, n_ctx_k, softmax_scale, neg_inf):
        q_vec = cuda.shared.array(HEAD_DIM, shared)
        k_vec = cuda.shared.array((2, HEAD_DIM), shared)
        v_vec = cuda.shared.array((2, VALUE_DIM), shared)
        pid_m = cuda.blockIdx.x
        pid_bh = cuda.blockIdx.y
        d = cuda.threadIdx.x

        q_row = (pid_bh * n_ctx_q + pid_m) * HEAD_DIM
        k_rows = pid_bh * n_ctx_k * HEAD_DIM
        v_rows = pid_bh * n_ctx_k * VALUE_DIM
        if d < HEAD_DIM:
            q_vec[d] = widen(q_ptr[q_row + d])
            if n_ctx_k > 0:
                k_vec[0, d] = widen(k_ptr[k_rows + d])
        if d < VALUE_DIM and n_ctx_k > 0:
            v_vec[0, d] = widen(v_ptr[v_rows + d])

        acc = zero
        m_i = real(neg_inf)
        l_i = zero
        for k_row in range(n_ctx_k):
            stage = k_row & 1
            cuda.syncthreads()
            if k_row + 1 < n_ctx_k:
                if d < HEAD_DIM:
                    k_vec[1 - stage, d] = widen(k_ptr[k_rows + (k_row + 1) * HEAD_DIM + d])
                if d < VALUE_DIM:
                    v_vec[1 - stage, d] = widen(v_ptr[v_rows + (k_row + 1) * VALUE_DIM + d])

            qk = dot(q_vec, k_vec[stage], HEAD_DIM, zero) * softmax_scale

            # exp(-inf − -inf) would be NaN: nothing has been added yet, or nothing is now, so the factor is 0.
            m_new = qk if qk > m_i else m_i
            alpha = zero if m_i == masked else real(math.exp(m_i - m_new))
            p = zero if qk == masked else real(math.exp(qk - m_new))
            l_i = alpha * l_i + p
            if d < VALUE_DIM:
                acc = alpha * acc + p * v_vec[stage, d]
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
    zero = real(0)
    masked = real(-math.inf)

    @device_function
    def dq_row(q_ptr, k_ptr, v_ptr, o_ptr, do_ptr, l_ptr, n_ctx_q, n_ctx_k, softmax_scale):
        """Column d of dq of the block's query row: the sum over all keys of ds · k · softmax_scale."""
        q_vec = cuda.shared.array(HEAD_DIM, shared)
        o_vec = cuda.shared.array(VALUE_DIM, shared)
        do_vec = cuda.shared.array(VALUE_DIM, shared)
        k_vec = cuda.shared.array((2, HEAD_DIM), shared)
        v_vec = cuda.shared.array((2, VALUE_DIM), shared)
        pid_m = cuda.blockIdx.x
        pid_bh = cuda.blockIdx.y
        d = cuda.threadIdx.x

        row = pid_bh * n_ctx_q + pid_m
        k_rows = pid_bh * n_ctx_k * HEAD_DIM
        v_rows = pid_bh * n_ctx_k * VALUE_DIM
        if d < HEAD_DIM:
            q_vec[d] = widen(q_ptr[row * HEAD_DIM + d])
            if n_ctx_k > 0:
                k_vec[0, d] = widen(k_ptr[k_rows + d])
        if d < VALUE_DIM:
            o_vec[d] = widen(o_ptr[row * VALUE_DIM + d])
            do_vec[d] = widen(do_ptr[row * VALUE_DIM + d])
            if n_ctx_k > 0:
                v_vec[0, d] = widen(v_ptr[v_rows + d])
        cuda.syncthreads()
        d_q = dot(o_vec, do_vec, VALUE_DIM, zero)
        l_q = l_ptr[row]

        dq_acc = zero
        n_keys = 0 if l_q == masked else n_ctx_k  # a masked row attends to nothing
        for k_row in range(n_keys):
            stage = k_row & 1
            cuda.syncthreads()
            if k_row + 1 < n_ctx_k:
                if d < HEAD_DIM:
                    k_vec[1 - stage, d] = widen(k_ptr[k_rows + (k_row + 1) * HEAD_DIM + d])
                if d < VALUE_DIM:
                    v_vec[1 - stage, d] = widen(v_ptr[v_rows + (k_row + 1) * VALUE_DIM + d])

            qk = dot(q_vec, k_vec[stage], HEAD_DIM, zero) * softmax_scale
            p = real(math.exp(qk - l_q))
            do_dot_v = dot(do_vec, v_vec[stage], VALUE_DIM, zero)
            ds = p * (do_dot_v - d_q)
            if d < HEAD_DIM:
                dq_acc += ds * k_vec[stage, d] * softmax_scale
        cuda.syncthreads()
        return dq_acc

    return dq_row


def _dkv_row(HEAD_DIM, VALUE_DIM, element):
    real, shared, widen = element.real, element.shared, element.widen
    zero = real(0)
    masked = real(-math.inf)

    @device_function
    def dkv_row(q_ptr, k_ptr, v_ptr, o_ptr, do_ptr, l_ptr, n_ctx_q, n_ctx_k, softmax_scale):
        """Column d of dk and dv of the block's key row: the sums over all queries of ds · q · softmax_scale and p · do."""
        k_vec = cuda.shared.array(HEAD_DIM, shared)
        v_vec = cuda.shared.array(VALUE_DIM, shared)
        q_vec = cuda.shared.array((2, HEAD_DIM), shared)
        o_vec = cuda.shared.array((2, VALUE_DIM), shared)
        do_vec = cuda.shared.array((2, VALUE_DIM), shared)
        pid_n = cuda.blockIdx.x
        pid_bh = cuda.blockIdx.y
        d = cuda.threadIdx.x

        row = pid_bh * n_ctx_k + pid_n
        q_rows = pid_bh * n_ctx_q * HEAD_DIM
        o_rows = pid_bh * n_ctx_q * VALUE_DIM
        if d < HEAD_DIM:
            k_vec[d] = widen(k_ptr[row * HEAD_DIM + d])
            if n_ctx_q > 0:
                q_vec[0, d] = widen(q_ptr[q_rows + d])
        if d < VALUE_DIM:
            v_vec[d] = widen(v_ptr[row * VALUE_DIM + d])
            if n_ctx_q > 0:
                o_vec[0, d] = widen(o_ptr[o_rows + d])
                do_vec[0, d] = widen(do_ptr[o_rows + d])

        dk_acc = zero
        dv_acc = zero
        for q_row in range(n_ctx_q):
            stage = q_row & 1
            cuda.syncthreads()
            if q_row + 1 < n_ctx_q:
                if d < HEAD_DIM:
                    q_vec[1 - stage, d] = widen(q_ptr[q_rows + (q_row + 1) * HEAD_DIM + d])
                if d < VALUE_DIM:
                    o_vec[1 - stage, d] = widen(o_ptr[o_rows + (q_row + 1) * VALUE_DIM + d])
                    do_vec[1 - stage, d] = widen(do_ptr[o_rows + (q_row + 1) * VALUE_DIM + d])

            l_m = l_ptr[pid_bh * n_ctx_q + q_row]
            if l_m != masked:  # a masked row attends to nothing
                d_m = dot(o_vec[stage], do_vec[stage], VALUE_DIM, zero)
                qk = dot(q_vec[stage], k_vec, HEAD_DIM, zero) * softmax_scale
                p = real(math.exp(qk - l_m))
                do_dot_v = dot(do_vec[stage], v_vec, VALUE_DIM, zero)
                ds = p * (do_dot_v - d_m)
                if d < VALUE_DIM:
                    dv_acc += p * do_vec[stage, d]
                if d < HEAD_DIM:
                    dk_acc += ds * q_vec[stage, d] * softmax_scale
        return dk_acc, dv_acc

    return dkv_row
