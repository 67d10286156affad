"""Planted bugs in the arithmetic of attention, written with einsum and loops over keys; see `mutants`."""

from __future__ import annotations

import numpy as np

from numba_psa.numerics import accumulator_dtype
from numba_psa.testing.mutants import LAYOUT_MUTANTS, Mutant

LN2 = 0.6931471805599453


def _wide(*arrays):
    return [x.astype(accumulator_dtype(arrays[0].dtype)) for x in arrays]


def _default(softmax_scale, width):
    return 1.0 / width**0.5 if softmax_scale is None else softmax_scale


def _positions(n: int, bug: str | None) -> list[int]:
    """The keys that the loop visits; -1 is a key of zeros."""
    match bug:
        case "skips-last-key":
            return list(range(n - 1))
        case "skips-first-key":
            return list(range(1, n))
        case "key-tail":
            return list(range(n - n % 16))
        case "key-tail-repeated":
            return list(range(n - n % 8)) + (list(range(n - 8, n)) if n % 8 and n > 8 else list(range(n - n % 8, n)))
        case "padded":
            return list(range(n)) + [-1] * (-n % 8)
    return list(range(n))


def flash(q, k, v, softmax_scale=None, *, bug=None):
    """One key after the other, like the original kernel."""
    dtype, (q, k, v) = q.dtype, _wide(q, k, v)
    scale = _default(softmax_scale, q.shape[2])
    if bug == "no-scale":
        scale = 1.0
    elif bug == "scale-twice":
        scale *= scale
    elif bug == "default-scale":
        scale = q.shape[2] ** -0.5
    elif bug == "exp2":
        scale *= LN2
    scale = q.dtype.type(scale)
    s = np.einsum("bid,bjd->bij", q, k) * scale
    if bug == "causal":
        i, j = np.ogrid[: q.shape[1], : k.shape[1]]
        s = np.where(j > i, -np.inf, s)
    if bug == "over-queries":
        return _softmax_over_queries(s, v, dtype)
    if bug == "half-sums":
        return _half_sums(q, k, v, scale, dtype)
    m = np.full(q.shape[:2], 0.0 if bug == "max-from-zero" else -np.inf, q.dtype)
    total, acc = np.zeros_like(m), np.zeros((*q.shape[:2], v.shape[2]), q.dtype)
    for j in _positions(k.shape[1], bug):
        column = s[:, :, j] if j >= 0 else np.zeros_like(m)
        new = np.zeros_like(m) if bug == "no-max" else np.maximum(m, column)
        safe = new if bug == "nan-row" else np.where(np.isneginf(new), 0, new)
        p = np.exp(column - safe)
        if bug == "p-in-half":
            p = p.astype(np.float16).astype(q.dtype)
        alpha = np.exp(m - safe) if not (bug == "nan-row" and j == 0) else np.where(np.isneginf(new), np.nan, 0)
        if bug == "no-max":
            alpha = np.ones_like(m)
        total = total * (1.0 if bug == "no-rescale-l" else alpha) + p
        acc = acc * (1.0 if bug == "no-rescale" else alpha[..., None])
        acc = acc + p[..., None] * (v[:, None, j] if j >= 0 else 0)
        m = new
    empty = total == 0 if bug != "nan-row" else np.zeros_like(total, bool)
    o = acc if bug == "unnormalised" else np.where(empty[..., None], 0, acc / total[..., None])
    l = np.where(empty, -np.inf, m + np.log(total))
    if bug == "lse-log2":
        l = l / LN2
    elif bug == "lse-unscaled":
        raw = np.einsum("bid,bjd->bij", q, k)
        top = raw.max(-1, initial=-np.inf)
        l = np.where(empty, -np.inf, top + np.log(np.exp(raw - np.where(np.isneginf(top), 0, top)[..., None]).sum(-1)))
    elif bug == "lse-no-max":
        l = np.log(total)
    elif bug == "lse-max":
        l = m
    elif bug == "query-tail":
        rows = q.shape[1] // 32 * 32
        o[:, rows:], l[:, rows:] = 0, 0
    return o.astype(dtype), l.astype(q.dtype)


