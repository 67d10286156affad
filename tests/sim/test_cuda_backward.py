"""The fused backward kernels in Numba's simulator, from the very source that a GPU runs; outputs are poisoned with NaN.

Small tiles, at least two blocks of columns, ragged sizes, judged by the oracle.
"""

from __future__ import annotations

import kernel_checks
import ml_dtypes
import numpy as np
import pytest

from numba_psa import OPERATIONS, DTypeError, ParameterError, PSAShape, ShapeError, cuda, oracle
from numba_psa._numba_cuda import to_device, to_host
from numba_psa.cuda.backward import make_backward
from numba_psa.cuda.backward_tf32 import make_backward_tf32
from numba_psa.cuda.backward_wgmma import make_backward_wgmma
from numba_psa.cuda.backward_wgmma_tf32 import make_backward_wgmma_tf32
from numba_psa.cuda.choice import Choice, Problem
from numba_psa.cuda.plans_backward import BackwardLauncher, exponent_scale
from numba_psa.cuda.tiles_backward import DKV, DQ, MmaBackwardConfig, Tf32BackwardConfig
from numba_psa.cuda.tiles_backward_wgmma import Tf32WarpgroupBackwardConfig, WarpgroupBackwardConfig
from numba_psa.shapes import AttentionShape
from numba_psa.testing.check import check

HALF, BRAIN, SINGLE = np.dtype(np.float16), np.dtype(ml_dtypes.bfloat16), np.dtype(np.float32)
MAKERS = {
    MmaBackwardConfig: make_backward,
    Tf32BackwardConfig: make_backward_tf32,
    WarpgroupBackwardConfig: make_backward_wgmma,
    Tf32WarpgroupBackwardConfig: make_backward_wgmma_tf32,
}


def dtype_of(config):
    if config.item == 4:
        return SINGLE
    return BRAIN if config.bf16 else HALF


def arguments(config, heads, n_queries, n_keys, amplitude=1.0, d_amplitude=1.0, scale=None):
    """q, k, v, o, do and l of a FlashAttention problem."""
    rng = np.random.default_rng([heads, n_queries, n_keys])
    dtype = dtype_of(config)
    widths = (n_queries, config.key_dim), (n_keys, config.key_dim), (n_keys, config.value_dim), (n_queries, config.value_dim)
    q, k, v, do = (rng.standard_normal((heads, *shape)) for shape in widths)
    given = {name: (amplitude * x).astype(dtype) for name, x in (("q", q), ("k", k), ("v", v))}
    return saved(given | {"do": (d_amplitude * do).astype(dtype)}, config.key_dim**-0.5 if scale is None else scale)


def saved(given, scale):
    """The same with the o and l that belong to it."""
    o, l = oracle.flash_attention2_forward(given["q"], given["k"], given["v"], scale)
    return given | {"o": o, "l": l, "softmax_scale": scale}


