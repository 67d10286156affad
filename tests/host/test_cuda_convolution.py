"""The convolutions of the CUDA layers on a machine without a GPU: machine code, configs, packed weights, plans of memory."""

import importlib.util
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from numba_psa.cuda.convolution import SIGNATURE, make_convolution
from numba_psa.cuda.convolution_tiles import ConvolutionConfig, DepthwiseConfig, choose_convolution, packed
from numba_psa.errors import ParameterError
from numba_psa.nn.planned_cuda import Buffer, images_at_a_time, joined, places
from numba_psa.nn.recording import Tensor

SCRIPT = Path(__file__).parents[2] / "scripts" / "compile_all.py"
specification = importlib.util.spec_from_file_location("compile_all_convolutions", SCRIPT)
compile_all = importlib.util.module_from_spec(specification)
sys.modules["compile_all_convolutions"] = compile_all
specification.loader.exec_module(compile_all)
PTXAS = compile_all.find_ptxas()


@pytest.mark.skipif(PTXAS is None, reason="ptxas is not installed: pip install 'numba-psa[cu13]'")
@pytest.mark.parametrize(
    ("arch", "item", "taps", "pieces", "batch", "whole"),
    [
        (80, 4, 1, 2, 1, True),
        (86, 2, 3, 1, 1, True),
        (90, 2, 1, 2, 1, False),
        (90, 4, 1, 4, 32, True),
        (120, 2, 3, 1, 32, True),
    ],
)
def test_kernels_compile_without_spills_or_float64(arch, item, taps, pieces, batch, whole):
    config = choose_convolution(256, 256, batch, 400, 132, taps=taps, item=item, pieces=pieces, whole=whole, arch=arch)
    report = compile_all.assess(PTXAS, make_convolution, config, SIGNATURE, arch)
    assert report.problem is None, report


BAD_CONFIGS = [
    ({"arch": 75}, "needs sm_80"),
    ({"item": 8}, "2 or 4 bytes"),
    ({"bf16": True}, "2 or 4 bytes"),
    ({"taps": 5}, "1×1 or 3×3, got 5×5"),
    ({"pieces": 5}, "pieces must be 1 to 4"),
    ({"k_warps": 16, "channel_warps": 4}, "1024"),
    ({"channel_tiles": 8, "token_groups": 2}, "spill"),
    ({"k_warps": 32, "arch": 86}, "shared memory exceed"),
]


@pytest.mark.parametrize(("fields", "message"), BAD_CONFIGS)
def test_configs_refuse_what_cannot_run(fields, message):
    with pytest.raises(ParameterError, match=message):
        ConvolutionConfig(**fields)


def test_the_name_of_a_config_tells_it_from_every_other():
    configs = [
        ConvolutionConfig(),
        ConvolutionConfig(taps=3),
        ConvolutionConfig(item=2),
        ConvolutionConfig(item=2, bf16=True),
    ]
    configs += [ConvolutionConfig(arch=90), ConvolutionConfig(whole=False), DepthwiseConfig(), DepthwiseConfig(whole=False)]
    assert len({config.name for config in configs}) == len({config.constants() for config in configs}) == len(configs)


@given(
    c_in=st.integers(1, 2000),
    c_out=st.integers(1, 2000),
    batch=st.integers(1, 100),
    tokens=st.integers(1, 10_000),
    taps=st.sampled_from((1, 3)),
    item=st.sampled_from((2, 4)),
    pieces=st.integers(1, 4),
    whole=st.booleans(),
    arch=st.sampled_from((80, 86, 90, 120)),
)
def test_there_are_tiles_for_every_convolution(c_in, c_out, batch, tokens, taps, item, pieces, whole, arch):
    config = choose_convolution(c_in, c_out, batch, tokens, 132, taps=taps, item=item, pieces=pieces, whole=whole, arch=arch)
    assert (config.taps, config.item, config.pieces, config.whole) == (taps, item, pieces, whole)


@given(
    c_out=st.integers(1, 40),
    c_in=st.integers(1, 40),
    k=st.sampled_from((1, 3)),
    item=st.sampled_from((2, 4)),
)
def test_packed_weights_are_what_the_tensor_cores_take(c_out, c_in, k, item):
    """Each weight where PTX's fragment of operand A wants it; zeros elsewhere."""
    weight = np.arange(1, c_out * c_in * k * k + 1, dtype=np.float64).reshape(c_out, c_in, k, k)
    pair, k_step = 4 // item, 32 // item
    found = packed(weight, item).reshape(-1, -(-c_in // k_step), k, k, 32, 4, pair)
    tile, chunk, dy, dx, lane, register, i = np.indices(found.shape)
    row = 16 * tile + lane // 4 + 8 * (register % 2)
    column = k_step * chunk + pair * (lane % 4) + 4 * pair * (register // 2) + i
    inside = (row < c_out) & (column < c_in)
    want = np.where(inside, weight[np.where(inside, row, 0), np.where(inside, column, 0), dy, dx], 0)
    np.testing.assert_array_equal(found, want)


# ---- what a plan does with memory -------------------------------------------------------------------------------------
@given(st.lists(st.tuples(st.integers(1, 3000), st.integers(0, 9), st.integers(0, 9)), max_size=12))
def test_buffers_in_use_together_do_not_overlap(sizes):
    buffers = [Buffer(size, sorted((first, last))) for size, first, last in sizes]
    found, total = places(buffers, 4)
    for i, (at, buffer) in enumerate(zip(found, buffers, strict=True)):
        assert at % 256 == 0
        assert at + 4 * buffer.elements <= total
        for other_at, other in zip(found[:i], buffers[:i], strict=True):
            together = buffer.steps[0] <= other.steps[1] and other.steps[0] <= buffer.steps[1]
            assert not together or at >= other_at + 4 * other.elements or other_at >= at + 4 * buffer.elements


def test_buffers_share_memory_where_they_can():
    chain = [Buffer(1000, [i, i + 1]) for i in range(6)]
    assert places(chain, 4)[1] <= 2 * 4096 + 4000


def test_neighbours_are_one_piece():
    one, other = Buffer(1), Buffer(1)
    a, b, c = Tensor(one, 0, 90, 4), Tensor(one, 40, 90, 5), Tensor(other, 90, 60, 3)
    assert joined([a, b, c], 10) == [Tensor(one, 0, 90, 9), c]
    assert joined([b, a, c], 10) == [b, a, c]
    assert joined([a, b, c], 20) == [a, b, c]


@given(st.integers(1, 100_000), st.integers(1, 2**20))
def test_parts_of_a_batch_are_even(batch, tokens):
    images = images_at_a_time(batch, tokens)
    assert 1 <= images <= min(batch, 65_535)
    assert images == 1 or images * tokens <= 2**18
