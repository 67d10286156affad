"""Comparing and diagnosing: NaN and inf by value, budgets that can be overridden, places in the alphabet, causes."""

from __future__ import annotations

import numpy as np
import pytest

from numba_psa import OPERATIONS, PSAShape, oracle
from numba_psa.errors import ParameterError
from numba_psa.shapes import AttentionShape
from numba_psa.testing.causes import CAUSES
from numba_psa.testing.compare import MismatchError, compare
from numba_psa.testing.diagnose import diagnose, predictions
from numba_psa.testing.hypotheses import INDEX_MAPS, adjoint
from numba_psa.testing.mutants_attention import MUTANTS
from numba_psa.testing.values import make_case

PSA = PSAShape(2, 3, 4, 3, 5)


def case_of(op, dtype=np.float32, **options):
    return make_case(op, PSA.attention if OPERATIONS[op].arrays[0] == "q" else PSA, dtype, **options)


def right(case):
    return {name: np.asarray(x) for name, x in case.operation(oracle, case).items()}


@pytest.mark.parametrize("op", OPERATIONS)
def test_the_oracle_passes_and_a_changed_element_fails(op):
    case = case_of(op, values=None)
    results = right(case)
    assert compare(results, case=case).check().kind == "passed"
    for name, x in results.items():
        wrong = {**results, name: x.copy()}
        wrong[name].flat[x.size // 2] += 1000
        report = compare(wrong, case=case)
        assert report.kind == "wrong-values"
        with pytest.raises(MismatchError, match="1 of"):
            report.check()


def test_nan_and_inf_are_compared_by_value():
    case = case_of("psa_pack_qkv", values="special")
    packed = right(case)["packed"]
    assert np.isnan(packed).any()
    assert np.isinf(packed).any()
    assert compare(packed, case=case).passed
    for place, value in ((np.isnan(packed), 0.0), (np.isposinf(packed), -np.inf), (np.isfinite(packed), np.nan)):
        wrong = packed.copy()
        wrong[tuple(np.argwhere(place)[0])] = value
        report = compare(wrong, case=case)
        assert not report.passed
        assert report.verdicts["packed"].misplaced == 1


def test_smallest_difference_beside_the_largest_number_is_seen():
    expected = np.array([[[[np.finfo(float).max, 0.0]], [[0.0, 0.0]]]])
    actual = expected.copy()
    actual[0, 1, 0, 1] = 5e-324
    assert not compare(actual, expected, op="psa_extract_v_nchw").passed
    assert compare(expected, expected, op="psa_extract_v_nchw").passed


def test_problems_of_count_shape_and_dtype_have_names():
    case = case_of("flash_attention2_forward", np.float16)
    o, l = right(case).values()
    assert l.dtype == np.float32
    assert compare((o, l), case=case).passed
    assert compare(o, case=case).kind == "wrong-count"
    assert compare((o, l, l), case=case).kind == "wrong-count"
    assert compare((o[:, :-1], l), case=case).kind == "wrong-shape"
    assert compare((o, l.astype(np.float16)), case=case).kind == "wrong-dtype"
    assert "l has dtype float16, expected float32" in str(compare((o, l.astype(np.float16)), case=case))


def test_tolerance_can_be_overridden_by_dtype_and_is_needed_without_arguments():
    case = case_of("psa_attention", values="normal")
    out = right(case)["out"]
    off = out * np.float32(1.001)
    assert not compare(off, case=case).passed
    assert compare(off, case=case, tolerance=0.01).passed
    assert compare(off, out, op="psa_attention", tolerance={"float32": 0.01}).passed
    assert not compare(off, out, op="psa_attention", tolerance=1e-5).passed
    for options in ({}, {"tolerance": {"float16": 1.0}}):
        with pytest.raises(ParameterError):
            compare(off, out, op="psa_attention", **options)
    with pytest.raises(ParameterError, match="op must be one of"):
        compare(off, out, op="attention")
    with pytest.raises(ParameterError, match="expected="):
        compare(off, op="psa_attention")


def test_a_report_says_where_in_the_alphabet():
    case = case_of("psa_pack_qkv", values="ramp")
    packed = right(case)["packed"]
    packed[3, 1 * 3 + 2, 7, 3] = -1  # V_hi, b = 1, h = 2, n = 7 = 1*5 + 2
    text = str(compare(packed, case=case))
    assert "1 of 1440 elements wrong; only section = V_hi, b = 1, h = 2, n = 7, d = 3" in text
    assert "worst at section=V_hi b=1 h=2 n=7 y=1 x=2 d=3: got -1" in text

    case = case_of("psa_extract_v_backward", values="ramp")
    d_qkv = right(case)["d_qkv"]
    d_qkv[:, (1 * 4 + 2) * 4 : (1 * 4 + 3) * 4, 1:] += 1
    text = str(compare(d_qkv, case=case))
    assert "only h = 1, section = V_lo, n >= 5" in text

    case = case_of("flash_attention2_forward", values="normal")
    o, l = right(case).values()
    l[:, 8:] += 1
    text = str(compare((o, l), case=case))
    assert "o: right" in text
    assert "only n >= 8" in text


def test_the_pytest_snippet_of_the_readme():
    from hypothesis import given, settings

    from numba_psa.testing.strategies import cases

    @settings(max_examples=20, database=None)
    @given(cases("psa_pack_qkv"))
    def test_my_kernel(case):
        compare(oracle.psa_pack_qkv(*case.args, **case.kwargs), case=case).check()

    test_my_kernel()


# ---- diagnosis --------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("op", OPERATIONS)
def test_every_prediction_has_a_name_and_fits_the_outputs(op):
    case = case_of(op, targets=bool(OPERATIONS[op].adds), values=None)
    truth = right(case)
    tried = set()
    with np.errstate(all="ignore"):
        for cause, _, outputs in predictions(case, truth, {name: 3 * x for name, x in truth.items()}):
            tried.add(cause)
            assert {name: x.shape for name, x in outputs.items()} == {name: x.shape for name, x in truth.items()}, cause
    assert tried <= set(CAUSES)
    assert len(tried) >= 15


def test_every_cause_is_predicted_somewhere():
    tried = {"half-accumulation"}
    for op in OPERATIONS:
        for shape in (PSA.attention if OPERATIONS[op].arrays[0] == "q" else PSA,):
            kinds = ("masked-rows", None) if OPERATIONS[op].scaled else (None,)
            for values in kinds:
                case = make_case(op, shape, np.float32, values=values, targets=bool(OPERATIONS[op].adds))
                with np.errstate(all="ignore"):
                    tried |= {cause for cause, _, _ in predictions(case, right(case), right(case))}
    assert tried == set(CAUSES)


def test_index_maps_move_and_adjoints_are_adjoint():
    rng = np.random.default_rng(0)
    for sections in (2, 4):
        shape = (2, 3, sections, 4, 3, 5)
        x, y = rng.standard_normal(shape), rng.standard_normal(shape)
        for cause, detail, move in INDEX_MAPS:
            assert move(x).shape == shape, cause
            assert np.isclose(np.vdot(move(x), y), np.vdot(x, adjoint(move, y))), (cause, detail)


def test_a_factor_and_a_sign_are_named():
    case = case_of("psa_attention", values="normal")
    out = right(case)["out"]
    assert str(compare(out * np.float32(0.25), case=case).diagnosis[0]).startswith("constant-factor (×0.25)")
    assert compare(-out, case=case).diagnosis[0].cause == "negated"


def test_an_unknown_mistake_is_not_explained_away():
    case = case_of("psa_attention", values="normal")
    noise = np.random.default_rng(0).standard_normal(case.shape.out).astype(np.float32)
    assert compare(noise, case=case).diagnosis == []
    assert "no known cause" in str(compare(noise, case=case))


def test_more_failures_tell_apart_what_one_cannot():
    """On one token a softmax over queries equals many mistakes; on one row a missing tail and a missing last key agree."""
    skips = next(m for m in MUTANTS if m.name == "flash_attention2_forward/skips-last-key")
    shapes = [AttentionShape(1, 2, n, 4, 4) for n in (17, 24, 33)]
    failures = []
    for shape in shapes:
        case = make_case("flash_attention2_forward", shape, np.float32, values="normal")
        failures.append((case, dict(zip("ol", skips.function(*case.args), strict=True))))
    assert diagnose(failures)[0].cause == "key-loop-off-by-one"
    assert {d.cause for d in diagnose(failures[:1])} >= {"key-loop-off-by-one", "tail-missing"}
    assert "tail-missing" not in {d.cause for d in diagnose(failures)}
