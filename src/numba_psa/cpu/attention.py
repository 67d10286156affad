"""The whole PSA attention on NCHW in one kernel: Q and K are read once for both halves of V, nothing is transposed."""

from __future__ import annotations

from functools import lru_cache

import numpy as np
from numpy.typing import ArrayLike

from numba_psa.arrays import as_floats, check_target
from numba_psa.cpu.flash_attn2 import attend, gradients, rounded
from numba_psa.cpu.operands import address, widened
from numba_psa.numerics import accumulator_dtype, check_dtypes, check_scale
from numba_psa.shapes import L_AXES, OUT_AXES, V_LO, K, PSAShape, Q, check_count, check_shape


def psa_attention(
    qkv: ArrayLike,
    num_heads: int,
    *,
    softmax_scale: float | None = None,
    save_for_backward: bool = False,
    out: np.ndarray | None = None,
) -> np.ndarray | tuple[np.ndarray, tuple[np.ndarray, np.ndarray]]:
    """out = v · softmax_keys(softmax_scale · qᵀ k)ᵀ for each head, NCHW in and out.

    As `numba_psa.oracle.psa_attention`; half inputs are computed in float32. `out`, shape and dtype of the result, any
    strides, is written and returned; it may overlap qkv.
    """
    qkv = np.asarray(qkv)
    dtype = check_dtypes(qkv=qkv.dtype)
    shape = _shape(qkv.shape, check_count("num_heads", num_heads, 1))
    scale = check_scale(softmax_scale, shape.softmax_scale)
    if out is not None:
        check_target("out", out, shape.out, OUT_AXES, dtype)
    compute = accumulator_dtype(dtype)
    direct = out is not None and dtype == compute and out.flags.c_contiguous and not np.may_share_memory(out, qkv)
    result = out if direct else np.empty(shape.out, compute)
    l = np.empty(shape.l, compute) if save_for_backward else None
    inputs = np.ascontiguousarray(widened(qkv)[0])
    n, key_dim, first = shape.n, shape.key_dim, address(inputs)
    head, section = 4 * key_dim * n, key_dim * n * compute.itemsize
    q, k, v = (first + Q * section, head, n, 1), (first + K * section, head, n, 1), (first + V_LO * section, head, n, 1)
    o = (address(result), head // 2, n, 1)
    attend((q, k, v, o), l, shape.bh, (n, n, key_dim, 2 * key_dim), compute, scale)
    result = rounded(result, dtype)
    if out is not None and not direct:
        out[...] = result
        result = out
    return (result, (result, l)) if save_for_backward else result


def psa_attention_backward(
    qkv: ArrayLike,
    d_out: ArrayLike,
    num_heads: int,
    *,
    softmax_scale: float | None = None,
    saved: tuple[ArrayLike, ArrayLike] | None = None,
) -> np.ndarray:
    """d_qkv, the gradient of ⟨psa_attention(qkv), d_out⟩. Stored, not added.

    As `numba_psa.oracle.psa_attention_backward`; half inputs are computed in float32.
    """
    (qkv, d_out), dtype = as_floats(qkv=qkv, d_out=d_out)
    shape = PSAShape.from_qkv(qkv.shape, num_heads)
    check_shape("d_out", d_out.shape, shape.out, OUT_AXES)
    scale = check_scale(softmax_scale, shape.softmax_scale)
    qkv, d_out = widened(qkv, d_out)
    if saved is None:
        _, (out, l) = psa_attention(qkv, num_heads, softmax_scale=scale, save_for_backward=True)
    else:
        out, l = (np.asarray(x) for x in saved)
        check_shape("out", out.shape, shape.out, OUT_AXES)
        check_shape("l", l.shape, shape.l, L_AXES)
        check_dtypes(qkv=dtype, out=out.dtype, l=l.dtype)
        out, l = widened(out, l)
    d_qkv = np.empty(shape.qkv, qkv.dtype)
    dq, dk, dv = _sections(d_qkv, shape)
    gradients(*_sections(qkv, shape), _tokens(out, shape), _tokens(d_out, shape), l, scale, dq=dq, dk=dk, dv=dv)
    return rounded(d_qkv, dtype)


_shape = lru_cache(maxsize=256)(PSAShape.from_qkv)
"""A layer asks for the same shape again and again; checking it takes as long as a tenth of the smallest attention."""


def _sections(qkv: np.ndarray, shape: PSAShape) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """q, k `[BH, N, KEY_DIM]` and v `[BH, N, 2*KEY_DIM]`, views of a contiguous qkv."""
    tokens = qkv.reshape(shape.bh, 2 * shape.head_dim, shape.n).swapaxes(1, 2)
    return tuple(np.split(tokens, (shape.key_dim, shape.head_dim), axis=2))


def _tokens(out: np.ndarray, shape: PSAShape) -> np.ndarray:
    """`[B, c, H, W]` as `[BH, N, 2*KEY_DIM]`."""
    return out.reshape(shape.bh, shape.head_dim, shape.n).swapaxes(1, 2)
