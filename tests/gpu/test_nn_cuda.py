"""Layers on a GPU, by impl cuda and mirror: every class, dtype and odd size against the oracle; libraries, streams, graphs.

And on trained weights (`scripts/fetch_models.sh`) at the sizes of 640×640 and 448×320 pictures, where they are there.
"""

import threading
from pathlib import Path

import numpy as np
import pytest
from hypothesis import example, given, settings
from layer_cases import FIXTURES, build, fixture, layers_with_input, normal

from numba_psa import nn
from numba_psa._numba_cuda import cuda as numba_cuda
from numba_psa._numba_cuda import to_device, to_host
from numba_psa.errors import DTypeError, ParameterError, ShapeError
from numba_psa.nn.discover import layer_class
from numba_psa.numerics import BFLOAT16, FLOAT16, FLOAT32, FLOAT64, relative_error
from numba_psa.testing.layers import agrees_rounded, exact

IMPLS = ("cuda", "mirror")
DTYPES = (FLOAT16, BFLOAT16, FLOAT32)
YOLO26N = Path(__file__).parents[2] / ".models" / "yolo26n.onnx"
LIMIT = 1e-5
"""For trained weights in float32, as on the CPU."""


def judge(layer, x, impl):
    y = layer(x, impl)
    assert y.dtype == x.dtype
    assert agrees_rounded(layer, x, y), (x.shape, x.dtype, relative_error(y, exact(layer, x)))
    np.testing.assert_array_equal(layer(x, impl).view(np.uint8), y.view(np.uint8))


@pytest.mark.parametrize("impl", IMPLS)
@settings(max_examples=6)
@given(layers_with_input())
@example((build(num_heads=4, key_dim=32, head_dim=65), normal(1, 265, 3, 5)))  # c = 260: head_dim is not 2·key_dim
@example((build(nn.PSA, num_heads=4, key_dim=36, head_dim=72), normal(2, 293, 4, 4)))  # YOLOv10m
@example((build(nn.C3k2, units=3), normal(1, 17, 5, 33)))
def test_layers_agree_with_the_oracle(impl, case):
    layer, x = case
    if impl == "cuda" and x.dtype == FLOAT64:
        with pytest.raises(DTypeError, match="not float64"):
            layer(x, impl)
        return
    judge(layer, x, impl)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("size", [(1, 20, 20), (8, 20, 20), (1, 14, 10), (2, 19, 21), (1, 40, 40)], ids=str)
@pytest.mark.parametrize("layer_class", [nn.Attention, nn.PSABlock, nn.C2PSA, nn.PSA, nn.C3k2])
def test_real_sizes(layer_class, size, dtype):
    layer = build(layer_class, num_heads=2, key_dim=32, head_dim=64)
    judge(layer, normal(size[0], layer.c_in, *size[1:], dtype=dtype), "cuda")


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("path", FIXTURES, ids=lambda path: path.stem)
def test_layers_agree_with_ultralytics(path, impl):
    layer, x, y, _ = fixture(path)
    assert relative_error(layer(x, impl), y) <= 2e-6


@pytest.mark.skipif(not YOLO26N.exists(), reason="no trained weights: bash scripts/fetch_models.sh")
@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("size", [(20, 20), (14, 10)], ids=str)
@pytest.mark.parametrize("prefix", ["model.10", "model.10.m.0", "model.10.m.0.attn", "model.22", "model.22.m.0.1"])
def test_trained_weights(prefix, size, impl):
    """On what a picture of 640×640 or 448×320 gives: SiLU of noise, for nothing else of the network runs here."""
    state = nn.read_state(YOLO26N)
    layer = layer_class(state, prefix).from_state_dict(state, prefix)
    x = np.maximum(normal(1, layer.c_in, *size), -0.25)
    assert relative_error(layer(x, impl), exact(layer, x)) <= LIMIT
    if impl == "cuda":
        for dtype in (FLOAT16, BFLOAT16):
            judge(layer, x.astype(dtype), impl)


def test_batches_in_parts(monkeypatch):
    from numba_psa.nn import planned_cuda

    layer = build(num_heads=2, key_dim=8, head_dim=16)
    x = normal(5, layer.c_in, 6, 6)
    y = layer(x, "cuda")
    monkeypatch.setattr(planned_cuda, "TOKENS_AT_A_TIME", 2 * 36)
    np.testing.assert_array_equal(layer(x, "cuda"), y)
    for i in (0, 4):
        np.testing.assert_array_equal(layer(x[i : i + 1], "cuda")[0], y[i])


@pytest.mark.parametrize("impl", IMPLS)
def test_nothing_leaks_between_images(impl):
    layer = build(nn.C3k2, units=2)
    x = normal(3, 17, 3, 5)
    y = layer(x, impl)
    x[1] = np.nan
    spoiled = layer(x, impl)
    assert np.isnan(spoiled[1]).all()
    np.testing.assert_array_equal(spoiled[::2], y[::2])


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("shape", [(0, 17, 3, 4), (2, 17, 0, 4), (2, 17, 4, 0)])
def test_empty(impl, shape):
    assert build()(normal(*shape), impl).shape == shape


