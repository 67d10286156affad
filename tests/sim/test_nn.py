"""Whole layers on the GPU's kernels in the simulator: the launches that a plan records, in order, and the mirror's."""

import numpy as np
import pytest
from layer_cases import build, normal

from numba_psa import nn
from numba_psa._numba_cuda import to_device, to_host
from numba_psa.errors import DTypeError, ParameterError, ShapeError
from numba_psa.nn import planned_cuda
from numba_psa.nn.conv import Conv
from numba_psa.nn.exact import Exact
from numba_psa.nn.mirrored import Mirrored
from numba_psa.numerics import BFLOAT16, FLOAT16, FLOAT32
from numba_psa.testing.layers import agrees_rounded


@pytest.fixture
def one_warp(monkeypatch):
    """Tiles for a GPU that is busy with a single block: fewer threads for the simulator."""
    monkeypatch.setattr(planned_cuda, "multiprocessors", lambda device: 0)


@pytest.mark.usefixtures("one_warp")
@pytest.mark.parametrize(
    ("layer_class", "impl", "dtype", "options"),
    [
        (nn.C2PSA, "cuda", FLOAT16, {}),
        (nn.C3k2, "cuda", BFLOAT16, {}),
        (nn.PSABlock, "cuda", FLOAT32, {"shortcut": False}),
        (nn.PSA, "mirror", FLOAT32, {}),
        (nn.C3k2, "mirror", BFLOAT16, {}),
    ],
)
def test_layers_agree_with_the_oracle(layer_class, impl, dtype, options):
    layer = build(layer_class, num_heads=2, key_dim=3, head_dim=5, **options)
    x = normal(2 if layer_class is nn.PSABlock else 1, layer.c_in, 3, 4, dtype=dtype)
    y = layer(x, impl)
    assert y.dtype == dtype
    assert agrees_rounded(layer, x, y)


@pytest.mark.usefixtures("one_warp")
def test_out_and_addresses_that_change():
    layer = build(nn.Attention, num_heads=1, key_dim=2, head_dim=4)
    inputs = [normal(1, layer.c_in, 2, 4, dtype=FLOAT16, seed=i) for i in range(2)]
    expected = [layer(x, "cuda") for x in inputs]
    for x, y in zip(inputs, expected, strict=True):
        out = np.full_like(y, np.nan)
        assert layer(x, "cuda", out=out) is out
        np.testing.assert_array_equal(out, y)
        assert agrees_rounded(layer, x, y)


@pytest.mark.parametrize(("groups", "stride", "k"), [(1, 2, 3), (2, 1, 3), (1, 2, 1)])
def test_mirror_convolutions_of_any_stride_and_groups(groups, stride, k):
    conv = Conv(normal(4, 6 // groups, k, k).astype(np.float64), normal(4).astype(np.float64), True, groups, stride)
    x, dtype = normal(2, 6, 5, 7, dtype=np.float64), np.dtype(np.float64)
    y = to_host(Mirrored(dtype).conv(conv, to_device(x)))
    np.testing.assert_allclose(y, Exact().conv(conv, x), rtol=1e-12, atol=1e-12)


def test_cuda_has_no_other_strides_and_groups(one_warp):
    class Strided:
        c_in = c_out = 4

        def forward(self, run, x):
            return run.conv(Conv(np.zeros((4, 4, 3, 3)), np.zeros(4), False, 1, 2), x)

    with pytest.raises(ShapeError, match="stride 1 in one group, not of stride 2 in 1"):
        planned_cuda.CudaPlan(Strided(), 1, 4, 4, FLOAT32, True, 0)


@pytest.mark.parametrize("impl", ["cuda", "mirror"])
def test_bad_input_is_named(impl):
    layer, x = build(), normal(1, 17, 3, 4)
    with pytest.raises(ShapeError, match="x has 16 channels on axis 1, but this C2PSA takes 17"):
        layer(normal(1, 16, 3, 4), impl)
    with pytest.raises(DTypeError, match="x has dtype int32"):
        layer(x.astype(np.int32), impl)
    with pytest.raises(ShapeError, match="out has H"):
        layer(x, impl, out=normal(1, 17, 4, 4))
    assert layer(x[:0], impl).shape == (0, 17, 3, 4)


def test_what_only_cuda_refuses():
    layer, x = build(), normal(1, 17, 3, 4)
    with pytest.raises(DTypeError, match="not float64"):
        layer(x.astype(np.float64), "cuda")
    with pytest.raises(ParameterError, match="overlaps x"):
        layer(x, "cuda", out=x)
    with pytest.raises(ShapeError, match="up to 64, got 65"):
        build(num_heads=1, key_dim=65, head_dim=10)(normal(1, 15, 3, 4), "cuda")
    units = build(nn.C3k2, units=4)
    with pytest.raises(ShapeError, match="up to 4 tensors as one along channels, here there are 5"):
        units(normal(1, units.c_in, 3, 4), "cuda")
    with pytest.raises(ParameterError, match="stream is for impl='cuda'"):
        layer(x, "mirror", stream=0)
