"""Layers: against Ultralytics, the CPU path against the oracle, and what a call promises."""

import threading

import numpy as np
import pytest
from hypothesis import example, given, settings
from layer_cases import FIXTURES, build, fixture, layers_with_input, normal

from numba_psa import cpu, nn
from numba_psa.devices import gpu_problem
from numba_psa.errors import BackendUnavailableError, DTypeError, ParameterError, ShapeError
from numba_psa.nn.layers import PLANS
from numba_psa.numerics import BFLOAT16, FLOATS, relative_error
from numba_psa.testing.layers import agrees, exact, plain_error


def judge_fixture(path, run=None):
    """`run` may be another runner than the oracle's."""
    layer, x, y, y64 = fixture(path)
    assert relative_error(exact(layer, x, run), y64) <= 1e-12
    assert relative_error(layer(x, "cpu"), y) <= 2e-6
    assert agrees(layer(x.astype(np.float64), "cpu"), y64)


def judge_layer(layer, x, impl="cpu"):
    before = x.tobytes()
    y = layer(x, impl)
    assert y.dtype == x.dtype
    assert agrees(y, exact(layer, x), plain_error(layer, x)), relative_error(y, exact(layer, x))
    assert x.tobytes() == before
    np.testing.assert_array_equal(layer(x, impl).view(np.uint8), y.view(np.uint8))  # the same bits, also in used buffers


@pytest.mark.parametrize("path", FIXTURES, ids=lambda path: path.stem)
def test_layers_agree_with_ultralytics(path):
    judge_fixture(path)


@given(layers_with_input())
@example((build(num_heads=4, key_dim=32, head_dim=65), normal(1, 265, 3, 5)))  # c = 260: head_dim is not 2·key_dim
@example((build(nn.PSA, num_heads=4, key_dim=36, head_dim=72), normal(2, 293, 4, 4)))  # YOLOv10m
@example((build(nn.C3k2, units=3), normal(1, 17, 5, 33)))  # rows longer than two vectors
@settings(max_examples=40)
def test_the_cpu_path_agrees_with_the_oracle(case):
    judge_layer(*case)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_the_oracle_rounds_once(dtype):
    layer, x = build(), normal(2, 17, 3, 4, dtype=dtype)
    np.testing.assert_array_equal(layer(x, "oracle"), exact(layer, x).astype(dtype))


def test_real_size_and_batches():
    """C2PSA of YOLO11n and YOLO26n at 640 px; eight images are computed in parts."""
    layer = build(num_heads=2, key_dim=32, head_dim=64)
    x = normal(8, layer.c_in, 20, 20)
    y = layer(x)
    assert agrees(y, exact(layer, x))
    for i in (0, 7):
        np.testing.assert_array_equal(layer(x[i : i + 1])[0], y[i])


def test_any_strides_and_out():
    layer = build()
    x, y = normal(2, 17, 4, 5), None
    y = layer(x)
    for other in (np.asfortranarray(x), np.ascontiguousarray(x.transpose(0, 2, 3, 1)).transpose(0, 3, 1, 2), x[:, :, ::-1]):
        np.testing.assert_array_equal(layer(other), layer(np.ascontiguousarray(other)))
    unaligned = np.frombuffer(b"\0" + x.tobytes(), np.uint8)[1:].view(np.float32).reshape(x.shape)
    np.testing.assert_array_equal(layer(unaligned), y)
    for impl in ("cpu", "oracle"):
        expected = layer(x, impl)
        for out in (np.full_like(y, np.nan), np.full(y.shape[::-1], np.nan, np.float32).T):
            assert layer(x, impl, out=out) is out
            np.testing.assert_array_equal(out, expected)
    shared = x.copy()
    np.testing.assert_array_equal(layer(shared, out=shared), y)  # c_in = c_out: in place


def test_out_of_half_precision():
    layer, x = build(), normal(1, 17, 2, 3, dtype=BFLOAT16)
    out = np.zeros_like(x)
    assert layer(x, out=out) is out
    np.testing.assert_array_equal(out, layer(x))


@pytest.mark.parametrize("impl", ["cpu", "oracle"])
@pytest.mark.parametrize("shape", [(0, 17, 3, 4), (2, 17, 0, 4), (2, 17, 4, 0)])
def test_empty_input_gives_empty_output(impl, shape):
    assert build()(normal(*shape), impl).shape == shape


def test_nothing_leaks_between_images():
    """NaN in one image; the borders of the other one are next to it in memory."""
    layer = build(nn.C3k2, units=2)
    x = normal(3, 17, 3, 5)
    y = layer(x)
    x[1] = np.nan
    spoiled = layer(x)
    assert np.isnan(spoiled[1]).all()
    np.testing.assert_array_equal(spoiled[::2], y[::2])


def test_nan_reaches_what_it_should():
    """In V of one token, by way of one channel of x: every token looks there, so all of the layer's output is NaN."""
    layer, x = build(), normal(1, 17, 3, 4)
    x[0, 2, 1, 1] = np.nan
    for impl in ("cpu", "oracle"):
        assert np.isnan(layer(x, impl)).all()


def test_results_do_not_depend_on_threads_or_earlier_sizes():
    import numba

    layer = build(num_heads=2, key_dim=8, head_dim=16)
    inputs = [normal(2, layer.c_in, 3 + i, 9 - i % 3, seed=i) for i in range(PLANS + 3)]
    expected = [layer(x) for x in inputs]
    assert len(layer._plans) == PLANS
    threads = numba.get_num_threads()
    try:
        numba.set_num_threads(1)
        for x, y in zip(inputs, expected, strict=True):
            np.testing.assert_array_equal(layer(x), y)
    finally:
        numba.set_num_threads(threads)