def run(config, given):
    """{dq, dk, dv} of a kernel; with channels first q, k and v are laid out as in qkv."""
    heads, n_queries, key_dim = given["q"].shape
    n_keys, value_dim = given["v"].shape[1:]
    dtype = given["q"].dtype
    problem = Problem(heads, n_queries, n_keys, key_dim, value_dim, dtype, config.tokens_first)
    launcher = BackwardLauncher(problem, config.passes, Choice(MAKERS[type(config)], config))
    names = "q", "k", "v"
    if config.tokens_first:
        arrays = [given[name] for name in (*names, "o", "do", "l")]
        gradients = [np.full_like(given[name], np.nan) for name in names]
        inputs, outputs = (tuple(x.ctypes.data for x in group) for group in (arrays, gradients))
    else:
        qkv = np.ascontiguousarray(np.concatenate([given[name].swapaxes(1, 2) for name in names], axis=1))
        o, do = (np.ascontiguousarray(given[name].swapaxes(1, 2)) for name in ("o", "do"))
        d_qkv, part = np.full_like(qkv, np.nan), key_dim * n_keys * dtype.itemsize
        inputs, outputs = (tuple(x.ctypes.data + i * part for i in range(3)) for x in (qkv, d_qkv))
        inputs = *inputs, o.ctypes.data, do.ctypes.data, given["l"].ctypes.data
        gradients = [x.swapaxes(1, 2) for x in np.split(d_qkv, (key_dim, 2 * key_dim), axis=1)]
    workspace = np.full(launcher.workspace_bytes // 4, np.nan, np.float32)
    scale = given["softmax_scale"]
    launcher(0, inputs, outputs, workspace.ctypes.data, scale, exponent_scale(scale, dtype))
    return dict(zip(("dq", "dk", "dv"), gradients, strict=True))


def assert_right(config, given, results=None):
    results = results or run(config, given)
    for name, of in (("flash_attention2_backward_dq", DQ), ("flash_attention2_backward_dkv", DKV)):
        if config.passes & of:
            verdicts = check(OPERATIONS[name], given, results)
            assert all(verdict.passed for verdict in verdicts.values()), (name, verdicts)


MMA = [
    (MmaBackwardConfig, {"row_warps": 2, "BN": 16}, 40, {}),
    (
        MmaBackwardConfig,
        {"row_warps": 1, "BN": 16, "copy": 2, "key_dim": 3, "value_dim": 6, "bf16": True},
        21,
        {"scale": -0.2},
    ),
    (MmaBackwardConfig, {"row_warps": 1, "BN": 32, "copy": 4, "key_dim": 18, "value_dim": 36}, 34, {"d_amplitude": 1e-3}),
    (Tf32BackwardConfig, {"row_warps": 1, "copy": 4, "key_dim": 5, "value_dim": 10}, 37, {"amplitude": 4.0}),
    (Tf32BackwardConfig, {"row_warps": 2, "key_dim": 8, "value_dim": 16}, 36, {"scale": -0.3}),
]


@pytest.mark.parametrize(("config", "fields", "n", "values"), MMA)
def test_gradients_on_channels_first(config, fields, n, values):
    config = config(**fields)
    assert_right(config, arguments(config, 1, n, n, **values))


TOKENS = [
    (MmaBackwardConfig, {"row_warps": 2, "BN": 16, "key_dim": 24, "value_dim": 40}, 35, 21),
    (MmaBackwardConfig, {"row_warps": 3, "BN": 16, "copy": 2, "key_dim": 80, "value_dim": 77, "passes": DQ}, 5, 18),
    (Tf32BackwardConfig, {"row_warps": 1, "copy": 4, "key_dim": 9, "value_dim": 17}, 20, 33),
]


@pytest.mark.parametrize(("config", "fields", "n_queries", "n_keys"), TOKENS)
def test_tokens_first_with_other_widths_and_lengths(config, fields, n_queries, n_keys):
    config = config(tokens_first=True, **fields)
    assert_right(config, arguments(config, 1, n_queries, n_keys))


WGMMA = [
    (
        WarpgroupBackwardConfig,
        {"passes": DQ, "key_step": 32, "copy": 4, "key_dim": 8, "value_dim": 16},
        66,
        {"d_amplitude": 1e-3},
    ),
    (WarpgroupBackwardConfig, {"passes": DKV, "stages": 3, "copy": 2, "key_dim": 7, "value_dim": 14, "bf16": True}, 67, {}),
    (Tf32WarpgroupBackwardConfig, {"passes": DQ, "row_warps": 4, "key_dim": 8, "value_dim": 16}, 36, {"amplitude": 4.0}),
    (
        Tf32WarpgroupBackwardConfig,
        {"passes": DKV, "row_warps": 4, "copy": 4, "key_dim": 5, "value_dim": 33},
        35,
        {"scale": -0.3},
    ),
]


@pytest.mark.parametrize(("config", "fields", "n", "values"), WGMMA)
def test_gradients_on_warpgroup_products(config, fields, n, values):
    config = config(arch=90, **fields)
    assert_right(config, arguments(config, 1, n, n, **values))


SPECIAL = [
    MmaBackwardConfig(row_warps=1, BN=16, copy=2, key_dim=4, value_dim=8),
    Tf32BackwardConfig(row_warps=1, copy=4, key_dim=4, value_dim=8),
    WarpgroupBackwardConfig(arch=90, passes=DKV, stages=3, copy=2, key_dim=4, value_dim=8),
    Tf32WarpgroupBackwardConfig(arch=90, passes=DQ, row_warps=4, copy=4, key_dim=4, value_dim=8),
]


@pytest.mark.parametrize("config", SPECIAL, ids=lambda config: type(config).__name__)
def test_special_values_stay_where_they_belong(config):
    """Head 0: queries without any key, one of them with NaN in do. Head 1: NaN in v. Head 2: inf in do, in one row."""
    n = 9
    given = arguments(config, 3, n, n)
    given["q"][0, :, 0], given["k"][0, :, 0] = np.where(np.arange(n) % 3, 1, 0.5), 1
    given["q"][0, ::3, :2] = -np.inf, 0
    given["do"][0, 3, 1] = np.nan
    given["v"][1, 4, 1] = np.nan
    given["do"][2, 5, 2] = np.inf
    given = saved(given, given["softmax_scale"])
    assert np.isneginf(given["l"]).sum() == 3
    assert_right(config, given)


def test_what_overflows_on_the_way_is_done_again():
    """An l that is far too small: weights far beyond 1, which float16 cannot hold, of gradients that it can."""
    config = MmaBackwardConfig(row_warps=1, BN=16, copy=2, key_dim=4, value_dim=8)
    given = arguments(config, 1, 17, 17, d_amplitude=1e-3)
    given["l"] -= 9
    assert_right(config, given)


def test_no_keys_and_no_queries():
    config = MmaBackwardConfig(row_warps=1, BN=16, tokens_first=True, copy=2, key_dim=4, value_dim=8)
    assert (run(config, arguments(config, 2, 5, 0))["dq"] == 0).all()
    results = run(config, arguments(config, 2, 0, 5))
    assert (results["dk"] == 0).all()
    assert (results["dv"] == 0).all()


# ---- from end to end --------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("name", ["psa_pack_qkv_backward", "psa_extract_v_backward", "psa_merge_attn_backward"])
@pytest.mark.parametrize(("shape", "dtype"), [(PSAShape(2, 2, 5, 3, 7), HALF), (PSAShape(1, 2, 4, 2, 4), SINGLE)], ids=str)
def test_layout_gradients_are_exact(name, shape, dtype):
    kernel_checks.agrees_on(cuda, name, shape, dtype)


def test_bfloat16_is_added_exactly():
    kernel_checks.agrees_on(cuda, "psa_pack_qkv_backward", PSAShape(1, 2, 8, 2, 5), BRAIN)


@pytest.mark.parametrize("dtype", [HALF, SINGLE], ids=str)
def test_attention_backward(dtype):
    kernel_checks.agrees_on(cuda, "psa_attention_backward", PSAShape(1, 1, 3, 3, 5), dtype)


@pytest.mark.parametrize("name", ["flash_attention2_backward_dq", "flash_attention2_backward_dkv", "psa_fa2_backward"])
def test_flash_gradients(name):
    kernel_checks.agrees_on_flash(cuda, name, AttentionShape(1, 18, 18, 4, 6), HALF)


def test_targets_are_added_to_in_place():
    kernel_checks.device_arrays_stay_on_the_device(cuda, "psa_fa2_backward", PSAShape(1, 1, 4, 2, 3), SINGLE)
    kernel_checks.strided_arrays_are_honoured(cuda, on_device=False)


def test_plans():
    shape = PSAShape(1, 1, 4, 2, 3)
    rng = np.random.default_rng(0)
    qkv, d_out = rng.standard_normal(shape.qkv).astype(HALF), rng.standard_normal(shape.out).astype(HALF)
    out, (_, l) = cuda.psa_attention(qkv, 1, save_for_backward=True)
    want = cuda.psa_attention_backward(qkv, d_out, 1, saved=(out, l))
    plan = cuda.plan_psa_attention_backward(shape, HALF)
    arrays = [to_device(x) for x in (qkv, d_out, out, l, np.full(shape.qkv, np.nan, HALF))]
    workspace = to_device(np.full(plan.workspace_bytes // 4, np.nan, np.float32))
    plan(*arrays, workspace)
    np.testing.assert_array_equal(to_host(arrays[4]), want)
    with pytest.raises(ShapeError, match="workspace has 4 bytes, the plan needs"):
        plan(*arrays, workspace[:1])
    with pytest.raises(ShapeError, match="l must have 2 dimensions"):
        plan(*arrays[:3], arrays[0], *arrays[4:], workspace)
    with pytest.raises(DTypeError, match="d_out has dtype float32, the plan is for float16"):
        plan(qkv, d_out.astype(SINGLE), *arrays[2:], workspace)
    with pytest.raises(DTypeError, match="out must be a CUDA array or its address, got NoneType"):
        plan(*arrays[:2], None, *arrays[3:], workspace)
    with pytest.raises(DTypeError, match="shape must be a PSAShape"):
        cuda.plan_psa_attention_backward(shape.qkv, HALF)
    with pytest.raises(ParameterError, match="no multiple of the 2 bytes"):
        plan(qkv.ctypes.data + 1, *arrays[1:], workspace)


def test_empty():
    kernel_checks.empty_problems_are_empty(cuda)
