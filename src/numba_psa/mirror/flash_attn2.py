"""FlashAttention-2 on the mirror kernels: the oracle's functions, one block a query or key row."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from numba_psa.mirror import flash_attn2_kernels as kernels
from numba_psa.mirror.launch import Call, batch_head_slices, check_lanes, launch
from numba_psa.numerics import accumulator_dtype, check_scale
from numba_psa.shapes import K_AXES, Q_AXES, V_AXES, AttentionShape


def flash_attention2_forward(q: Any, k: Any, v: Any, softmax_scale: float | None = None) -> tuple[Any, Any]:
    """o = softmax(s) v and l = logsumexp(s), s = softmax_scale · q kᵀ, by the online recurrence, a key at a time.

    As `numba_psa.oracle.flash_attention2_forward`; arrays are NumPy or device arrays, widths at most 1,024.
    """
    call = Call(q=q, k=k, v=v)
    shape = AttentionShape.from_qkv(call.shape("q"), call.shape("k"), call.shape("v"))
    scale = call.real(check_scale(softmax_scale, shape.softmax_scale))
    lanes = _lanes(shape)
    o, l = call.empty(shape.o), call.empty(shape.l, accumulator_dtype(call.dtype))
    _launch(
        kernels.flash_attention2_forward_kernel,
        call,
        shape,
        shape.n_ctx_q,
        lanes,
        [*zip(call.flat("q", "k", "v"), (shape.q, shape.k, shape.v), strict=True), (o, shape.o), (l, shape.l)],
        (shape.n_ctx_q, shape.n_ctx_k, scale, call.real(-math.inf)),
    )
    return call.result(o, shape.o), call.result(l, shape.l, accumulator_dtype(call.dtype))


def flash_attention2_backward_dq(q: Any, k: Any, v: Any, o: Any, do: Any, l: Any, softmax_scale: float | None = None) -> Any:
    """dq = softmax_scale · dS k, dS = P ∘ (do vᵀ − rowsum(o ∘ do)), P = exp(s − l). Stored, not added.

    As `numba_psa.oracle.flash_attention2_backward_dq`.
    """
    call, shape, scale, inputs = _backward_call(q, k, v, o, do, l, softmax_scale)
    dq = call.empty(shape.q)
    scalars = (shape.n_ctx_q, shape.n_ctx_k, scale)
    kernel = kernels.flash_attention2_backward_dq_kernel
    _launch(kernel, call, shape, shape.n_ctx_q, _lanes(shape), [*inputs, (dq, shape.q)], scalars)
    return call.result(dq, shape.q)


def flash_attention2_backward_dkv(
    q: Any, k: Any, v: Any, o: Any, do: Any, l: Any, softmax_scale: float | None = None
) -> tuple[Any, Any]:
    """dk = softmax_scale · dSᵀ q and dv = Pᵀ do. Stored, not added. As `numba_psa.oracle.flash_attention2_backward_dkv`."""
    call, shape, scale, inputs = _backward_call(q, k, v, o, do, l, softmax_scale)
    dk, dv = call.empty(shape.k), call.empty(shape.v)
    outputs = [(dk, shape.k), (dv, shape.v)]
    scalars = (shape.n_ctx_q, shape.n_ctx_k, scale)
    kernel = kernels.flash_attention2_backward_dkv_kernel
    _launch(kernel, call, shape, shape.n_ctx_k, _lanes(shape), [*inputs, *outputs], scalars)
    return call.result(dk, shape.k), call.result(dv, shape.v)


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
) -> tuple[Any, Any, Any]:
    """dq += softmax_scale · dS k;  dk += softmax_scale · dSᵀ q;  dv = Pᵀ do: adds, adds, stores.

    As `numba_psa.oracle.psa_fa2_backward`; each block computes dq of one row, then dk and dv of the same row.
    """
    call, shape, scale, inputs = _backward_call(q, k, v, o, do, l, softmax_scale)
    shape.check_self_attention()
    flat_dq = call.target("dq", dq, shape.q, Q_AXES)
    flat_dk = call.target("dk", dk, shape.k, K_AXES)
    flat_dv = call.target("dv", dv, shape.v, V_AXES)
    outputs = [(flat_dq, shape.q), (flat_dk, shape.k), (flat_dv, shape.v)]
    kernel = kernels.psa_fa2_backward_kernel
    _launch(kernel, call, shape, shape.n_ctx_q, _lanes(shape), [*inputs, *outputs], (shape.n_ctx_q, scale))
    return (
        call.finish(dq, flat_dq, shape.q),
        call.finish(dk, flat_dk, shape.k),
        call.finish(dv, flat_dv, shape.v),
    )


def _lanes(shape: AttentionShape) -> int:
    return max(check_lanes("D", shape.head_dim), check_lanes("Dv", shape.value_dim))


def _backward_call(q, k, v, o, do, l, softmax_scale):
    """(call, shape, scale, inputs with their shapes) of a backward."""
    call = Call(q=q, k=k, v=v, o=o, do=do, l=l)
    shape = AttentionShape.from_qkv(call.shape("q"), call.shape("k"), call.shape("v"))
    shape.check_saved(call.shape("o"), call.shape("do"), call.shape("l"))
    scale = call.real(check_scale(softmax_scale, shape.softmax_scale))
    flat = call.flat("q", "k", "v", "o", "do", "l")
    return call, shape, scale, [*zip(flat, (shape.q, shape.k, shape.v, shape.o, shape.o, shape.l), strict=True)]


def _launch(
    factory: Callable,
    call: Call,
    shape: AttentionShape,
    rows: int,
    lanes: int,
    arrays: list[tuple[Any, tuple[int, ...]]],
    scalars: tuple,
) -> None:
    """Grid (rows, BH) in the argument order of the original; more batch-heads than a y axis holds go in several launches."""
    constants = (shape.head_dim, shape.value_dim, call.element)
    parts = batch_head_slices(shape.bh)
    for part in parts:
        pointers = [flat for flat, _ in arrays]
        if len(parts) > 1:
            pointers = [
                flat[part.start * math.prod(layout[1:]) : part.stop * math.prod(layout[1:])] for flat, layout in arrays
            ]
        launch(factory, constants, (rows, part.stop - part.start), lanes, *pointers, *scalars)
