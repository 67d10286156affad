"""The oracle's functions on the fused kernels, for arrays of any library."""

from __future__ import annotations

from math import gcd
from typing import Any

from numba_psa._numba_cuda import MAX_GRID_Y
from numba_psa.cuda import layout
from numba_psa.cuda.choice import Problem
from numba_psa.cuda.launching import current_device, kernel
from numba_psa.cuda.layout import LayoutConfig
from numba_psa.cuda.plans import cached_plan, device_scale, exactness, launcher
from numba_psa.cuda.views import Call
from numba_psa.errors import ParameterError, ShapeError
from numba_psa.numerics import FLOAT32, check_scale
from numba_psa.shapes import OUT_AXES, SECTION_AXES, SECTIONS, AttentionShape, PSAShape, check_count, check_shape


def psa_attention(
    qkv: Any,
    num_heads: int,
    *,
    softmax_scale: float | None = None,
    save_for_backward: bool = False,
    out: Any = None,
    stream: Any = None,
    precision: str | None = None,
) -> Any:
    """out = v · softmax_keys(softmax_scale · qᵀ k)ᵀ for each head, NCHW in and out, in one kernel.

    qkv `[B, num_heads*4*KEY_DIM, H, W]`, KEY_DIM up to 64, float16, bfloat16 or float32: a CUDA array of any library, or a
    NumPy array, which is copied over and back. A result is of the same kind. float32 is computed to float32's precision
    (three TF32 products for one); precision="tf32" takes one. out: an array `[B, num_heads*2*KEY_DIM, H, W]` to store into
    and to return. stream: a CUDA stream of any library or its handle; left out, the current one of torch or CuPy, the one
    that the array names, or the default one. Nothing waits for the device, unless arrays are NumPy's.
    With save_for_backward, `(out, (out, l))` as in the oracle.
    Raises ShapeError, DTypeError, ParameterError, BackendUnavailableError. Source: Dao, "FlashAttention-2" (2023).
    """
    call = Call(stream, qkv=qkv)
    source = call["qkv"]
    scale = None if softmax_scale is None else check_scale(softmax_scale, 1.0)
    check_count("num_heads", num_heads, 1)
    plan = cached_plan(source.shape, num_heads, call.dtype, scale, precision, save_for_backward, current_device())
    target = call.target("out", out, plan.shape.out, OUT_AXES)
    l = call.empty(plan.shape.l, FLOAT32) if save_for_backward else None
    plan.launch(source.pointer, target.pointer, l.pointer if l else 0, call.stream, call.scratch)
    result = call.finish(out, target)
    return (result, (result, call.result(l))) if l else result


def flash_attention2_forward(
    q: Any,
    k: Any,
    v: Any,
    softmax_scale: float | None = None,
    *,
    stream: Any = None,
    precision: str | None = None,
) -> tuple[Any, Any]:
    """o = softmax(s) v and l = logsumexp(s), with s = softmax_scale · q kᵀ.

    q `[BH, n_ctx_q, D]`, k `[BH, n_ctx_k, D]`, v `[BH, n_ctx_k, Dv]`; D and Dv up to 128. Kinds of arrays, dtypes, stream
    and precision as in psa_attention. Returns o `[BH, n_ctx_q, Dv]` and l `[BH, n_ctx_q]`, float32; special values as in
    the oracle. Raises ShapeError, DTypeError, ParameterError, BackendUnavailableError.
    """
    call = Call(stream, q=q, k=k, v=v)
    views = call["q"], call["k"], call["v"]
    shape = AttentionShape.from_qkv(*(view.shape for view in views))
    scale = device_scale(check_scale(softmax_scale, shape.softmax_scale))
    exact = exactness(precision, call.dtype)
    o, l = call.empty(shape.o), call.empty(shape.l, FLOAT32)
    pointers = *(view.pointer for view in views), o.pointer
    problem = Problem(
        shape.bh,
        shape.n_ctx_q,
        shape.n_ctx_k,
        shape.head_dim,
        shape.value_dim,
        call.dtype,
        tokens_first=True,
        saves_l=True,
        exact=exact,
        alignment=gcd(16, *pointers),
    )
    problem.check_widths()
    if shape.bh and shape.n_ctx_q:
        launcher(problem, current_device())(call.stream, *pointers, l.pointer, scale)
    return call.result(o), call.result(l)


