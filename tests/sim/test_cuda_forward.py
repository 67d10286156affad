"""The fused kernels in Numba's simulator, from the very source that a GPU runs: NUMBA_ENABLE_CUDASIM=1 pytest tests/sim

Small tiles, at least two blocks of keys, ragged sizes. Outputs are poisoned with NaN; the oracle judges.
"""

from __future__ import annotations

import sys

import ml_dtypes
import numpy as np
import pytest

from numba_psa import OPERATIONS
from numba_psa._numba_cuda import SIMULATED, cuda
from numba_psa.cuda.align import AlignConfig, make_align_rows, pitch_of
from numba_psa.cuda.forward import make_forward
from numba_psa.cuda.forward_tf32 import make_forward_tf32
from numba_psa.cuda.forward_wgmma import make_forward_wgmma
from numba_psa.cuda.forward_wgmma_tf32 import make_forward_wgmma_tf32
from numba_psa.cuda.plans import device_scale
from numba_psa.cuda.tiles import MmaTileConfig, Tf32TileConfig
from numba_psa.cuda.tiles_wgmma import Tf32WarpgroupTileConfig, WarpgroupTileConfig
from numba_psa.testing.check import check

pytestmark = [
    pytest.mark.skipif(not SIMULATED, reason="set NUMBA_ENABLE_CUDASIM=1: these kernels are for the simulator"),
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),  # overflow to inf is what a GPU does, silently
]
FORWARD = OPERATIONS["flash_attention2_forward"]


