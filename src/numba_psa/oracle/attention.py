"""The whole PSA attention on NCHW, as one formula: what pack, two attentions and merge must amount to.

Source: the attention of Ultralytics' C2PSA (YOLO11, YOLO26), between its qkv convolution and its positional term.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike, DTypeLike

from numba_psa.arrays import as_floats, quiet
from numba_psa.numerics import FLOAT64, check_dtypes, check_scale, float_dtype
from numba_psa.oracle.flash_attn2 import flash_attention2_forward, gradients_of
from numba_psa.shapes import L_AXES, OUT_AXES, PSAShape, check_shape


def psa_attention(
    qkv: ArrayLike,
    num_heads: int,
    *,
    softmax_scale: float | None = None,
    save_for_backward: bool = False,
    dtype: DTypeLike | None = None,
    compute_dtype: DTypeLike = np.float64,
) -> np.ndarray | tuple[np.ndarray, tuple[np.ndarray, np.ndarray]]:
    """out = v · softmax_keys(softmax_scale · qᵀ k)ᵀ for each head, NCHW in and out.

    qkv `[B, num_heads*4*KEY_DIM, H, W]`: head h holds q, k `[KEY_DIM, N]` and v `[2*KEY_DIM, N]`, N = H*W. softmax_scale
    defaults to 1/sqrt(KEY_DIM).
    Returns out `[B, num_heads*2*KEY_DIM, H, W]` in the dtype of qkv; with save_for_backward, `(out, (out, l))` where
    l `[BH, N]` is the log-sum-exp of the scaled scores, float32 for half inputs.
    Raises ShapeError, DTypeError, ParameterError.
    """
    (qkv,), _ = as_floats(qkv=qkv)
    shape = PSAShape.from_qkv(qkv.shape, num_heads)
    q, k, v = _split(qkv, shape)
    scale = check_scale(softmax_scale, shape.softmax_scale)
    o, l = flash_attention2_forward(q, k, v, scale, dtype=dtype, compute_dtype=compute_dtype)
    out = np.ascontiguousarray(o.swapaxes(1, 2)).reshape(shape.out)
    return (out, (out, l)) if save_for_backward else out


def psa_attention_backward(
    qkv: ArrayLike,
    d_out: ArrayLike,
    num_heads: int,
    *,
    softmax_scale: float | None = None,
    saved: tuple[ArrayLike, ArrayLike] | None = None,
    dtype: DTypeLike | None = None,
    compute_dtype: DTypeLike = np.float64,
) -> np.ndarray:
    """d_qkv, the gradient of ⟨psa_attention(qkv), d_out⟩: dq, dk and dv of each head, back in the channels of qkv.

    qkv as in `psa_attention`, d_out `[B, num_heads*2*KEY_DIM, H, W]` of the same dtype. `saved` is the `(out, l)` of
    `psa_attention(…, save_for_backward=True)`; without it both are computed again, and not rounded in between.
    Returns d_qkv, shape and dtype of qkv, stored, not added. Raises ShapeError, DTypeError, ParameterError.
    """
    (qkv, d_out), input_dtype = as_floats(qkv=qkv, d_out=d_out)
    shape = PSAShape.from_qkv(qkv.shape, num_heads)
    check_shape("d_out", d_out.shape, shape.out, OUT_AXES)
    scale = check_scale(softmax_scale, shape.softmax_scale)
    if saved is None:
        # Everything in the wider type, so that o and l reach the gradient unrounded.
        qkv, d_out = qkv.astype(FLOAT64), d_out.astype(FLOAT64)
        _, saved = psa_attention(qkv, num_heads, softmax_scale=scale, save_for_backward=True, compute_dtype=compute_dtype)
    out, l = (np.asarray(x) for x in saved)
    check_shape("out", out.shape, shape.out, OUT_AXES)
    check_shape("l", l.shape, shape.l, L_AXES)
    check_dtypes(qkv=qkv.dtype, out=out.dtype, l=l.dtype)
    o, do = _tokens(out, shape), _tokens(d_out, shape)
    (dq, dk, dv), _ = gradients_of(*_split(qkv, shape), o, do, l, scale, compute_dtype)
    d_qkv = np.concatenate((dq, dk, dv), axis=2).swapaxes(1, 2).reshape(shape.qkv)
    with quiet():
        return np.array(d_qkv, input_dtype if dtype is None else float_dtype(dtype), order="C")


def _split(qkv: np.ndarray, shape: PSAShape) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """q, k `[BH, N, KEY_DIM]` and v `[BH, N, 2*KEY_DIM]`."""
    tokens = qkv.reshape(shape.bh, 2 * shape.head_dim, shape.n).swapaxes(1, 2)
    return tuple(np.split(tokens, (shape.key_dim, shape.head_dim), axis=2))


def _tokens(out: np.ndarray, shape: PSAShape) -> np.ndarray:
    """`[B, c, H, W]` as `[BH, N, 2*KEY_DIM]`."""
    return out.reshape(shape.bh, shape.head_dim, shape.n).swapaxes(1, 2)
