"""The layout operations around PSA attention, their backwards, and the combined backward of one V half, on NumPy arrays."""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike

from numba_psa.arrays import as_floats, quiet, target_or_zeros
from numba_psa.cpu import layout
from numba_psa.cpu.flash_attn2 import check_saved, gradients, rounded
from numba_psa.cpu.operands import address, addressable
from numba_psa.numerics import HALVES, accumulator_dtype
from numba_psa.shapes import K_AXES, Q_AXES, QKV_AXES, SECTION_AXES, V_AXES, V_LO, PSAShape, check_shape


def psa_pack_qkv(qkv: ArrayLike, num_heads: int) -> np.ndarray:
    """packed[section, bh, n, d] = qkv[b, (4·h + section)·KEY_DIM + d, y, x]. As `numba_psa.oracle.psa_pack_qkv`."""
    (qkv,), dtype = as_floats(qkv=qkv)
    shape = PSAShape.from_qkv(qkv.shape, num_heads)
    packed = np.empty(shape.packed, dtype)
    _move(_by_section(qkv.reshape(shape.heads)), packed)
    return packed


def psa_extract_v_nchw(qkv: ArrayLike, num_heads: int) -> np.ndarray:
    """v = sections V_lo and V_hi of each head. As `numba_psa.oracle.psa_extract_v_nchw`."""
    (qkv,), _ = as_floats(qkv=qkv)
    shape = PSAShape.from_qkv(qkv.shape, num_heads)
    # One block of memory a head: nothing beats memcpy.
    return np.array(qkv.reshape(shape.heads)[:, V_LO:], order="C").reshape(shape.out)


def psa_merge_attn_nchw(lo: ArrayLike, hi: ArrayLike, num_heads: int, height: int, width: int) -> np.ndarray:
    """out[b, h·2·KEY_DIM + d, y, x] = lo[bh, n, d], and hi KEY_DIM channels further.

    As `numba_psa.oracle.psa_merge_attn_nchw`.
    """
    (lo, hi), dtype = as_floats(lo=lo, hi=hi)
    shape = PSAShape.from_section(lo.shape, num_heads, height, width, "lo")
    check_shape("hi", hi.shape, shape.section, SECTION_AXES)
    out = np.empty(shape.out, dtype)
    halves = _by_section(out.reshape(shape.out_heads))
    _move(lo[None], halves[:1])
    _move(hi[None], halves[1:])
    return out


def psa_pack_qkv_backward(
    d_packed: ArrayLike, num_heads: int, height: int, width: int, *, d_qkv: np.ndarray | None = None
) -> np.ndarray:
    """d_qkv[b, (4·h + section)·KEY_DIM + d, y, x] += d_packed[section, bh, n, d].

    **Adds into** `d_qkv`, or into zeros. As `numba_psa.oracle.psa_pack_qkv_backward`.
    """
    (d_packed,), dtype = as_floats(d_packed=d_packed)
    shape = PSAShape.from_packed(d_packed.shape, num_heads, height, width, "d_packed")
    target = target_or_zeros("d_qkv", d_qkv, shape.qkv, QKV_AXES, dtype)
    direct = dtype not in HALVES and target.flags.c_contiguous and not np.may_share_memory(target, d_packed)
    sums = target if direct else np.zeros(shape.qkv, accumulator_dtype(dtype))
    _run(layout.add, sums.dtype, rounded(d_packed, sums.dtype), _by_section(sums.reshape(shape.heads)))
    return target if direct else _add_rounded(target, sums)