def test_one_layer_in_several_threads():
    layer, inputs = build(), [normal(1, 17, 4, 5, seed=i) for i in range(4)]
    expected, wrong = [layer(x) for x in inputs], []

    def work(i):
        for _ in range(20):
            if not np.array_equal(layer(inputs[i]), expected[i]):
                wrong.append(i)

    workers = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert not wrong


def test_a_warm_call_allocates_nothing():
    """Nothing of the size of an activation, 1 MiB here; each thread has less than 100 KiB for its tiles."""
    import tracemalloc

    import numba

    layer = build(num_heads=2, key_dim=16, head_dim=32)
    x = normal(1, layer.c_in, 64, 64)
    out = layer(x)
    threads = numba.get_num_threads()
    numba.set_num_threads(1)
    tracemalloc.start()
    try:
        layer(x, out=out)
        assert tracemalloc.get_traced_memory()[1] < 100 << 10
    finally:
        tracemalloc.stop()
        numba.set_num_threads(threads)


@pytest.mark.parametrize("block", [0, 1])
@pytest.mark.parametrize("layer_class", [nn.C2PSA, nn.C3k2])
def test_attention_maps_are_the_weights_of_the_attention(layer_class, block):
    """Σ_n P[query, n] · v[n] is what the attention gives for the query."""
    from numba_psa.nn.exact import Exact, split_heads

    layer = build(layer_class, units=2)
    x, query, head = normal(2, 17, 3, 4), (2, 1), 1
    weights = layer.attention_map(x, query, head, block)
    np.testing.assert_allclose(weights.sum((1, 2)), 1, rtol=1e-12)
    run = Exact()
    exact(layer, x, run)
    qkv = run.qkvs[block]
    v = split_heads(qkv, 2, 3)[2].reshape(2, 2, 6, 12)[:, head]
    heads = cpu.psa_attention(qkv, 2).reshape(2, 2, 6, 3, 4)[:, head]
    np.testing.assert_allclose(np.einsum("bdn,bn->bd", v, weights.reshape(2, 12)), heads[..., 2, 1], rtol=1e-10)


def test_attention_map_refuses_what_is_not_there():
    layer, x = build(), normal(1, 17, 3, 4)
    for bad in ({"query": (3, 0)}, {"query": (0, -1)}, {"query": (1,)}, {"head": 2}, {"head": -1}, {"block": 1}):
        with pytest.raises(ParameterError, match=next(iter(bad))):
            layer.attention_map(x, **{"query": (0, 0), **bad})
    for bad in ({"query": (0.0, 1)}, {"head": True}, {"block": "0"}):
        with pytest.raises(DTypeError, match=next(iter(bad))):
            layer.attention_map(x, **{"query": (0, 0), **bad})


def test_bad_input_is_named():
    layer, x = build(), normal(1, 17, 3, 4)
    for bad, error, message in (
        (x[0], ShapeError, "x must have 4 dimensions"),
        (normal(1, 16, 3, 4), ShapeError, "x has 16 channels on axis 1, but this C2PSA takes 17"),
        (x.astype(np.int32), DTypeError, "x has dtype int32"),
        (None, DTypeError, "x has dtype object"),
    ):
        for impl in ("cpu", "oracle"):
            with pytest.raises(error, match=message):
                layer(bad, impl)
    with pytest.raises(ParameterError, match="impl must be one of"):
        layer(x, "torch")
    with pytest.raises(ShapeError, match="out has H"):
        layer(x, out=normal(1, 17, 4, 4))
    with pytest.raises(DTypeError, match="out has dtype float64"):
        layer(x, out=normal(1, 17, 3, 4, dtype=np.float64))


class OnDevice:
    """What a device array looks like from outside."""

    shape, dtype = (1, 17, 3, 4), np.dtype(np.float32)
    __cuda_array_interface__ = {"shape": shape, "typestr": "<f4", "data": (0, False), "version": 3}  # noqa: RUF012

    def __array__(self, *_arguments, **_keywords):
        raise AssertionError("copied to the host")


@pytest.mark.parametrize("impl", ["cpu", "oracle"])
def test_device_arrays_are_never_copied(impl):
    with pytest.raises(DTypeError, match="takes NumPy arrays, and a OnDevice lies on the device"):
        build()(OnDevice(), impl)
    with pytest.raises(DTypeError, match="attention_map takes NumPy arrays"):
        build().attention_map(OnDevice(), (0, 0))


@pytest.mark.skipif(gpu_problem() is None, reason="there is a GPU")
@pytest.mark.parametrize(("x", "impl"), [(OnDevice(), None), (normal(1, 17, 3, 4), "cuda"), (normal(1, 17, 3, 4), "mirror")])
def test_without_a_gpu_the_error_says_what_is_missing(x, impl):
    with pytest.raises(BackendUnavailableError, match=rf"impl='{impl or 'cuda'}' needs a CUDA GPU.*impl='cpu'"):
        build()(x, impl)


def test_a_stream_is_for_cuda():
    with pytest.raises(ParameterError, match="stream is for impl='cuda'"):
        build()(normal(1, 17, 3, 4), stream=0)


def test_layers_need_no_numba_for_the_oracle():
    import subprocess
    import sys

    code = (
        "import sys; sys.path.insert(0, sys.argv[1]); from layer_cases import build, normal;"
        "build()(normal(1, 17, 3, 4), 'oracle'); print('numba' in sys.modules)"
    )
    folder = str(FIXTURES[0].parents[2] / "host")
    done = subprocess.run([sys.executable, "-c", code, folder], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"
