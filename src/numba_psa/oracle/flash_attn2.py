"""FlashAttention-2 on `[BH, n_ctx, D]`: forward, the online recurrence, and the backward passes.

Source: Dao, "FlashAttention-2" (2023), sections 2.3 and 3.1; kernels of the same names in vision-rs 0.1.1.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike, DTypeLike

from numba_psa.arrays import as_floats, quiet
from numba_psa.numerics import FLOAT64, accumulator_dtype, check_scale, float_dtype
from numba_psa.shapes import AttentionShape


def flash_attention2_forward(
    q: ArrayLike,
    k: ArrayLike,
    v: ArrayLike,
    softmax_scale: float | None = None,
    *,
    dtype: DTypeLike | None = None,
    compute_dtype: DTypeLike = np.float64,
) -> tuple[np.ndarray, np.ndarray]:
    """o = softmax(s) v and l = logsumexp(s), with s = softmax_scale · q kᵀ.

    Two passes: the maximum of each row first, then the sums. This is the definition.

    q `[BH, n_ctx_q, D]`, k `[BH, n_ctx_k, D]`, v `[BH, n_ctx_k, Dv]`, one float dtype, any strides; Dv may differ from D.
    softmax_scale defaults to 1/sqrt(D).
    Returns o `[BH, n_ctx_q, Dv]` in the dtype of q and l `[BH, n_ctx_q]` (natural logarithm, of the *scaled* scores), in
    float32 for half inputs. Rows whose scores are all -inf, and all rows if n_ctx_k = 0, give o = 0 and l = -inf.
    Raises ShapeError, DTypeError, ParameterError.
    """
    arrays, input_dtype = as_floats(q=q, k=k, v=v)
    q, k, v = arrays
    shape = AttentionShape.from_qkv(q.shape, k.shape, v.shape)
    scale = check_scale(softmax_scale, shape.softmax_scale)
    compute = float_dtype(compute_dtype)
    o, l = np.empty(shape.o, compute), np.empty(shape.l, compute)
    with quiet():
        for bh in range(shape.bh):
            o[bh], l[bh] = attend(*(x[bh].astype(compute) for x in arrays), scale)
        return round_outputs(o, l, input_dtype, dtype)


def flash_attention2_forward_online(
    q: ArrayLike,
    k: ArrayLike,
    v: ArrayLike,
    softmax_scale: float | None = None,
    *,
    neg_inf: float = -np.inf,
    dtype: DTypeLike | None = None,
) -> tuple[np.ndarray, np.ndarray]:
    """The online softmax of FlashAttention, one key at a time, to step through beside a port.

        m_new = max(m_i, s_j)             alpha = exp(m_i − m_new)     p = exp(s_j − m_new)
        l_i   = alpha · l_i + p           acc   = alpha · acc + p · v_j
        o     = acc / l_i                 l     = m_i + log(l_i)

    Arguments, result shapes and special values as `flash_attention2_forward`; in float64 both agree. `neg_inf` is the
    initial running maximum, an argument in the original too. `dtype` is the type of every step *and* of both results;
    the default is what kernels accumulate in: float32 for half inputs, else the dtype of q.
    """
    arrays, input_dtype = as_floats(q=q, k=k, v=v)
    shape = AttentionShape.from_qkv(*(x.shape for x in arrays))
    compute = accumulator_dtype(input_dtype) if dtype is None else float_dtype(dtype)
    q, k, v = (x.astype(compute) for x in arrays)
    scale = compute.type(check_scale(softmax_scale, shape.softmax_scale))

    acc = np.zeros(shape.o, compute)
    m_i = np.full(shape.l, neg_inf, compute)
    l_i = np.zeros(shape.l, compute)
    with quiet():
        for j in range(shape.n_ctx_k):
            s_j = np.sum(q * k[:, j : j + 1], axis=-1, dtype=compute) * scale
            m_new = np.maximum(m_i, s_j)
            masked = m_new == -np.inf  # exp(-inf − -inf) is NaN; nothing has been added yet, so both factors are 0
            alpha = np.where(masked, compute.type(0), np.exp(m_i - m_new))
            p = np.where(masked, compute.type(0), np.exp(s_j - m_new))
            l_i = alpha * l_i + p
            acc = alpha[..., None] * acc + p[..., None] * v[:, j : j + 1]
            m_i = m_new
        empty = l_i == 0
        o = np.where(empty[..., None], compute.type(0), acc / l_i[..., None])
        l = np.where(empty, compute.type(-np.inf), m_i + np.log(l_i))
    return o, l


def flash_attention2_backward_dq(
    q: ArrayLike,
    k: ArrayLike,
    v: ArrayLike,
    o: ArrayLike,
    do: ArrayLike,
    l: ArrayLike,
    softmax_scale: float | None = None,
    *,
    dtype: DTypeLike | None = None,
    compute_dtype: DTypeLike = np.float64,
) -> np.ndarray:
    """dq = softmax_scale · dS k, with P = exp(s − l), dS = P ∘ (do vᵀ − delta) and delta = rowsum(o ∘ do).

    q, k, v, softmax_scale as in the forward; o, do `[BH, n_ctx_q, Dv]` in their dtype; l `[BH, n_ctx_q]` as the forward
    saved it (float32 for half inputs). P is recomputed from l, which must belong to the same softmax_scale.
    Returns dq, shape and dtype of q, stored, not added. A row with l = -inf gets and gives no gradient.
    Raises ShapeError, DTypeError, ParameterError.
    """
    dq, _, _ = _backward(q, k, v, o, do, l, softmax_scale, dtype, compute_dtype)
    return dq


def flash_attention2_backward_dkv(
    q: ArrayLike,
    k: ArrayLike,
    v: ArrayLike,
    o: ArrayLike,
    do: ArrayLike,
    l: ArrayLike,
    softmax_scale: float | None = None,
    *,
    dtype: DTypeLike | None = None,
    compute_dtype: DTypeLike = np.float64,
) -> tuple[np.ndarray, np.ndarray]:
    """dk = softmax_scale · dSᵀ q and dv = Pᵀ do, with P and dS as in `flash_attention2_backward_dq`.

    Same arguments. Returns dk (shape of k) and dv (shape of v) in the dtype of q, stored, not added.
    """
    _, dk, dv = _backward(q, k, v, o, do, l, softmax_scale, dtype, compute_dtype)
    return dk, dv


def _backward(q, k, v, o, do, l, softmax_scale, dtype, compute_dtype) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    gradients, input_dtype = gradients_of(q, k, v, o, do, l, softmax_scale, compute_dtype)
    with quiet():
        return tuple(x.astype(input_dtype if dtype is None else float_dtype(dtype)) for x in gradients)


# ---- what the other modules of the oracle share -----------------------------------------------------------------------
def round_outputs(o, l, input_dtype, dtype) -> tuple[np.ndarray, np.ndarray]:
    """o in the input dtype and l in its accumulator dtype, or both in `dtype` if one is asked for."""
    if dtype is not None:
        return o.astype(float_dtype(dtype)), l.astype(float_dtype(dtype))
    return o.astype(input_dtype), l.astype(accumulator_dtype(input_dtype))


def attend(q, k, v, scale):
    """(o, l) of one head in the dtype of its arguments: softmax(scale · q kᵀ) v and its log-sum-exp."""
    s = (q @ k.T) * q.dtype.type(scale)
    m = np.max(s, axis=-1, keepdims=True, initial=-np.inf)
    masked = m == -np.inf
    p = np.exp(s - np.where(masked, q.dtype.type(0), m))
    total = np.sum(p, axis=-1, keepdims=True)
    o = np.where(masked, q.dtype.type(0), (p @ v) / total)
    return o, (m + np.log(total))[:, 0]


def gradients_of(q, k, v, o, do, l, softmax_scale, compute_dtype=FLOAT64):
    """((dq, dk, dv) in the compute dtype, dtype of the inputs): all gradients of the flash forward, checked and exact."""
    arrays, input_dtype = as_floats(q=q, k=k, v=v, o=o, do=do, l=l)
    q, k, v, o, do, l = arrays
    shape = AttentionShape.from_qkv(q.shape, k.shape, v.shape)
    shape.check_saved(o.shape, do.shape, l.shape)
    scale = check_scale(softmax_scale, shape.softmax_scale)
    compute = float_dtype(compute_dtype)
    dq, dk, dv = np.empty(shape.q, compute), np.empty(shape.k, compute), np.empty(shape.v, compute)
    with quiet():
        for bh in range(shape.bh):
            dq[bh], dk[bh], dv[bh] = _gradients(*(x[bh].astype(compute) for x in arrays), compute.type(scale))
    return (dq, dk, dv), input_dtype


def _gradients(q, k, v, o, do, l, scale):
    # A row with l = -inf attends to nothing: it is left out whole, for 0 times the inf that masked it would be NaN.
    masked = l[:, None] == -np.inf
    q, o, do = (np.where(masked, q.dtype.type(0), x) for x in (q, o, do))
    p = np.where(masked, q.dtype.type(0), np.exp((q @ k.T) * scale - l[:, None]))
    delta = np.sum(o * do, axis=-1, keepdims=True)
    ds = np.where(masked, q.dtype.type(0), p * (do @ v.T - delta))
    dq = np.where(masked, q.dtype.type(0), scale * (ds @ k))
    return dq, scale * (ds.T @ q), p.T @ do
