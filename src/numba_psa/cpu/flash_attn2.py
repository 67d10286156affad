"""FlashAttention-2 on `[BH, n_ctx, D]`, fused, on NumPy arrays."""

from __future__ import annotations

from collections.abc import Sequence

import numba
import numpy as np
from numpy.typing import ArrayLike

from numba_psa.arrays import as_floats, quiet
from numba_psa.cpu import backward as kernels
from numba_psa.cpu.forward import forward
from numba_psa.cpu.operands import Operand, address, operand, tiles, widened
from numba_psa.numerics import accumulator_dtype, check_scale
from numba_psa.shapes import AttentionShape


def flash_attention2_forward(
    q: ArrayLike, k: ArrayLike, v: ArrayLike, softmax_scale: float | None = None
) -> tuple[np.ndarray, np.ndarray]:
    """o = softmax(s) v and l = logsumexp(s), with s = softmax_scale · q kᵀ.

    As `numba_psa.oracle.flash_attention2_forward`; half inputs are computed in float32.
    """
    (q, k, v), dtype = as_floats(q=q, k=k, v=v)
    shape = AttentionShape.from_qkv(q.shape, k.shape, v.shape)
    scale = check_scale(softmax_scale, shape.softmax_scale)
    compute = accumulator_dtype(dtype)
    o, l = np.empty(shape.o, compute), np.empty(shape.l, compute)
    arrays = widened(q, k, v)
    sizes = shape.n_ctx_q, shape.n_ctx_k, shape.head_dim, shape.value_dim
    attend([operand(x) for x in (*arrays, o)], l, shape.bh, sizes, compute, scale)
    return rounded(o, dtype), l


def flash_attention2_backward_dq(
    q: ArrayLike, k: ArrayLike, v: ArrayLike, o: ArrayLike, do: ArrayLike, l: ArrayLike, softmax_scale: float | None = None
) -> np.ndarray:
    """dq = softmax_scale · dS k. Stored, not added. As `numba_psa.oracle.flash_attention2_backward_dq`."""
    arrays, shape, scale, dtype = check_saved(q, k, v, o, do, l, softmax_scale)
    dq = np.empty(shape.q, arrays[0].dtype)
    gradients(*arrays, scale, dq=dq)
    return rounded(dq, dtype)


def flash_attention2_backward_dkv(
    q: ArrayLike, k: ArrayLike, v: ArrayLike, o: ArrayLike, do: ArrayLike, l: ArrayLike, softmax_scale: float | None = None
) -> tuple[np.ndarray, np.ndarray]:
    """dk = softmax_scale · dSᵀ q and dv = Pᵀ do. Stored, not added. As `numba_psa.oracle.flash_attention2_backward_dkv`."""
    arrays, shape, scale, dtype = check_saved(q, k, v, o, do, l, softmax_scale)
    dk, dv = np.empty(shape.k, arrays[0].dtype), np.empty(shape.v, arrays[0].dtype)
    gradients(*arrays, scale, dk=dk, dv=dv)
    return rounded(dk, dtype), rounded(dv, dtype)


# ---- what the other modules share: arrays `[BH, tokens, channels]` of any strides, float32 or float64 -------------------
Sizes = tuple[int, int, int, int]
"""n_ctx_q, n_ctx_k, D, Dv."""


def check_saved(q, k, v, o, do, l, softmax_scale) -> tuple[list[np.ndarray], AttentionShape, float, np.dtype]:
    """(q, k, v, o, do, l in the compute dtype, their shape, the scale, the dtype of the inputs), all checked."""
    arrays, dtype = as_floats(q=q, k=k, v=v, o=o, do=do, l=l)
    shape = AttentionShape.from_qkv(*(x.shape for x in arrays[:3]))
    shape.check_saved(*(x.shape for x in arrays[3:]))
    return widened(*arrays), shape, check_scale(softmax_scale, shape.softmax_scale), dtype


def rounded(x: np.ndarray, dtype: np.dtype) -> np.ndarray:
    """x in the dtype of the result; itself where that is the compute dtype."""
    if x.dtype == dtype:
        return x
    with quiet():
        return x.astype(dtype)


def attend(operands: Sequence[Operand], l: np.ndarray | None, bh: int, sizes: Sizes, dtype: np.dtype, scale: float) -> None:
    """o, and l `[BH, n_ctx_q]`, contiguous, unless it is None; operands q, k, v, o, which the caller keeps alive."""
    q, k, v, o = operands
    saved = 0 if l is None else address(l)
    problem = (*q, *k, *v, *o, saved, *sizes)
    forward.run(dtype, bh * tiles(sizes[0], dtype), problem, scale, most_threads=_worthwhile(bh, sizes))


def gradients(q, k, v, o, do, l, scale, *, dq=None, dk=None, dv=None) -> None:
    """Store dq, or dk and dv, or all three."""
    (bh, n_ctx_q, key_dim), (_, n_ctx_k, value_dim) = q.shape, v.shape
    sizes = n_ctx_q, n_ctx_k, key_dim, value_dim
    l = np.ascontiguousarray(l)
    delta = np.empty_like(l)
    query_tiles, most = bh * tiles(n_ctx_q, q.dtype), _worthwhile(bh, sizes)
    kernels.delta.run(
        q.dtype, query_tiles, (*operand(o), *operand(do), address(delta), n_ctx_q, value_dim), most_threads=most
    )
    together = dq is not None and dk is not None and _heads_suffice(bh) and not np.isneginf(l).any()
    if dq is not None and not together:
        problem = (*operand(q), *operand(k), *operand(v), *operand(do), *operand(dq), address(l), address(delta), *sizes)
        kernels.backward_dq.run(q.dtype, query_tiles, problem, scale, most_threads=most)
    if dk is not None:
        q, do, l, delta, counts = _without_masked_rows(q, do, l, delta)
        operands = (*operand(q), *operand(k), *operand(v), *operand(do), *operand(dk), *operand(dv))
        third = operand(dq) if together else (0, 0, 0, 0)
        problem = (*operands, *third, address(l), address(delta), address(counts), *sizes)
        items = bh if together else bh * tiles(n_ctx_k, q.dtype)
        kernels.backward_dkv.run(q.dtype, items, problem, scale, most_threads=most)


def _heads_suffice(bh: int) -> bool:
    """Whether whole heads, at 7 matrix products each, are done before tiles of them, at 10. The bits are the same."""
    threads = numba.get_num_threads()
    return -(-bh // threads) * 7 <= bh / threads * 10


def _worthwhile(bh: int, sizes: Sizes) -> int:
    """Threads that have at least a million multiply-adds each: about 20 µs, several times what it takes to wake one."""
    n_ctx_q, n_ctx_k, key_dim, value_dim = sizes
    return 1 + bh * n_ctx_q * n_ctx_k * (key_dim + value_dim) // 1_000_000


def _without_masked_rows(q, do, l, delta):
    """The same queries, those with l = -inf left out, in their order, and how many are left in each bh.

    A masked row gives keys and values no gradient; 0 times the inf that masked it would be NaN.
    """
    kept = l != -np.inf
    counts = np.count_nonzero(kept, axis=1).astype(np.int64)
    if kept.all():
        return q, do, l, delta, counts
    first = np.argsort(~kept, axis=1, kind="stable")
    rows = first[:, :, None]
    return (
        np.take_along_axis(q, rows, 1),
        np.take_along_axis(do, rows, 1),
        np.take_along_axis(l, first, 1),
        np.take_along_axis(delta, first, 1),
        counts,
    )
