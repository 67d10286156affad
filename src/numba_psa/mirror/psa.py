"""The layout operations on the mirror kernels: the oracle's functions, one block a token, one lane a channel."""

from __future__ import annotations

from typing import Any

from numba_psa.mirror import psa_kernels as kernels
from numba_psa.mirror.launch import Call, check_lanes, launch
from numba_psa.shapes import QKV_AXES, SECTION_AXES, SECTIONS, PSAShape, check_shape


def psa_pack_qkv(qkv: Any, num_heads: int) -> Any:
    """packed[section, bh, n, d] = qkv[b, (4·h + section)·KEY_DIM + d, y, x]. As `numba_psa.oracle.psa_pack_qkv`."""
    call = Call(qkv=qkv)
    shape = PSAShape.from_qkv(call.shape("qkv"), num_heads)
    lanes, packed = check_lanes("KEY_DIM", shape.key_dim), call.empty(shape.packed)
    scalars = (shape.qkv_h, shape.height, shape.width, shape.batch, shape.num_heads)
    grid = (SECTIONS * shape.bh * shape.n,)
    launch(kernels.psa_pack_qkv_kernel, (lanes, call.element), grid, lanes, *call.flat("qkv"), packed, *scalars)
    return call.result(packed, shape.packed)


def psa_extract_v_nchw(qkv: Any, num_heads: int) -> Any:
    """v = the V_lo and V_hi channels of each head of qkv. As `numba_psa.oracle.psa_extract_v_nchw`."""
    call = Call(qkv=qkv)
    shape = PSAShape.from_qkv(call.shape("qkv"), num_heads)
    lanes, v = check_lanes("KEY_DIM", shape.key_dim), call.empty(shape.out)
    scalars = (shape.qkv_h, shape.c, shape.height, shape.width, shape.num_heads)
    grid = (shape.bh * shape.n,)
    launch(kernels.psa_extract_v_nchw_kernel, (lanes, call.element), grid, lanes, *call.flat("qkv"), v, *scalars)
    return call.result(v, shape.out)


def psa_merge_attn_nchw(lo: Any, hi: Any, num_heads: int, height: int, width: int) -> Any:
    """out = lo and hi of each head side by side, as NCHW. As `numba_psa.oracle.psa_merge_attn_nchw`."""
    call = Call(lo=lo, hi=hi)
    shape = PSAShape.from_section(call.shape("lo"), num_heads, height, width, "lo")
    check_shape("hi", call.shape("hi"), shape.section, SECTION_AXES)
    lanes, out = check_lanes("KEY_DIM", shape.key_dim), call.empty(shape.out)
    scalars = (shape.c, shape.height, shape.width, shape.num_heads)
    grid = (shape.bh * shape.n,)
    launch(kernels.psa_merge_attn_nchw_kernel, (lanes, call.element), grid, lanes, *call.flat("lo", "hi"), out, *scalars)
    return call.result(out, shape.out)


def psa_pack_qkv_backward(d_packed: Any, num_heads: int, height: int, width: int, *, d_qkv: Any = None) -> Any:
    """d_qkv[b, (4·h + section)·KEY_DIM + d, y, x] += d_packed[section, bh, n, d]: adds into d_qkv, or into zeros.

    As `numba_psa.oracle.psa_pack_qkv_backward`.
    """
    call = Call(d_packed=d_packed)
    shape = PSAShape.from_packed(call.shape("d_packed"), num_heads, height, width, "d_packed")
    lanes, target = check_lanes("KEY_DIM", shape.key_dim), call.target("d_qkv", d_qkv, shape.qkv, QKV_AXES)
    scalars = (shape.qkv_h, shape.height, shape.width, shape.batch, shape.num_heads)
    grid = (SECTIONS * shape.bh * shape.n,)
    kernel = kernels.psa_pack_qkv_backward_kernel
    launch(kernel, (lanes, call.element), grid, lanes, *call.flat("d_packed"), target, *scalars)
    return call.finish(d_qkv, target, shape.qkv)


def psa_extract_v_backward(d_v: Any, num_heads: int, *, d_qkv: Any = None) -> Any:
    """d_qkv's V_lo and V_hi channels += d_v: adds into d_qkv, or into zeros; never touches Q and K.

    As `numba_psa.oracle.psa_extract_v_backward`.
    """
    call = Call(d_v=d_v)
    shape = PSAShape.from_out(call.shape("d_v"), num_heads, "d_v")
    lanes, target = check_lanes("KEY_DIM", shape.key_dim), call.target("d_qkv", d_qkv, shape.qkv, QKV_AXES)
    scalars = (shape.qkv_h, shape.c, shape.height, shape.width, shape.num_heads)
    grid = (shape.bh * shape.n,)
    kernel = kernels.psa_extract_v_backward_kernel
    launch(kernel, (lanes, call.element), grid, lanes, *call.flat("d_v"), target, *scalars)
    return call.finish(d_qkv, target, shape.qkv)


def psa_merge_attn_backward(d_merged: Any, num_heads: int) -> tuple[Any, Any]:
    """d_lo, d_hi = the two halves of each head of d_merged. Stored. As `numba_psa.oracle.psa_merge_attn_backward`."""
    call = Call(d_merged=d_merged)
    shape = PSAShape.from_out(call.shape("d_merged"), num_heads, "d_merged")
    lanes = check_lanes("KEY_DIM", shape.key_dim)
    d_lo, d_hi = call.empty(shape.section), call.empty(shape.section)
    scalars = (shape.c, shape.height, shape.width, shape.num_heads)
    grid = (shape.bh * shape.n,)
    kernel = kernels.psa_merge_attn_backward_kernel
    launch(kernel, (lanes, call.element), grid, lanes, *call.flat("d_merged"), d_lo, d_hi, *scalars)
    return call.result(d_lo, shape.section), call.result(d_hi, shape.section)
