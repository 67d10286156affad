"""The whole attention as the original's graph runs it: pack, attention over V_lo and over V_hi, merge; and back."""

from __future__ import annotations

from typing import Any

import numpy as np

from numba_psa._numba_cuda import cuda, is_device_array, require_device, to_numba_array
from numba_psa.mirror.flash_attn2 import flash_attention2_forward, psa_fa2_backward
from numba_psa.mirror.psa import psa_merge_attn_backward, psa_merge_attn_nchw, psa_pack_qkv, psa_pack_qkv_backward
from numba_psa.numerics import check_dtypes
from numba_psa.shapes import L_AXES, OUT_AXES, V_HI, V_LO, K, PSAShape, Q, check_shape


def psa_attention(qkv: Any, num_heads: int, *, softmax_scale: float | None = None, save_for_backward: bool = False) -> Any:
    """out = v · softmax_keys(softmax_scale · qᵀ k)ᵀ, NCHW in and out: pack, attention on V_lo and on V_hi, merge.

    As `numba_psa.oracle.psa_attention`.
    """
    arrays, on_device = _on_device(qkv=qkv)
    shape = PSAShape.from_qkv(arrays["qkv"].shape, num_heads)
    packed = psa_pack_qkv(arrays["qkv"], num_heads)
    o_lo, l = flash_attention2_forward(packed[Q], packed[K], packed[V_LO], softmax_scale)
    o_hi, _ = flash_attention2_forward(packed[Q], packed[K], packed[V_HI], softmax_scale)
    out = psa_merge_attn_nchw(o_lo, o_hi, num_heads, shape.height, shape.width)
    if not on_device:
        out, l = out.copy_to_host(), l.copy_to_host()
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

    packed = psa_pack_qkv(qkv, num_heads)
    o_halves, do_halves = psa_merge_attn_backward(out, num_heads), psa_merge_attn_backward(d_out, num_heads)
    d_packed = cuda.to_device(np.zeros(shape.packed, qkv.dtype))
    for section, o, do in zip((V_LO, V_HI), o_halves, do_halves, strict=True):
        gradients = {"dq": d_packed[Q], "dk": d_packed[K], "dv": d_packed[section]}
        psa_fa2_backward(packed[Q], packed[K], packed[section], o, do, l, softmax_scale, **gradients)
    d_qkv = psa_pack_qkv_backward(d_packed, num_heads, shape.height, shape.width)
    return d_qkv if on_device else d_qkv.copy_to_host()


def _on_device(**arrays: Any) -> tuple[dict[str, Any], bool]:
    """The arrays as Numba device arrays, and whether the caller's were on the device already."""
    require_device("mirror")
    on_device = is_device_array(next(iter(arrays.values())))
    if on_device:
        found = {name: to_numba_array(x) for name, x in arrays.items()}
    else:
        found = {name: np.ascontiguousarray(x) for name, x in arrays.items()}
    check_dtypes(**{name: x.dtype for name, x in found.items()})
    return (found if on_device else {name: cuda.to_device(x) for name, x in found.items()}), on_device
