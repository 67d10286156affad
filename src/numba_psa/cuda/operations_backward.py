"""The oracle's gradients on the fused kernels, for arrays of any library."""

from __future__ import annotations

from math import gcd, prod
from typing import Any

from numba_psa.cuda import layout_backward as layout
from numba_psa.cuda.choice import Problem
from numba_psa.cuda.launching import current_device, kernel
from numba_psa.cuda.layout import MERGE_SIGNATURE, PACK_SIGNATURE
from numba_psa.cuda.layout_backward import GradientLayoutConfig
from numba_psa.cuda.operations import heads_on_grid, launch_transpose, layout_config, psa_attention
from numba_psa.cuda.plans_backward import backward_launcher, cached_backward_plan, exponent_scale
from numba_psa.cuda.tiles_backward import DKV, DQ
from numba_psa.cuda.views import Call, View
from numba_psa.numerics import BFLOAT16, FLOAT32, check_scale
from numba_psa.shapes import (
    K_AXES,
    L_AXES,
    OUT_AXES,
    Q_AXES,
    QKV_AXES,
    SECTIONS,
    V_AXES,
    AttentionShape,
    PSAShape,
    check_count,
    check_shape,
)


def psa_attention_backward(
    qkv: Any,
    d_out: Any,
    num_heads: int,
    *,
    softmax_scale: float | None = None,
    saved: tuple[Any, Any] | None = None,
    stream: Any = None,
) -> Any:
    """d_qkv, the gradient of ⟨psa_attention(qkv), d_out⟩. Stored, not added; the same bits on every run.

    As `numba_psa.oracle.psa_attention_backward`; arrays and stream as in psa_attention. saved: the `(out, l)` of
    `psa_attention(…, save_for_backward=True)`; without it the forward runs first.
    """
    arrays = {"qkv": qkv, "d_out": d_out}
    if saved is None:
        call = Call(stream, **arrays)
        PSAShape.from_qkv(call["qkv"].shape, check_count("num_heads", num_heads, 1))
        scale = {"softmax_scale": softmax_scale, "stream": stream}
        with call.on_stream():
            _, saved = psa_attention(qkv, num_heads, save_for_backward=True, **scale)
    call = Call(stream, **arrays, out=saved[0], l=saved[1])
    scale = None if softmax_scale is None else check_scale(softmax_scale, 1.0)
    check_count("num_heads", num_heads, 1)
    plan = cached_backward_plan(call["qkv"].shape, num_heads, call.dtype, scale, current_device())
    check_shape("d_out", call["d_out"].shape, plan.shape.out, OUT_AXES)
    check_shape("out", call["out"].shape, plan.shape.out, OUT_AXES)
    check_shape("l", call["l"].shape, plan.shape.l, L_AXES)
    d_qkv = call.empty(plan.shape.qkv)
    with call.on_stream():
        workspace = call.empty((plan.workspace_bytes // 4,), FLOAT32)
    addresses = (call[name].pointer for name in ("qkv", "d_out", "out", "l"))
    plan.launch(*addresses, d_qkv.pointer, workspace.pointer, call.stream)
    return call.result(d_qkv)


# ---- FlashAttention-2 -------------------------------------------------------------------------------------------------
def flash_attention2_backward_dq(
    q: Any, k: Any, v: Any, o: Any, do: Any, l: Any, softmax_scale: float | None = None, *, stream: Any = None
) -> Any:
    """dq = softmax_scale · dS k, dS = P ∘ (do vᵀ − rowsum(o ∘ do)), P = exp(s − l). Stored, not added.

    As `numba_psa.oracle.flash_attention2_backward_dq`; arrays and stream as in psa_attention, D and Dv up to 128.
    """
    call, shape, scale = _saved(q, k, v, o, do, l, softmax_scale, stream)
    dq = call.empty(shape.q)
    _launch(call, shape, scale, DQ, (dq, None, None))
    return call.result(dq)


def flash_attention2_backward_dkv(
    q: Any, k: Any, v: Any, o: Any, do: Any, l: Any, softmax_scale: float | None = None, *, stream: Any = None
) -> tuple[Any, Any]:
    """dk = softmax_scale · dSᵀ q and dv = Pᵀ do. Stored, not added.

    As `numba_psa.oracle.flash_attention2_backward_dkv`; arrays and stream as in flash_attention2_backward_dq.
    """
    call, shape, scale = _saved(q, k, v, o, do, l, softmax_scale, stream)
    dk, dv = call.empty(shape.k), call.empty(shape.v)
    _launch(call, shape, scale, DKV, (None, dk, dv))
    return call.result(dk), call.result(dv)


def psa_fa2_backward(
    q: Any,
    k: Any,
    v: Any,
    o: Any,
    do: Any,
    l: Any,
    softmax_scale: float | None = None,
    *,
    dq: Any = None,
    dk: Any = None,
    dv: Any = None,
    stream: Any = None,
) -> tuple[Any, Any, Any]:
    """dq += softmax_scale · dS k;  dk += softmax_scale · dSᵀ q;  dv = Pᵀ do.

    **Adds into** dq and dk, or into zeros (halves: a gradient is rounded, then the sum); **stores** dv.
    As `numba_psa.oracle.psa_fa2_backward`; arrays and stream as in flash_attention2_backward_dq.
    """
    call, shape, scale = _saved(q, k, v, o, do, l, softmax_scale, stream)
    shape.check_self_attention()
    added = [
        call.added_target(name, given, sizes, axes) if given is not None else None
        for name, given, sizes, axes in (("dq", dq, shape.q, Q_AXES), ("dk", dk, shape.k, K_AXES))
    ]
    stored = call.target("dv", dv, shape.v, V_AXES)
    with call.on_stream():
        fresh = [call.empty(sizes) for sizes in (shape.q, shape.k)]
    _launch(call, shape, scale, DQ | DKV, (*fresh, stored))
    for target, gradient in zip(added, fresh, strict=True):
        if target is not None:
            _add(call, gradient, target)
    targets = [gradient if target is None else target for gradient, target in zip(fresh, added, strict=True)]
    return call.finish(dq, targets[0]), call.finish(dk, targets[1]), call.finish(dv, stored)


def _saved(q, k, v, o, do, l, softmax_scale, stream) -> tuple[Call, AttentionShape, float]:
    call = Call(stream, q=q, k=k, v=v, o=o, do=do, l=l)
    shape = AttentionShape.from_qkv(call["q"].shape, call["k"].shape, call["v"].shape)
    shape.check_saved(call["o"].shape, call["do"].shape, call["l"].shape)
    return call, shape, check_scale(softmax_scale, shape.softmax_scale)


def _launch(
    call: Call, shape: AttentionShape, scale: float, passes: int, gradients: tuple[View | None, View | None, View | None]
) -> None:
    inputs = tuple(call[name].pointer for name in ("q", "k", "v", "o", "do", "l"))
    outputs = tuple(view.pointer if view else 0 for view in gradients)
    problem = Problem(
        shape.bh,
        shape.n_ctx_q,
        shape.n_ctx_k,
        shape.head_dim,
        shape.value_dim,
        call.dtype,
        tokens_first=True,
        alignment=gcd(16, *inputs[:5], *outputs),
    )
    problem.check_widths()
    if not shape.bh or not max(shape.n_ctx_q, shape.n_ctx_k):
        return
    launcher = backward_launcher(problem, passes, current_device())
    with call.on_stream():
        workspace = call.empty((launcher.workspace_bytes // 4,), FLOAT32)
    launcher(call.stream, inputs, outputs, workspace.pointer, scale, exponent_scale(scale, call.dtype))


# ---- layout -----------------------------------------------------------------------------------------------------------
def psa_pack_qkv_backward(
    d_packed: Any, num_heads: int, height: int, width: int, *, d_qkv: Any = None, stream: Any = None
) -> Any:
    """d_qkv[b, (4·h + section)·KEY_DIM + d, y, x] += d_packed[section, bh, n, d]: adds into d_qkv, or into zeros.

    As `numba_psa.oracle.psa_pack_qkv_backward`; arrays and stream as in psa_attention.
    """
    call = Call(stream, d_packed=d_packed)
    shape = PSAShape.from_packed(call["d_packed"].shape, num_heads, height, width, "d_packed")
    target = None if d_qkv is None else call.added_target("d_qkv", d_qkv, shape.qkv, QKV_AXES)
    with call.on_stream():
        moved = call.empty(shape.qkv)
    pointers = call["d_packed"].pointer, moved.pointer
    launch_transpose(call, layout.make_psa_pack_qkv_backward, PACK_SIGNATURE, shape, SECTIONS, *pointers)
    if target is None:
        return call.result(moved)
    _add(call, moved, target)
    return call.finish(d_qkv, target)


def psa_extract_v_backward(d_v: Any, num_heads: int, *, d_qkv: Any = None, stream: Any = None) -> Any:
    """d_qkv's V_lo and V_hi channels += d_v: adds into d_qkv, or into zeros; never touches Q and K.

    As `numba_psa.oracle.psa_extract_v_backward`; arrays and stream as in psa_attention.
    """
    call = Call(stream, d_v=d_v)
    shape = PSAShape.from_out(call["d_v"].shape, num_heads, "d_v")
    if d_qkv is None:
        target = call.empty(shape.qkv)
    else:
        target = call.added_target("d_qkv", d_qkv, shape.qkv, QKV_AXES)
    if shape.bh and shape.n:
        item, size = call.dtype.itemsize, shape.head_dim * shape.n
        config = _straight(call, gcd(16, item * size, call["d_v"].pointer, target.pointer), shape.key_dim, d_qkv is not None)
        grid = -(-size // (config.tokens * config.key_dim)), *heads_on_grid(shape.bh)
        run = kernel(layout.make_psa_extract_v_backward, config, PACK_SIGNATURE)
        run(grid, call.stream, call["d_v"].pointer, target.pointer, shape.n, shape.bh)
    return call.finish(d_qkv, target)


def psa_merge_attn_backward(d_merged: Any, num_heads: int, *, stream: Any = None) -> tuple[Any, Any]:
    """d_lo, d_hi = the two halves of each head of d_merged. Stored, not added. Bit-exact.

    As `numba_psa.oracle.psa_merge_attn_backward`; arrays and stream as in psa_attention.
    """
    call = Call(stream, d_merged=d_merged)
    shape = PSAShape.from_out(call["d_merged"].shape, num_heads, "d_merged")
    d_lo, d_hi = call.empty(shape.section), call.empty(shape.section)
    pointers = call["d_merged"].pointer, d_lo.pointer, d_hi.pointer
    launch_transpose(call, layout.make_psa_merge_attn_backward, MERGE_SIGNATURE, shape, 2, *pointers)
    return call.result(d_lo), call.result(d_hi)


def _add(call: Call, source: View, target: View) -> None:
    """target += source."""
    size = prod(target.shape)
    if size:
        config = _straight(call, gcd(16, source.pointer, target.pointer), 8, True)
        grid = -(-size // (config.tokens * config.key_dim)), 1, 1
        kernel(layout.make_add, config, layout.ADD_SIGNATURE)(grid, call.stream, source.pointer, target.pointer, size)


def _straight(call: Call, copy: int, key_dim: int, adds: bool) -> GradientLayoutConfig:
    """The config of a kernel that copies or adds straight ahead."""
    item = call.dtype.itemsize
    tokens = layout_config(key_dim, item, copy, copy).tokens
    return GradientLayoutConfig(key_dim, item, copy, copy, tokens, adds=adds, bf16=call.dtype == BFLOAT16)
