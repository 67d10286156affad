"""Ports to fuzz in tests: a right one, and one for each finding that is not about values."""

from __future__ import annotations

import os
import sys
import time

import numpy as np

from numba_psa import oracle

_buffers: dict[tuple[int, ...], np.ndarray] = {}
_calls = 0


def right(qkv, num_heads):
    print("a port may print")
    return oracle.psa_pack_qkv(qkv, num_heads)


def wrong(qkv, num_heads):
    return oracle.psa_pack_qkv(qkv, num_heads)[[0, 1, 3, 2]]


def right_or_no_odd_key_dim(qkv, num_heads):
    if qkv.shape[1] // (4 * num_heads) % 2:
        raise NotImplementedError("odd KEY_DIM")
    return oracle.psa_pack_qkv(qkv, num_heads)


def raises(qkv, num_heads):
    raise KeyError("nothing here")


def hangs(qkv, num_heads):
    time.sleep(600)


def crashes(qkv, num_heads):
    print("last words", file=sys.stderr, flush=True)
    os.abort()


def wrong_shape(qkv, num_heads):
    return oracle.psa_pack_qkv(qkv, num_heads)[None]


def wrong_dtype(qkv, num_heads):
    return oracle.psa_pack_qkv(qkv, num_heads, dtype=np.float64)


def wrong_count(qkv, num_heads):
    return oracle.psa_pack_qkv(qkv, num_heads), qkv


def returns_none(qkv, num_heads):
    return None


def modifies_inputs(qkv, num_heads):
    result = oracle.psa_pack_qkv(qkv, num_heads)
    qkv[...] = 0
    return result


def rounds_at_random(q, k, v, softmax_scale=None):
    """Within the budget, but in another last place at every second call, as sums by atomics are."""
    global _calls
    _calls += 1
    o, l = oracle.flash_attention2_forward(q, k, v, softmax_scale)
    return (np.nextafter(o, o + 1) if _calls % 2 else o), l


def stale(d_v, num_heads, *, d_qkv=None):
    result = oracle.psa_extract_v_backward(d_v, num_heads, d_qkv=d_qkv)
    if d_qkv is not None:
        return result
    total = _buffers.setdefault(result.shape, np.zeros_like(result))
    total += result
    return total.copy()
