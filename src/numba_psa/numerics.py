"""Element types, special values, and the one tolerance rule. No other module holds a numeric limit for a kernel.

**Types.** Every function returns the dtype of its inputs. Half inputs (float16, bfloat16) accumulate in float32 and save
the log-sum-exp `l` in float32; float32 and float64 accumulate and save in themselves. The oracle computes in float64
whatever comes in.

**Special values**, the same in every implementation. A row whose scores are all -inf, and every row when n_ctx_k = 0, has
o = 0 (whatever v holds), l = -inf and no gradient. A NaN in q reaches its own row, in k every row of its bh, in v column
d of every row of its bh; an inf in v makes column d of every row of its bh that is not masked inf or NaN. Nothing outside
that bh changes. The factor that rescales the accumulator is 0 while the running maximum is -inf. Scores that overflow
the type they are computed in are outside the contract, except to -inf.

**Tolerance**: see `judge`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from numbers import Real

import ml_dtypes
import numpy as np

from numba_psa.errors import DTypeError, ParameterError

FLOAT16 = np.dtype(np.float16)
BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
FLOAT32 = np.dtype(np.float32)
FLOAT64 = np.dtype(np.float64)
FLOATS = (FLOAT16, BFLOAT16, FLOAT32, FLOAT64)
HALVES = (FLOAT16, BFLOAT16)

LOG2E = 1.4426950408889634
"""log2(e): exp(x) = 2**(x*LOG2E)."""

FORWARD_FACTOR = 2
"""k of `judge` for forward kernels."""
GRADIENT_FACTOR = 3
"""k of `judge` for gradients."""
WORST_FACTOR = 20
"""How far the worst element may be beyond the budget of the whole array."""
FLOAT32_LIMIT = 2e-6
"""Relative norm that every float32 forward stays below on N(0, 1) input at N = 400."""


# ---- element types ----------------------------------------------------------------------------------------------------
def float_dtype(dtype: object) -> np.dtype:
    """`dtype` (a name, type or np.dtype) as one of the four supported dtypes, or DTypeError."""
    try:
        found = BFLOAT16 if isinstance(dtype, str) and dtype == "bfloat16" else np.dtype(dtype)
    except TypeError:
        found = None
    if dtype is None or found is None or found not in FLOATS:  # to NumPy, None is float64
        raise DTypeError(f"dtype must be float16, bfloat16, float32 or float64, got {dtype}")
    return found


def accumulator_dtype(dtype: np.dtype) -> np.dtype:
    """What sums of `dtype` are kept in: float32 for halves, else `dtype`. Also the dtype of `l`."""
    return FLOAT32 if dtype in HALVES else np.dtype(dtype)


def machine_epsilon(dtype: np.dtype) -> float:
    """Distance from 1 to the next larger number: 2**-10, 2**-7, 2**-23, 2**-52."""
    return float(ml_dtypes.finfo(dtype).eps)


def largest_finite(dtype: np.dtype) -> float:
    """The largest finite number."""
    return float(ml_dtypes.finfo(dtype).max)


def check_dtypes(**dtypes: object) -> np.dtype:
    """The one dtype that all named arrays have; DTypeError names the one that is unsupported or different.

    `l` is checked against the accumulator dtype of the others, in which every forward saves it.
    """
    common, owner = None, None
    for name, given in dtypes.items():
        if given not in FLOATS:
            raise DTypeError(f"{name} has dtype {given}; supported are float16, bfloat16, float32 and float64")
        if common is None:
            common, owner = np.dtype(given), name
        expected = accumulator_dtype(common) if name == "l" else common
        if given != expected:
            raise DTypeError(f"{name} has dtype {given}, expected {expected} because {owner} is {common}")
    return common


def check_scale(softmax_scale: object, default: float) -> float:
    """softmax_scale as a float, `default` for None; DTypeError or ParameterError for what is no finite number."""
    if softmax_scale is None:
        return default
    if isinstance(softmax_scale, bool) or not isinstance(softmax_scale, Real | np.ndarray) or np.ndim(softmax_scale):
        raise DTypeError(f"softmax_scale must be a number, got {type(softmax_scale).__name__} {softmax_scale!r}")
    if not math.isfinite(softmax_scale):
        raise ParameterError(f"softmax_scale must be finite, got {softmax_scale!r}")
    return float(softmax_scale)


# ---- the tolerance rule -----------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Verdict:
    """What `judge` found. `error` and `worst` pass when at most `budget` and `worst_budget`."""

    error: float
    budget: float
    worst: float
    worst_budget: float
    misplaced: int
    """Elements that are NaN or inf where the truth is not, or the reverse, or the other infinity."""

    @property
    def passed(self) -> bool:
        return self.misplaced == 0 and self.error <= self.budget and self.worst <= self.worst_budget


def relative_error(actual: np.ndarray, truth: np.ndarray, reference_norm: float = 0.0) -> float:
    """‖actual − truth‖ / ‖truth‖ in float64, over the elements whose truth is finite.

    Where ‖truth‖ is 0 the divisor is `reference_norm`, the norm of the upstream gradient or input; where that is 0 too,
    the error is absolute.
    """
    return _errors(actual, truth, reference_norm)[0]


def norm(x: np.ndarray) -> float:
    """‖x‖, also where squares of its elements would overflow or vanish."""
    largest = float(np.max(np.abs(x), initial=0.0))
    if largest == 0.0 or not math.isfinite(largest):
        return largest
    return largest * math.sqrt(float(np.sum(np.square(x / largest))))  # no BLAS: its threads cost more than such a sum


def judge(
    actual: np.ndarray,
    truth: np.ndarray,
    plain: np.ndarray | Sequence[np.ndarray] | None = None,
    *,
    factor: float = FORWARD_FACTOR,
    reference_norm: float = 0.0,
) -> Verdict:
    """Whether `actual` is as good as its dtype allows.

    With error(x) = ‖x − truth‖ / ‖truth‖, truth in float64, `actual` passes when

        error(actual) <= factor * error(plain) + eps(dtype of actual)

    where `plain` is the same computation done plainly in the same precision: two-pass NumPy for fused kernels, the
    online recurrence for mirror kernels. So no constant says how wrong a kernel may be: the data does. Of several results
    (`testing.check.neighbours`: one plain result of a small problem may be exact by luck) the worst counts.

    An element is measured relative to its own magnitude or to the root mean square of truth, whichever is larger: the
    worst may be off by WORST_FACTOR times the budget of the norm, or by `factor` times the worst of plain. NaN and inf
    must sit where truth, rounded to the dtype, has them. `plain=None` means that the operation only moves or adds
    numbers: the result must be the rounded truth exactly.
    """
    dtype = actual.dtype
    with np.errstate(over="ignore"):
        rounded = np.asarray(truth).astype(dtype)
    misplaced = int(np.count_nonzero(~_same_special(np.asarray(actual), rounded, np.asarray(truth, np.float64))))
    if plain is None:
        error, worst = _errors(actual, rounded, reference_norm)
        if np.any((actual != rounded) & np.isfinite(actual) & np.isfinite(rounded)):
            error = max(error, 5e-324)  # also where the quotient of the norms is too small for a float64
        return Verdict(error, 0.0, worst, 0.0, misplaced)
    error, worst = _errors(actual, truth, reference_norm)
    several = [plain] if isinstance(plain, np.ndarray) else plain
    # Where plain itself fails, it allows nothing.
    usable = [np.where(np.isfinite(x.astype(np.float64)), truth, np.nan) for x in several]
    allowed = [_errors(x, y, reference_norm) for x, y in zip(several, usable, strict=True)]
    budget = factor * max(x for x, _ in allowed) + machine_epsilon(dtype)
    return Verdict(error, budget, worst, max(WORST_FACTOR * budget, factor * max(x for _, x in allowed)), misplaced)


def _errors(actual: np.ndarray, truth: np.ndarray, reference_norm: float) -> tuple[float, float]:
    """(relative error of the norm, error of the worst element relative to itself or to the root mean square)."""
    got, want = _finite_part(actual, truth)
    if not want.size:
        return 0.0, 0.0
    size = norm(want) or reference_norm
    with np.errstate(over="ignore", invalid="ignore"):  # what is beyond the largest float64 is inf: it fails, as it should
        difference = np.abs(got - want)
        relative = difference / np.maximum(np.abs(want), size / math.sqrt(want.size) or 1.0)
    return norm(difference) / (size or 1.0), float(np.max(np.where(np.isnan(relative), np.inf, relative)))


def _finite_part(actual: np.ndarray, truth: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Both in float64 where truth is finite, clipped to the range of actual's dtype: overflow is judged as its maximum.

    NaN where truth is finite counts as the largest error there is, so that it can never pass.
    """
    limit = largest_finite(actual.dtype)
    actual, truth = np.asarray(actual, np.float64), np.asarray(truth, np.float64)
    finite = np.isfinite(truth)
    got = np.nan_to_num(actual[finite], nan=np.inf)
    return np.clip(got, -limit, limit), np.clip(truth[finite], -limit, limit)


def _same_special(actual: np.ndarray, rounded: np.ndarray, truth: np.ndarray) -> np.ndarray:
    """True where both are finite, both NaN or the same infinity; also at an overflow that may round either way."""
    actual, rounded = actual.astype(np.float64), rounded.astype(np.float64)
    same = (actual == rounded) | (np.isnan(actual) & np.isnan(rounded)) | (np.isfinite(actual) & np.isfinite(rounded))
    return same | (np.isfinite(truth) & ~np.isnan(actual) & (np.isinf(rounded) | np.isinf(actual)))
