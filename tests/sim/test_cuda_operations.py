"""The functions of numba_psa.cuda from end to end in the simulator: arrays in, a kernel of the choice table, arrays out."""

import kernel_checks
import ml_dtypes
import numpy as np
import pytest
from bad_input import BAD_CALLS

from numba_psa import OPERATIONS, DTypeError, ParameterError, PSAShape, ShapeError, cuda, oracle
from numba_psa._numba_cuda import to_device, to_host
from numba_psa.cuda import plans
from numba_psa.cuda.choice import Choice, Problem
from numba_psa.cuda.dlpack import Lent, lent
from numba_psa.cuda.forward_wgmma import make_forward_wgmma
from numba_psa.cuda.tiles_wgmma import WarpgroupTileConfig
from numba_psa.shapes import AttentionShape
from numba_psa.testing.check import check

LAYOUT = ("psa_pack_qkv", "psa_extract_v_nchw", "psa_merge_attn_nchw")
HALF, BRAIN, SINGLE = np.dtype(np.float16), np.dtype(ml_dtypes.bfloat16), np.dtype(np.float32)


LAYOUTS = [
    (PSAShape(2, 2, 5, 3, 7), HALF),
    (PSAShape(1, 2, 4, 2, 4), SINGLE),
    (PSAShape(1, 1, 24, 5, 7), HALF),
    (PSAShape(1, 1, 16, 8, 18), BRAIN),
]


@pytest.mark.parametrize("name", LAYOUT)
@pytest.mark.parametrize(("shape", "dtype"), LAYOUTS, ids=str)
def test_layout_is_exact(name, shape, dtype):
    kernel_checks.agrees_on(cuda, name, shape, dtype)


@pytest.mark.parametrize("dtype", [HALF, BRAIN, SINGLE], ids=str)
def test_attention(dtype):
    kernel_checks.agrees_on(cuda, "psa_attention", PSAShape(1, 2, 3, 3, 5), dtype)


def test_flash_forward():
    kernel_checks.agrees_on_flash(cuda, "flash_attention2_forward", AttentionShape(1, 5, 18, 4, 6), HALF)


def test_targets_plans_and_what_backward_needs():
    shape = PSAShape(1, 1, 4, 2, 3)
    qkv = np.random.default_rng(0).standard_normal(shape.qkv).astype(HALF)
    want = cuda.psa_attention(qkv, 1)
    out = np.full(shape.out, np.nan, HALF)
    assert cuda.psa_attention(qkv, 1, out=out) is out
    np.testing.assert_array_equal(out, want)
    on_device, target = to_device(qkv), to_device(np.full(shape.out, np.nan, HALF))
    cuda.plan_psa_attention(shape, HALF)(on_device, target)
    np.testing.assert_array_equal(to_host(target), want)
    result, (saved, l) = cuda.psa_attention(qkv, 1, save_for_backward=True)
    np.testing.assert_array_equal(result, want)
    assert saved is result
    np.testing.assert_allclose(l, oracle.psa_attention(qkv, 1, save_for_backward=True)[1][1], rtol=1e-6, atol=1e-6)


def test_plans_refuse_what_they_are_not_for():
    shape = PSAShape(1, 1, 4, 2, 3)
    plan = cuda.plan_psa_attention(shape, HALF)
    qkv, out = np.zeros(shape.qkv, HALF), np.zeros(shape.out, HALF)
    with pytest.raises(ShapeError, match="qkv has W = 2"):
        plan(qkv[..., :2], out)
    with pytest.raises(DTypeError, match="out has dtype float32, the plan is for float16"):
        plan(qkv, out.astype(SINGLE))
    with pytest.raises(DTypeError, match="out must be a CUDA array or its address, got NoneType"):
        plan(qkv, None)
    with pytest.raises(DTypeError, match="shape must be a PSAShape"):
        cuda.plan_psa_attention(qkv.shape, HALF)
    with pytest.raises(ParameterError, match="no multiple of the 2 bytes"):
        plan(qkv.ctypes.data + 1, out.ctypes.data)