@pytest.fixture(autouse=True)
def quick_thread_switches():
    """Threads of a warp wait for each other all the time: four times as fast."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(5e-5)
    yield
    sys.setswitchinterval(before)


def dtype_of(config):
    if config.item == 4:
        return np.float32
    return ml_dtypes.bfloat16 if config.bf16 else np.float16


def arguments(config, heads, n_queries, n_keys, amplitude=1.0, scale=None):
    """q, k and v of a FlashAttention problem."""
    rng = np.random.default_rng([heads, n_queries, n_keys])
    widths = (n_queries, config.key_dim), (n_keys, config.key_dim), (n_keys, config.value_dim)
    q, k, v = ((amplitude * rng.standard_normal((heads, *shape))).astype(dtype_of(config)) for shape in widths)
    return {"q": q, "k": k, "v": v, "softmax_scale": config.key_dim**-0.5 if scale is None else scale}


def run(make, config, given):
    """{o, l} of a kernel; with channels first q, k and v are laid out as in qkv."""
    q, k, v = given["q"], given["k"], given["v"]
    heads, n_queries, n_keys = len(q), q.shape[1], k.shape[1]
    o, l = np.full((heads, n_queries, config.value_dim), np.nan, q.dtype), np.full((heads, n_queries), np.nan, np.float32)
    if config.tokens_first:
        arrays = [q, k, v, o]
        pointers = [x.ctypes.data for x in arrays]
    else:
        qkv = np.ascontiguousarray(np.concatenate([x.swapaxes(1, 2) for x in (q, k, v)], axis=1))
        out = np.ascontiguousarray(o.swapaxes(1, 2))
        row = n_keys * q.itemsize
        first = qkv.ctypes.data
        pointers = [first, first + config.key_dim * row, first + 2 * config.key_dim * row, out.ctypes.data]
    if config.packed:
        align = AlignConfig(config.key_dim)
        rows = np.full(heads * align.bytes(n_keys) // 2, np.nan, q.dtype)
        aligner = cuda.jit(make_align_rows(align))
        aligner[(align.blocks(n_keys), heads), align.threads](pointers[1], rows.ctypes.data, n_keys, heads)
        pointers[1:3] = rows.ctypes.data, rows.ctypes.data + 2 * config.key_dim * pitch_of(n_keys)
    grid = -(-n_queries // config.BM), heads
    scale = np.float32(device_scale(given["softmax_scale"]))
    kernel = cuda.jit(make(config))
    kernel[grid, config.threads, 0, config.shared_bytes](*pointers, l.ctypes.data, n_queries, n_keys, scale)
    return {"o": o if config.tokens_first else out.swapaxes(1, 2), "l": l}


def assert_right(make, config, given):
    verdicts = check(FORWARD, given, run(make, config, given))
    assert all(verdict.passed for verdict in verdicts.values()), verdicts


MMA = [
    ({"query_warps": 1, "query_tiles": 2, "BN": 32}, 1, 40, {}),
    ({"query_warps": 1, "key_warps": 2, "BN": 16, "copy": 2, "realigned": True}, 1, 35, {"scale": -0.2}),
    ({"query_warps": 2, "BN": 16, "copy": 2, "key_dim": 3, "value_dim": 6, "bf16": True}, 2, 37, {"amplitude": 4.0}),
    ({"query_warps": 1, "BN": 16, "copy": 4, "key_dim": 18, "value_dim": 36}, 1, 34, {"scale": 0.0}),
    ({"query_warps": 1, "BN": 16, "copy": 4, "realigned": True, "stages": 3, "key_dim": 18, "value_dim": 36}, 1, 38, {}),
]


@pytest.mark.parametrize(("fields", "heads", "n", "values"), MMA)
def test_mma_forward_on_channels_first(fields, heads, n, values):
    config = MmaTileConfig(saves_l=True, **fields)
    assert_right(make_forward, config, arguments(config, heads, n, n, **values))


TOKENS = [
    (MmaTileConfig, make_forward, {"query_warps": 1, "BN": 16, "copy": 16, "key_dim": 24, "value_dim": 40}, 35, 21),
    (MmaTileConfig, make_forward, {"query_warps": 2, "BN": 16, "copy": 2, "key_dim": 19, "value_dim": 5}, 20, 45),
    (Tf32TileConfig, make_forward_tf32, {"query_warps": 1, "copy": 4, "key_dim": 9, "value_dim": 17}, 20, 33),
    (Tf32TileConfig, make_forward_tf32, {"query_warps": 1, "copy": 4, "key_dim": 75, "value_dim": 6}, 13, 35),
]


@pytest.mark.parametrize(("config_type", "make", "fields", "n_queries", "n_keys"), TOKENS)
def test_tokens_first_with_other_widths_and_lengths(config_type, make, fields, n_queries, n_keys):
    config = config_type(tokens_first=True, saves_l=True, **fields)
    assert_right(make, config, arguments(config, 1, n_queries, n_keys))


TF32 = [
    ({"query_warps": 1}, 40, {}),
    ({"query_warps": 1, "key_warps": 2, "copy": 4, "key_dim": 6, "value_dim": 12}, 45, {"amplitude": 4.0}),
    ({"query_warps": 1, "copy": 4, "key_dim": 5, "value_dim": 10}, 33, {"scale": -0.3}),
]


@pytest.mark.parametrize(("fields", "n", "values"), TF32)
def test_float32_is_float32(fields, n, values):
    config = Tf32TileConfig(saves_l=True, **fields)
    assert_right(make_forward_tf32, config, arguments(config, 1, n, n, **values))


WGMMA = [
    ({"tail": 16}, 72, {}),
    ({"tail": 16, "copy": 2, "key_dim": 18, "value_dim": 36}, 15, {"amplitude": 4.0}),
    ({"key_groups": 2, "copy": 2, "realigned": True}, 67, {}),
    ({"tail": 48, "copy": 4, "realigned": True, "warpgroups": 2, "key_dim": 9, "value_dim": 18}, 106, {"amplitude": 4.0}),
    ({"bf16": True}, 64, {"scale": -0.2}),
]


@pytest.mark.parametrize(("fields", "n", "values"), WGMMA)
def test_wgmma_forward(fields, n, values):
    config = WarpgroupTileConfig(arch=90, stages=3, saves_l=True, **fields)
    assert_right(make_forward_wgmma, config, arguments(config, 1, n, n, **values))


WGMMA_TF32 = [
    ({"copy": 4, "key_dim": 5, "value_dim": 10}, 70, {"amplitude": 4.0}),
    ({"key_groups": 2, "key_dim": 8, "value_dim": 16}, 100, {"scale": -0.3}),
]


@pytest.mark.parametrize(("fields", "n", "values"), WGMMA_TF32)
def test_wgmma_forward_in_float32(fields, n, values):
    config = Tf32WarpgroupTileConfig(arch=90, saves_l=True, **fields)
    assert_right(make_forward_wgmma_tf32, config, arguments(config, 1, n, n, **values))


SPECIAL = [
    (make_forward, MmaTileConfig(query_warps=1, BN=16, copy=2, key_dim=4, value_dim=8, saves_l=True)),
    (make_forward, MmaTileConfig(query_warps=1, key_warps=2, BN=16, copy=2, key_dim=4, value_dim=8, saves_l=True)),
    (make_forward_wgmma, WarpgroupTileConfig(arch=90, stages=3, tail=32, copy=2, key_dim=4, value_dim=8, saves_l=True)),
    (make_forward_wgmma_tf32, Tf32WarpgroupTileConfig(arch=90, copy=4, key_dim=4, value_dim=8, saves_l=True)),
    (make_forward_tf32, Tf32TileConfig(query_warps=1, copy=4, key_dim=4, value_dim=8, saves_l=True)),
    (make_forward_tf32, Tf32TileConfig(query_warps=1, key_warps=2, copy=4, key_dim=4, value_dim=8, saves_l=True)),
]


@pytest.mark.parametrize(("make", "config"), SPECIAL, ids=lambda x: getattr(x, "name", ""))
def test_special_values_stay_where_they_belong(make, config):
    """Head 0: rows that attend to nothing beside rows that do, and inf in v where every weight is 0. Head 1: NaN in q."""
    n = 25
    given = arguments(config, 2, n, n)
    q, k, v = given["q"], given["k"], given["v"]
    q[:, :, 0], k[0, :, 0] = 1, -np.inf  # scores of head 0: -inf for all but query 3
    q[0, 3, 0] = 0.5
    k[0, 7, 0] = 1
    k[0, 7, 1:], q[0, :3, 0] = 0.25, 1
    k[0, :, 0] = np.where(np.arange(n) == 7, -np.inf, k[0, :, 0])
    v[0, 5, 2] = np.inf
    q[1, 4, 1] = np.nan
    result = run(make, config, given)
    assert np.all(result["o"][0] == 0)
    assert np.all(result["l"][0] == -np.inf)
    rows = np.isnan(result["o"][1].astype(np.float32)).any(axis=1)
    assert list(np.flatnonzero(rows)) == [4]
    assert np.isnan(result["l"][1]).sum() == 1


@pytest.mark.parametrize(("make", "config"), SPECIAL, ids=lambda x: getattr(x, "name", ""))
def test_one_masked_key_is_left_out(make, config):
    n = 25
    given = arguments(config, 1, n, n)
    given["q"][0, :, 0] = np.abs(given["q"][0, :, 0]) + 0.5
    given["k"][0, 7, 0] = -np.inf
    assert_right(make, config, given)
