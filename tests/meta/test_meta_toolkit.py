"""The toolkit's own proof: planted porting bugs are killed and named, correct ports are left alone.

This is the small part of `python -m numba_psa.testing.score`: the default seed, not twenty others, and 50 cases for each
correct variant and operation.
"""

from __future__ import annotations

import functools
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context

import pytest

from numba_psa import OPERATIONS, PSAShape
from numba_psa.testing import mutants, mutants_attention, score
from numba_psa.testing.causes import CAUSES
from numba_psa.testing.compare import compare
from numba_psa.testing.fuzz import fuzz
from numba_psa.testing.score import MUTANTS, VARIANTS, false_alarms, kill
from numba_psa.testing.targets import CallableTarget
from numba_psa.testing.values import make_case
from numba_psa.testing.variants import Variant, direct, two_pass


def test_there_are_enough_bugs_for_every_operation():
    assert len(MUTANTS) >= 45
    assert {mutant.op for mutant in MUTANTS} == set(OPERATIONS)
    assert {mutant.cause for mutant in MUTANTS} <= {*CAUSES, None}
    assert len({mutant.name for mutant in MUTANTS}) == len(MUTANTS)
    assert len(VARIANTS) >= 8


def test_every_bug_is_killed_and_nine_in_ten_are_named(monkeypatch):
    monkeypatch.setenv("OPENBLAS_NUM_THREADS", "1")  # one process a core
    with ProcessPoolExecutor(mp_context=get_context("spawn")) as pool:  # other tests may have left threads behind
        kills = list(pool.map(functools.partial(kill, shrink=False), range(len(MUTANTS))))
    assert [k.name for k in kills if not k.killed] == []
    assert max(k.examples for k in kills) <= 200
    wrong = [(k.name, k.cause, k.named) for k in kills if k.cause is not None and k.named != k.cause]
    assert len(wrong) <= 0.1 * sum(k.cause is not None for k in kills), wrong


@pytest.mark.parametrize("op", OPERATIONS)
def test_the_code_of_the_bugs_is_right_without_them(op):
    """So that each is killed for its bug, not for the code around it."""
    tables = (mutants._LAYOUT, mutants_attention._ATTENTION)
    (function,) = (f for table in tables for name, f in table if name == op)
    result = fuzz(op, CallableTarget(mutants_attention._quiet(function, None)), dtype=None, max_examples=50)
    assert result.finding is None, result.finding
    assert result.examples == 50


@pytest.mark.parametrize("op", OPERATIONS)
def test_correct_variants_raise_no_alarm(op):
    count, alarms = false_alarms(op, 1, 50)
    assert count == 50
    assert sum(alarms.values()) == 0, alarms


def test_a_budget_that_is_too_wide_would_let_bugs_live():
    """With the limit replaced by 100 % of the norm, subtle bugs pass: it is the measured budget that kills them."""
    problem = PSAShape(1, 2, 8, 5, 5)
    for name in ("flash_attention2_forward/p-in-half", "flash_attention2_forward/half-sums", "psa_attention/padded"):
        mutant = next(m for m in MUTANTS if m.name == name)
        shape = problem if mutant.op == "psa_attention" else problem.attention
        case = make_case(mutant.op, shape, "float32", values="normal")
        returned, _ = case.call(mutant.function)
        assert not compare(returned, case=case).passed
        assert compare(returned, case=case, tolerance=1.0).passed


def test_an_alarm_would_be_counted(monkeypatch):
    """False alarms are looked for by code that can see one: a wrong variant is reported."""

    class Broken(Variant):
        def psa_pack_qkv(self, qkv, num_heads):
            return super().psa_pack_qkv(qkv, num_heads)[::-1]

    monkeypatch.setattr(score, "VARIANTS", (Broken("broken", two_pass, direct),))
    count, alarms = score.false_alarms("psa_pack_qkv", 1, 20)
    assert alarms["broken"] > 0.8 * count
