"""One test case: an operation with its arguments, the memory layout of each array, and what is special about it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np

from numba_psa.contract import OPERATIONS, Operation
from numba_psa.numerics import HALVES, accumulator_dtype
from numba_psa.shapes import AttentionShape, PSAShape

LAYOUTS = ("C", "F", "strided", "reversed", "offset")
"""Row-major; column-major; every second element of the last axis; negative strides; three elements into a buffer."""

LARGE_LOGIT = 88.0
"""exp overflows float32 just above."""
TILE = 16
"""The narrowest tile of a tensor core: an N that it does not divide has a tail for every wider power of two as well."""


@dataclass(frozen=True, eq=False)
class Case(Mapping[str, Any]):
    """Arguments of one call, a mapping as `contract.Operation.__call__` takes it.

    `arguments` holds every array and size of the operation, softmax_scale when it is not the default, and a target for
    each output that is to be added or stored into one. `layouts` names the layout of arrays that are not "C". `values`
    says how the numbers were made.
    """

    op: str
    arguments: Mapping[str, Any]
    layouts: Mapping[str, str] = field(default_factory=dict)
    values: str = ""

    def __getitem__(self, name: str) -> Any:
        return self.arguments[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.arguments)

    def __len__(self) -> int:
        return len(self.arguments)

    @property
    def operation(self) -> Operation:
        return OPERATIONS[self.op]

    @property
    def dtype(self) -> np.dtype:
        """Of the inputs; results have it too, but for l (see `result_dtype`)."""
        return self.arguments[self.operation.arrays[0]].dtype

    def result_dtype(self, output: str) -> np.dtype:
        """The dtype that `output` must have."""
        return accumulator_dtype(self.dtype) if output == "l" else self.dtype

    @cached_property
    def shape(self) -> PSAShape | AttentionShape:
        """The problem that the shapes of the arguments describe."""
        return problem(self.operation, self.arguments)

    @property
    def targets(self) -> tuple[str, ...]:
        """Outputs that the call adds or stores into an array of the caller."""
        return tuple(name for name in self.operation.adds + self.operation.stores if name in self.arguments)

    @property
    def tokens(self) -> tuple[int, ...]:
        """N, or n_ctx_q and n_ctx_k."""
        s = self.shape
        return (s.n,) if isinstance(s, PSAShape) else (s.n_ctx_q, s.n_ctx_k)

    # ---- calling ----
    @property
    def args(self) -> list[Any]:
        """Positional arguments: fresh copies of the arrays, laid out, then the sizes."""
        operation = self.operation
        arrays = [lay_out(self.arguments[name], self.layouts.get(name, "C")) for name in operation.arrays]
        return arrays + [self.arguments[name] for name in operation.sizes]

    @property
    def kwargs(self) -> dict[str, Any]:
        """Keywords: softmax_scale when it is not the default, and fresh copies of the targets."""
        keywords = {name: lay_out(self.arguments[name], self.layouts.get(name, "C")) for name in self.targets}
        if self.arguments.get("softmax_scale") is not None:
            keywords["softmax_scale"] = self.arguments["softmax_scale"]
        return keywords

    def call(self, function: Callable[..., Any]) -> tuple[list[Any], list[str]]:
        """(what `function` returned, as a list; names of inputs that it changed). Whatever it raises passes through."""
        args, keywords = self.args, self.kwargs
        inputs = dict(zip(self.operation.arrays, args, strict=False))
        before = {name: whole_buffer(x).tobytes() for name, x in inputs.items()}
        returned = function(*args, **keywords)
        changed = [name for name, x in inputs.items() if whole_buffer(x).tobytes() != before[name]]
        return list(returned) if isinstance(returned, tuple | list) else [returned], changed

    # ---- describing ----
    @cached_property
    def flags(self) -> tuple[str, ...]:
        """What is special about this case, sorted; `FLAGS` explains each."""
        return tuple(sorted(name for name, (_, holds) in FLAGS.items() if holds(self)))

    @property
    def sizes(self) -> str:
        """The sizes in the alphabet, on one line."""
        s = self.shape
        if isinstance(s, PSAShape):
            return f"B={s.batch} num_heads={s.num_heads} KEY_DIM={s.key_dim} H={s.height} W={s.width}"
        return f"BH={s.bh} n_ctx_q={s.n_ctx_q} n_ctx_k={s.n_ctx_k} D={s.head_dim} Dv={s.value_dim}"

    def _repr_pretty_(self, printer, cycle: bool) -> None:
        """For Hypothesis, which would print a million numbers otherwise."""
        printer.text(repr(self))

    def __repr__(self) -> str:
        parts = [self.op, self.sizes, str(self.dtype)]
        if self.arguments.get("softmax_scale") is not None:
            parts.append(f"softmax_scale={self.arguments['softmax_scale']:g}")
        if self.values:
            parts.append(f"values={self.values}")
        if self.targets:
            parts.append(f"targets={','.join(self.targets)}")
        parts += [f"{name}:{layout}" for name, layout in self.layouts.items() if layout != "C"]
        return f"<Case {' '.join(parts)}>"


def problem(operation: Operation, arguments: Mapping[str, Any]) -> PSAShape | AttentionShape:
    """The shape object that the arguments of `operation` describe; ShapeError or DTypeError if they do not fit."""
    first = operation.arrays[0]
    shape = np.shape(arguments[first])
    if operation.arrays[:3] == ("q", "k", "v"):
        return AttentionShape.from_qkv(*(np.shape(arguments[name]) for name in "qkv"))
    if first == "qkv":
        return PSAShape.from_qkv(shape, arguments["num_heads"])
    if first in ("lo", "d_packed"):
        make = PSAShape.from_section if first == "lo" else PSAShape.from_packed
        return make(shape, arguments["num_heads"], arguments["height"], arguments["width"], first)
    return PSAShape.from_out(shape, arguments["num_heads"], first)


# ---- layouts in memory ------------------------------------------------------------------------------------------------
def lay_out(array: np.ndarray, layout: str = "C") -> np.ndarray:
    """A copy of `array`, equal in shape and values, that lies in memory as `layout` says.

    What lies between and before the elements is NaN: a port that takes the pointer and forgets the strides reads it.
    """
    if layout == "C" or array.ndim == 0:
        return np.array(array, order="C")
    if layout == "F":
        return np.array(array, order="F")
    if layout == "reversed":
        flip = (slice(None, None, -1),) * array.ndim
        return np.array(array[flip], order="C")[flip]
    if layout == "strided":
        buffer = np.full((*array.shape[:-1], 2 * array.shape[-1]), np.nan, array.dtype)
        view = buffer[..., ::2]
    elif layout == "offset":
        view = np.full(array.size + 3, np.nan, array.dtype)[3:].reshape(array.shape)
    else:
        raise ValueError(f"layout must be one of {', '.join(LAYOUTS)}, got {layout!r}")
    view[...] = array
    return view


def whole_buffer(array: np.ndarray) -> np.ndarray:
    """The array that owns the memory of `array`, gaps included."""
    while isinstance(array.base, np.ndarray):
        array = array.base
    return array


# ---- flags ------------------------------------------------------------------------------------------------------------
def _width(case: Case) -> int:
    return case.shape.key_dim if isinstance(case.shape, PSAShape) else case.shape.head_dim


def _inputs(case: Case) -> list[np.ndarray]:
    return [case[name] for name in case.operation.arrays if name not in ("o", "l")]


def scores(case: Case) -> np.ndarray | None:
    """softmax_scale · q kᵀ `[BH, n_ctx_q, n_ctx_k]` in float64; None for layout operations."""
    if not case.operation.scaled:
        return None
    if "qkv" in case.arguments:
        heads = case["qkv"].astype(np.float64).reshape(case.shape.heads)
        q, k = heads[:, 0].swapaxes(1, 2), heads[:, 1].swapaxes(1, 2)
    else:
        q, k = case["q"].astype(np.float64), case["k"].astype(np.float64)
    scale = case.arguments.get("softmax_scale")
    with np.errstate(all="ignore"):
        return np.matmul(q, k.swapaxes(1, 2)) * (case.shape.softmax_scale if scale is None else scale)


def _largest_score(case: Case) -> float:
    s = scores(case)
    finite = s[np.isfinite(s)] if s is not None else np.zeros(0)
    return float(np.max(np.abs(finite))) if finite.size else 0.0


def _masked(case: Case) -> np.ndarray:
    s = scores(case)
    return np.zeros((0, 0, 0), bool) if s is None else s == -np.inf


def _tiny(x: np.ndarray) -> bool:
    wide = np.abs(x.astype(np.float64))
    return bool(np.any((wide > 0) & (wide < float(np.ldexp(1.0, _MIN_EXPONENT[x.dtype.name])))))


_MIN_EXPONENT = {"float16": -14, "bfloat16": -126, "float32": -126, "float64": -1022}

FLAGS: dict[str, tuple[str, Callable[[Case], bool]]] = {
    "Accumulates": (
        "an output is added into an array that holds values",
        lambda c: bool(set(c.targets) & set(c.operation.adds)),
    ),
    "Empty": ("some array has no elements", lambda c: any(x.size == 0 for x in _inputs(c))),
    "Half": ("float16 or bfloat16", lambda c: c.dtype in HALVES),
    "HasInf": ("an input holds inf", lambda c: any(bool(np.isinf(x).any()) for x in _inputs(c))),
    "HasNaN": ("an input holds NaN", lambda c: any(bool(np.isnan(x).any()) for x in _inputs(c))),
    "LargeLogit": (
        f"a finite score is beyond ±{LARGE_LOGIT:g}, where exp overflows float32",
        lambda c: _largest_score(c) > LARGE_LOGIT,
    ),
    "MaskedKey": (
        "some, not all scores of a row are -inf",
        lambda c: bool((_masked(c).any(-1) & ~_masked(c).all(-1)).any()),
    ),
    "MaskedRow": ("all scores of a row are -inf", lambda c: bool(_masked(c).all(-1).any())),
    "MultiBatch": ("B is at least 2", lambda c: isinstance(c.shape, PSAShape) and c.shape.batch > 1),
    "MultiHead": ("num_heads is at least 2", lambda c: isinstance(c.shape, PSAShape) and c.shape.num_heads > 1),
    "NonContiguous": (
        "an input is not C-ordered in memory",
        lambda c: any(x not in ("C", "offset") for x in c.layouts.values()),
    ),
    "NonPow2": ("KEY_DIM or D is no power of two", lambda c: bool(_width(c) & (_width(c) - 1))),
    "NonSquare": ("H differs from W", lambda c: isinstance(c.shape, PSAShape) and c.shape.height != c.shape.width),
    "Overwrites": (
        "an output is stored over an array that holds values",
        lambda c: bool(set(c.targets) & set(c.operation.stores)),
    ),
    "Ragged": ("n_ctx_q differs from n_ctx_k", lambda c: len(set(c.tokens)) > 1),
    "Scaled": ("softmax_scale is not the default", lambda c: c.arguments.get("softmax_scale") is not None),
    "Subnormal": ("an input holds subnormal numbers", lambda c: any(_tiny(x) for x in _inputs(c))),
    "Tail": (f"a token count is no multiple of {TILE}", lambda c: any(n % TILE for n in c.tokens)),
    "WideValue": (
        "v is not as wide as k",
        lambda c: isinstance(c.shape, AttentionShape) and c.shape.value_dim != c.shape.head_dim,
    ),
}
"""{flag: (meaning, test)}: for vectors, and for naming what a port is known not to support."""