def _softmax_over_queries(s, v, dtype):
    top = np.max(s, axis=1, keepdims=True, initial=-np.inf)
    e = np.exp(s - np.where(np.isneginf(top), 0, top))
    p = e / e.sum(1, keepdims=True)
    m = s.max(-1, initial=-np.inf)
    l = m + np.log(np.exp(s - np.where(np.isneginf(m), 0, m)[..., None]).sum(-1))
    return np.einsum("bij,bje->bie", p, v).astype(dtype), l.astype(s.dtype)


def _half_sums(q, k, v, scale, dtype):
    """P·v kept in float16."""
    s = np.einsum("bid,bjd->bij", q, k) * scale
    m = s.max(-1, initial=-np.inf)
    p = np.exp(s - np.where(np.isneginf(m), 0, m)[..., None])
    total = p.sum(-1)
    acc = np.zeros((*q.shape[:2], v.shape[2]), np.float16)
    for j in range(k.shape[1]):
        acc = (acc + p[:, :, j, None] / total[..., None] * v[:, None, j]).astype(np.float16)
    o = np.where((total == 0)[..., None], 0, acc.astype(q.dtype))
    return o.astype(dtype), np.where(total == 0, -np.inf, m + np.log(total)).astype(q.dtype)


def gradients(q, k, v, o, do, l, softmax_scale=None, *, bug=None):
    """(dq, dk, dv) in the compute dtype."""
    q, k, v, o, do, l = _wide(q, k, v, o, do, l)
    scale = q.dtype.type(_default(softmax_scale, q.shape[2]))
    dead = np.isneginf(l)[:, :, None]
    live = [np.where(dead, 0, x) for x in (q, o, do)]
    qs, os, dos = live
    s = np.einsum("bid,bjd->bij", qs, k) * (1 if bug == "p-unscaled" else scale)
    exponent = s / LN2 - l[:, :, None] if bug == "lse-log2" else s - l[:, :, None]
    p = np.exp2(exponent) if bug == "lse-log2" else np.exp(exponent)
    p = np.where(dead, 0, p)
    if bug == "causal":
        p = np.tril(p)
    elif bug == "p-in-half":
        p = p.astype(np.float16).astype(q.dtype)
    delta = np.einsum("bie,bie->bi", os, dos)[:, :, None]
    dp = np.einsum("bie,bje->bij", dos, v)
    ds = dp * p if bug == "no-delta" else p * (dp + delta) if bug == "plus-delta" else p * (dp - delta)
    ds = np.where(dead, 0, ds)
    keys, queries = slice(None), slice(None)
    if bug == "skips-last-key":
        keys = slice(0, -1)
    elif bug == "query-block":
        queries = slice((max(q.shape[1], 1) - 1) // 16 * 16, None)
    elif bug == "query-tail":
        queries = slice(0, q.shape[1] // 16 * 16)
    dq = np.where(dead, 0, np.einsum("bij,bjd->bid", ds[:, :, keys], k[:, keys])) * (
        1 if bug in ("no-scale", "no-scale-dq") else scale
    )
    dk = np.einsum("bij,bid->bjd", ds[:, queries], qs[:, queries]) * (1 if bug in ("no-scale", "no-scale-dk") else scale)
    dv = np.einsum("bij,bie->bje", (ds if bug == "dv-from-ds" else p)[:, queries], dos[:, queries])
    if bug == "dk-untransposed" and q.shape[1] == k.shape[1]:
        dk = np.einsum("bji,bid->bjd", ds, qs) * scale
    elif bug == "scale-twice":
        dq, dk = dq * scale, dk * scale
    elif bug == "first-head":
        dq, dk, dv = (np.repeat(x[:1], len(x), axis=0) for x in (dq, dk, dv))
    return dq, dk, dv


def backward_dq(q, k, v, o, do, l, softmax_scale=None, *, bug=None):
    return gradients(q, k, v, o, do, l, softmax_scale, bug=bug)[0].astype(q.dtype)


def backward_dkv(q, k, v, o, do, l, softmax_scale=None, *, bug=None):
    _, dk, dv = gradients(q, k, v, o, do, l, softmax_scale, bug=bug)
    if bug == "swapped" and dk.shape == dv.shape:
        dk, dv = dv, dk
    return dk.astype(q.dtype), dv.astype(q.dtype)


def fa2_backward(q, k, v, o, do, l, softmax_scale=None, *, dq=None, dk=None, dv=None, bug=None):
    found = gradients(q, k, v, o, do, l, softmax_scale, bug=bug)
    start = [
        np.zeros(x.shape, x.dtype) if t is None else t.astype(x.dtype) for t, x in zip((dq, dk, dv), found, strict=True)
    ]
    results = [start[0] + found[0], start[1] + found[1], found[2]]
    if bug == "stores-dq":
        results[0] = found[0]
    elif bug == "stores-all":
        results[:2] = found[:2]
    elif bug == "adds-dv":
        results[2] = start[2] + found[2]
    elif bug == "forgets-dk":
        results[1] = start[1]
    return tuple(x.astype(q.dtype) for x in results)


# ---- the whole: channels of a head taken by slices --------------------------------------------------------------------
def _heads(x, heads, bug):
    """q, k, v [BH, n, width] of qkv, or one array of out."""
    b, channels, height, width = x.shape
    per_head = channels // heads
    blocks = [x[i, h * per_head : (h + 1) * per_head] for i in range(b) for h in range(heads)]
    if bug == "section-major":
        kd = per_head // 4
        blocks = [
            np.concatenate([x[i, (s * heads + h) * kd :][:kd] for s in range(4)]) for i in range(b) for h in range(heads)
        ]
    if bug == "first-head":
        blocks = [x[i, :per_head] for i in range(b) for h in range(heads)]
    flat = [block.reshape(per_head, height * width).T for block in blocks]
    return np.stack(flat) if flat else np.zeros((0, height * width, per_head), x.dtype)


def attention(qkv, num_heads, *, softmax_scale=None, bug=None):
    b, channels, height, width = qkv.shape
    x = _heads(qkv, num_heads, bug)
    kd = x.shape[2] // 4
    q, k, v = x[:, :, :kd], x[:, :, kd : 2 * kd], x[:, :, 2 * kd :]
    if bug == "k-q":
        k, q = q, k
    elif bug == "v-before-k":
        q, v, k = x[:, :, :kd], x[:, :, kd : 3 * kd], x[:, :, 3 * kd :]
    elif bug == "lo-hi":
        v = np.concatenate((v[:, :, kd:], v[:, :, :kd]), axis=2)
    elif bug == "lo-twice":
        v = np.concatenate((v[:, :, :kd], v[:, :, :kd]), axis=2)
    if bug == "head-dim-scale":
        softmax_scale = (2 * kd) ** -0.5 if softmax_scale is None else softmax_scale
    o, _ = flash(q, k, v, softmax_scale, bug=bug)
    if bug == "not-back":
        return o.reshape(b, channels // 2, height, width)
    out = np.zeros((b, channels // 2, height, width), qkv.dtype)
    for i in range(len(o)):
        image, h = divmod(i, num_heads)
        if bug == "batch-head":
            h, image = divmod(i, b)
        block = o[i].T.reshape(2 * kd, height, width)
        if bug == "transposed":
            block = o[i].T.reshape(2 * kd, width, height).swapaxes(1, 2)
        out[image, h * 2 * kd : (h + 1) * 2 * kd] = block
    return out


def attention_backward(qkv, d_out, num_heads, *, softmax_scale=None, bug=None):
    height, width = qkv.shape[2:]
    x, do = _wide(_heads(qkv, num_heads, bug), _heads(d_out, num_heads, None))
    kd = x.shape[2] // 4
    q, k, v = x[:, :, :kd], x[:, :, kd : 2 * kd], x[:, :, 2 * kd :]
    scale = (2 * kd) ** -0.5 if bug == "head-dim-scale" and softmax_scale is None else _default(softmax_scale, kd)
    o, l = flash(q, k, v, scale)
    dq, dk, dv = gradients(q, k, v, o, do, l, scale, bug=bug)
    if bug == "lo-only":
        dq, dk, _ = gradients(q, k, v[:, :, :kd], o[:, :, :kd], do[:, :, :kd], l, scale)
    elif bug == "dq-hi-only":
        dq, _, _ = gradients(q, k, v[:, :, kd:], o[:, :, kd:], do[:, :, kd:], l, scale)
    elif bug == "dk-dq":
        dq, dk = dk, dq
    elif bug == "dv-lo-hi":
        dv = np.roll(dv, kd, axis=2)
    d_qkv = np.zeros(qkv.shape, qkv.dtype)
    for i, parts in enumerate(zip(dq, dk, dv, strict=True)):
        image, h = divmod(i, num_heads)
        block = np.concatenate(parts, axis=1).T.reshape(4 * kd, height, width)
        if bug == "section-major":
            for s in range(4):
                d_qkv[image, (s * num_heads + h) * kd :][:kd] = block[s * kd : (s + 1) * kd]
        else:
            d_qkv[image, h * 4 * kd : (h + 1) * 4 * kd] = block
    return d_qkv


_ATTENTION = {
    ("flash_attention2_forward", flash): {
        "no-scale": "scale-missing",
        "scale-twice": "scale-twice",
        "default-scale": "scale-ignored",
        "exp2": "exp-base",
        "over-queries": "softmax-over-queries",
        "no-max": "no-max-subtraction",
        "max-from-zero": "no-max-subtraction",
        "lse-log2": "lse-log2",
        "lse-unscaled": "lse-unscaled",
        "lse-no-max": "lse-without-max",
        "lse-max": "lse-is-max",
        "causal": "causal",
        "skips-last-key": "key-loop-off-by-one",
        "key-tail": "tail-missing",
        "key-tail-repeated": "tail-repeated",
        "query-tail": "tail-missing",
        "padded": "padded-keys",
        "no-rescale": "no-rescale",
        "no-rescale-l": "no-rescale",
        "unnormalised": "unnormalised",
        "nan-row": "masked-row",
        "half-sums": "half-accumulation",
        "p-in-half": "half-precision",
    },
    ("flash_attention2_backward_dq", backward_dq): {
        "no-scale": "gradient-without-scale",
        "no-delta": "delta-missing",
        "plus-delta": "delta-sign",
        "lse-log2": "lse-log2",
        "skips-last-key": "key-loop-off-by-one",
        "p-unscaled": "scale-missing",
        "first-head": "first-head-copied",
    },
    ("flash_attention2_backward_dkv", backward_dkv): {
        "no-scale-dk": "gradient-without-scale",
        "dv-from-ds": "ds-for-p",
        "dk-untransposed": "not-transposed",
        "swapped": "outputs-swapped",
        "query-block": "last-block-only",
        "query-tail": "tail-missing",
        "causal": "causal",
        "p-in-half": "half-precision",
    },
    ("psa_fa2_backward", fa2_backward): {
        "stores-dq": "stored-instead-of-added",
        "stores-all": "stored-instead-of-added",
        "adds-dv": "added-instead-of-stored",
        "forgets-dk": "not-written",
        "no-delta": "delta-missing",
        "no-scale-dq": "gradient-without-scale",
        "scale-twice": "gradient-scale-twice",
    },
    ("psa_attention", attention): {
        "head-dim-scale": "scale-of-head-dim",
        "no-scale": "scale-missing",
        "section-major": "section-major",
        "k-q": "section-order",
        "v-before-k": "section-order",
        "lo-hi": "lo-hi-swapped",
        "lo-twice": "one-half-for-both",
        "first-head": "first-head-copied",
        "batch-head": "batch-head-swapped",
        "transposed": "spatial-transpose",
        "not-back": "token-width-transposed",
        "over-queries": "softmax-over-queries",
        "query-tail": "tail-missing",
        "padded": "padded-keys",
    },
    ("psa_attention_backward", attention_backward): {
        "lo-only": "one-half-gradient",
        "dq-hi-only": "one-half-gradient",
        "no-scale": "gradient-without-scale",
        "head-dim-scale": "scale-of-head-dim",
        "section-major": "section-major",
        "dk-dq": "section-order",
        "dv-lo-hi": "lo-hi-swapped",
        "no-delta": "delta-missing",
    },
}


def _quiet(function, bug):
    def run(*args, **keywords):
        with np.errstate(all="ignore"):
            return function(*args, **keywords, bug=bug)

    return run


MUTANTS: tuple[Mutant, ...] = LAYOUT_MUTANTS + tuple(
    Mutant(f"{op}/{bug}", op, cause, _quiet(function, bug))
    for (op, function), bugs in _ATTENTION.items()
    for bug, cause in bugs.items()
)
"""Every planted bug."""
