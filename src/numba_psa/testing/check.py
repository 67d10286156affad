"""Judging one call of one operation against the oracle by the tolerance rule of `numba_psa.numerics`."""

from __future__ import annotations

import math
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from numba_psa import oracle
from numba_psa.contract import Operation
from numba_psa.numerics import FLOAT32, FLOAT64, Verdict, accumulator_dtype, judge, machine_epsilon, norm
from numba_psa.shapes import SECTIONS

Plain = Literal["two-pass", "online"]


def truth(operation: Operation, arguments: Mapping[str, Any], **keywords: Any) -> dict[str, np.ndarray]:
    """{output: the unrounded float64 result of the oracle}; `keywords` go to it as well."""
    widened = {name: arguments[name].astype(FLOAT64) for name in operation.adds + operation.stores if name in arguments}
    return operation(oracle, {**arguments, **widened}, dtype=FLOAT64, **keywords)


def plain(operation: Operation, arguments: Mapping[str, Any], how: Plain = "two-pass") -> dict[str, np.ndarray]:
    """{output: the same computation done plainly in the precision a kernel accumulates in, rounded to the input dtype}.

    "two-pass" is the oracle's formula; "online" takes the FlashAttention recurrence where there is one. Of float64 there is
    no truth in a higher precision: its rounding error is measured in float32, on inputs rounded to float32, and scaled by
    the ratio of the epsilons.
    """
    compute = accumulator_dtype(np.asarray(arguments[operation.arrays[0]]).dtype)
    if compute == FLOAT64:
        with np.errstate(over="ignore"):
            rounded = {name: x.astype(FLOAT32) if isinstance(x, np.ndarray) else x for name, x in arguments.items()}
        exact, rough, target = truth(operation, rounded), plain(operation, rounded, how), truth(operation, arguments)
        ratio = machine_epsilon(FLOAT64) / machine_epsilon(FLOAT32)
        with np.errstate(invalid="ignore"):
            return {name: target[name] + ratio * (rough[name] - exact[name]) for name in operation.outputs}
    if how == "online" and operation.name == "flash_attention2_forward":
        q, k, v = (np.asarray(arguments[name]) for name in operation.arrays)
        o, l = oracle.flash_attention2_forward_online(q, k, v, arguments.get("softmax_scale"), dtype=compute)
        with np.errstate(over="ignore"):
            return {"o": o.astype(q.dtype), "l": l}
    return operation(oracle, arguments, compute_dtype=compute)


def neighbours(operation: Operation, arguments: Mapping[str, Any]) -> list[dict[str, np.ndarray]]:
    """Results of the exact computation on inputs that differ about as much as sums in a kernel's precision are wrong.

    No kernel can be asked for more: rounding q·scale, a score or a product of delta has such an effect. One plain result
    of a small problem may be exact by luck (one key, D = 1, constant rows), which would ask the impossible of every other
    order of operations; large problems average over their elements and need fewer.
    """
    kept: tuple[np.ndarray, ...] = ()
    if operation.name == "psa_attention_backward":
        # What the forward inside it keeps is rounded too: o and l no longer fit q, k and v to the last bit.
        wide, scale = np.asarray(arguments["qkv"], FLOAT64), arguments.get("softmax_scale")
        _, kept = oracle.psa_attention(wide, arguments["num_heads"], softmax_scale=scale, save_for_backward=True)
    first = np.asarray(arguments[operation.arrays[0]])
    width = _width(operation, arguments)
    return [
        truth(
            operation,
            moved,
            **({"saved": tuple(move(x, pattern, "saved", first.dtype, width) for x in kept)} if kept else {}),
        )
        for pattern, moved in enumerate(moved_arguments(operation, arguments))
    ]


