"""The oracle against tensors of other software, at special values, and on arrays that are not plain."""

from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from problems import normal

from numba_psa import oracle
from numba_psa.numerics import FLOATS, accumulator_dtype

DATA = Path(__file__).parent.parent / "data"
TORCH = sorted((DATA / "torch_float64").glob("*.npz"))
FLASH, PSA = [[path for path in TORCH if path.name.startswith(kind)] for kind in ("flash", "psa")]


def relative(got, want, reference=0.0):
    return np.linalg.norm(got.astype(float) - want) / (np.linalg.norm(want) or reference)


def limits(path):
    """A float32 log-sum-exp of ±1024 cannot give exp(s − l) to float32 accuracy: those files count in float64 only."""
    yield np.float64, 1e-10
    if "shift1024" not in path.name:
        yield np.float32, 2e-5


@pytest.mark.parametrize("path", PSA, ids=lambda path: path.stem)
def test_psa_attention_agrees_with_pytorch(path):
    with np.load(path) as file:
        qkv, d_out, heads, out, d_qkv = (file[x] for x in ("qkv", "d_out", "num_heads", "out", "d_qkv"))
    for dtype, limit in limits(path):
        x, dy = qkv.astype(dtype), d_out.astype(dtype)
        got, saved = oracle.psa_attention(x, int(heads), save_for_backward=True)
        assert got.dtype == dtype
        assert relative(got, out) < limit
        for kept in (saved, None):
            assert relative(oracle.psa_attention_backward(x, dy, int(heads), saved=kept), d_qkv) < limit


@pytest.mark.parametrize("path", FLASH, ids=lambda path: path.stem)
def test_flash_attention_agrees_with_pytorch(path):
    with np.load(path) as file:
        want = dict(file)
    scale, reference = float(want["scale"]), np.linalg.norm(want["do"])
    for dtype, limit in limits(path):
        q, k, v, do = (want[x].astype(dtype) for x in ("q", "k", "v", "do"))
        o, l = oracle.flash_attention2_forward(q, k, v, scale)
        saved = (q, k, v, o, do, l, scale)
        dk, dv = oracle.flash_attention2_backward_dkv(*saved)
        got = {"o": o, "l": l, "dq": oracle.flash_attention2_backward_dq(*saved), "dk": dk, "dv": dv}
        for name, array in got.items():
            assert relative(array, want[name], reference) < limit, name


def test_attention_of_a_trained_network_agrees_with_onnxruntime():
    with np.load(DATA / "yolo26n_astronaut_448x320.npz") as file:
        got = oracle.psa_attention(file["qkv"], int(file["num_heads"]))
        assert relative(got, file["attn_out"].astype(float)) < 2e-5


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_results_have_the_dtype_of_the_inputs_and_l_that_of_the_accumulator(dtype):
    q, k, v = normal(0, (2, 3, 4), (2, 5, 4), (2, 5, 6), dtype=dtype)
    o, l = oracle.flash_attention2_forward(q, k, v)
    assert (o.dtype, l.dtype) == (dtype, accumulator_dtype(dtype))
    dk, dv = oracle.flash_attention2_backward_dkv(q, k, v, o, o, l)
    assert dk.dtype == dv.dtype == dtype
    assert oracle.flash_attention2_forward(q, k, v, dtype=np.float64)[0].dtype == np.float64


# ---- special values ---------------------------------------------------------------------------------------------------
def masked_inputs():
    """Row 1 of 3 queries has only scores of -inf."""
    q, k, v, do = normal(1, (1, 3, 4), (1, 5, 4), (1, 5, 2), (1, 3, 2))
    k[..., 0] = 1.0
    q[0, 1] = (-np.inf, 0.0, 0.0, 0.0)
    return q, k, v, do


@pytest.mark.parametrize("forward", [oracle.flash_attention2_forward, oracle.flash_attention2_forward_online])
def test_a_masked_row_gives_zero_and_minus_infinity(forward):
    q, k, v, _ = masked_inputs()
    o, l = forward(q, k, v)
    assert (o[0, 1] == 0).all()
    assert l[0, 1] == -np.inf
    assert np.isfinite(o).all()
    assert np.isfinite(l[0, ::2]).all()


def test_a_masked_row_gets_and_gives_no_gradient():
    q, k, v, do = masked_inputs()
    o, l = oracle.flash_attention2_forward(q, k, v)
    dq = oracle.flash_attention2_backward_dq(q, k, v, o, do, l)
    assert (dq[0, 1] == 0).all()
    rest = [x[:, ::2] for x in (q, o, do, l)]
    without = oracle.flash_attention2_backward_dkv(rest[0], k, v, rest[1], rest[2], rest[3])
    for got, want in zip(oracle.flash_attention2_backward_dkv(q, k, v, o, do, l), without, strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-13)


