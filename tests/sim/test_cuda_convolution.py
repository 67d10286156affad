"""The convolution kernels in Numba's simulator, against plain NumPy: pieces, residuals, ragged sizes, sums in parts."""

from __future__ import annotations

import numpy as np
import pytest

from numba_psa._numba_cuda import SIMULATED, cuda
from numba_psa.cuda.convolution import make_convolution, make_depthwise
from numba_psa.cuda.convolution_tiles import ConvolutionConfig, DepthwiseConfig, packed
from numba_psa.nn.conv import Conv
from numba_psa.nn.exact import Exact
from numba_psa.numerics import BFLOAT16, FLOAT16, FLOAT32, machine_epsilon, relative_error

pytestmark = [
    pytest.mark.skipif(not SIMULATED, reason="set NUMBA_ENABLE_CUDASIM=1: these kernels are for the simulator"),
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),
]


def dtype_of(config):
    return FLOAT32 if config.item == 4 else BFLOAT16 if config.bf16 else FLOAT16


def normal(rng, shape, dtype):
    return rng.standard_normal(shape).astype(dtype)


def random_conv(rng, c_out, c_in, k, silu, dtype, groups=1):
    """Weights that the dtype holds exactly, so that only sums are rounded."""
    shape = c_out, c_in // groups, k, k
    weight = (rng.standard_normal(shape) / np.sqrt(np.prod(shape[1:]))).astype(dtype).astype(np.float64)
    return Conv(weight, rng.standard_normal(c_out).astype(np.float32).astype(np.float64), silu, groups)


def exact(conv, pieces, add=None):
    wide = [piece.astype(np.float64) for piece in pieces]
    return Exact().conv(conv, wide, None if add is None else add.astype(np.float64))


def address(array):
    return array.ctypes.data


