"""The flash functions in float64 or float32, the same bits on every machine: what golden vectors are made of.

Only single additions, multiplications, divisions and comparisons of IEEE 754, in a fixed order, and rounding casts: no BLAS,
whose sums depend on the machine, and no exp, log or pow of libm or of a vector unit. Checked against the oracle.
"""

from __future__ import annotations

import math

import numpy as np

from numba_psa.numerics import accumulator_dtype

_LN2_HIGH = float.fromhex("0x1.62e42feep-1")  # 32 bits: multiples up to 2**11 are exact
_LN2_LOW = float.fromhex("0x1.a39ef35793c76p-33")
_LOG2E = float.fromhex("0x1.71547652b82fep+0")
_EXP_TERMS = tuple(1.0 / math.factorial(i) for i in range(14))
_LOG_TERMS = tuple(2.0 / (2 * i + 1) for i in range(14))


def exp(x: np.ndarray) -> np.ndarray:
    """e**x of float64, within 1e-15: x = n·ln2 + r, a Taylor polynomial of r, times 2**n. exp NaN = NaN, exp −inf = 0."""
    with np.errstate(all="ignore"):
        clipped = np.clip(x, -746.0, 710.0)  # beyond, the result is 0 or inf
        n = np.rint(np.nan_to_num(clipped * _LOG2E))
        r = (clipped - n * _LN2_HIGH) - n * _LN2_LOW
        total = np.full_like(r, _EXP_TERMS[-1])
        for term in _EXP_TERMS[-2::-1]:
            total = total * r + term
        return np.ldexp(total, n.astype(np.int32))


def log(x: np.ndarray) -> np.ndarray:
    """ln x of float64 x >= 0, within 1e-15: x = m·2**n, ln m = 2·artanh((m − 1)/(m + 1)). log 0 = -inf."""
    with np.errstate(all="ignore"):
        m, n = np.frexp(x)
        small = m < math.sqrt(0.5)
        m, n = np.where(small, m * 2.0, m), (n - small).astype(np.float64)
        f = (m - 1.0) / (m + 1.0)
        square, total = f * f, np.full_like(f, _LOG_TERMS[-1])
        for term in _LOG_TERMS[-2::-1]:
            total = total * square + term
        result = n * _LN2_HIGH + (f * total + n * _LN2_LOW)
        return np.where(x == 0, -np.inf, np.where(np.isfinite(x), result, x))


def matmul(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """a `[…, i, j]` times b `[…, j, k]`, summed over j in order, in their dtype."""
    out = np.zeros((*a.shape[:-1], b.shape[-1]), a.dtype)
    for j in range(a.shape[-1]):
        out += a[..., :, j, None] * b[..., None, j, :]
    return out


def row_sum(a: np.ndarray) -> np.ndarray:
    """Sum over the last axis, in order."""
    out = np.zeros(a.shape[:-1], a.dtype)
    for j in range(a.shape[-1]):
        out += a[..., j]
    return out


def _exp_in(x: np.ndarray) -> np.ndarray:
    return exp(x.astype(np.float64)).astype(x.dtype)


def scale_of(softmax_scale: float | None, width: int) -> float:
    return 1.0 / math.sqrt(width) if softmax_scale is None else softmax_scale  # sqrt is correctly rounded, pow is not


def forward(q, k, v, softmax_scale=None, compute=np.float64) -> tuple[np.ndarray, np.ndarray]:
    """(o, l) in `compute`; see `oracle.flash_attention2_forward`."""
    q, k, v = (x.astype(compute) for x in (q, k, v))
    with np.errstate(all="ignore"):
        s = matmul(q, k.swapaxes(1, 2)) * q.dtype.type(scale_of(softmax_scale, q.shape[2]))
        m = np.max(s, axis=-1, initial=-np.inf)
        masked = m == -np.inf
        p = _exp_in(s - np.where(masked, q.dtype.type(0), m)[..., None])
        total = row_sum(p)
        o = np.where(masked[..., None], q.dtype.type(0), matmul(p, v) / total[..., None])
        return o, (m + log(total.astype(np.float64)).astype(q.dtype)).astype(q.dtype)


def saved(q, k, v, softmax_scale=None) -> tuple[np.ndarray, np.ndarray]:
    """(o, l) as a kernel saves them: o in the dtype of q, l in its accumulator dtype."""
    o, l = forward(q, k, v, softmax_scale)
    with np.errstate(all="ignore"):
        return o.astype(q.dtype), l.astype(accumulator_dtype(q.dtype))


def gradients(q, k, v, o, do, l, softmax_scale=None, compute=np.float64) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(dq, dk, dv) in `compute`; see `oracle.flash_attention2_backward_dq`."""
    q, k, v, o, do, l = (x.astype(compute) for x in (q, k, v, o, do, l))
    zero, scale = q.dtype.type(0), q.dtype.type(scale_of(softmax_scale, q.shape[2]))
    masked = (l == -np.inf)[..., None]
    with np.errstate(all="ignore"):
        q, o, do = (np.where(masked, zero, x) for x in (q, o, do))
        p = np.where(masked, zero, _exp_in(matmul(q, k.swapaxes(1, 2)) * scale - l[..., None]))
        ds = np.where(masked, zero, p * (matmul(do, v.swapaxes(1, 2)) - row_sum(o * do)[..., None]))
        dq = np.where(masked, zero, scale * matmul(ds, k))
        return dq, scale * matmul(ds.swapaxes(1, 2), q), matmul(p.swapaxes(1, 2), do)
