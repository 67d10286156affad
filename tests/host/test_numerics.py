"""The tolerance rule and the dtype policy."""

import ml_dtypes
import numpy as np
import pytest

from numba_psa import DTypeError, ParameterError
from numba_psa.numerics import (
    BFLOAT16,
    FLOAT32,
    FLOATS,
    HALVES,
    accumulator_dtype,
    check_dtypes,
    check_scale,
    float_dtype,
    judge,
    machine_epsilon,
    relative_error,
)

TRUTH = np.random.default_rng(0).standard_normal((3, 40))
PLAIN = TRUTH.astype(np.float32)


def verdict(change, **keywords):
    actual = TRUTH.astype(np.float32)
    change(actual)
    return judge(actual, TRUTH, PLAIN, **keywords)


def test_the_rounded_truth_passes():
    assert verdict(lambda x: None).passed


@pytest.mark.parametrize(
    "change",
    [
        lambda x: np.multiply(x, np.float32(1 + 2e-6), out=x),
        lambda x: x.__setitem__((1, 5), x[1, 5] + 1e-4),
        lambda x: x.__setitem__((1, 5), np.nan),
        lambda x: x.__setitem__((1, 5), np.inf),
        lambda x: x.__setitem__(slice(None), x[::-1].copy()),
        lambda x: x.__setitem__(slice(None), 0),
    ],
    ids=["scaled", "one element", "NaN", "inf", "permuted", "zero"],
)
def test_what_is_wrong_does_not_pass(change):
    assert not verdict(change).passed


def test_one_bad_element_cannot_hide_in_a_large_array():
    truth = np.random.default_rng(1).standard_normal(10**6)
    actual = truth.astype(np.float32)
    actual[7] += 1e-4
    found = judge(actual, truth, truth.astype(np.float32))
    assert found.error < found.budget
    assert not found.passed


def test_nan_and_infinity_count_by_value_and_place():
    truth = np.array([1.0, np.nan, np.inf, -np.inf])
    assert judge(truth.astype(np.float32), truth, truth.astype(np.float32)).passed
    for i, wrong in ((0, np.nan), (1, 1.0), (2, np.nan), (2, -np.inf), (3, 0.0)):
        actual = truth.astype(np.float32)
        actual[i] = wrong
        assert judge(actual, truth, truth.astype(np.float32)).misplaced == 1


def test_overflow_of_the_result_dtype_is_judged_as_its_maximum():
    truth = np.array([1.0, 70000.0, 65519.0, 65521.0])
    with np.errstate(over="ignore"):
        assert judge(truth.astype(np.float16), truth, truth.astype(np.float16)).passed
        assert not judge(np.array([1.0, 6e4, np.inf, np.inf], np.float16), truth, truth.astype(np.float16)).passed


def test_where_the_truth_is_zero_the_reference_norm_counts():
    zero = np.zeros(4)
    tiny = np.full(4, 1e-9, np.float32)
    assert judge(tiny, zero, zero.astype(np.float32), reference_norm=1.0).passed
    assert not judge(tiny, zero, zero.astype(np.float32), reference_norm=1e-3).passed
    assert relative_error(tiny, zero) == pytest.approx(2e-9)


def test_a_plain_computation_that_fails_allows_nothing():
    plain = np.full(TRUTH.shape, np.nan, np.float32)
    assert not judge((TRUTH * (1 + 1e-5)).astype(np.float32), TRUTH, plain).passed


def test_without_a_plain_computation_the_result_is_exact():
    rounded = TRUTH.astype(ml_dtypes.bfloat16)
    assert judge(rounded, TRUTH).passed
    rounded[0, 0] = np.nextafter(rounded[0, 0], ml_dtypes.bfloat16(np.inf))
    assert not judge(rounded, TRUTH).passed


def test_epsilons():
    assert [machine_epsilon(x) for x in FLOATS] == [2.0**-10, 2.0**-7, 2.0**-23, 2.0**-52]


def test_halves_accumulate_in_float32():
    assert [accumulator_dtype(x) for x in FLOATS] == [FLOAT32, FLOAT32, FLOAT32, np.float64]
    assert set(HALVES) == {np.dtype(np.float16), BFLOAT16}


def test_dtypes_must_agree_and_l_with_the_accumulator():
    assert check_dtypes(q=np.dtype(np.float16), l=FLOAT32) == np.float16
    with pytest.raises(DTypeError, match="l has dtype float16, expected float32"):
        check_dtypes(q=np.dtype(np.float16), l=np.dtype(np.float16))
    with pytest.raises(DTypeError, match="k has dtype float16, expected float32 because q"):
        check_dtypes(q=FLOAT32, k=np.dtype(np.float16))


def test_dtype_names():
    assert float_dtype("bfloat16") == BFLOAT16
    for wrong in ("int8", "nonsense", complex):
        with pytest.raises(DTypeError, match="bfloat16"):
            float_dtype(wrong)


def test_scale():
    assert check_scale(None, 0.5) == 0.5
    assert check_scale(np.float32(2), 0.5) == 2.0
    for wrong, error in ((np.inf, ParameterError), ("2", DTypeError), (True, DTypeError), (np.ones(2), DTypeError)):
        with pytest.raises(error, match="softmax_scale"):
            check_scale(wrong, 0.5)
