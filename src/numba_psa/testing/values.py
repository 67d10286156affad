"""The numbers in a test case, the same bits on every machine. NumPy only.

Relies on: the raw 64-bit stream of `np.random.Philox` for a key, which NumPy keeps stable, and IEEE 754 addition,
multiplication and rounding of single elements. No `np.random.Generator` method and nothing of libm, BLAS or SIMD exp.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Mapping
from typing import Any

import ml_dtypes
import numpy as np

from numba_psa.contract import OPERATIONS
from numba_psa.numerics import largest_finite, machine_epsilon
from numba_psa.oracle import flash_attention2_forward
from numba_psa.shapes import AttentionShape, PSAShape
from numba_psa.testing.case import Case

Forward = Callable[..., tuple[np.ndarray, np.ndarray]]


class Source:
    """Numbers drawn from `seed`; `name` picks an independent stream, so that each array has its own."""

    def __init__(self, seed: int, name: str):
        self._bits = np.random.Philox(key=seed | zlib.crc32(name.encode()) << 64)

    def raw(self, count: int) -> np.ndarray:
        return self._bits.random_raw(count) if count else np.zeros(0, np.uint64)

    def below(self, limit: int) -> int:
        """An integer in [0, limit)."""
        return int(self.raw(1)[0] >> np.uint64(11)) % limit

    def normal(self, shape: tuple[int, ...]) -> np.ndarray:
        """Close to N(0, 1): twelve 20-bit uniforms less six. Variance 1, and every step is exact in float64."""
        count = int(np.prod(shape, dtype=int))
        raw, total = self.raw(4 * count).reshape(4, count), np.zeros(count)
        for word in raw:
            for shift in (0, 20, 40):
                total += ((word >> np.uint64(shift)) & np.uint64(0xFFFFF)).astype(np.float64)
        return ((total + 6.0) * 2.0**-20 - 6.0).reshape(shape)

    def eighths(self, shape: tuple[int, ...]) -> np.ndarray:
        """Multiples of 1/8 in [-2, 2] without 0: easy to read, exact in every dtype."""
        count = int(np.prod(shape, dtype=int))
        step = (self.raw(count) >> np.uint64(32)).astype(np.int64) % 32
        return (np.where(step < 16, step - 16, step - 15) / 8.0).reshape(shape)


# ---- layout kernels: arrays one by one --------------------------------------------------------------------------------
def ramp(shape: tuple[int, ...], dtype: np.dtype, first: int = 1) -> np.ndarray:
    """1, 2, 3, … as far as the dtype counts exactly, then again: every neighbour differs, and so does every stride."""
    exact = min(2 ** round(1 - np.log2(machine_epsilon(dtype))), 2**24) - 1  # odd: no power of two is a multiple of it
    count = int(np.prod(shape, dtype=int))
    return ((np.arange(count) + first - 1) % exact + 1).astype(dtype).reshape(shape)


def _scatter_specials(array: np.ndarray, source: Source) -> np.ndarray:
    """`array` with NaN, infinities, -0, the smallest subnormal and the largest number in about a third of its places."""
    info = ml_dtypes.finfo(array.dtype)
    tiny = np.nextafter(np.zeros((), array.dtype), np.ones((), array.dtype))
    specials = np.array([np.nan, np.inf, -np.inf, -0.0, float(tiny), float(info.max)]).astype(array.dtype)
    pick = (source.raw(array.size) >> np.uint64(40)).astype(np.int64).reshape(array.shape) % 18
    return np.where(pick < 6, specials[np.minimum(pick, 5)], array).astype(array.dtype)


LAYOUT_VALUES: dict[str, Callable[[tuple[int, ...], np.dtype, Source], np.ndarray]] = {
    "ramp": lambda shape, dtype, source: ramp(shape, dtype, 1 + source.below(2)),
    "normal": lambda shape, dtype, source: source.normal(shape).astype(dtype),
    "wide": lambda shape, dtype, source: (source.normal(shape) * 100).astype(dtype),
    "special": lambda shape, dtype, source: _scatter_specials(ramp(shape, dtype), source),
}


# ---- attention: q, k, v and do together -------------------------------------------------------------------------------
Arrays = dict[str, np.ndarray]


def _each(function: Callable[[Source, tuple[int, ...]], np.ndarray]):
    return lambda shapes, dtype, seed: {name: function(Source(seed, name), shape) for name, shape in shapes.items()}


_normal = _each(lambda source, shape: source.normal(shape))
_constant_rows = _each(lambda source, shape: source.normal((*shape[:-1], 1)) * np.ones(shape))


def _one_hot_keys(shapes, dtype, seed) -> Arrays:
    """Each key points along one axis: every query picks few keys."""
    x = _normal(shapes, dtype, seed)
    _, n, d = shapes["k"]
    return x | {"q": x["q"] * 4, "k": np.broadcast_to(np.eye(d)[np.arange(n) % d] * 8.0, shapes["k"])}


def _near_ties(shapes, dtype, seed) -> Arrays:
    """All keys equal but for a last place: the maximum is decided by rounding."""
    x = _normal(shapes, dtype, seed)
    steps = (np.arange(shapes["k"][1]) % 3).reshape(1, -1, 1)
    return x | {"q": x["q"] * 4, "k": x["k"][:, :1] * (1.0 + steps * machine_epsilon(dtype))}


def _subnormal(shapes, dtype, seed) -> Arrays:
    """Every other number is subnormal; the rest keep the norm of the result normal."""
    smallest = float(np.nextafter(np.zeros((), dtype), np.ones((), dtype)))
    x = _normal(shapes, dtype, seed)
    for name, shape in shapes.items():
        odd = (np.arange(int(np.prod(shape, dtype=int))) % 2 == 1).reshape(shape)
        x[name] = np.where(odd, smallest * np.ceil(np.abs(x[name]) * 3), x[name])
    return x


def _masked_rows(shapes, dtype, seed) -> Arrays:
    """Some queries meet only scores of -inf: first component -inf, against keys whose first component is positive."""
    x = _normal(shapes, dtype, seed)
    x["k"][..., 0] = np.abs(x["k"][..., 0]) + 0.5
    rows = Source(seed, "rows").eighths(shapes["q"][:2]) > 0
    if rows.size and not rows.any():
        rows.flat[0] = True
    x["q"][rows, 0] = -np.inf
    return x


def _masked_keys(shapes, dtype, seed) -> Arrays:
    """Some keys score -inf against every query. Forward only: 0·(−inf) in dS·k is NaN by definition."""
    x = _normal(shapes, dtype, seed)
    x["q"][..., 0] = np.abs(x["q"][..., 0]) + 0.5
    x["k"][Source(seed, "rows").eighths(shapes["k"][:2]) > 0, 0] = -np.inf
    return x


def _one_nan(shapes, dtype, seed) -> Arrays:
    x, source = _normal(shapes, dtype, seed), Source(seed, "place")
    name = tuple(shapes)[source.below(len(shapes))]
    if x[name].size:
        x[name].flat[source.below(x[name].size)] = np.nan
    return x


def _large_values(shapes, dtype, seed) -> Arrays:
    """v and do near the largest half: sums of few products overflow float16, not the float32 they are kept in."""
    x = _normal(shapes, dtype, seed)
    return x | {name: np.clip(x[name] * 2e4, -6e4, 6e4) for name in ("v", "do") if name in x}


def _negative_scores(shapes, dtype, seed) -> Arrays:
    """All scores of every row about -200: without subtracting the (negative) maximum every exponential is 0."""
    x, d = _normal(shapes, dtype, seed), shapes["q"][2]
    x["q"][..., 0], x["k"][..., 0] = 20.0, -10.0 * np.sqrt(d)  # sqrt is correctly rounded everywhere
    return x


def _scaled(**factors: float):
    def make(shapes, dtype, seed) -> Arrays:
        return {name: x * factors.get(name, 1.0) for name, x in _normal(shapes, dtype, seed).items()}

    return make


ATTENTION_VALUES: dict[str, Callable[[Mapping[str, tuple[int, ...]], np.dtype, int], Arrays]] = {
    "eighths": _each(lambda source, shape: source.eighths(shape)),
    "normal": _normal,
    "wide30": _scaled(q=30, k=30, v=30, do=30),
    "wide100": _scaled(q=100, k=100, v=100, do=100),
    "constant-rows": _constant_rows,
    "one-hot-keys": _one_hot_keys,
    "near-ties": _near_ties,
    "zero-scores": _scaled(q=0, k=0),
    "negative-scores": _negative_scores,
    "overflow-half": _scaled(q=300, k=300, v=1000),
    "large-values": _large_values,
    "subnormal": _subnormal,
    "masked-rows": _masked_rows,
    "masked-keys": _masked_keys,
    "nan": _one_nan,
}
POSITIVE_SCALE_ONLY = ("masked-rows", "masked-keys")
"""Kinds whose -inf scores would become NaN or inf under another softmax_scale."""
FORWARD_ONLY = ("masked-keys",)


def value_kinds(op: str) -> tuple[str, ...]:
    """Names of the kinds of values that suit `op`, plainest first."""
    kind = OPERATIONS[op].kind
    if kind == "layout":
        return tuple(LAYOUT_VALUES)
    return tuple(name for name in ATTENTION_VALUES if kind == "forward" or name not in FORWARD_ONLY)


# ---- whole cases ------------------------------------------------------------------------------------------------------
def make_case(
    op: str,
    shape: PSAShape | AttentionShape,
    dtype: np.dtype,
    *,
    values: str | None = None,
    seed: int = 0,
    softmax_scale: float | None = None,
    targets: bool = False,
    layouts: Mapping[str, str] | None = None,
    forward: Forward = flash_attention2_forward,
) -> Case:
    """The case of `op` that these parameters define. `forward` computes the o and l that a backward takes as saved.

    `targets` adds an array that already holds values for every output that is added or stored into one.
    """
    operation, dtype = OPERATIONS[op], np.dtype(dtype)
    values = values or value_kinds(op)[0]
    make = _layout_arguments if operation.kind == "layout" else _attention_arguments
    arguments: dict[str, Any] = make(op, shape, dtype, values, seed, softmax_scale, forward)
    if softmax_scale is not None:
        arguments["softmax_scale"] = softmax_scale
    if targets:
        sizes = {
            "d_qkv": getattr(shape, "qkv", ()),
            "dq": shape_of(shape, "q"),
            "dk": shape_of(shape, "k"),
            "dv": shape_of(shape, "v"),
        }
        for name in operation.adds + operation.stores:
            arguments[name] = (Source(seed, f"target {name}").eighths(sizes[name]) + 4).astype(dtype)
    return Case(op, arguments, dict(layouts or {}), values)


def shape_of(shape: PSAShape | AttentionShape, name: str) -> tuple[int, ...]:
    """Shape of q, k, v, o or do of a flash operation; () for a PSA problem."""
    return getattr(shape, {"do": "o"}.get(name, name)) if isinstance(shape, AttentionShape) else ()


_LAYOUT_SHAPES = {"qkv": "qkv", "lo": "section", "hi": "section", "d_packed": "packed", "d_v": "out", "d_merged": "out"}


def _layout_arguments(op, shape: PSAShape, dtype, values, seed, softmax_scale, forward) -> dict[str, Any]:
    sizes = {"num_heads": shape.num_heads, "height": shape.height, "width": shape.width}
    operation = OPERATIONS[op]
    arguments: dict[str, Any] = {}
    for name in operation.arrays:
        arguments[name] = LAYOUT_VALUES[values](getattr(shape, _LAYOUT_SHAPES[name]), dtype, Source(seed, name))
    if op == "psa_merge_attn_nchw" and values == "ramp":
        arguments["hi"] = ramp(shape.section, dtype, 1 + arguments["lo"].size)
    return arguments | {name: sizes[name] for name in operation.sizes}


def _attention_arguments(op, shape, dtype, values, seed, softmax_scale, forward) -> dict[str, Any]:
    whole = isinstance(shape, PSAShape)
    inner = AttentionShape(shape.bh, shape.n, shape.n, shape.key_dim, shape.head_dim) if whole else shape
    backward = OPERATIONS[op].kind == "gradient"
    shapes = {name: shape_of(inner, name) for name in ("q", "k", "v", "do")[: 4 if backward else 3]}
    limit = largest_finite(dtype)
    with np.errstate(all="ignore"):
        made = ATTENTION_VALUES[values](shapes, dtype, seed)
        x = {name: np.where(np.isfinite(a), np.clip(a, -limit, limit), a).astype(dtype) for name, a in made.items()}
    if not whole:
        if backward:
            x["o"], x["l"] = forward(x["q"], x["k"], x["v"], softmax_scale)
        return {name: x[name] for name in OPERATIONS[op].arrays}
    channels = np.concatenate((x["q"], x["k"], x["v"]), axis=2).swapaxes(1, 2)
    arguments: dict[str, Any] = {"qkv": np.ascontiguousarray(channels).reshape(shape.qkv)}
    if backward:
        arguments["d_out"] = np.ascontiguousarray(x["do"].swapaxes(1, 2)).reshape(shape.out)
    return arguments | {"num_heads": shape.num_heads}