def psa_extract_v_backward(d_v: ArrayLike, num_heads: int, *, d_qkv: np.ndarray | None = None) -> np.ndarray:
    """d_qkv += d_v in sections V_lo and V_hi of each head; Q and K are never touched.

    **Adds into** `d_qkv`, or into zeros. As `numba_psa.oracle.psa_extract_v_backward`.
    """
    (d_v,), dtype = as_floats(d_v=d_v)
    shape = PSAShape.from_out(d_v.shape, num_heads, "d_v")
    target = target_or_zeros("d_qkv", d_qkv, shape.qkv, QKV_AXES, dtype)
    gradient = rounded(d_v, accumulator_dtype(dtype))
    for h in range(shape.num_heads):
        first = (4 * h + V_LO) * shape.key_dim
        _add_rounded(target[:, first : first + shape.head_dim], gradient[:, h * shape.head_dim : (h + 1) * shape.head_dim])
    return target


def psa_merge_attn_backward(d_merged: ArrayLike, num_heads: int) -> tuple[np.ndarray, np.ndarray]:
    """d_lo and d_hi, the halves of d_merged, tokens first. Stored. As `numba_psa.oracle.psa_merge_attn_backward`."""
    (d_merged,), dtype = as_floats(d_merged=d_merged)
    shape = PSAShape.from_out(d_merged.shape, num_heads, "d_merged")
    d_lo, d_hi = np.empty(shape.section, dtype), np.empty(shape.section, dtype)
    halves = _by_section(d_merged.reshape(shape.out_heads))
    _move(halves[:1], d_lo[None])
    _move(halves[1:], d_hi[None])
    return d_lo, d_hi


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
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """dq += softmax_scale · dS k;  dk += softmax_scale · dSᵀ q;  dv = Pᵀ do.

    **Adds into** dq and dk, or into zeros; **stores** dv. As `numba_psa.oracle.psa_fa2_backward`.
    """
    arrays, shape, scale, dtype = check_saved(q, k, v, o, do, l, softmax_scale)
    shape.check_self_attention()
    targets = [
        target_or_zeros(name, target, sizes, axes, dtype)
        for name, target, sizes, axes in (
            ("dq", dq, shape.q, Q_AXES),
            ("dk", dk, shape.k, K_AXES),
            ("dv", dv, shape.v, V_AXES),
        )
    ]
    fresh = [np.empty(target.shape, arrays[0].dtype) for target in targets]
    gradients(*arrays, scale, dq=fresh[0], dk=fresh[1], dv=fresh[2])
    dq, dk, dv = targets
    with quiet():
        _add_rounded(dq, fresh[0])
        _add_rounded(dk, fresh[1])
        dv[...] = rounded(fresh[2], dtype)
    return dq, dk, dv


BYTES_A_THREAD = 1 << 19
"""Less than this moves faster than another thread wakes."""


# ---- views `[outer, inner, tokens, channels]` and what is done with them ------------------------------------------------
def _by_section(heads: np.ndarray) -> np.ndarray:
    """`[BH, sections, KEY_DIM, N]` seen as `[sections, BH, N, KEY_DIM]`."""
    return heads.transpose(1, 0, 3, 2)


def _grid(x: np.ndarray) -> tuple[int, ...]:
    return address(x), *(stride // x.itemsize for stride in x.strides)


def _run(kernel, dtype, source: np.ndarray, target: np.ndarray) -> None:
    source = addressable(source)
    outer, inner, tokens, channels = source.shape
    items = outer * inner * -(-tokens // layout.TOKENS)
    problem = (*_grid(source), *_grid(target), inner, tokens, channels)
    kernel.run(dtype, items, problem, most_threads=1 + source.nbytes // BYTES_A_THREAD)


def _move(source: np.ndarray, target: np.ndarray) -> None:
    """target = source, whose bits are moved as unsigned integers; target is fresh memory."""
    _run(layout.move, np.dtype(f"uint{8 * source.itemsize}"), source, target)


def _add_rounded(target: np.ndarray, gradient: np.ndarray) -> np.ndarray:
    """target += gradient, which is in the accumulator dtype: each sum rounded once."""
    with quiet():
        target[...] = (target.astype(gradient.dtype, copy=False) + gradient).astype(target.dtype, copy=False)
    return target
