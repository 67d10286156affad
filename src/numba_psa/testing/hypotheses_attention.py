"""Predictions for mistakes in the arithmetic of attention: see `hypotheses`.

All work on q, k, v (and o, do, l) of every bh, in the precision of a kernel: a mistake overflows here where it overflows in
a port. The whole operations are split into those and put together again.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import ml_dtypes
import numpy as np

from numba_psa.numerics import LOG2E, accumulator_dtype
from numba_psa.shapes import V_LO, K, PSAShape, Q
from numba_psa.testing.case import Case
from numba_psa.testing.hypotheses import (
    INDEX_MAPS,
    TILES,
    Outputs,
    Prediction,
    adjoint,
    canonical,
    decode,
    subsets,
    to_nchw,
    to_sections,
    with_targets,
)


@dataclass(frozen=True)
class Heads:
    """The inputs of one operation by head, `[BH, n, D]`, and its scale."""

    q: np.ndarray
    k: np.ndarray
    v: np.ndarray
    scale: float
    o: np.ndarray | None = None
    do: np.ndarray | None = None
    l: np.ndarray | None = None

    @property
    def s(self) -> np.ndarray:
        return np.matmul(self.q, self.k.swapaxes(1, 2)) * self.scale


def heads_of(case: Case, x: np.ndarray | None = None) -> Heads:
    """From the arguments; `x` stands in for the canonical qkv of a whole operation."""
    given, compute = case.arguments.get("softmax_scale"), accumulator_dtype(case.dtype)
    scale = case.shape.softmax_scale if given is None else given
    if not isinstance(case.shape, PSAShape):
        return Heads(**{name: case[name].astype(compute) for name in case.operation.arrays}, scale=scale)
    sections = to_sections(decode(case) if x is None else x).astype(compute)
    heads = Heads(sections[Q], sections[K], np.concatenate(list(sections[V_LO:]), axis=2), scale)
    if case.operation.kind == "forward":
        return heads
    do = to_sections(canonical(case["d_out"].astype(compute), case.shape, tokens_first=False))
    o, l = forward(heads)
    return replace(heads, o=o, l=l, do=np.concatenate(list(do), axis=2))


def pack_up(case: Case, results: Outputs) -> Outputs:
    """Outputs of the operation from results by head: o and l, or dq, dk and dv."""
    if not isinstance(case.shape, PSAShape):
        return with_targets(case, {name: results[name] for name in case.operation.outputs})
    parts = [results["o"]] if "o" in results else [results["dq"], results["dk"], results["dv"]]
    halves = [*parts[:-1], *np.split(parts[-1], 2, axis=2)]
    return {case.operation.outputs[0]: to_nchw(canonical(np.stack(halves), case.shape, tokens_first=True))}


# ---- forward ----------------------------------------------------------------------------------------------------------
def forward(x: Heads, s: np.ndarray | None = None, axis: int = -1) -> tuple[np.ndarray, np.ndarray]:
    """(o, l) of scores `s`, with a softmax over `axis`."""
    s = x.s if s is None else s
    m = np.max(s, axis=axis, keepdims=True, initial=-np.inf)
    p = np.exp(s - np.where(np.isneginf(m), 0, m))
    total = p.sum(axis=axis, keepdims=True)
    p = np.where(total == 0, 0, p / total)
    o = np.where(np.isneginf(s).all(-1, keepdims=True), 0, np.matmul(p, x.v))
    return o, np.squeeze(m + np.log(total), axis)


def _keys(x: Heads, index) -> Heads:
    return replace(x, k=x.k[:, index], v=x.v[:, index])


def _causal(x: Heads) -> np.ndarray:
    return np.where(np.tri(x.q.shape[1], x.k.shape[1], dtype=bool), x.s, -np.inf)


def _unshifted(x: Heads, floor: bool) -> tuple[np.ndarray, np.ndarray]:
    """No maximum subtracted or, with `floor`, one that starts at 0."""
    s = x.s
    m = np.maximum(np.max(s, axis=-1, keepdims=True, initial=-np.inf), 0) if floor else np.zeros((), s.dtype)
    p = np.exp(s - m)
    total = p.sum(-1, keepdims=True)
    return np.matmul(p, x.v) / total, np.squeeze(np.log(total) + m, -1)


def _no_rescale(x: Heads, block: int, what: str) -> tuple[np.ndarray, np.ndarray]:
    s, n = x.s, x.k.shape[1]
    shape = s.shape[:2]
    m, total, acc = np.full(shape, -np.inf), np.zeros(shape), np.zeros((*shape, x.v.shape[2]))
    for first in range(0, n, block):
        part = s[..., first : first + block]
        new = np.maximum(m, part.max(-1))
        alpha = np.where(np.isneginf(m), 0.0, np.exp(m - new))
        p = np.exp(part - np.where(np.isneginf(new), 0, new)[..., None])
        acc = acc * (1.0 if "acc" in what else alpha[..., None]) + np.matmul(p, x.v[:, first : first + block])
        total = total * (1.0 if "l_i" in what else alpha) + p.sum(-1)
        m = new
    return np.where((total == 0)[..., None], 0, acc / total[..., None]), m + np.log(total)


def _scales(x: Heads, case: Case) -> Iterator[tuple[str, str, float]]:
    default = case.shape.softmax_scale
    width = x.q.shape[2]
    yield "scale-missing", "", 1.0
    yield "scale-of-head-dim", "", (2 * width) ** -0.5
    yield "scale-of-head-dim", "1/KEY_DIM", 1.0 / width
    yield "scale-twice", "", x.scale**2
    yield "scale-inverted", "", 1.0 / x.scale if x.scale else 0.0
    yield "scale-ignored", "", default
    yield "exp-base", "exp2 without log2(e)", x.scale / LOG2E
    yield "exp-base", "exp with log2(e)", x.scale * LOG2E


def _key_sets(n: int) -> Iterator[tuple[str, str, np.ndarray]]:
    if n:
        yield "key-loop-off-by-one", "the last", np.arange(n - 1)
        yield "key-loop-off-by-one", "the first", np.arange(1, n)
    for tile in TILES:
        whole = n // tile * tile
        if whole < n:
            yield "tail-missing", f"keys in tiles of {tile}", np.arange(whole)
            if n > tile:
                yield "tail-repeated", f"keys in tiles of {tile}", np.r_[:whole, n - tile : n]
                yield "tail-repeated", f"keys in tiles of {tile}", np.r_[:whole, whole - tile : n - tile]
            yield "tail-repeated", "the last key fills the tile" + f" of {tile}", np.r_[:n, [n - 1] * (whole + tile - n)]


def _forward_mistakes(x: Heads, case: Case) -> Iterator[tuple[str, str, tuple[np.ndarray, np.ndarray]]]:
    o, l = forward(x)
    s = x.s
    for cause, detail, scale in _scales(x, case):
        yield cause, detail, forward(replace(x, scale=scale))
    yield "lse-unscaled", "", (o, forward(replace(x, scale=1.0))[1])
    yield "lse-log2", "", (o, l * LOG2E)
    m = np.max(s, axis=-1, initial=-np.inf)
    yield "lse-without-max", "", (o, l - np.where(np.isneginf(m), 0, m))
    yield "lse-is-max", "", (o, m)
    yield "softmax-over-queries", "", (forward(x, s, axis=-2)[0], l)
    if x.q.shape[1] == x.k.shape[1]:
        yield "not-transposed", "P", (np.matmul(np.exp(s - l[..., None]).swapaxes(1, 2), x.v), l)
    yield "causal", "", forward(x, _causal(x))
    yield "no-softmax", "", (np.matmul(s, x.v), l)
    total = np.exp(l - np.where(np.isneginf(m), 0, m))
    yield "unnormalised", "", (o * total[..., None], l)
    for floor in (False, True):
        over, l_over = _unshifted(x, floor)
        detail = "the maximum starts at 0" if floor else ""
        yield "no-max-subtraction", detail, (over, l_over)
        gone = np.isneginf(l_over)
        yield "no-max-subtraction", detail, (np.where(gone[..., None], 0, over), l_over)
    for block in (1, *TILES):
        for what in ("acc", "l_i", "acc and l_i"):
            yield "no-rescale", f"{what}, blocks of {block}", _no_rescale(x, block, what)
    for cause, detail, index in _key_sets(x.k.shape[1]):
        yield cause, detail, forward(_keys(x, index))
    for tile in TILES:
        if extra := -x.k.shape[1] % tile:
            pad = ((0, 0), (0, extra), (0, 0))
            padded = replace(x, k=np.pad(x.k, pad), v=np.pad(x.v, pad))
            yield "padded-keys", f"tiles of {tile}", forward(padded)
    for cause, detail, index in _query_sets(x.q.shape[1]):
        yield cause, detail, tuple(_only_rows(a, index) for a in (o, l))
    masked = np.isneginf(m)
    if masked.any():
        yield "masked-row", "NaN", (np.where(masked[..., None], np.nan, o), np.where(masked, np.nan, l))
        yield "masked-row", "o is NaN", (np.where(masked[..., None], np.nan, o), l)
        mean = np.mean(x.v, axis=1, keepdims=True) if x.v.shape[1] else 0
        yield "masked-row", "o is the mean of v", (np.where(masked[..., None], mean, o), l)
    if not isinstance(case.shape, PSAShape):  # where q, k and v share an array, the order of its sections says it
        for cause, detail, order in _swaps(x):
            yield cause, detail, forward(order)
    yield "first-head-copied", "", tuple(np.broadcast_to(a[:1], a.shape) if len(a) else a for a in (o, l))
    yield (
        "batches-missing",
        "only bh = 0",
        tuple(np.where((np.arange(len(a)) == 0).reshape(-1, *[1] * (a.ndim - 1)), a, 0) for a in (o, l)),
    )
    for name, half in (("float16", np.float16), ("bfloat16", ml_dtypes.bfloat16)):
        rounded = replace(x, **{n: getattr(x, n).astype(half).astype(s.dtype) for n in "qkv"})
        yield "half-precision", f"inputs in {name}", forward(rounded)
        p = np.exp(s - l[..., None]).astype(half).astype(s.dtype)
        yield "half-precision", f"P in {name}", (np.matmul(p, x.v), l)
        shift = np.where(np.isneginf(m), 0, m)[..., None]
        e = np.exp(s - shift).astype(half).astype(s.dtype)
        total = e.sum(-1)
        o_half = np.where((total == 0)[..., None], 0, np.matmul(e, x.v) / total[..., None])
        yield "half-precision", f"P in {name}, before it is divided by its sum", (o_half, m + np.log(total))


def _swaps(x: Heads) -> Iterator[tuple[str, str, Heads]]:
    if x.q.shape == x.k.shape:
        yield "arguments-swapped", "q and k", replace(x, q=x.k, k=x.q)
    if x.k.shape == x.v.shape:
        yield "arguments-swapped", "k and v", replace(x, k=x.v, v=x.k)
    if x.q.shape == x.v.shape == x.k.shape:
        yield "arguments-swapped", "q and v", replace(x, q=x.v, v=x.q)


def _query_sets(n: int) -> Iterator[tuple[str, str, np.ndarray]]:
    if n:
        yield "query-loop-off-by-one", "the last", np.arange(n - 1)
        yield "query-loop-off-by-one", "the first", np.arange(1, n)
    for tile in TILES:
        if n % tile:
            yield "tail-missing", f"queries in tiles of {tile}", np.arange(n // tile * tile)


def _only_rows(a: np.ndarray, index: np.ndarray) -> np.ndarray:
    out = np.zeros_like(a)
    out[:, index] = a[:, index]
    return out


# ---- backward ---------------------------------------------------------------------------------------------------------
def backward(x: Heads, *, p=None, delta=1.0, ds=None, scale=None, s=None, factors=(None, None)) -> Outputs:
    """dq, dk and dv with a step replaced: P, dS, the weight of delta, or the factors of dq and dk, by default the scale."""
    dead = np.isneginf(x.l)[..., None]
    q, o, do = (np.where(dead, 0, a) for a in (x.q, x.o, x.do))
    scale = x.scale if scale is None else scale
    if p is None:
        s = np.matmul(q, x.k.swapaxes(1, 2)) * scale if s is None else s
        p = np.where(dead, 0, np.exp(s - x.l[..., None]))
    if ds is None:
        ds = np.where(dead, 0, p * (np.matmul(do, x.v.swapaxes(1, 2)) - delta * (o * do).sum(-1, keepdims=True)))
    of_dq, of_dk = (scale if factor is None else factor for factor in factors)
    dq = np.where(dead, 0, np.matmul(ds, x.k)) * of_dq
    return {"dq": dq, "dk": np.matmul(ds.swapaxes(1, 2), q) * of_dk, "dv": np.matmul(p.swapaxes(1, 2), do)}


def _rows(x: Heads, index: np.ndarray) -> Heads:
    return replace(x, q=x.q[:, index], o=x.o[:, index], do=x.do[:, index], l=x.l[:, index])


def _backward_mistakes(x: Heads, case: Case) -> Iterator[tuple[str, str, Outputs]]:
    whole = isinstance(case.shape, PSAShape)
    true = backward(x)
    dead = np.isneginf(x.l)[..., None]
    s = np.where(dead, 0, x.s)
    p = np.where(dead, 0, np.exp(s - x.l[..., None]))
    dp = np.matmul(np.where(dead, 0, x.do), x.v.swapaxes(1, 2))
    delta = (np.where(dead, 0, x.o) * x.do).sum(-1, keepdims=True)
    ds = p * (dp - delta)
    for cause, detail, scale in _scales(x, case):
        changed = replace(x, scale=scale)
        yield cause, detail, backward(changed)
        if whole:
            o, l = forward(changed)
            yield cause, detail, backward(replace(changed, o=o, l=l))
        else:
            yield cause, f"{detail} in P only".strip(), backward(x, s=np.matmul(x.q, x.k.swapaxes(1, 2)) * scale)
    for part, dq, dk in (("", True, True), ("dq", True, False), ("dk", False, True)):
        yield "gradient-without-scale", part, backward(x, factors=(1.0 if dq else None, 1.0 if dk else None))
        twice = x.scale**2
        yield "gradient-scale-twice", part, backward(x, factors=(twice if dq else None, twice if dk else None))
    yield "delta-missing", "", backward(x, delta=0.0)
    yield "delta-sign", "", backward(x, delta=-1.0)
    yield "p-missing", "", backward(x, ds=dp - delta)
    yield "ds-for-p", "", true | {"dv": np.matmul(ds.swapaxes(1, 2), x.do)}
    yield "ds-for-p", "dk and dv from P", true | {"dk": np.matmul(p.swapaxes(1, 2), x.q) * x.scale}
    yield "lse-ignored", "", backward(x, p=np.where(dead, 0, np.exp(s)))
    yield "lse-log2", "", backward(x, p=np.where(dead, 0, np.exp2(s * LOG2E - x.l[..., None])))
    yield (
        "lse-log2",
        "l is multiplied by log2(e) once more",
        backward(x, p=np.where(dead, 0, np.exp(s - x.l[..., None] * LOG2E))),
    )
    if x.q.shape[1] == x.k.shape[1]:
        yield "not-transposed", "dv = P do", true | {"dv": np.matmul(p, x.do)}
        yield "not-transposed", "dk = dS q", true | {"dk": np.matmul(ds, x.q) * x.scale}
        yield "not-transposed", "dq = dS^T k", true | {"dq": np.matmul(ds.swapaxes(1, 2), x.k) * x.scale}
        yield "softmax-over-queries", "", backward(x, p=_column_softmax(s))
    yield "causal", "", backward(x, p=np.where(np.tri(*p.shape[1:], dtype=bool), p, 0))
    if whole:
        width = x.q.shape[2]
        for half, name in ((slice(0, width), "V_lo"), (slice(width, None), "V_hi")):
            one = backward(replace(x, v=x.v[..., half], o=x.o[..., half], do=x.do[..., half]))
            yield "one-half-gradient", f"{name} alone", true | {"dq": one["dq"], "dk": one["dk"]}
            yield "one-half-gradient", f"dq from {name} alone", true | {"dq": one["dq"]}
            yield "one-half-gradient", f"dk from {name} alone", true | {"dk": one["dk"]}
    for cause, detail, index in _key_sets(x.k.shape[1]):
        yield cause, detail, true | {"dq": backward(_keys(x, index))["dq"]}
        if np.unique(index).size == index.size:
            cut = backward(_keys(x, index))
            yield cause, detail, {"dq": cut["dq"]} | {n: _scattered(true[n], cut[n], index) for n in ("dk", "dv")}
            yield cause, detail, true | {n: _scattered(true[n], cut[n], index) for n in ("dk", "dv")}
    for cause, detail, index in _query_sets(x.q.shape[1]):
        cut = backward(_rows(x, index))
        yield cause, detail, true | {"dk": cut["dk"], "dv": cut["dv"]}
        yield cause, detail, cut | {"dq": _only_rows(true["dq"], index)}
        yield cause, detail, true | {"dq": _only_rows(true["dq"], index)}
    for tile in (1, *TILES):
        n_q, n_k = x.q.shape[1], x.k.shape[1]
        if n_q > tile:
            last = backward(_rows(x, np.arange((n_q - 1) // tile * tile, n_q)))
            yield "last-block-only", f"queries in blocks of {tile}", true | {"dk": last["dk"], "dv": last["dv"]}
        if n_k > tile:
            last = backward(_keys(x, np.arange((n_k - 1) // tile * tile, n_k)))
            yield "last-block-only", f"keys in blocks of {tile}", true | {"dq": last["dq"]}
    if not whole:
        for cause, detail, order in _swaps(x):
            yield cause, detail, backward(order)
    if not whole and x.o.shape == x.do.shape:
        yield "arguments-swapped", "o and do", backward(replace(x, o=x.do, do=x.o))
    yield "first-head-copied", "", {n: np.broadcast_to(a[:1], a.shape) if len(a) else a for n, a in true.items()}
    yield "masked-row", "NaN", backward(x, p=np.exp(x.s - x.l[..., None]))
    for name, half in (("float16", np.float16), ("bfloat16", ml_dtypes.bfloat16)):
        low = [a.astype(half).astype(s.dtype) for a in (p, ds)]
        yield "half-precision", f"P and dS in {name}", backward(x, p=low[0], ds=low[1])
        yield "half-precision", f"P in {name}", backward(x, p=low[0])
        yield "half-precision", f"dS in {name}", backward(x, p=p, ds=low[1])
        rounded = {n: getattr(x, n).astype(half).astype(s.dtype) for n in ("q", "k", "v", "o", "do")}
        yield "half-precision", f"inputs in {name}", backward(replace(x, **rounded))


def _column_softmax(s: np.ndarray) -> np.ndarray:
    e = np.exp(s - s.max(-2, keepdims=True, initial=-np.inf))
    return e / e.sum(-2, keepdims=True)


def _scattered(like: np.ndarray, rows: np.ndarray, index: np.ndarray) -> np.ndarray:
    out = np.zeros_like(like)
    out[:, index] = rows
    return out


# ---- predictions ------------------------------------------------------------------------------------------------------
def attention_predictions(case: Case) -> Iterator[Prediction]:
    """Mistakes in the arithmetic, alone or, for the whole operations, in the layout around it."""
    is_forward = case.operation.kind == "forward"
    x = heads_of(case)
    if isinstance(case.shape, PSAShape):
        yield from _layout_of_whole(case, is_forward)
    if is_forward:
        for cause, detail, (o, l) in _forward_mistakes(x, case):
            yield cause, detail, pack_up(case, {"o": o, "l": l})
        return
    true = backward(x)
    for cause, detail, results in _backward_mistakes(x, case):
        yield cause, detail, pack_up(case, results)
        # A mistake may sit in the code of one gradient only.
        if len(case.operation.outputs) > 1:
            for names in subsets({n: true[n] for n in case.operation.outputs})[1:]:
                part = f"{detail + ', ' if detail else ''}{' and '.join(names)} only"
                yield cause, part, pack_up(case, true | {n: results[n] for n in names})


def _layout_of_whole(case: Case, is_forward: bool) -> Iterator[Prediction]:
    x = decode(case)

    def solve(y: np.ndarray) -> np.ndarray:
        heads = heads_of(case, y)
        results = dict(zip("ol", forward(heads), strict=True)) if is_forward else backward(heads)
        return canonical(pack_up(case, results)[case.operation.outputs[0]], case.shape, tokens_first=False)

    right = solve(x)
    name = case.operation.outputs[0]
    for cause, detail, move in INDEX_MAPS:
        yield cause, f"{detail or 'in the output'}", {name: to_nchw(move(right))}
        read = solve(move(x))
        yield cause, f"{detail or 'in qkv'}", {name: to_nchw(read)}
        if not is_forward and np.isfinite(read).all():
            yield cause, f"{detail or 'in qkv and its gradient'}", {name: to_nchw(adjoint(move, read))}