def convolve(config, conv, pieces, add):
    """The kernel's result, between neighbours that must stay as they are."""
    batch, _, height, width = pieces[0].shape
    room = np.full((batch, conv.c_out + 2, height, width), 7, pieces[0].dtype)
    y = room[:, 1:-1]
    y[...] = np.nan
    firsts = np.cumsum([0] + [piece.shape[1] for piece in pieces[:-1]])
    four = [*pieces, *pieces[:1] * (4 - len(pieces))]
    weights = packed(conv.weight.astype(dtype_of(config)), config.item)
    bias = conv.bias.astype(np.float32)
    arguments = [
        *map(address, four),
        *(piece.strides[0] for piece in four),
        *(int(firsts[i]) if i < len(pieces) else 0 for i in (1, 2, 3)),
        *(address(weights), address(bias)),
        *((address(add), add.strides[0]) if add is not None else (0, 0)),
        *(address(y), y.strides[0]),
        *(conv.c_in, conv.c_out, height, width, int(conv.silu)),
    ]
    grid = -(-height * width // config.block_tokens), -(-conv.c_out // config.block_channels), batch
    cuda.jit(make_convolution(config))[grid, config.threads, 0, config.shared_bytes](*arguments)
    assert (room[:, [0, -1]] == 7).all()
    return y


CASES = [
    # fields, c_out, channels of the pieces, H, W, SiLU, residual
    ({"k_warps": 2, "steps": 1}, 20, (24,), 4, 10, True, False),
    ({"k_warps": 1, "whole": False, "channel_tiles": 1}, 9, (5,), 3, 5, False, True),
    ({"k_warps": 3, "steps": 2, "pieces": 3, "channel_tiles": 1}, 16, (3, 12, 8), 2, 8, True, True),
    ({"k_warps": 1, "channel_warps": 2, "channel_tiles": 1, "token_groups": 2}, 40, (8,), 5, 16, False, False),
    ({"item": 2, "k_warps": 2, "steps": 1}, 20, (40,), 4, 10, True, False),
    ({"item": 2, "k_warps": 1, "whole": False, "channel_tiles": 1, "pieces": 2}, 9, (3, 4), 3, 5, False, True),
    ({"item": 2, "bf16": True, "k_warps": 2, "pieces": 4, "steps": 2}, 32, (16, 1, 16, 7), 2, 8, True, True),
    ({"taps": 3, "k_warps": 2, "steps": 1, "channel_tiles": 1}, 12, (10,), 3, 8, True, True),
    ({"taps": 3, "k_warps": 1, "steps": 2, "whole": False, "channel_tiles": 1}, 7, (3,), 4, 2, False, False),
    ({"taps": 3, "item": 2, "k_warps": 2, "steps": 2, "channel_tiles": 1}, 16, (18,), 3, 12, True, False),
    ({"taps": 3, "item": 2, "bf16": True, "k_warps": 1, "steps": 1, "whole": False}, 18, (5,), 5, 1, False, True),
]


@pytest.mark.parametrize(("fields", "c_out", "channels", "height", "width", "silu", "residual"), CASES)
def test_convolution(fields, c_out, channels, height, width, silu, residual):
    config = ConvolutionConfig(**fields)
    rng, dtype = np.random.default_rng(c_out), dtype_of(config)
    conv = random_conv(rng, c_out, sum(channels), config.taps, silu, dtype)
    pieces = [normal(rng, (2, c, height, width), dtype) for c in channels]
    add = normal(rng, (2, c_out, height, width), dtype) if residual else None
    y = convolve(config, conv, pieces, add)
    assert relative_error(y, exact(conv, pieces, add)) <= 8 * machine_epsilon(FLOAT32) + machine_epsilon(dtype)


def test_nan_stays_in_its_token():
    """Of a 1×1 convolution; channels that pad the last product are not read as numbers times 0."""
    for item in (2, 4):
        config = ConvolutionConfig(item=item, k_warps=1, channel_tiles=1)
        rng, dtype = np.random.default_rng(0), dtype_of(config)
        conv = random_conv(rng, 4, 5, 1, True, dtype)
        room = np.full((1, 16, 2, 4), np.nan, dtype)
        room[:, :5] = normal(rng, (1, 5, 2, 4), dtype)
        room[0, 2, 1, 1] = np.nan
        y = convolve(config, conv, [room[:, :5]], None)
        bad = np.isnan(y.astype(np.float32))[0].all(axis=0)
        assert bad[1, 1]
        assert bad.sum() == 1


@pytest.mark.parametrize(
    ("fields", "heads", "head_dim", "height", "width"),
    [
        ({}, 2, 3, 4, 8),
        ({"whole": False}, 1, 4, 3, 5),
        ({"item": 2}, 3, 2, 2, 12),
        ({"item": 2, "bf16": True, "whole": False}, 2, 2, 5, 1),
    ],
)
def test_depthwise_on_the_values_of_qkv_added_in_place(fields, heads, head_dim, height, width):
    config = DepthwiseConfig(threads=32, **fields)
    rng, dtype, above = np.random.default_rng(height), dtype_of(config), 3  # channels of q and k in a head
    conv = random_conv(rng, heads * head_dim, heads * head_dim, 3, False, np.float32, groups=heads * head_dim)
    qkv = normal(rng, (2, heads, above + head_dim, height, width), dtype)
    v = qkv[:, :, above:]
    y = normal(rng, (2, heads * head_dim, height, width), dtype)
    want = exact(conv, [np.ascontiguousarray(v).reshape(y.shape)], y)
    weights, bias = conv.weight.astype(np.float32).reshape(-1), conv.bias.astype(np.float32)
    arguments = [
        *(address(v), v.strides[1], v.strides[0], head_dim, address(weights), address(bias)),
        *(address(y), y.strides[0], address(y), y.strides[0], heads * head_dim, height, width),
    ]
    grid = -(-heads * head_dim * -(-height * width // 4) // config.threads), 1, 2
    cuda.jit(make_depthwise(config))[grid, config.threads](*arguments)
    assert relative_error(y, want) <= 4 * machine_epsilon(FLOAT32) + machine_epsilon(dtype)
