"""Planted porting bugs: what the fuzzer must find, and the diagnosis that must come first.

Written as a port is, not as the oracle or the hypotheses are: flat offsets for the layout kernels (here), einsum and key
loops for attention (`mutants_attention`). So a right diagnosis is found in the data, not in shared code.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np


@dataclass(frozen=True)
class Mutant:
    """A wrong implementation of `op`. `cause` is the right top diagnosis, or None if the cause has no name."""

    name: str
    op: str
    cause: str | None
    function: Callable[..., Any]


# ---- layout kernels: every element moves from one flat offset to another ----------------------------------------------
def _grid(b, heads, sections, kd, height, width) -> SimpleNamespace:
    g = SimpleNamespace(B=b, heads=heads, S=sections, kd=kd, H=height, W=width, N=height * width)
    g.b, g.h, g.s, g.n, g.d = np.ogrid[:b, :heads, :sections, : g.N, :kd]
    return g


def _nchw(g, b, h, s, n, d, sections):
    """Offset in [B, heads*sections*kd, H, W]."""
    return ((b * g.heads + h) * sections * g.kd + s * g.kd + d) * g.N + n


def _rows(g, s, b, h, n, d):
    """Offset in [S, B*heads, N, kd]."""
    return ((s * g.B * g.heads + b * g.heads + h) * g.N + n) * g.kd + d


def _move(
    source: np.ndarray, read: np.ndarray, out: np.ndarray, write: np.ndarray, add: bool = False, keep=True
) -> np.ndarray:
    """out[write] = source[read], both flat; offsets that run out of the array wrap around, as nothing checks them."""
    shape = np.broadcast_shapes(read.shape, write.shape, np.shape(keep))
    keep = np.broadcast_to(keep, shape).ravel()
    read, write = (np.broadcast_to(x, shape).ravel()[keep] for x in (read, write))
    if source.size and out.size:
        values = source.ravel()[read % source.size]
        flat = out.reshape(-1)
        with np.errstate(all="ignore"):
            flat[write % out.size] = flat[write % out.size] + values if add else values
    return out


def _tile_tail(g, tile):
    return g.n < g.N // tile * tile


def pack(qkv, num_heads, bug):
    b, channels, height, width = qkv.shape
    g = _grid(b, num_heads, 4, channels // (4 * num_heads), height, width)
    h, s, n, d = g.h, g.s, g.n, g.d
    read, write, keep = _nchw(g, g.b, h, s, n, d, 4), _rows(g, s, g.b, h, n, d), True
    y, x = np.divmod(n, max(width, 1))
    match bug:
        case "lo-hi":
            write = _rows(g, np.where(s < 2, s, 5 - s), g.b, h, n, d)
        case "q-k":
            write = _rows(g, np.where(s < 2, 1 - s, s), g.b, h, n, d)
        case "v-first":
            read = _nchw(g, g.b, h, (s + 2) % 4, n, d, 4)
        case "section-major":
            read = (g.b * channels + (s * num_heads + h) * g.kd + d) * g.N + n
        case "packed-by-head":
            write = (((g.b * num_heads + h) * 4 + s) * g.N + n) * g.kd + d
        case "batch-head":
            write = ((s * b * num_heads + h * b + g.b) * g.N + n) * g.kd + d
        case "transposed":
            read = _nchw(g, g.b, h, s, (n % max(height, 1)) * width + n // max(height, 1), d, 4)
        case "pitch":
            read = _nchw(g, g.b, h, s, (y * height + x) % max(g.N, 1), d, 4)
        case "width-first":
            write = ((s * b * num_heads + g.b * num_heads + h) * g.kd + d) * g.N + n
        case "head-stride":
            read = (g.b * channels + (h * 3 + s) * g.kd + d) * g.N + n
        case "interleaved":
            read = (g.b * channels + h * 4 * g.kd + d * 4 + s) * g.N + n
        case "tail":
            keep = _tile_tail(g, 16)
        case "vector-tail":
            keep = d < g.kd // 4 * 4
        case "first-head":
            read = _nchw(g, g.b, h * 0, s, n, d, 4)
        case "first-image":
            keep = g.b == 0
        case "nan-to-zero":
            qkv = np.where(np.isnan(qkv), 0, qkv).astype(qkv.dtype)
        case "flush":
            qkv = np.where(np.abs(qkv) < np.finfo(np.float32).tiny, 0, qkv).astype(qkv.dtype)
        case "ignores-strides":
            memory = qkv if qkv.flags.c_contiguous else qkv.base
            qkv = np.resize(memory.ravel(), qkv.shape)
    return _move(qkv, read, np.zeros((4, b * num_heads, g.N, g.kd), qkv.dtype), write, keep=keep)


def extract(qkv, num_heads, bug):
    b, channels, height, width = qkv.shape
    g = _grid(b, num_heads, 2, channels // (4 * num_heads), height, width)
    read = _nchw(g, g.b, g.h, g.s + 2, g.n, g.d, 4)
    write = _nchw(g, g.b, g.h, g.s, g.n, g.d, 2)
    match bug:
        case "one-early":
            read = _nchw(g, g.b, g.h, g.s + 1, g.n, g.d, 4)
        case "section-major":
            read = (g.b * channels + ((g.s + 2) * num_heads + g.h) * g.kd + g.d) * g.N + g.n
        case "lo-hi":
            read = _nchw(g, g.b, g.h, 3 - g.s, g.n, g.d, 4)
        case "head-stride":
            read = (g.b * channels + (g.h * 2 + g.s + 2) * g.kd + g.d) * g.N + g.n
        case "first-image":
            read = _nchw(g, g.b * 0, g.h, g.s + 2, g.n, g.d, 4)
    return _move(qkv, read, np.zeros((b, channels // 2, height, width), qkv.dtype), write)


def merge(lo, hi, num_heads, height, width, bug):
    bh, _, kd = lo.shape
    b = bh // num_heads
    g = _grid(b, num_heads, 2, kd, height, width)
    both = np.stack((lo, hi))
    read, write, keep = _rows(g, g.s, g.b, g.h, g.n, g.d), _nchw(g, g.b, g.h, g.s, g.n, g.d, 2), True
    match bug:
        case "lo-hi":
            read = _rows(g, 1 - g.s, g.b, g.h, g.n, g.d)
        case "lo-twice":
            read = _rows(g, 0 * g.s, g.b, g.h, g.n, g.d)
        case "batch-head":
            read = ((g.s * bh + g.h * b + g.b) * g.N + g.n) * kd + g.d
        case "transposed":
            write = _nchw(g, g.b, g.h, g.s, (g.n % max(width, 1)) * height + g.n // max(width, 1), g.d, 2)
        case "tail":
            keep = _tile_tail(g, 8)
        case "halves-outermost":
            write = ((g.b * 2 + g.s) * num_heads * kd + g.h * kd + g.d) * g.N + g.n
    return _move(both, read, np.zeros((b, 2 * num_heads * kd, height, width), lo.dtype), write, keep=keep)


def pack_backward(d_packed, num_heads, height, width, bug, *, d_qkv=None):
    _, bh, _, kd = d_packed.shape
    b = bh // num_heads
    g = _grid(b, num_heads, 4, kd, height, width)
    out = np.zeros((b, 4 * num_heads * kd, height, width), d_packed.dtype) if d_qkv is None else d_qkv.copy()
    s = g.s
    read = _rows(g, s, g.b, g.h, g.n, g.d)
    write = _nchw(g, g.b, g.h, s, g.n, g.d, 4)
    match bug:
        case "v-first":
            write = _nchw(g, g.b, g.h, (s + 2) % 4, g.n, g.d, 4)
        case "width-first":
            read = ((s * bh + g.b * num_heads + g.h) * kd + g.d) * g.N + g.n
        case "batch-head":
            read = ((s * bh + g.h * b + g.b) * g.N + g.n) * kd + g.d
        case "pitch":
            y, x = np.divmod(g.n, max(width, 1))
            read = _rows(g, s, g.b, g.h, (y * height + x) % max(g.N, 1), g.d)
    return _move(d_packed, read, out, write, add=bug != "stores")


def extract_backward(d_v, num_heads, bug, *, d_qkv=None):
    b, c, height, width = d_v.shape
    kd = c // (2 * num_heads)
    g = _grid(b, num_heads, 2, kd, height, width)
    out = np.zeros((b, 2 * c, height, width), d_v.dtype) if d_qkv is None else d_qkv.copy()
    read = _nchw(g, g.b, g.h, g.s, g.n, g.d, 2)
    write = _nchw(g, g.b, g.h, g.s + 2, g.n, g.d, 4)
    match bug:
        case "into-q-k":
            write = _nchw(g, g.b, g.h, g.s, g.n, g.d, 4)
        case "lo-hi":
            write = _nchw(g, g.b, g.h, 3 - g.s, g.n, g.d, 4)
        case "clears-q-k":
            out.reshape(b, num_heads, 4, -1)[:, :, :2] = 0
        case "section-major":
            write = (g.b * 2 * c + ((g.s + 2) * num_heads + g.h) * kd + g.d) * g.N + g.n
        case "replaces":
            out[...] = 0
    return _move(d_v, read, out, write, add=True)


def merge_backward(d_merged, num_heads, bug):
    b, c, height, width = d_merged.shape
    kd = c // (2 * num_heads)
    g = _grid(b, num_heads, 2, kd, height, width)
    read, write = _nchw(g, g.b, g.h, g.s, g.n, g.d, 2), _rows(g, g.s, g.b, g.h, g.n, g.d)
    keep = True
    match bug:
        case "lo-hi":
            write = _rows(g, 1 - g.s, g.b, g.h, g.n, g.d)
        case "halves-outermost":
            read = (g.b * c + (g.s * num_heads + g.h) * kd + g.d) * g.N + g.n
        case "transposed":
            read = _nchw(g, g.b, g.h, g.s, (g.n % max(height, 1)) * width + g.n // max(height, 1), g.d, 2)
        case "one-head":
            keep = g.h == 0
    out = _move(d_merged, read, np.zeros((2, b * num_heads, g.N, kd), d_merged.dtype), write, keep=keep)
    return out[0], out[1]


_LAYOUT = {
    ("psa_pack_qkv", pack): {
        "lo-hi": "lo-hi-swapped",
        "q-k": "section-order",
        "v-first": "section-order",
        "section-major": "section-major",
        "packed-by-head": "section-major",
        "batch-head": "batch-head-swapped",
        "transposed": "spatial-transpose",
        "pitch": "row-pitch",
        "width-first": "token-width-transposed",
        "head-stride": "key-dim-stride",
        "interleaved": "key-dim-stride",
        "tail": "tail-missing",
        "vector-tail": "tail-missing",
        "first-head": "first-head-copied",
        "first-image": "batches-missing",
        "nan-to-zero": None,
        "flush": None,
        "ignores-strides": None,
    },
    ("psa_extract_v_nchw", extract): {
        "one-early": "section-order",
        "section-major": "section-major",
        "lo-hi": "lo-hi-swapped",
        "head-stride": "key-dim-stride",
        "first-image": "first-batch-copied",
    },
    ("psa_merge_attn_nchw", merge): {
        "lo-hi": "lo-hi-swapped",
        "lo-twice": "one-half-for-both",
        "batch-head": "batch-head-swapped",
        "transposed": "spatial-transpose",
        "tail": "tail-missing",
        "halves-outermost": "section-major",
    },
    ("psa_pack_qkv_backward", pack_backward): {
        "v-first": "section-order",
        "width-first": "token-width-transposed",
        "batch-head": "batch-head-swapped",
        "pitch": "row-pitch",
        "stores": "stored-instead-of-added",
    },
    ("psa_extract_v_backward", extract_backward): {
        "into-q-k": "section-order",
        "lo-hi": "lo-hi-swapped",
        "clears-q-k": "target-cleared",
        "section-major": "section-major",
        "replaces": "stored-instead-of-added",
    },
    ("psa_merge_attn_backward", merge_backward): {
        "lo-hi": "lo-hi-swapped",
        "halves-outermost": "section-major",
        "transposed": "spatial-transpose",
        "one-head": "heads-missing",
    },
}

LAYOUT_MUTANTS: tuple[Mutant, ...] = tuple(
    Mutant(f"{op}/{bug}", op, cause, partial(function, bug=bug))
    for (op, function), bugs in _LAYOUT.items()
    for bug, cause in bugs.items()
)
