"""The mirror kernels in the simulator against the oracle: all ten, all dtypes, ragged, special values, bad input."""

import threading
import time

import kernel_checks
import numpy as np
import pytest
from bad_input import BAD_CALLS
from hypothesis import given, settings
from hypothesis import strategies as st
from numba.cuda.simulator.kernelapi import FakeCUDAShared

import numba_psa
from numba_psa import OPERATIONS, PSAShape, ShapeError, mirror, oracle
from numba_psa.mirror import launch
from numba_psa.numerics import FLOATS
from numba_psa.ops import PsaAttentionGraph
from numba_psa.shapes import AttentionShape

FLASH = [name for name, operation in OPERATIONS.items() if name.startswith("flash")]
tiny = st.builds(PSAShape, st.integers(1, 2), st.integers(1, 2), st.integers(1, 5), st.integers(1, 2), st.integers(1, 3))


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("name", OPERATIONS)
def test_agrees_with_the_oracle(name, dtype):
    kernel_checks.agrees_on(mirror, name, PSAShape(2, 2, 3, 1, 3), dtype)


@pytest.mark.parametrize("name", [name for name in OPERATIONS if name != "psa_attention_backward"])
@settings(max_examples=5)
@given(shape=tiny, seed=st.integers(0, 99))
def test_agrees_with_the_oracle_on_any_shape(name, shape, seed):
    kernel_checks.agrees_on(mirror, name, shape, np.float32, seed)


@pytest.mark.parametrize("key_dim", [36, 64])
@pytest.mark.parametrize("name", ["flash_attention2_forward", "psa_fa2_backward", "psa_merge_attn_nchw"])
def test_stock_widths(name, key_dim):
    kernel_checks.agrees_on(mirror, name, PSAShape(1, 1, key_dim, 1, 2), np.float32)


@pytest.mark.parametrize("name", FLASH)
@pytest.mark.parametrize(
    "shape",
    [
        AttentionShape(2, 3, 5, 4, 7),
        AttentionShape(1, 5, 1, 6, 2),
        AttentionShape(1, 1, 35, 2, 2),
        AttentionShape(1, 37, 2, 2, 3),
    ],
    ids=["wide values", "one key", "two tiles of keys", "two tiles of queries"],
)
def test_flash_shapes(name, shape):
    kernel_checks.agrees_on_flash(mirror, name, shape, np.float32)


@pytest.mark.parametrize("name", OPERATIONS)
def test_device_arrays_stay_on_the_device(name):
    kernel_checks.device_arrays_stay_on_the_device(mirror, name, PSAShape(1, 2, 2, 1, 2), np.float32)


def test_bfloat16_device_arrays():
    kernel_checks.device_arrays_stay_on_the_device(mirror, "psa_attention", PSAShape(1, 1, 3, 1, 2), FLOATS[1])


def test_special_values():
    kernel_checks.special_values(mirror)


@pytest.mark.parametrize("on_device", [False, True])
def test_strides(on_device):
    kernel_checks.strided_arrays_are_honoured(mirror, on_device)


def test_empty():
    kernel_checks.empty_problems_are_empty(mirror)


@pytest.mark.parametrize("case", BAD_CALLS)
def test_bad_input_is_refused(case):
    name, arguments, keywords, error, message = BAD_CALLS[case]
    with pytest.raises(error, match=message):
        getattr(mirror, name)(*arguments, **keywords)


def test_more_lanes_than_a_block_has_are_refused():
    wide = np.zeros((1, 1, 1025), np.float32)
    with pytest.raises(ShapeError, match=r"D = 1025.*1024.*impl='cpu'"):
        mirror.flash_attention2_forward(wide, wide, wide)
    with pytest.raises(ShapeError, match="KEY_DIM = 1025"):
        mirror.psa_pack_qkv(np.zeros((1, 4100, 1, 1), np.float32), 1)


def test_a_grid_beyond_the_limit_of_x_is_refused(monkeypatch):
    monkeypatch.setattr(launch, "MAX_GRID_X", 7)
    with pytest.raises(ShapeError, match="grid of 8 blocks"):
        mirror.psa_pack_qkv(np.zeros((1, 8, 1, 1), np.float32), 2)


def test_batch_heads_beyond_the_limit_of_y_take_several_launches(monkeypatch):
    monkeypatch.setattr(launch, "MAX_GRID_Y", 3)
    assert launch.batch_head_slices(7) == [slice(0, 3), slice(3, 6), slice(6, 7)]
    for name in FLASH:
        kernel_checks.agrees_on_flash(mirror, name, AttentionShape(7, 2, 3, 2, 3), np.float32)


def test_a_wider_block_than_columns_changes_nothing():
    """The original's runtime launches 128 threads whatever KEY_DIM is."""
    from numba_psa.mirror.elements import ELEMENTS
    from numba_psa.mirror.flash_attn2_kernels import flash_attention2_forward_kernel

    q, k, v = np.random.default_rng(0).standard_normal((3, 2, 3, 2)).astype(np.float32)
    o, l = np.empty_like(q), np.empty((2, 3), np.float32)
    kernel = launch.compiled(flash_attention2_forward_kernel, 2, 2, ELEMENTS[q.dtype])
    pointers = [x.reshape(-1) for x in (q, k, v, o, l)]
    kernel[(3, 2), 8](*pointers, 3, 3, np.float32(2**-0.5), np.float32(-np.inf))
    want, _ = oracle.flash_attention2_forward(q, k, v)
    np.testing.assert_allclose(o, want, rtol=1e-5)


def test_the_graph_runs_on_mirror_kernels():
    graph = PsaAttentionGraph(2, 3, 1, 2)
    rng = np.random.default_rng(4)
    qkv, d_attention, d_v = (
        rng.standard_normal(x).astype(np.float32) for x in ((1, 24, 1, 2), (1, 12, 1, 2), (1, 12, 1, 2))
    )
    results = {}
    for impl in ("oracle", "mirror"):
        attention, v, tape = graph.forward(qkv, impl=impl)
        results[impl] = attention, v, graph.backward(tape, d_attention, d_v, impl=impl)
    for got, want in zip(results["mirror"], results["oracle"], strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-5)


def test_the_front_door_takes_mirror():
    qkv = np.random.default_rng(5).standard_normal((1, 8, 1, 2)).astype(np.float32)
    out, saved = numba_psa.attention(qkv, 1, impl="mirror", save_for_backward=True)
    np.testing.assert_allclose(out, oracle.psa_attention(qkv, 1), rtol=1e-5, atol=1e-6)
    with_saved = numba_psa.attention_backward(qkv, out, 1, impl="mirror", saved=saved)
    without = numba_psa.attention_backward(qkv, out, 1, impl="mirror")
    np.testing.assert_array_equal(with_saved, without)


def test_lanes_that_allocate_at_once_share_the_array(monkeypatch):
    shared, together, real, found = FakeCUDAShared(0), threading.Barrier(8), np.empty, []

    def slowly(*arguments):
        time.sleep(0.02)
        return real(*arguments)

    def lane():
        together.wait()
        found.append(shared.array(4, np.float32))

    monkeypatch.setattr(np, "empty", slowly)
    lanes = [threading.Thread(target=lane) for _ in range(8)]
    for thread in lanes:
        thread.start()
    for thread in lanes:
        thread.join()
    assert len(found) == 8
    assert all(array is found[0] for array in found)
