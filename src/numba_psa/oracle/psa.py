"""The layout operations around PSA attention, their backwards, and the combined backward of one V half.

Source: kernels of the same names in vision-rs 0.1.1. `section` counts Q, K, V_lo, V_hi = 0, 1, 2, 3; bh = b*num_heads + h;
n = y*W + x.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike, DTypeLike

from numba_psa.arrays import as_floats, quiet, target_or_zeros
from numba_psa.numerics import float_dtype
from numba_psa.oracle.flash_attn2 import gradients_of
from numba_psa.shapes import K_AXES, Q_AXES, QKV_AXES, V_AXES, V_LO, AttentionShape, PSAShape, check_shape


def psa_pack_qkv(qkv: ArrayLike, num_heads: int, *, dtype: DTypeLike | None = None) -> np.ndarray:
    """packed[section, bh, n, d] = qkv[b, (4·h + section)·KEY_DIM + d, y, x].

    qkv `[B, num_heads*4*KEY_DIM, H, W]`. Returns packed `[4, BH, N, KEY_DIM]`, sections first: Q, K, V_lo, V_hi. (The
    graph op labels the very same buffer `[B, 4, num_heads, N, KEY_DIM]`.) Moves values only: bit-exact.
    Raises ShapeError, DTypeError.
    """
    (qkv,), input_dtype = as_floats(qkv=qkv)
    shape = PSAShape.from_qkv(qkv.shape, num_heads)
    packed = qkv.reshape(shape.heads).transpose(1, 0, 3, 2)
    return _result(packed, input_dtype, dtype)


def psa_extract_v_nchw(qkv: ArrayLike, num_heads: int, *, dtype: DTypeLike | None = None) -> np.ndarray:
    """v[b, h·2·KEY_DIM + e, y, x] = qkv[b, h·4·KEY_DIM + 2·KEY_DIM + e, y, x] for e in [0, 2·KEY_DIM).

    qkv `[B, num_heads*4*KEY_DIM, H, W]`. Returns v `[B, num_heads*2*KEY_DIM, H, W]`: V_lo then V_hi of each head.
    Bit-exact. Raises ShapeError, DTypeError.
    """
    (qkv,), input_dtype = as_floats(qkv=qkv)
    shape = PSAShape.from_qkv(qkv.shape, num_heads)
    return _result(qkv.reshape(shape.heads)[:, V_LO:].reshape(shape.out), input_dtype, dtype)


def psa_merge_attn_nchw(
    lo: ArrayLike, hi: ArrayLike, num_heads: int, height: int, width: int, *, dtype: DTypeLike | None = None
) -> np.ndarray:
    """out[b, h·2·KEY_DIM + d, y, x] = lo[bh, n, d], and hi[bh, n, d] KEY_DIM channels further.

    lo, hi `[BH, N, KEY_DIM]` with N = height*width: attention over V_lo and V_hi. Returns out
    `[B, num_heads*2*KEY_DIM, H, W]`. Bit-exact. Raises ShapeError, DTypeError, also if N != height*width.
    """
    (lo, hi), input_dtype = as_floats(lo=lo, hi=hi)
    shape = PSAShape.from_section(lo.shape, num_heads, height, width, "lo")
    check_shape("hi", hi.shape, shape.section, ("BH", "N", "KEY_DIM"))
    out = np.stack((lo, hi), axis=1).swapaxes(2, 3).reshape(shape.out)
    return _result(out, input_dtype, dtype)


def psa_pack_qkv_backward(
    d_packed: ArrayLike,
    num_heads: int,
    height: int,
    width: int,
    *,
    d_qkv: np.ndarray | None = None,
    dtype: DTypeLike | None = None,
) -> np.ndarray:
    """d_qkv[b, (4·h + section)·KEY_DIM + d, y, x] += d_packed[section, bh, n, d].

    d_packed `[4, BH, N, KEY_DIM]`, N = height*width. **Adds into** `d_qkv` `[B, num_heads*4*KEY_DIM, H, W]` when it is
    given (dtype of d_packed, any strides, changed in place), else into zeros; returns it.
    Each sum is rounded once. Raises ShapeError, DTypeError.
    """
    (d_packed,), input_dtype = as_floats(d_packed=d_packed)
    shape = PSAShape.from_packed(d_packed.shape, num_heads, height, width, "d_packed")
    target = _target("d_qkv", d_qkv, shape.qkv, QKV_AXES, input_dtype, dtype)
    return _add(target, d_packed.transpose(1, 0, 3, 2).reshape(shape.qkv))


def psa_extract_v_backward(
    d_v: ArrayLike, num_heads: int, *, d_qkv: np.ndarray | None = None, dtype: DTypeLike | None = None
) -> np.ndarray:
    """d_qkv[b, h·4·KEY_DIM + 2·KEY_DIM + e, y, x] += d_v[b, h·2·KEY_DIM + e, y, x] for e in [0, 2·KEY_DIM).

    d_v `[B, num_heads*2*KEY_DIM, H, W]`. **Adds into** `d_qkv` `[B, num_heads*4*KEY_DIM, H, W]` when it is given (dtype of
    d_v, any strides, changed in place), else into zeros; returns it. Sections 0 and 1 (Q, K) are never touched.
    Raises ShapeError, DTypeError.
    """
    (d_v,), input_dtype = as_floats(d_v=d_v)
    shape = PSAShape.from_out(d_v.shape, num_heads, "d_v")
    target = _target("d_qkv", d_qkv, shape.qkv, QKV_AXES, input_dtype, dtype)
    for h in range(shape.num_heads):
        first = (4 * h + V_LO) * shape.key_dim
        _add(target[:, first : first + shape.head_dim], d_v[:, h * shape.head_dim : (h + 1) * shape.head_dim])
    return target


def psa_merge_attn_backward(
    d_merged: ArrayLike, num_heads: int, *, dtype: DTypeLike | None = None
) -> tuple[np.ndarray, np.ndarray]:
    """d_lo[bh, n, d] = d_merged[b, h·2·KEY_DIM + d, y, x]; d_hi the same, KEY_DIM channels further.

    d_merged `[B, num_heads*2*KEY_DIM, H, W]`. Returns d_lo, d_hi `[BH, N, KEY_DIM]`, stored, not added. Bit-exact.
    Raises ShapeError, DTypeError.
    """
    (d_merged,), input_dtype = as_floats(d_merged=d_merged)
    shape = PSAShape.from_out(d_merged.shape, num_heads, "d_merged")
    halves = d_merged.reshape(shape.out_heads).transpose(1, 0, 3, 2)
    return _result(halves[0], input_dtype, dtype), _result(halves[1], input_dtype, dtype)


def psa_fa2_backward(
    q: ArrayLike,
    k: ArrayLike,
    v: ArrayLike,
    o: ArrayLike,
    do: ArrayLike,
    l: ArrayLike,
    softmax_scale: float | None = None,
    *,
    dq: np.ndarray | None = None,
    dk: np.ndarray | None = None,
    dv: np.ndarray | None = None,
    dtype: DTypeLike | None = None,
    compute_dtype: DTypeLike = np.float64,
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """dq += softmax_scale · dS k;  dk += softmax_scale · dSᵀ q;  dv = Pᵀ do.

    The backward of one V half, with P, dS as in `flash_attention2_backward_dq`; n_ctx_q must equal n_ctx_k. dq and dk are
    **added into**, because V_lo and V_hi share Q and K; dv is **stored**. Targets that are not given start as zeros; those
    given (shape of q, k, v, dtype of the inputs, any strides) change in place. Returns (dq, dk, dv).
    Raises ShapeError, DTypeError, ParameterError.
    """
    gradients, input_dtype = gradients_of(q, k, v, o, do, l, softmax_scale, compute_dtype)
    shape = AttentionShape.from_qkv(*(x.shape for x in gradients))
    shape.check_self_attention()
    dq = _target("dq", dq, shape.q, Q_AXES, input_dtype, dtype)
    dk = _target("dk", dk, shape.k, K_AXES, input_dtype, dtype)
    dv = _target("dv", dv, shape.v, V_AXES, input_dtype, dtype)
    with quiet():
        _add(dq, gradients[0])
        _add(dk, gradients[1])
        dv[...] = gradients[2].astype(dv.dtype)
    return dq, dk, dv


# ---- results and targets ----------------------------------------------------------------------------------------------
def _result(view: np.ndarray, input_dtype: np.dtype, dtype: DTypeLike | None) -> np.ndarray:
    """A new C-ordered array: never a view of the caller's data."""
    with quiet():
        return np.array(view, input_dtype if dtype is None else float_dtype(dtype), order="C")


def _target(name, target, shape, axes, input_dtype, dtype) -> np.ndarray:
    return target_or_zeros(name, target, shape, axes, input_dtype if dtype is None else float_dtype(dtype))


def _add(target: np.ndarray, gradient: np.ndarray) -> np.ndarray:
    """target += gradient, each sum computed in float64 (or the gradient's own type) and rounded once."""
    with quiet():
        target[...] = (target.astype(np.float64) + gradient.astype(np.float64)).astype(target.dtype)
    return target