def test_keys_at_odd_places_are_aligned_first(monkeypatch):
    """A kernel on warpgroup products and the one before it; more heads than the memory between them holds."""
    shape = PSAShape(1, 2, 8, 1, 67)
    qkv = np.random.default_rng(3).standard_normal(shape.qkv).astype(HALF)
    out, l = np.full(shape.out, np.nan, HALF), np.full(shape.l, np.nan, SINGLE)
    config = WarpgroupTileConfig(8, 16, saves_l=True, copy=2, realigned=True, stages=3, tail=16, arch=90)
    problem = Problem(shape.bh, shape.n, shape.n, 8, 16, HALF, saves_l=True)
    monkeypatch.setattr(plans.Aligner, "MOST", 1)
    launch, part = plans.Launcher(problem, Choice(make_forward_wgmma, config)), 8 * 2 * shape.n
    at = qkv.ctypes.data
    launch(0, at, at + part, at + 2 * part, out.ctypes.data, l.ctypes.data, plans.device_scale(8**-0.5))
    verdicts = check(OPERATIONS["psa_attention"], {"qkv": qkv, "num_heads": 2}, {"out": out})
    assert all(verdict.passed for verdict in verdicts.values()), verdicts
    np.testing.assert_allclose(l, oracle.psa_attention(qkv, 2, save_for_backward=True)[1][1], rtol=1e-6, atol=1e-6)


class OnlyDLPack:
    """An array of a library that knows DLPack and the array API only, as jax's bfloat16 does."""

    def __init__(self, array):
        self._array = array

    def __dlpack__(self, *, stream=None):
        return self._array.__dlpack__()

    def __dlpack_device__(self):
        return self._array.__dlpack_device__()

    def __array_namespace__(self):
        return np


def test_dlpack_both_ways():
    qkv = np.random.default_rng(2).standard_normal((1, 16, 2, 3)).astype(HALF)
    result = cuda.psa_attention(OnlyDLPack(qkv), 1)
    np.testing.assert_array_equal(result, cuda.psa_attention(qkv, 1))
    assert lent() == 1
    del result
    assert lent() == 0
    Lent(qkv.ctypes.data, qkv.shape, HALF, qkv, 0, 0).__dlpack__()
    assert lent() == 0  # nobody took the capsule over
    with pytest.raises(ParameterError, match="for reading"):
        cuda.psa_attention(OnlyDLPack(qkv), 1, out=OnlyDLPack(qkv[:, :8]))


def test_strided_arrays_and_targets():
    room = np.random.default_rng(1).standard_normal((1, 16, 3, 8)).astype(HALF)
    out = np.full((1, 8, 3, 8), 7, HALF)
    cuda.psa_attention(room[..., ::2], 1, out=out[..., ::2])
    np.testing.assert_array_equal(out[..., ::2], cuda.psa_attention(np.ascontiguousarray(room[..., ::2]), 1))
    assert (out[..., 1::2] == 7).all()


@pytest.mark.parametrize("case", list(BAD_CALLS))
def test_bad_input_is_refused(case):
    name, arguments, keywords, error, message = BAD_CALLS[case]
    with pytest.raises(error, match=message):
        getattr(cuda, name)(*arguments, **keywords)


QKV = np.zeros((1, 8, 2, 3), np.float32)


@pytest.mark.parametrize(
    ("arguments", "keywords", "error", "message"),
    [
        ((QKV.astype(np.float64), 1), {}, DTypeError, "not float64"),
        ((np.zeros((1, 4 * 65, 1, 1), np.float32), 1), {}, ShapeError, "up to 64, got 65"),
        ((QKV, 1), {"precision": "fast"}, ParameterError, "'fast'"),
        ((QKV.astype(np.float16), 1), {"precision": "tf32"}, ParameterError, "float16"),
        ((QKV, 1), {"out": np.zeros((1, 4, 2, 2), np.float32)}, ShapeError, "out has W = 2"),
        ((QKV, 1), {"out": np.zeros((1, 4, 2, 3), np.float16)}, DTypeError, "out has dtype float16"),
        ((QKV, 1), {"out": QKV[:, :4]}, ParameterError, "overlaps qkv"),
        ((QKV, 1), {"stream": "default"}, DTypeError, "stream"),
        ((QKV, 1), {"out": [1.0]}, DTypeError, "numpy.ndarray"),
        ((object(), 1), {}, DTypeError, "got object"),
    ],
)
def test_what_only_cuda_refuses(arguments, keywords, error, message):
    with pytest.raises(error, match=message):
        cuda.psa_attention(*arguments, **keywords)


@pytest.mark.parametrize("shape", [(0, 16, 2, 3), (2, 16, 0, 3)])
def test_empty(shape):
    qkv = np.zeros(shape, np.float32)
    assert cuda.psa_attention(qkv, 2).shape == (shape[0], 8, *shape[2:])
    assert cuda.psa_pack_qkv(qkv, 2).size == 0
