"""Comparing results with what they should be: how wrong, where, in what pattern, and why.

report = compare(my_pack(qkv, 2), op="psa_pack_qkv", arguments={"qkv": qkv, "num_heads": 2})
report.passed; print(report); report.check()
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import numpy as np

from numba_psa.contract import OPERATIONS
from numba_psa.errors import ParameterError
from numba_psa.numerics import WORST_FACTOR, Verdict, judge, largest_finite, norm
from numba_psa.shapes import PSAShape
from numba_psa.testing.case import Case
from numba_psa.testing.check import standard
from numba_psa.testing.diagnose import Diagnosis, diagnose
from numba_psa.testing.hypotheses import SECTION_NAMES

Results = np.ndarray | Sequence[np.ndarray] | Mapping[str, np.ndarray]
Tolerance = float | Mapping[str, float]


class MismatchError(AssertionError):
    """Results are not what the contract asks for; the message is the report."""


@dataclass(frozen=True)
class Problem:
    """Results that cannot be compared number by number: `kind` is wrong-count, wrong-shape or wrong-dtype."""

    kind: str
    text: str


@dataclass(frozen=True)
class Report:
    """What `compare` found."""

    op: str
    case: Case | None
    actual: Mapping[str, np.ndarray] = field(repr=False)
    expected: Mapping[str, np.ndarray] = field(repr=False)
    verdicts: Mapping[str, Verdict]
    problem: Problem | None = None
    others: Sequence[tuple[Case, Mapping[str, np.ndarray]]] = field(default=(), repr=False)
    """Further failures of the same port: they sharpen the diagnosis."""

    @property
    def passed(self) -> bool:
        return self.problem is None and all(v.passed for v in self.verdicts.values())

    @property
    def kind(self) -> str:
        """ "passed", "wrong-values", or the kind of the problem."""
        return self.problem.kind if self.problem else "passed" if self.passed else "wrong-values"

    @cached_property
    def diagnosis(self) -> list[Diagnosis]:
        """Possible causes, best first. Empty when the results pass, when no known cause fits, and without arguments."""
        if self.passed or self.problem or self.case is None:
            return []
        return diagnose([(self.case, self.actual), *self.others])

    def check(self) -> Report:
        """Itself, or MismatchError with the report as its message."""
        if not self.passed:
            raise MismatchError(str(self))
        return self

    def __str__(self) -> str:
        if self.passed:
            return f"{self.op}: passed"
        lines = [f"{self.op}: {self.kind}" + (f"  {self.case!r}" if self.case is not None else "")]
        if self.problem:
            return "\n".join((*lines, f"  {self.problem.text}"))
        for name, v in self.verdicts.items():
            if v.passed:
                lines.append(f"  {name}: right (error {v.error:.3g}, budget {v.budget:.3g})")
                continue
            where = Wrong.of(self, name)
            error, worst = f"error {v.error:.3g}, budget {v.budget:.3g}", f"{v.worst:.3g}, budget {v.worst_budget:.3g}"
            lines.append(f"  {name}: {error}; worst element {worst}")
            if v.misplaced:
                lines.append(f"    NaN or inf in the wrong place: {v.misplaced} of {self.actual[name].size} elements")
            lines += [f"    {text}" for text in where.lines]
        if self.diagnosis:
            lines += ["  likely causes:", *(f"    {i}. {d}" for i, d in enumerate(self.diagnosis[:3], 1))]
        elif self.case is None:
            lines.append("  give arguments= for a diagnosis")
        else:
            lines.append("  no known cause explains it")
        return "\n".join(lines)


def compare(
    actual: Results,
    expected: Results | None = None,
    *,
    op: str | None = None,
    arguments: Mapping[str, Any] | None = None,
    case: Case | None = None,
    tolerance: Tolerance | None = None,
) -> Report:
    """Whether `actual`, the results of `op` for `arguments` (or for `case`, which holds both), are right; see `Report`.

    actual and expected: an array, a sequence in the order of the contract, or a mapping by output name. expected defaults
    to the oracle's. The limit is the tolerance rule of `numba_psa.numerics`, which needs the arguments; `tolerance`, a
    relative norm or one by dtype name, replaces it: without arguments it is needed for everything but layout operations.
    """
    if case is None and arguments is not None and op is not None:
        case = Case(op, arguments)
    op = case.op if case is not None else op
    if op not in OPERATIONS:
        raise ParameterError(f"op must be one of {', '.join(OPERATIONS)}, got {op!r}")
    operation = OPERATIONS[op]
    if case is None and expected is None:
        raise ParameterError("compare needs expected=, or arguments= (or case=) to compute it")
    if expected is None:
        measured = standard(operation, case)
        wanted = measured.expected
    else:
        wanted = _named(expected, operation.outputs)
        if problem := _count_problem(wanted, operation.outputs):
            raise ParameterError(f"expected: {problem.text}")
    got = _named(actual, operation.outputs)
    if problem := problem_of(got, wanted, case):
        return Report(op, case, got, wanted, {}, problem)
    if tolerance is not None:
        verdicts = {name: _with_limit(got[name], wanted[name], tolerance) for name in operation.outputs}
    elif expected is None:
        verdicts = measured.judge(got)
    elif operation.kind == "layout":
        verdicts = {name: judge(got[name], wanted[name]) for name in operation.outputs}
    else:
        raise ParameterError(f"{op} rounds: give arguments= without expected= to measure its budget, or tolerance=")
    return Report(op, case, got, wanted, verdicts)


def _named(results: Any, outputs: tuple[str, ...]) -> dict[str, np.ndarray]:
    if isinstance(results, Mapping):
        return {name: np.asarray(x) for name, x in results.items()}
    values = list(results) if isinstance(results, list | tuple) else [results]
    names = outputs if len(values) == len(outputs) else [f"result {i}" for i in range(len(values))]
    return {name: np.asarray(x) for name, x in zip(names, values, strict=True)}


def _count_problem(results: Mapping[str, np.ndarray], outputs: tuple[str, ...]) -> Problem | None:
    if set(results) == set(outputs):
        return None
    return Problem(
        "wrong-count", f"got {len(results)} results ({', '.join(results)}), expected {len(outputs)} ({', '.join(outputs)})"
    )


def problem_of(got: Mapping[str, np.ndarray], wanted: Mapping[str, np.ndarray], case: Case | None) -> Problem | None:
    """Why `got` cannot be compared with `wanted`, or None."""
    outputs = tuple(wanted)
    if problem := _count_problem(got, outputs):
        return problem
    for name in outputs:
        if got[name].shape != wanted[name].shape:
            return Problem("wrong-shape", f"{name} has shape {got[name].shape}, expected {wanted[name].shape}")
    for name in outputs:
        dtype = wanted[name].dtype if case is None else case.result_dtype(name)
        if got[name].dtype != dtype:
            return Problem("wrong-dtype", f"{name} has dtype {got[name].dtype}, expected {dtype}")
    return None


def _with_limit(actual: np.ndarray, expected: np.ndarray, tolerance: Tolerance) -> Verdict:
    if isinstance(tolerance, Mapping):
        if actual.dtype.name not in tolerance:
            raise ParameterError(f"tolerance has no entry for {actual.dtype.name}, only for {', '.join(tolerance)}")
        tolerance = tolerance[actual.dtype.name]
    return within(actual, expected, float(tolerance), WORST_FACTOR * float(tolerance))


def within(actual: np.ndarray, expected: np.ndarray, norm: float, worst: float, reference_norm: float = 0.0) -> Verdict:
    """The verdict of `numerics.judge` with limits that are given, not measured."""
    exact = norm == 0 and worst == 0
    verdict = judge(actual, expected, None if exact else expected, reference_norm=reference_norm)
    return replace(verdict, budget=norm, worst_budget=worst)


# ---- where ------------------------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Wrong:
    """Where an output is wrong, in the alphabet."""

    count: int
    size: int
    worst: Mapping[str, Any]
    got: float
    want: float
    pattern: tuple[str, ...]

    @classmethod
    def of(cls, report: Report, name: str) -> Wrong:
        """Of output `name`: an element is wrong beyond the budget for the worst one, or beyond 0 where none is allowed."""
        actual, verdict = report.actual[name], report.verdicts[name]
        with np.errstate(all="ignore"):
            a, e = actual.astype(np.float64), report.expected[name].astype(actual.dtype).astype(np.float64)
            same = (a == e) | (np.isnan(a) & np.isnan(e))
            limit = largest_finite(actual.dtype)
            off = np.abs(
                np.clip(np.nan_to_num(a, nan=np.inf), -limit, limit) - np.clip(np.nan_to_num(e, nan=np.inf), -limit, limit)
            )
        finite = e[np.isfinite(e)]
        rms = norm(finite) / max(finite.size, 1) ** 0.5
        with np.errstate(all="ignore"):
            relative = np.where(same, 0.0, off / np.maximum(np.where(np.isfinite(e), np.abs(e), 0), rms or 1.0))
        special = ~same & ~(np.isfinite(a) & np.isfinite(e))
        wrong = special | (relative > verdict.worst_budget)
        if not wrong.any():  # no element stands out: all that are beyond the budget of the norm
            wrong = relative > verdict.budget
        place = int(np.argmax(np.where(special, np.inf, relative)))
        axes = coordinates(report.op, name, actual.shape, report.case)
        worst = {axis: _label(axis, values.flat[place]) for axis, values in axes.items()}
        return cls(int(wrong.sum()), wrong.size, worst, float(a.flat[place]), float(e.flat[place]), _pattern(axes, wrong))

    @property
    def lines(self) -> list[str]:
        spot = " ".join(f"{axis}={value}" for axis, value in self.worst.items())
        lines = [
            f"{self.count} of {self.size} elements wrong" + (f"; only {', '.join(self.pattern)}" if self.pattern else "")
        ]
        return [*lines, f"worst at {spot}: got {self.got:.6g}, expected {self.want:.6g}"]


def coordinates(op: str, name: str, shape: tuple[int, ...], case: Case | None) -> dict[str, np.ndarray]:
    """{axis of the alphabet: its value at every element}: b, h, section, n, y, x, d, or bh, n, d."""
    problem = case.shape if case is not None else None
    grid = dict(enumerate(np.indices(shape)))
    if not isinstance(problem, PSAShape):
        names = ("bh", "n", "d") if OPERATIONS[op].arrays[0] == "q" else tuple(f"axis{i}" for i in range(len(shape)))
        return {axis: grid[i] for i, axis in enumerate(names[: len(shape)])}
    if len(shape) == 4 and name != "packed":
        sections = shape[1] // (problem.num_heads * problem.key_dim)
        h, rest = np.divmod(grid[1], sections * problem.key_dim)
        section, d = np.divmod(rest, problem.key_dim)
        y, x = grid[2], grid[3]
        return {"b": grid[0], "h": h, "section": section + 4 - sections, "n": y * problem.width + x, "y": y, "x": x, "d": d}
    lead = {"section": grid[0]} if name == "packed" else {}
    bh, n, d = (grid[i] for i in range(len(shape) - 3, len(shape)))
    b, h = np.divmod(bh, problem.num_heads)
    y, x = np.divmod(n, max(problem.width, 1))
    return lead | {"b": b, "h": h, "n": n, "y": y, "x": x, "d": d}


def _label(axis: str, value: int) -> str:
    return SECTION_NAMES[value] if axis == "section" else str(int(value))


def _pattern(axes: Mapping[str, np.ndarray], wrong: np.ndarray) -> tuple[str, ...]:
    """Which values of each axis are affected, for axes on which not all are."""
    found = []
    for axis, values in axes.items():
        every, hit = np.unique(values), np.unique(values[wrong])
        if not 0 < hit.size < every.size:
            continue
        if axis in ("y", "x") and any(text.startswith("n") for text in found):
            continue
        if hit.size > 1 and axis != "section" and np.array_equal(hit, every[every >= hit[0]]):
            found.append(f"{axis} >= {hit[0]}")
        elif hit.size > 1 and axis != "section" and np.array_equal(hit, every[every <= hit[-1]]):
            found.append(f"{axis} <= {hit[-1]}")
        elif hit.size > 2 and np.array_equal(hit, every[every % 2 == hit[0] % 2]):
            found.append(f"{'odd' if hit[0] % 2 else 'even'} {axis}")
        elif hit.size <= 4:
            found.append(f"{axis} = {', '.join(_label(axis, x) for x in hit)}")
    return tuple(found)
