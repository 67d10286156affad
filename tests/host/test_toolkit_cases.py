"""The cases that are fuzzed with: valid, varied, small when they fail, the same bits everywhere."""

from __future__ import annotations

import hashlib
import pickle

import numpy as np
import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import find as find_smallest
from hypothesis import strategies as st

from numba_psa import OPERATIONS, PSAShape, oracle
from numba_psa.numerics import FLOATS
from numba_psa.testing.case import FLAGS, LAYOUTS, Case, lay_out, whole_buffer
from numba_psa.testing.compare import compare
from numba_psa.testing.stock import STOCK_MODELS, STOCK_SIDES
from numba_psa.testing.strategies import TILES, TOKENS, cases, psa_shapes
from numba_psa.testing.values import Source, make_case, ramp, value_kinds

QUICK = settings(max_examples=150, deadline=None, database=None, derandomize=True, suppress_health_check=list(HealthCheck))


@pytest.mark.parametrize("op", OPERATIONS)
def test_every_case_is_one_the_oracle_takes(op):
    @settings(QUICK, max_examples=60)
    @given(cases(op, dtype=None))
    def run(case: Case):
        returned, changed = case.call(getattr(oracle, op))
        assert not changed
        assert compare(returned, case=case).passed

    run()


def test_every_flag_and_dtype_comes_up():
    seen = set()
    for op in ("psa_fa2_backward", "psa_attention", "flash_attention2_forward", "psa_pack_qkv"):

        @settings(QUICK, max_examples=300)
        @given(cases(op, dtype=None))
        def run(case: Case):
            seen.update((*case.flags, case.dtype.name))

        run()
    assert seen == set(FLAGS) | {dtype.name for dtype in FLOATS}


@pytest.mark.parametrize("op", ["psa_pack_qkv", "psa_attention"])
def test_a_lo_hi_swap_shrinks_to_one_pixel(op):
    def swapped(case: Case) -> bool:
        heads = case["qkv"].reshape(case.shape.heads)[:, [0, 1, 3, 2]].reshape(case.shape.qkv)
        return not compare(getattr(oracle, op)(heads, *case.args[1:], **case.kwargs), case=case).passed

    case = find_smallest(cases(op), swapped, settings=settings(QUICK, phases=[Phase.generate, Phase.shrink]))
    assert case.shape == PSAShape(1, 1, 1, 1, 1)
    assert case.values == value_kinds(op)[0]
    assert not case.layouts
    assert "softmax_scale" not in case


def test_a_tail_bug_shrinks_to_the_smallest_tail():
    case = find_smallest(cases("psa_pack_qkv"), lambda c: c.shape.n % 16 and c.shape.n > 16, settings=QUICK)
    assert case.shape.n <= 23
    assert (case.shape.batch, case.shape.num_heads, case.shape.key_dim) == (1, 1, 1)


def test_tiles_and_their_neighbours_and_stock_models_come_up():
    assert {tile + e for tile in TILES for e in (-1, 0, 1)} <= set(TOKENS)
    seen = set()

    @settings(QUICK, max_examples=1000)
    @given(psa_shapes())
    def run(shape):
        seen.add(shape)

    run()
    stock = {PSAShape(1, m.num_heads, m.key_dim, side, side) for m in STOCK_MODELS for side in STOCK_SIDES.values()}
    assert len(stock & seen) >= len(stock) // 2
    assert any(shape.height != shape.width for shape in seen)
    assert all(shape.n <= 400 for shape in seen)


@given(st.sampled_from(LAYOUTS), st.lists(st.integers(0, 4), min_size=1, max_size=4))
@QUICK
def test_layouts_keep_values_and_poison_the_gaps(layout, shape):
    array = ramp(tuple(shape), np.dtype(np.float32))
    laid = lay_out(array, layout)
    assert np.array_equal(laid, array)
    assert not np.shares_memory(laid, array)
    gaps = whole_buffer(laid).size - array.size
    assert np.isnan(whole_buffer(laid)).sum() == gaps


def test_ramps_are_unique_and_exact():
    for dtype in FLOATS:
        x = ramp((100,), dtype).astype(float)
        assert np.array_equal(x, np.arange(1, 101))
    merge = make_case("psa_merge_attn_nchw", PSAShape(2, 2, 3, 2, 2), np.float32)
    assert np.unique(np.concatenate((merge["lo"].ravel(), merge["hi"].ravel()))).size == 2 * merge["lo"].size


def test_numbers_are_the_same_bits_everywhere():
    source = Source(7, "q")
    numbers = np.concatenate((source.normal((50,)), source.eighths((50,))))
    assert abs(Source(1, "v").normal((20000,)).std() - 1) < 0.02
    digest = hashlib.sha256(numbers.astype("<f8").tobytes()).hexdigest()
    assert digest == "fee9937ed97a51f95170ffc2cfe00f6d4ccc0021cd9c2518056e962f769d3e42"


def test_a_case_survives_pickling_and_says_what_it_is():
    case = make_case("psa_fa2_backward", PSAShape(1, 2, 4, 2, 3).attention, "float16", targets=True, softmax_scale=0.5)
    again = pickle.loads(pickle.dumps(case))
    assert repr(again) == repr(case) != ""
    assert again.flags == case.flags
    assert {"Accumulates", "Overwrites", "Half", "Scaled", "Tail"} <= set(case.flags)
    assert all(np.array_equal(a, b) for a, b in zip(again.args, case.args, strict=True))


def test_targets_are_copies_each_time():
    case = make_case("psa_extract_v_backward", PSAShape(1, 1, 2, 2, 2), np.float32, targets=True)
    before = case["d_qkv"].copy()
    for _ in range(2):
        case.call(oracle.psa_extract_v_backward)
    assert np.array_equal(case["d_qkv"], before)


def test_a_change_to_the_memory_around_an_input_is_seen():
    def scribbles(qkv, num_heads):
        result = oracle.psa_pack_qkv(qkv, num_heads)
        qkv.base.flat[0] = 7.0
        return result

    case = make_case("psa_pack_qkv", PSAShape(1, 1, 1, 1, 1), np.float32, layouts={"qkv": "offset"})
    assert case.call(scribbles)[1] == ["qkv"]
    assert case.call(oracle.psa_pack_qkv)[1] == []
