"""Judging one call of one operation against the oracle by the tolerance rule of `numba_psa.numerics`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

import numpy as np

from numba_psa import oracle
from numba_psa.contract import Operation
from numba_psa.numerics import FLOAT32, FLOAT64, Verdict, accumulator_dtype, judge, machine_epsilon

Plain = Literal["two-pass", "online"]


def truth(operation: Operation, arguments: Mapping[str, Any]) -> dict[str, np.ndarray]:
    """{output: the unrounded float64 result of the oracle}."""
    widened = {name: arguments[name].astype(FLOAT64) for name in operation.adds + operation.stores if name in arguments}
    return operation(oracle, {**arguments, **widened}, dtype=FLOAT64)


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


def check(
    operation: Operation, arguments: Mapping[str, Any], results: Mapping[str, np.ndarray], how: Plain = "two-pass"
) -> dict[str, Verdict]:
    """{output: verdict} for `results`, which some implementation gave for `arguments`. Layout operations are exact."""
    exact = operation.kind == "layout"
    expected = truth(operation, arguments)
    reference = {} if exact else plain(operation, arguments, how)
    upstream = np.asarray(arguments[operation.upstream], FLOAT64)
    norm = float(np.linalg.norm(upstream[np.isfinite(upstream)]))
    return {
        name: judge(results[name], expected[name], reference.get(name), factor=operation.factor, reference_norm=norm)
        for name in operation.outputs
    }