def moved_arguments(operation: Operation, arguments: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """The arguments of each of `neighbours`, in float64."""
    inputs = {name: np.asarray(arguments[name]) for name in operation.arrays}
    elements, dtype, width = (
        sum(x.size for x in inputs.values()),
        inputs[operation.arrays[0]].dtype,
        _width(operation, arguments),
    )
    patterns = 6 if elements < 1 << 12 else 2 if elements < 1 << 16 else 1 if elements < 1 << 20 else 0
    for pattern in range(patterns):
        yield {**arguments, **{name: move(x, pattern, name, dtype, width) for name, x in inputs.items()}}


def _width(operation: Operation, arguments: Mapping[str, Any]) -> int:
    """How many terms a score is the sum of: D, or KEY_DIM."""
    shape = np.shape(arguments[operation.arrays[0]])
    return shape[1] // (SECTIONS * arguments["num_heads"]) if operation.arrays[0] == "qkv" else shape[-1]


def move(x: np.ndarray, pattern: int, name: str, dtype: np.dtype, width: int) -> np.ndarray:
    """x · (1 ± eps·√width) in float64, eps of the accumulator of `dtype`, with signs that look random but never change.

    By pattern, each element has its own sign, each row, or each column: a sum of terms of one sign does not average its
    rounding errors away. √width is how the error of such a sum grows; l is no term of one, and moves by one eps.
    """
    shape = np.shape(x)
    terms = 1 if pattern % 3 == 0 or len(shape) == 2 else width
    if pattern % 3 == 0:
        index = np.arange(x.size).reshape(shape)
    elif pattern % 3 == 1:
        index = np.broadcast_to(np.arange(int(np.prod(shape[:-1], dtype=int))).reshape(*shape[:-1], 1), shape)
    else:
        tail = shape[2:] if len(shape) == 4 else shape[-1:]
        index = np.broadcast_to(np.arange(int(np.prod(tail, dtype=int))).reshape(tail), shape)
    start = 0.7548776662466927 * pattern + 0.5698402909980532 * (zlib.crc32(name.encode()) % 1000)
    up = (index * (0.6180339887498949 + 0.1 * pattern) + start) % 1.0 < 0.5
    size = machine_epsilon(accumulator_dtype(dtype)) * math.sqrt(terms)
    with np.errstate(invalid="ignore"):
        return x.astype(FLOAT64) * np.where(up, 1.0 + size, 1.0 - size)


def upstream_norm(operation: Operation, arguments: Mapping[str, Any]) -> float:
    """What errors are relative to where the oracle's result is 0."""
    upstream = np.asarray(arguments[operation.upstream], FLOAT64)
    return norm(upstream[np.isfinite(upstream)])


@dataclass(frozen=True)
class Standard:
    """What results for certain arguments are judged by; measured once, it serves many implementations."""

    operation: Operation
    expected: Mapping[str, np.ndarray]
    """Unrounded float64 results."""
    references: tuple[Mapping[str, np.ndarray], ...]
    """Results as wrong as results may be; none for layout operations, which are exact."""
    factor: float
    upstream: float

    def judge(self, results: Mapping[str, np.ndarray]) -> dict[str, Verdict]:
        """{output: verdict}."""
        return {
            name: judge(
                results[name],
                self.expected[name],
                [reference[name] for reference in self.references] or None,
                factor=self.factor,
                reference_norm=self.upstream,
            )
            for name in self.operation.outputs
        }


def standard(operation: Operation, arguments: Mapping[str, Any], how: Plain = "two-pass") -> Standard:
    """The standard for results of `operation` on these arguments."""
    references = ()
    if operation.kind != "layout":
        references = (plain(operation, arguments, how), *neighbours(operation, arguments))
    expected, upstream = truth(operation, arguments), upstream_norm(operation, arguments)
    return Standard(operation, expected, references, factor_of(operation, arguments), upstream)


def factor_of(operation: Operation, arguments: Mapping[str, Any]) -> float:
    """k of the tolerance rule; twice that for float64, where the truth is rounded too: it may be as wrong as a kernel."""
    return operation.factor * (2 if np.asarray(arguments[operation.arrays[0]]).dtype == FLOAT64 else 1)


def check(
    operation: Operation, arguments: Mapping[str, Any], results: Mapping[str, np.ndarray], how: Plain = "two-pass"
) -> dict[str, Verdict]:
    """{output: verdict} for `results`, which some implementation gave for `arguments`. Layout operations are exact."""
    return standard(operation, arguments, how).judge(results)