@pytest.mark.parametrize("impl", IMPLS)
def test_any_strides_and_out(impl):
    layer, x = build(), normal(2, 17, 4, 8)
    y = layer(x, impl)
    for other in (np.asfortranarray(x), x[:, :, ::-1]):
        np.testing.assert_array_equal(layer(other, impl), layer(np.ascontiguousarray(other), impl))
    for out in (np.full_like(y, np.nan), np.full(y.shape[::-1], np.nan, np.float32).T):
        assert layer(x, impl, out=out) is out
        np.testing.assert_array_equal(out, y)
    room = to_device(np.full((2, 17, 4, 16), 7, np.float32))
    layer(to_device(x), impl, out=room[:, :, :, ::2])
    np.testing.assert_array_equal(to_host(room)[..., ::2], y)
    assert (to_host(room)[..., 1::2] == 7).all()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_addresses_that_are_no_multiples_of_16(dtype):
    layer, x = build(), normal(1, 17, 4, 8, dtype=dtype)
    room, out = to_device(np.concatenate([x.reshape(-1)[:1], x.reshape(-1)])), to_device(np.full(x.size + 3, 7, dtype))
    layer(room[1:].reshape(x.shape), out=out[1 : 1 + x.size].reshape(x.shape))
    found = to_host(out)
    assert agrees_rounded(layer, x, found[1:-2].reshape(x.shape))
    assert (found[[0, -1, -2]] == 7).all()


def test_addresses_change_from_call_to_call():
    layer = build(nn.PSABlock, num_heads=2, key_dim=8, head_dim=16)  # x is read by two launches of it
    inputs = [to_device(normal(1, layer.c_in, 5, 8, seed=i)) for i in range(3)]
    results = [layer(x) for x in inputs]
    for x, y in zip(inputs, results, strict=True):
        np.testing.assert_array_equal(to_host(y), layer(to_host(x), "cuda"))


def test_one_layer_in_several_threads():
    layer, inputs = build(), [normal(1, 17, 4, 5, seed=i) for i in range(4)]
    expected, wrong = [layer(x, "cuda") for x in inputs], []

    def work(i):
        for _ in range(20):
            if not np.array_equal(layer(inputs[i], "cuda"), expected[i]):
                wrong.append(i)

    workers = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert not wrong


def test_streams():
    layer, x, stream = build(), normal(1, 17, 4, 8), numba_cuda.stream()
    out = to_device(np.full_like(x, np.nan))
    layer(to_device(x), out=out, stream=stream)
    stream.synchronize()
    np.testing.assert_array_equal(to_host(out), layer(x, "cuda"))


def test_torch_and_graphs_of_its_own():
    torch = pytest.importorskip("torch")
    layer = build(num_heads=2, key_dim=32, head_dim=64)
    for dtype in (torch.float16, torch.bfloat16, torch.float32):
        x = torch.randn(2, layer.c_in, 20, 20, device="cuda").to(dtype)
        y = layer(x)
        assert isinstance(y, torch.Tensor)
        assert y.dtype == dtype
        assert torch.equal(layer(x.permute(0, 2, 3, 1).contiguous().permute(0, 3, 1, 2)), y)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            again = layer(x)
        x.copy_(torch.randn_like(x))
        graph.replay()
        assert torch.equal(layer(x), again)
    with pytest.raises(DTypeError, match="lies on the device"):
        layer(x, "cpu")
    np.testing.assert_array_equal(layer(x.cpu().numpy(), "cuda"), layer(x).cpu().numpy())
    allocated = torch.cuda.memory_allocated()
    out = layer(x)
    layer(x, out=out)
    assert torch.cuda.memory_allocated() - allocated <= out.nbytes + 512


def test_cupy_and_jax():
    cupy = pytest.importorskip("cupy")
    jax = pytest.importorskip("jax")
    layer, x = build(), normal(1, 17, 4, 8)
    want = layer(x, "cuda")
    result = layer(cupy.asarray(x))
    assert isinstance(result, cupy.ndarray)
    np.testing.assert_array_equal(cupy.asnumpy(result), want)
    np.testing.assert_array_equal(to_host(layer(jax.numpy.asarray(x))), want)


@pytest.mark.parametrize("impl", IMPLS)
def test_bad_input_is_named(impl):
    layer, x = build(), normal(1, 17, 3, 4)
    for bad, error, message in (
        (x[0], ShapeError, "x must have 4 dimensions"),
        (normal(1, 16, 3, 4), ShapeError, "x has 16 channels on axis 1, but this C2PSA takes 17"),
        (x.astype(np.int32), DTypeError, "x has dtype int32"),
    ):
        with pytest.raises(error, match=message):
            layer(bad, impl)
    with pytest.raises(ShapeError, match="out has H"):
        layer(x, impl, out=normal(1, 17, 4, 4))
    with pytest.raises(DTypeError, match="out has dtype float64"):
        layer(x, impl, out=normal(1, 17, 3, 4, dtype=np.float64))


def test_what_only_cuda_refuses():
    layer, x = build(), to_device(normal(1, 17, 3, 4))
    with pytest.raises(ParameterError, match="overlaps x"):
        layer(x, out=x)
    with pytest.raises(ShapeError, match="up to 64, got 65"):
        build(num_heads=1, key_dim=65, head_dim=10)(normal(1, 15, 3, 4), "cuda")
    units = build(nn.C3k2, units=4)
    with pytest.raises(ShapeError, match="up to 4 tensors as one along channels, here there are 5"):
        units(normal(1, units.c_in, 3, 4), "cuda")


def test_infer(tmp_path):
    from typer.testing import CliRunner

    from numba_psa.cli import app

    path = next(path for path in FIXTURES if path.stem == "c2psa_c128_n2")
    layer, x, _, _ = fixture(path)
    np.save(tmp_path / "x.npy", x)
    arguments = ["--weights", path, "--prefix", "", "--input", tmp_path / "x.npy", "--output", tmp_path / "y.npy"]
    result = CliRunner().invoke(app, ["infer", *map(str, arguments), "--impl", "cuda"])
    assert result.exit_code == 0, result.output
    np.testing.assert_array_equal(np.load(tmp_path / "y.npy"), layer(x, "cuda"))
