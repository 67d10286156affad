"""Correct implementations that differ from the oracle in every way a port may: what the fuzzer must not complain about.

Each `Variant` is a namespace with the twelve functions of the contract, in NumPy, in the precision a kernel accumulates in.
They share no arithmetic with the oracle: other algorithms, other orders of summation, other index arithmetic.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from numba_psa.numerics import LOG2E, accumulator_dtype

Head = tuple[np.ndarray, ...]


def _slices(n: int, size: int) -> Iterator[slice]:
    return (slice(first, min(first + size, n)) for first in range(0, n, size))


def _finish(acc: np.ndarray, total: np.ndarray, m: np.ndarray) -> Head:
    empty = total == 0
    o = np.where(empty[:, None], 0, acc / total[:, None])
    return o, np.where(empty, -np.inf, m + np.log(total))


# ---- forwards of one head: q [n_q, D], k [n_k, D], v [n_k, Dv], all in the compute dtype -----------------------------
def two_pass(q, k, v, scale) -> Head:
    s = scale * np.dot(q, k.T)
    m = np.max(s, axis=1, initial=-np.inf)
    p = np.exp(s - np.where(np.isneginf(m), 0, m)[:, None])
    return _finish(np.dot(p, v), p.sum(axis=1), m)


def normalise_first(q, k, v, scale) -> Head:
    """P is divided by its sum before it meets v, and the scale goes into q."""
    s = (q * scale) @ k.T
    m = np.max(s, axis=1, initial=-np.inf)
    p = np.exp(s - np.where(np.isneginf(m), 0, m)[:, None])
    total = p.sum(axis=1)
    with_any = np.where(total == 0, 1, total)
    o = np.where((total == 0)[:, None], 0, (p / with_any[:, None]) @ v)
    return o, np.where(total == 0, -np.inf, m + np.log(with_any))


def einsum(q, k, v, scale) -> Head:
    s = np.einsum("id,jd->ij", q, k) * scale
    m = np.max(s, axis=1, initial=-np.inf)
    p = np.exp(s - np.where(np.isneginf(m), 0, m)[:, None])
    return _finish(np.einsum("ij,je->ie", p, v), np.einsum("ij->i", p), m)


def _online(q, k, v, scale, blocks, exp=np.exp) -> Head:
    """(acc, total, m) after the key blocks, rescaled whenever the maximum grows."""
    m, total = np.full(len(q), -np.inf, q.dtype), np.zeros(len(q), q.dtype)
    acc = np.zeros((len(q), v.shape[1]), q.dtype)
    for block in blocks:
        s = (q @ k[block].T) * scale
        new = np.maximum(m, s.max(axis=1))
        shift = np.where(np.isneginf(new), 0, new)
        p, alpha = exp(s - shift[:, None]), np.where(np.isneginf(m), 0, exp(m - shift))
        total, acc, m = alpha * total + p.sum(axis=1), alpha[:, None] * acc + p @ v[block], new
    return acc, total, m


def blocked(q, k, v, scale) -> Head:
    return _finish(*_online(q, k, v, scale, _slices(len(k), 16)))


def reversed_keys(q, k, v, scale) -> Head:
    return _finish(*_online(q, k, v, scale, [slice(j, j + 1) for j in reversed(range(len(k)))]))


def split_keys(q, k, v, scale) -> Head:
    """Three parts of the keys on their own, merged by their log-sum-exps."""
    parts = [
        _online(q, k[part], v[part], scale, _slices(part.stop - part.start, 8))
        for part in _slices(len(k), -(-len(k) // 3) or 1)
    ]
    m = np.max([part[2] for part in parts], axis=0, initial=-np.inf) if parts else np.full(len(q), -np.inf, q.dtype)
    acc, total = np.zeros((len(q), v.shape[1]), q.dtype), np.zeros(len(q), q.dtype)
    for part_acc, part_total, part_m in parts:
        weight = np.where(np.isneginf(part_m), 0, np.exp(part_m - np.where(np.isneginf(m), 0, m)))
        acc, total = acc + weight[:, None] * part_acc, total + weight * part_total
    return _finish(acc, total, np.where(np.isneginf(m), -np.inf, m).astype(q.dtype))


def log2_domain(q, k, v, scale) -> Head:
    """exp2 of scores scaled by log2(e), as GPU kernels do it."""
    acc, total, m = _online(q, k, v, q.dtype.type(scale * LOG2E), _slices(len(k), 32), np.exp2)
    empty = total == 0
    o = np.where(empty[:, None], 0, acc / total[:, None])
    return o, np.where(empty, -np.inf, (m + np.log2(total)) / q.dtype.type(LOG2E))


def outer_products(q, k, v, scale) -> Head:
    """Sums over d one product at a time; P·v as a sum of outer products."""
    s = np.zeros((len(q), len(k)), q.dtype)
    for d in range(q.shape[1]):
        s += np.multiply.outer(q[:, d], k[:, d])
    s *= scale
    m = np.max(s, axis=1, initial=-np.inf)
    p = np.exp(s - np.where(np.isneginf(m), 0, m)[:, None])
    acc = np.zeros((len(q), v.shape[1]), q.dtype)
    for j in range(len(k)):
        acc += np.multiply.outer(p[:, j], v[j])
    return _finish(acc, np.cumsum(p, axis=1)[:, -1] if len(k) else p.sum(axis=1), m)


# ---- backwards of one head -------------------------------------------------------------------------------------------
def _live(q, o, do, l) -> Head:
    """Everything of a row that attends to nothing is 0, so that no 0·inf arises."""
    dead = np.isneginf(l)
    return (*(np.where(dead[:, None], 0, x) for x in (q, o, do)), dead)


def direct(q, k, v, o, do, l, scale) -> Head:
    q, o, do, dead = _live(q, o, do, l)
    p = np.where(dead[:, None], 0, np.exp(np.dot(q, k.T) * scale - l[:, None]))
    ds = p * (np.dot(do, v.T) - (o * do).sum(axis=1)[:, None])
    ds = np.where(dead[:, None], 0, ds)
    return np.where(dead[:, None], 0, np.dot(ds, k) * scale), np.dot(ds.T, q) * scale, np.dot(p.T, do)


def by_key_block(q, k, v, o, do, l, scale) -> Head:
    """One block of keys at a time; the scale goes into dS."""
    q, o, do, dead = _live(q, o, do, l)
    delta = np.einsum("ie,ie->i", do, o)
    dq, dk, dv = np.zeros_like(q), np.zeros_like(k), np.zeros_like(v)
    for block in _slices(len(k), 16):
        p = np.where(dead[:, None], 0, np.exp(scale * (q @ k[block].T) - l[:, None]))
        ds = np.where(dead[:, None], 0, p * (do @ v[block].T - delta[:, None])) * scale
        dq += np.where(dead[:, None], 0, ds @ k[block])
        dk[block], dv[block] = ds.T @ q, p.T @ do
    return dq, dk, dv


def by_query(q, k, v, o, do, l, scale) -> Head:
    """One query at a time, last first; the scale goes into q and k."""
    dq, dk, dv = np.zeros_like(q), np.zeros_like(k), np.zeros_like(v)
    for i in reversed(range(len(q))):
        if np.isneginf(l[i]):
            continue
        p = np.exp(k @ (q[i] * scale) - l[i])
        ds = p * (v @ do[i] - np.dot(o[i], do[i]))
        dq[i] = ds @ (k * scale)
        dk += np.outer(ds, q[i] * scale)
        dv += np.outer(p, do[i])
    return dq, dk, dv


def log2_backward(q, k, v, o, do, l, scale) -> Head:
    """P = exp2(s·log2e − l·log2e); dP − delta as one product with o appended to v."""
    q, o, do, dead = _live(q, o, do, l)
    log2e = q.dtype.type(LOG2E)
    p = np.where(dead[:, None], 0, np.exp2((q @ k.T) * (scale * log2e) - (np.where(dead, 0, l) * log2e)[:, None]))
    ds = np.where(dead[:, None], 0, p * np.einsum("ije,ie->ij", v[None] - o[:, None], do))
    return np.where(dead[:, None], 0, scale * (ds @ k)), scale * np.einsum("ij,id->jd", ds, q), np.einsum("ij,ie->je", p, do)


# ---- layouts: lists of (section, d) channel indices, or reshapes ------------------------------------------------------
def channels_by_formula(heads: int, sections: int, kd: int) -> np.ndarray:
    """Channel of [section, h, d]."""
    section, h, d = np.ogrid[:sections, :heads, :kd]
    return (h * sections + section) * kd + d


def channels_by_counting(heads: int, sections: int, kd: int) -> np.ndarray:
    out = np.empty((sections, heads, kd), int)
    channel = 0
    for h in range(heads):
        for section in range(sections):
            for d in range(kd):
                out[section, h, d], channel = channel, channel + 1
    return out


@dataclass(frozen=True)
class Variant:
    """One correct implementation: how it attends, how it differentiates, how it finds channels."""

    name: str
    forward: Callable[..., Head]
    backward: Callable[..., Head]
    channels: Callable[[int, int, int], np.ndarray] = channels_by_formula
    compute: Any = None
    """The dtype of its arithmetic; left out, what a kernel accumulates in."""

    def _compute(self, dtype: np.dtype) -> np.dtype:
        return np.dtype(self.compute) if self.compute and dtype != np.float64 else accumulator_dtype(dtype)

    # ---- flash ----
    def flash_attention2_forward(self, q, k, v, softmax_scale=None):
        compute = self._compute(q.dtype)
        scale = compute.type(q.shape[2] ** -0.5 if softmax_scale is None else softmax_scale)
        o = np.zeros((*q.shape[:2], v.shape[2]), q.dtype)
        l = np.zeros(q.shape[:2], accumulator_dtype(q.dtype))
        with np.errstate(all="ignore"):
            for bh in range(len(q)):
                o[bh], l[bh] = self.forward(*(x[bh].astype(compute) for x in (q, k, v)), scale)
        return o, l

    def _gradients(self, arrays, softmax_scale):
        q = arrays[0]
        compute = self._compute(q.dtype)
        scale = compute.type(q.shape[2] ** -0.5 if softmax_scale is None else softmax_scale)
        outputs = tuple(np.zeros(x.shape, compute) for x in arrays[:3])
        with np.errstate(all="ignore"):
            for bh in range(len(q)):
                for out, x in zip(outputs, self.backward(*(x[bh].astype(compute) for x in arrays), scale), strict=True):
                    out[bh] = x
        return outputs

    def flash_attention2_backward_dq(self, q, k, v, o, do, l, softmax_scale=None):
        with np.errstate(all="ignore"):
            return self._gradients((q, k, v, o, do, l), softmax_scale)[0].astype(q.dtype)

    def flash_attention2_backward_dkv(self, q, k, v, o, do, l, softmax_scale=None):
        with np.errstate(all="ignore"):
            return tuple(x.astype(q.dtype) for x in self._gradients((q, k, v, o, do, l), softmax_scale)[1:])

    def psa_fa2_backward(self, q, k, v, o, do, l, softmax_scale=None, *, dq=None, dk=None, dv=None):
        gradients = self._gradients((q, k, v, o, do, l), softmax_scale)
        with np.errstate(all="ignore"):
            dq, dk = (x.astype(q.dtype) if t is None else _add(t, x) for t, x in zip((dq, dk), gradients, strict=False))
            stored = gradients[2].astype(q.dtype)
        if dv is not None:
            dv[:] = stored
        return dq, dk, stored

    # ---- layouts ----
    def psa_pack_qkv(self, qkv, num_heads):
        b, channels, height, width = qkv.shape
        index = self.channels(num_heads, 4, channels // (4 * num_heads))
        picked = qkv[:, index].transpose(1, 0, 2, 4, 5, 3)
        return np.ascontiguousarray(picked).reshape(4, b * num_heads, height * width, index.shape[2])

    def psa_extract_v_nchw(self, qkv, num_heads):
        index = self.channels(num_heads, 4, qkv.shape[1] // (4 * num_heads))
        return qkv[:, index[2:].swapaxes(0, 1).ravel()]

    def psa_merge_attn_nchw(self, lo, hi, num_heads, height, width):
        bh, _, kd = lo.shape
        out = np.zeros((bh // num_heads, 2 * num_heads * kd, height, width), lo.dtype)
        index = self.channels(num_heads, 2, kd)
        for i in range(bh):
            b, h = divmod(i, num_heads)
            for half, section in enumerate((lo, hi)):
                out[b, index[half, h]] = section[i].T.reshape(kd, height, width)
        return out

    def psa_pack_qkv_backward(self, d_packed, num_heads, height, width, *, d_qkv=None):
        _, bh, _, kd = d_packed.shape
        index = self.channels(num_heads, 4, kd)
        moved = np.zeros((bh // num_heads, 4 * num_heads * kd, height, width), d_packed.dtype)
        for i in range(bh):
            b, h = divmod(i, num_heads)
            for section in range(4):
                moved[b, index[section, h]] = d_packed[section, i].T.reshape(kd, height, width)
        return moved if d_qkv is None else _add(d_qkv, moved)

    def psa_extract_v_backward(self, d_v, num_heads, *, d_qkv=None):
        b, c, height, width = d_v.shape
        moved = np.zeros((b, 2 * c, height, width), d_v.dtype)
        moved[:, self.channels(num_heads, 4, c // (2 * num_heads))[2:].swapaxes(0, 1).ravel()] = d_v
        return moved if d_qkv is None else _add(d_qkv, moved)

    def psa_merge_attn_backward(self, d_merged, num_heads):
        b, c, height, width = d_merged.shape
        index = self.channels(num_heads, 2, c // (2 * num_heads))
        halves = d_merged[:, index].transpose(1, 0, 2, 4, 5, 3).reshape(2, b * num_heads, height * width, index.shape[2])
        return halves[0].copy(), halves[1].copy()

    # ---- the whole ----
    def psa_attention(self, qkv, num_heads, *, softmax_scale=None):
        q, k, lo, hi = self.psa_pack_qkv(qkv, num_heads)
        halves = [self.flash_attention2_forward(q, k, v, softmax_scale)[0] for v in (lo, hi)]
        return self.psa_merge_attn_nchw(*halves, num_heads, *qkv.shape[2:])

    def psa_attention_backward(self, qkv, d_out, num_heads, *, softmax_scale=None):
        compute = self._compute(qkv.dtype)
        q, k, lo, hi = self.psa_pack_qkv(qkv.astype(compute), num_heads)
        v, do = (
            np.concatenate((lo, hi), 2),
            np.concatenate(self.psa_merge_attn_backward(d_out.astype(compute), num_heads), 2),
        )
        o, l = self.flash_attention2_forward(q, k, v, softmax_scale)
        dq, dk, dv = self._gradients((q, k, v, o, do, l), softmax_scale)
        packed = np.stack((dq, dk, *np.split(dv, 2, axis=2)))
        with np.errstate(all="ignore"):
            return self.psa_pack_qkv_backward(packed, num_heads, *qkv.shape[2:]).astype(qkv.dtype)


def _add(target: np.ndarray, gradient: np.ndarray) -> np.ndarray:
    with np.errstate(all="ignore"):
        target[...] = (target.astype(accumulator_dtype(target.dtype)) + gradient).astype(target.dtype)
    return target


VARIANTS = (
    Variant("two-pass", two_pass, direct),
    Variant("normalise-first", normalise_first, by_key_block, channels_by_counting),
    Variant("einsum", einsum, log2_backward),
    Variant("blocked", blocked, by_key_block),
    Variant("reversed-keys", reversed_keys, by_query, channels_by_counting),
    Variant("split-keys", split_keys, direct, channels_by_counting),
    Variant("log2-domain", log2_domain, log2_backward),
    Variant("outer-products", outer_products, by_query),
    Variant("float64", two_pass, direct, compute=np.float64),
)
"""float16 and bfloat16 cases accumulate in float32 in all of them but the last."""