@pytest.mark.parametrize("forward", [oracle.flash_attention2_forward, oracle.flash_attention2_forward_online])
def test_no_keys_give_zero_and_minus_infinity(forward):
    o, l = forward(np.ones((2, 3, 4)), np.ones((2, 0, 4)), np.ones((2, 0, 5)))
    assert o.shape == (2, 3, 5)
    assert (o == 0).all()
    assert (l == -np.inf).all()
    dq = oracle.flash_attention2_backward_dq(*(np.ones((2, n, 4)) for n in (3, 0, 0, 3, 3)), l)
    assert (dq == 0).all()


def test_the_original_recurrence_would_be_nan_here():
    q = np.array([[[1e20]]], np.float32)
    k, v = np.array([[[-1e20], [0]]], np.float32), np.array([[[3], [7]]], np.float32)
    for forward in (oracle.flash_attention2_forward, oracle.flash_attention2_forward_online):
        o, l = forward(q, k, v)
        assert o[0, 0, 0] == 7
        assert l[0, 0] == 0


def test_scores_beyond_float16_do_not_overflow():
    q = np.full((1, 2, 32), 46, np.float16)  # q·k = 67,712 > 65,504
    v = normal(0, (1, 2, 32), dtype=np.float16)[0]
    o, l = oracle.flash_attention2_forward(q, q, v)
    np.testing.assert_allclose(o[0, 0].astype(float), v[0].astype(float).mean(0), atol=1e-3)
    assert np.isfinite(l).all()


def test_nan_reaches_what_it_must_and_nothing_else():
    clean = normal(2, (2, 3, 4), (2, 5, 4), (2, 5, 6))
    expected = oracle.flash_attention2_forward(*clean)[0]
    wanted = np.zeros((3, *expected.shape), bool)
    wanted[0, 0, 1], wanted[1, 0], wanted[2, 0, :, 3] = True, True, True
    for which, (place, mask) in enumerate(zip([(0, 1, 2), (0, 4, 0), (0, 2, 3)], wanted, strict=True)):
        dirty = [x.copy() for x in clean]
        dirty[which][place] = np.nan
        for forward in (oracle.flash_attention2_forward, oracle.flash_attention2_forward_online):
            o, _ = forward(*dirty)
            np.testing.assert_array_equal(np.isnan(o), mask)
            np.testing.assert_allclose(o[~mask], expected[~mask], rtol=1e-12)


@pytest.mark.parametrize("shape", [(0, 32, 3, 2), (2, 32, 0, 2), (2, 32, 3, 0)])
def test_empty_problems_are_empty(shape):
    qkv, d_out = np.zeros(shape), np.zeros((shape[0], 16, *shape[2:]))
    assert oracle.psa_pack_qkv(qkv, 2).size == 0
    assert oracle.psa_attention(qkv, 2).shape == d_out.shape
    assert oracle.psa_attention_backward(qkv, d_out, 2).shape == shape
    d_lo, _ = oracle.psa_merge_attn_backward(d_out, 2)
    assert oracle.psa_merge_attn_nchw(d_lo, d_lo, 2, *shape[2:]).shape == d_out.shape


# ---- arrays that are not plain ----------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    "layout",
    [np.asfortranarray, lambda x: x[:, ::-1][:, ::-1], lambda x: np.repeat(x, 2, axis=-1)[..., ::2], np.flip],
    ids=["fortran", "reversed twice", "strided", "flipped"],
)
def test_strides_are_honoured(layout):
    (qkv,) = normal(3, (2, 24, 3, 2))
    view = layout(qkv)
    np.testing.assert_array_equal(oracle.psa_attention(view, 2), oracle.psa_attention(np.ascontiguousarray(view), 2))
    np.testing.assert_array_equal(oracle.psa_pack_qkv(view, 2), oracle.psa_pack_qkv(np.ascontiguousarray(view), 2))


def test_results_are_no_views_of_the_input():
    (qkv,) = normal(4, (1, 8, 1, 1))
    for result in (oracle.psa_pack_qkv(qkv, 2), oracle.psa_extract_v_nchw(qkv, 2)):
        assert not np.shares_memory(result, qkv)


def test_a_strided_target_is_added_into():
    d_packed, room = normal(5, (4, 2, 6, 3), (1, 48, 3, 2))
    view = room[:, ::2]
    expected = view + oracle.psa_pack_qkv_backward(d_packed, 2, 3, 2)
    untouched = room[:, 1::2].copy()
    oracle.psa_pack_qkv_backward(d_packed, 2, 3, 2, d_qkv=view)
    np.testing.assert_array_equal(room[:, ::2], expected)
    np.testing.assert_array_equal(room[:, 1::2], untouched)


def test_lists_are_arrays_too():
    assert oracle.flash_attention2_forward([[[1.0]]], [[[1.0]]], [[[2.0]]])[0][0, 0, 0] == 2.0


def test_sums_of_halves_are_rounded_once():
    a, b = normal(6, (4, 1, 1, 8), (1, 32, 1, 1), dtype=ml_dtypes.bfloat16)
    expected = (b.astype(float) + a.transpose(1, 0, 3, 2).reshape(b.shape).astype(float)).astype(b.dtype)
    np.testing.assert_array_equal(oracle.psa_pack_qkv_backward(a, 1, 1, 1, d_qkv=b), expected)
