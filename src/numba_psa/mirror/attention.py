"""The whole attention as the original's graph runs it: pack, attention over V_lo and over V_hi, merge; and back."""

from __future__ import annotations

from typing import Any

import numpy as np

from numba_psa._numba_cuda import cuda, is_device_array, require_device, to_device, to_host, to_numba_array
from numba_psa.mirror.flash_attn2 import flash_attention2_forward, psa_fa2_backward
from numba_psa.mirror.psa import psa_merge_attn_backward, psa_merge_attn_nchw, psa_pack_qkv, psa_pack_qkv_backward
from numba_psa.numerics import check_dtypes
from numba_psa.shapes import L_AXES, OUT_AXES, SECTIONS, PSAShape, check_shape


def psa_attention(qkv: Any, num_heads: int, *, softmax_scale: float | None = None, save_for_backward: bool = False) -> Any:
    """out = v · softmax_keys(softmax_scale · qᵀ k)ᵀ, NCHW in and out: pack, attention on V_lo and on V_hi, merge.

    As `numba_psa.oracle.psa_attention`.
    """
    arrays, on_device = _on_device(qkv=qkv)
    shape = PSAShape.from_qkv(arrays["qkv"].shape, num_heads)
    q, k, v_lo, v_hi = _sections(psa_pack_qkv(arrays["qkv"], num_heads))
    o_lo, l = flash_attention2_forward(q, k, v_lo, softmax_scale)
    o_hi, _ = flash_attention2_forward(q, k, v_hi, softmax_scale)
    out = psa_merge_attn_nchw(o_lo, o_hi, num_heads, shape.height, shape.width)
    if not on_device:
        out, l = to_host(out), to_host(l)
    return (out, (out, l)) if save_for_backward else out


def psa_attention_backward(
    qkv: Any,
    d_out: Any,
    num_heads: int,
    *,
    softmax_scale: float | None = None,
    saved: tuple[Any, Any] | None = None,
) -> Any:
    """d_qkv by the original's backward kernels: merge, the halves V_lo and V_hi adding into one dq and dk, pack.

    As `numba_psa.oracle.psa_attention_backward`; without `saved` the forward kernels run first.
    """
    if saved is None:
        _, saved = psa_attention(qkv, num_heads, softmax_scale=softmax_scale, save_for_backward=True)
    arrays, on_device = _on_device(qkv=qkv, d_out=d_out, out=saved[0], l=saved[1])
    qkv, d_out, out, l = arrays.values()
    shape = PSAShape.from_qkv(qkv.shape, num_heads)
    check_shape("d_out", d_out.shape, shape.out, OUT_AXES)
    check_shape("out", out.shape, shape.out, OUT_AXES)
    check_shape("l", l.shape, shape.l, L_AXES)

    q, k, *v_halves = _sections(psa_pack_qkv(qkv, num_heads))
    d_packed = to_device(np.zeros(shape.packed, qkv.dtype))
    dq, dk, *dv_halves = _sections(d_packed)
    o_halves, do_halves = psa_merge_attn_backward(out, num_heads), psa_merge_attn_backward(d_out, num_heads)
    for v, o, do, dv in zip(v_halves, o_halves, do_halves, dv_halves, strict=True):
        psa_fa2_backward(q, k, v, o, do, l, softmax_scale, dq=dq, dk=dk, dv=dv)
    d_qkv = psa_pack_qkv_backward(d_packed, num_heads, shape.height, shape.width)
    return d_qkv if on_device else to_host(d_qkv)


def _sections(packed: Any) -> list[Any]:
    """Q, K, V_lo, V_hi: the four sections of a packed device array, sharing its memory."""
    if packed.size == 0:  # numba-cuda cannot slice an empty array
        return [cuda.device_array(packed.shape[1:], packed.dtype) for _ in range(SECTIONS)]
    return [packed[section] for section in range(SECTIONS)]


def _on_device(**arrays: Any) -> tuple[dict[str, Any], bool]:
    """The arrays as Numba device arrays, and whether the caller's were on the device already."""
    require_device("mirror")
    on_device = is_device_array(next(iter(arrays.values())))
    found = {name: to_numba_array(x) if on_device else np.asarray(x) for name, x in arrays.items()}
    check_dtypes(**{name: x.dtype for name, x in found.items()})
    return (found if on_device else {name: to_device(x) for name, x in found.items()}), on_device
