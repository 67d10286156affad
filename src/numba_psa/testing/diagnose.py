"""Why results are wrong: every known mistake is tried against the data, and what explains it best comes first."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import ml_dtypes
import numpy as np

from numba_psa import oracle
from numba_psa.numerics import FLOAT16, HALVES, machine_epsilon, norm
from numba_psa.testing.case import Case
from numba_psa.testing.causes import CAUSES
from numba_psa.testing.check import truth
from numba_psa.testing.hypotheses import Outputs, Prediction, layout_predictions, output_predictions
from numba_psa.testing.hypotheses_attention import attention_predictions

EXPLAINED = 0.003
"""A prediction that leaves less than this part of the error is as good as exact."""
WORTH_NAMING = 0.5
"""A prediction that leaves more than this part of the error is not named."""
OF_THE_SIZE = {"half-accumulation": 0.4, "half-precision": 0.45}
"""What is left of the error by a cause that explains how large it is, not its values: {cause: part}."""


@dataclass(frozen=True)
class Diagnosis:
    """One possible cause. `explained` is the part of the error that it accounts for, 1 being all of it."""

    cause: str
    detail: str
    explained: float

    @property
    def text(self) -> str:
        """What the cause means."""
        return CAUSES[self.cause]

    def __str__(self) -> str:
        detail = f" ({self.detail})" if self.detail else ""
        return f"{self.cause}{detail}: {self.text} [explains {100 * self.explained:.0f} % of the error]"


def diagnose(failures: Sequence[tuple[Case, Mapping[str, np.ndarray]]]) -> list[Diagnosis]:
    """Causes of wrong results `(case, {output: array})` of one operation, best first; [] if no known cause fits.

    Several failures tell more than one: small problems look alike under many mistakes. A cause must explain all of them,
    with the same details.
    """
    left: dict[tuple[str, str], float] = {}
    with np.errstate(all="ignore"):
        for number, (case, actual) in enumerate(failures):
            best: dict[tuple[str, str], float] = {}
            for key, unexplained in _trials(case, {name: np.asarray(x) for name, x in actual.items()}):
                best[key] = min(unexplained, best.get(key, 1.0))
            for key in left.keys() | best.keys():
                left[key] = left.get(key, float(number)) + best.get(key, 1.0)
    mean = {key: total / len(failures) for key, total in left.items()}
    order = {cause: i for i, cause in enumerate(CAUSES)}
    ranked = sorted(mean, key=lambda key: (_bucket(mean[key]), order[key[0]]))
    # Where some cause explains everything, those that explain a part are noise.
    limit = EXPLAINED if ranked and mean[ranked[0]] <= EXPLAINED else WORTH_NAMING
    found: dict[str, Diagnosis] = {}
    for cause, detail in ranked:
        if mean[cause, detail] <= limit and cause not in found:
            found[cause] = Diagnosis(cause, detail, 1.0 - mean[cause, detail])
    return list(found.values())


def _bucket(unexplained: float) -> float:
    return 0.0 if unexplained <= EXPLAINED else round(unexplained, 3)


def _trials(case: Case, actual: Outputs) -> Iterator[tuple[tuple[str, str], float]]:
    """((cause, detail), part of the error left unexplained) of every prediction."""
    expected = truth(case.operation, case)
    score = _Score(case, actual, expected)
    for cause, detail, predicted in predictions(case, expected, actual):
        unexplained = score(predicted)
        if unexplained > OF_THE_SIZE.get(cause, 1.0) and _same_size(actual, predicted, expected):
            unexplained = OF_THE_SIZE[cause]
        yield (cause, detail), unexplained
    if case.operation.kind != "layout" and case.dtype not in HALVES:
        for half in (FLOAT16, np.dtype(ml_dtypes.bfloat16)):
            if _same_size(actual, case.operation(oracle, case, compute_dtype=half), expected):
                yield ("half-accumulation", ""), OF_THE_SIZE["half-accumulation"]


def predictions(case: Case, expected: Outputs, actual: Outputs) -> Iterator[Prediction]:
    """Everything that this operation is known to be got wrong in. `actual` only serves to fit a factor."""
    yield from output_predictions(case, expected, {name: np.asarray(x, np.float64) for name, x in actual.items()})
    yield from (layout_predictions if case.operation.kind == "layout" else attention_predictions)(case)


class _Score:
    """Part of the error against the truth that remains against a prediction; 1 if it explains nothing.

    Layout operations are exact: the error is the number of elements that differ.
    """

    def __init__(self, case: Case, actual: Outputs, expected: Outputs):
        self.dtypes = {name: case.result_dtype(name) for name in actual}
        self.exact = case.operation.kind == "layout"
        self.actual = {name: x.astype(np.float64) for name, x in actual.items()}
        rounded = {name: self._rounded(name, expected[name]) for name in actual}
        self.scales = {name: norm(x[np.isfinite(x)]) or 1.0 for name, x in rounded.items()}
        self.error, self.misplaced = self._distance(rounded)

    def _rounded(self, name: str, x: np.ndarray) -> np.ndarray:
        return np.asarray(x).astype(self.dtypes[name]).astype(np.float64)

    def _distance(self, predicted: Outputs) -> tuple[float, int]:
        """(error beyond rounding, elements that are NaN or inf in one only)."""
        total, misplaced = 0.0, 0
        for name, a in self.actual.items():
            p = predicted[name]
            if self.exact:
                total += np.count_nonzero(~((a == p) | (np.isnan(a) & np.isnan(p))))
                continue
            finite = np.isfinite(a) & np.isfinite(p)
            misplaced += int(np.count_nonzero(~(finite | (a == p) | (np.isnan(a) & np.isnan(p)))))
            error = norm(a[finite] - p[finite]) / self.scales[name]
            total += max(0.0, error - 8 * machine_epsilon(self.dtypes[name])) ** 2
        return total if self.exact else total**0.5, misplaced

    def __call__(self, predicted: Outputs) -> float:
        error, misplaced = self._distance({name: self._rounded(name, predicted[name]) for name in self.actual})
        of_values = 0.0 if error == 0 else error / self.error if self.error else np.inf
        of_places = misplaced / max(self.misplaced, 1)
        return float(min(max(of_values, of_places), 1.0))


def _same_size(actual: Outputs, low: Outputs, expected: Outputs) -> bool:
    """Whether the errors of `actual` are all finite, at most about those of half precision, and as large in some output."""
    as_large = False
    for name, t in expected.items():
        a, h = actual[name].astype(np.float64), low[name].astype(np.float64)
        finite = np.isfinite(t) & np.isfinite(h)
        got, half = norm(a[finite] - t[finite]), norm(h[finite] - t[finite])
        if not np.isfinite(a[np.isfinite(t)]).all() or got > 4 * half:
            return False
        as_large |= 0 < 0.1 * half <= got
    return as_large