# ---- layout -----------------------------------------------------------------------------------------------------------
def psa_pack_qkv(qkv: Any, num_heads: int, *, stream: Any = None) -> Any:
    """packed[section, bh, n, d] = qkv[b, (4·h + section)·KEY_DIM + d, y, x]: `[4, BH, N, KEY_DIM]`. Bit-exact.

    As `numba_psa.oracle.psa_pack_qkv`; arrays and stream as in psa_attention.
    """
    call = Call(stream, qkv=qkv)
    shape = PSAShape.from_qkv(call["qkv"].shape, num_heads)
    packed = call.empty(shape.packed)
    launch_transpose(
        call, layout.make_psa_pack_qkv, layout.PACK_SIGNATURE, shape, SECTIONS, call["qkv"].pointer, packed.pointer
    )
    return call.result(packed)


def psa_merge_attn_nchw(lo: Any, hi: Any, num_heads: int, height: int, width: int, *, stream: Any = None) -> Any:
    """out = lo and hi of each head side by side, as NCHW `[B, num_heads*2*KEY_DIM, H, W]`. Bit-exact.

    As `numba_psa.oracle.psa_merge_attn_nchw`; arrays and stream as in psa_attention.
    """
    call = Call(stream, lo=lo, hi=hi)
    shape = PSAShape.from_section(call["lo"].shape, num_heads, height, width, "lo")
    check_shape("hi", call["hi"].shape, shape.section, SECTION_AXES)
    out = call.empty(shape.out)
    pointers = call["lo"].pointer, call["hi"].pointer, out.pointer
    launch_transpose(call, layout.make_psa_merge_attn_nchw, layout.MERGE_SIGNATURE, shape, 2, *pointers)
    return call.result(out)


def psa_extract_v_nchw(qkv: Any, num_heads: int, *, stream: Any = None) -> Any:
    """v = the V_lo and V_hi channels of each head of qkv, `[B, num_heads*2*KEY_DIM, H, W]`. Bit-exact.

    As `numba_psa.oracle.psa_extract_v_nchw`; arrays and stream as in psa_attention.
    """
    call = Call(stream, qkv=qkv)
    shape = PSAShape.from_qkv(call["qkv"].shape, num_heads)
    v = call.empty(shape.out)
    if shape.bh and shape.n:
        item, size = call.dtype.itemsize, shape.head_dim * shape.n
        copy = gcd(16, item * size, call["qkv"].pointer, v.pointer)
        config = layout_config(shape.key_dim, item, copy, copy)
        blocks = -(-size // (config.tokens * config.key_dim))
        run = kernel(layout.make_psa_extract_v_nchw, config, layout.PACK_SIGNATURE)
        run((blocks, *heads_on_grid(shape.bh)), call.stream, call["qkv"].pointer, v.pointer, shape.n, shape.bh)
    return call.result(v)


def launch_transpose(call: Call, make: Any, signature: Any, shape: PSAShape, matrices: int, *pointers: int) -> None:
    """Launch a transpose of `matrices` matrices a head."""
    if not shape.bh or not shape.n:
        return
    item = call.dtype.itemsize
    rows, tokens = gcd(16, item * shape.n, *pointers), gcd(16, item * shape.n * shape.key_dim, *pointers)
    config = layout_config(shape.key_dim, item, rows, tokens)
    grid = (-(-shape.n // config.tokens), *heads_on_grid(matrices * shape.bh))
    kernel(make, config, signature)(grid, call.stream, *pointers, shape.n, shape.bh)


def layout_config(key_dim: int, item: int, rows_copy: int, tokens_copy: int) -> LayoutConfig:
    for tokens in (128, 64, 32, 16, 8):
        try:
            return LayoutConfig(key_dim, item, rows_copy, tokens_copy, tokens)
        except ParameterError:
            continue
    raise ShapeError(
        f"impl='cuda' cannot transpose KEY_DIM = {key_dim} in shared memory: impl='cpu' and 'oracle' have no limit"
    )


def heads_on_grid(matrices: int) -> tuple[int, int]:
    """A count on the y and z axes of a grid."""
    return min(matrices, MAX_GRID_Y), -(-matrices // MAX_GRID_Y)
