"""Whole detectors with random weights on the CPU, and small networks of every operation, against the formulas in float64."""

import hashlib
import itertools
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numba
import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from yolo_cases import LIMIT, Small, detector, judge_small, picture, random_weights

from numba_psa.cpu.frames import Frame
from numba_psa.errors import BackendUnavailableError, DTypeError, ParameterError, ShapeError
from numba_psa.nn import C2PSA, C3k2
from numba_psa.nn.yolo.plan import Buffer, NetworkPlan, _place
from numba_psa.numerics import relative_error

KERNELS = (1, 1), (3, 1), (3, 2)
small_networks = st.builds(
    Small,
    width=st.integers(1, 40),
    first=st.sampled_from(KERNELS),
    second=st.sampled_from(KERNELS),
    nc=st.integers(1, 20),
    bins=st.sampled_from((1, 1, 16)),
    pooled=st.booleans(),
    deep=st.booleans(),
    shortcut=st.booleans(),
    silu=st.booleans(),
    seed=st.integers(0, 2**16),
)


@given(small_networks, st.integers(1, 6), st.integers(1, 14), st.sampled_from((np.float32, np.float32, np.float64)))
@example(Small(16, (3, 2), (3, 2), deep=True), 1, 1, np.float32)  # maps of 2×2 and 1×1: a vector holds several rows
@example(Small(8, (3, 2), (3, 1), shortcut=True, bins=16), 1, 13, np.float32)  # 26 tokens and the frame: rows end in vectors
@example(Small(33, (1, 1), (1, 1), pooled=True), 5, 1, np.float64)  # one column
@settings(max_examples=30)
def test_small_networks(network, height, width, dtype):
    judge_small(network, 8 * height, 8 * width, dtype)


@pytest.mark.parametrize(("height", "width"), [(1, 1), (1, 7), (5, 3), (31, 33), (17, 64)])
def test_maps_of_odd_sizes(height, width):
    judge_small(Small(6, (3, 2), (3, 1), pooled=True, shortcut=True), height, width)
    judge_small(Small(6, (3, 1), (3, 2)), height, width)


@st.composite
def lives(draw):
    """(channels, born, dies) of buffers in order of birth."""
    found = draw(st.lists(st.tuples(st.integers(1, 9), st.integers(0, 30), st.integers(0, 12)), min_size=1, max_size=25))
    return sorted(((channels, born, born + age) for channels, born, age in found), key=lambda life: life[1])


def judge_places(found, place=_place):
    buffers = [Buffer(None, *life) for life in found]
    size = place(buffers)
    for i, a in enumerate(buffers):
        assert 0 <= a.place <= size - a.channels
        for b in buffers[:i]:
            together = a.born <= b.dies and b.born <= a.dies
            assert not together or a.place + a.channels <= b.place or b.place + b.channels <= a.place
    assert size <= sum(buffer.channels for buffer in buffers)
    assert size >= max(sum(b.channels for b in buffers if b.born <= now <= b.dies) for now in range(45))


@given(lives())
@example([(4, 0, 1), (4, 1, 2), (4, 2, 3), (4, 3, 4)])
def test_buffers_that_live_together_do_not_overlap(found):
    judge_places(found)


def test_memory_is_used_again():
    buffers = [Buffer(None, 4, step, step + 1) for step in range(10)]
    assert _place(buffers) == 8


def judge_detector(model, x, limit=LIMIT):
    """Layers, and the head as far as it does not depend on which of two almost equal scores is larger."""
    taps = [str(index) for index in range(23)]
    (y, got), (expected, layers) = (model(x, taps=taps, impl=impl) for impl in ("cpu", "oracle"))
    for tap in taps:
        assert got[tap].shape == layers[tap].shape
        assert relative_error(got[tap], layers[tap]) <= limit, tap
    assert y.shape == expected.shape
    if model.end2end:
        np.testing.assert_allclose(y[..., 4], expected[..., 4], rtol=0, atol=1e-5)
        assert (np.diff(y[..., 4]) <= 0).all()
    else:
        assert relative_error(y[:, :4], expected[:, :4]) <= limit
        np.testing.assert_allclose(y[:, 4:], expected[:, 4:], rtol=0, atol=1e-5)


@pytest.mark.parametrize(("family", "end2end"), [("yolo11", False), ("yolo26", True), ("yolo26", False)])
def test_detectors(family, end2end):
    model = detector(family, "n", 5, end2end=end2end)
    assert (model.family, model.scale, model.nc, model.end2end) == (family, "n", 5, end2end)
    assert type(model.layers[10]) is C2PSA
    assert type(model.layers[22]) is C3k2
    judge_detector(model, picture(2, 3, 64, 96))


@pytest.mark.parametrize("impl", ["cpu", "oracle"])
@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_an_image_of_no_numbers_spoils_no_other(value, impl):
    model, images = detector("yolo26", "n", 5), picture(2, 3, 64, 160)
    expected = model.predict(images[1:], impl)
    images[0] = value
    y = model.predict(images, impl)
    assert not (y[0, :, 4] > 0).any()
    np.testing.assert_array_equal(y[1:], expected)


def test_float64_is_computed_in_float64():
    model, x = detector("yolo11"), picture(1, 3, 32, 64, dtype=np.float64)
    y, expected = model(x), model(x, impl="oracle")
    assert y.dtype == np.float64
    assert relative_error(y, expected) <= 1e-13


def test_an_image_is_the_same_in_any_batch_and_again():
    model, x = detector(), picture(3, 3, 64, 64)
    together = model(x)
    for image, y in zip(x, together, strict=True):
        np.testing.assert_array_equal(model(image[None])[0], y)
    np.testing.assert_array_equal(model(x.astype(np.float32)), together)
    assert model(x[:0]).shape == (0, *together.shape[1:])


def test_input_of_any_memory_layout_is_not_changed():
    model, x = detector(), picture(1, 64, 64, 3)
    channels_last = x.transpose(0, 3, 1, 2)
    before = channels_last.copy()
    np.testing.assert_array_equal(model(channels_last), model(before))
    np.testing.assert_array_equal(channels_last, before)
    np.testing.assert_allclose(model(before.astype(np.float16)), model(before.astype(np.float16).astype(np.float32)))


def test_many_sizes_one_after_the_other():
    model = detector()
    for side in (32, 64, 96, 128, 160, 192, 224, 256, 288, 32):
        x = picture(1, 3, 32, side)
        assert relative_error(model(x, taps=["22"])[1]["22"], model(x, taps=["22"], impl="oracle")[1]["22"]) <= LIMIT
    assert len(model._plans) <= 8


@pytest.mark.parametrize(("family", "scale"), [("yolo11", "s"), ("yolo26", "x")])
def test_other_scales(family, scale):
    """Shapes, layers, and memory: buffers are used again, so a plan keeps a fraction of what layers give."""
    model = detector(family, scale, 80, folded=True)
    assert model.scale == scale
    x = picture(1, 3, 64, 64)
    judge_detector(model, x)
    shapes = {tap: y.shape[1:] for tap, y in model(x, taps=["0", "10", "16", "21"])[1].items()}
    c = {"s": 32, "x": 96}[scale]
    assert shapes == {
        "0": (c, 32, 32),
        "10": (8 * c if scale == "x" else 16 * c, 2, 2),
        "16": (4 * c, 8, 8),
        "21": shapes["21"],
    }
    (plan,) = model._plans.values()
    written = sum(buffer.channels * buffer.frame.plane for buffer in plan._buffers) * 4
    assert plan.nbytes < written / 2


@pytest.mark.parametrize(
    ("x", "error", "says"),
    [
        (np.zeros((3, 64, 64), np.float32), ShapeError, "B"),
        (np.zeros((1, 4, 64, 64), np.float32), ShapeError, "4 channels on axis 1"),
        (np.zeros((1, 3, 64, 80), np.float32), ShapeError, "W = 80 must be a positive multiple of 32: 64 or 96"),
        (np.zeros((1, 3, 0, 64), np.float32), ShapeError, "H = 0 must be a positive multiple of 32: 32 would fit"),
        (np.zeros((1, 3, 64, 64), np.uint8), DTypeError, "uint8"),
    ],
)
def test_wrong_input_is_told(x, error, says):
    with pytest.raises(error, match=says):
        detector()(x)


def test_wrong_options_are_told():
    model, x = detector(), picture(1, 3, 32, 32)
    for tap in ("23", "-1", "ten", ""):
        with pytest.raises(ParameterError, match="layers are '0' to '22'"):
            model(x, taps=[tap])
    with pytest.raises(ParameterError, match="only for pictures"):
        model(x, conf=0.5)
    with pytest.raises(BackendUnavailableError, match="no impl='cuda'"):
        model(x, impl="cuda")
    with pytest.raises(ParameterError):
        model(x, impl="gpu")


def test_one_tap_and_the_same_tap_twice():
    model, x = detector(), picture(1, 3, 32, 32)
    for taps in ("10", [10], ["10", "10"]):
        y, layers = model(x, taps=taps)
        assert list(layers) == ["10"]
        np.testing.assert_array_equal(layers["10"], model(x, taps=["10"])[1]["10"])
        np.testing.assert_array_equal(y, model(x))


def test_an_array_on_a_device_is_not_taken_for_a_picture():
    device_array = type("DeviceArray", (), {"__cuda_array_interface__": {}})()
    with pytest.raises(BackendUnavailableError, match="copy a device array to the host"):
        detector()(device_array)


@pytest.mark.parametrize(("family", "index"), [("yolo11", 2), ("yolo11", 8), ("yolo26", 10), ("yolo26", 22)])
def test_a_layer_alone_is_that_of_the_network(family, index):
    """With bottlenecks, with C3k, C2PSA, and with attention."""
    model = detector(family)
    layers = model(picture(1, 3, 96, 64), taps=[index - 1, index])[1]
    for impl in ("cpu", "oracle"):
        assert relative_error(model.layers[index](layers[str(index - 1)], impl), layers[str(index)]) <= LIMIT


def test_a_profile_names_every_layer():
    model = detector(nc=80)
    rows = model.profile(picture(1, 3, 320, 320), rounds=2)
    assert [row.layer for row in rows] == [*map(str, range(24)), "decode"]
    assert [row.kind for row in rows][8:11] == ["C3k2", "SPPF", "C2PSA"]
    assert rows[12].shape == (384, 20, 20)
    assert sum(row.share for row in rows) == pytest.approx(1)
    assert all(row.ms >= 0 for row in rows)
    # The published number for 640×640 is 5.4; an enlarged map is convolved before it is enlarged, which saves some.
    assert 5.0 < 4 * sum(row.gflop for row in rows) < 5.5


def test_a_profile_needs_an_image_and_a_round():
    with pytest.raises(ShapeError, match="no image"):
        detector().profile(picture(0, 3, 32, 32))
    with pytest.raises(ShapeError, match="rounds must be at least 1"):
        detector().profile(picture(1, 3, 32, 32), rounds=0)


def test_a_convolution_without_a_kernel_is_told():
    with pytest.raises(ShapeError, match="1×1 of stride 2"):
        NetworkPlan(Small(4, (1, 2)).record, 8, 8, np.dtype(np.float32))


def test_an_enlarged_map_that_no_kernel_reads_is_told():
    def record(run, image):
        large, convs = run.upsample(image), Small(4).convs
        return [run.conv(convs["first"], (large, large))]

    with pytest.raises(ShapeError, match="only by a 1×1 convolution"):
        NetworkPlan(record, 8, 8, np.dtype(np.float32))


def test_nothing_is_kept_of_an_image():
    """NaN in one image does not reach the next one through buffers."""
    model, x = detector("yolo11"), picture(1, 3, 64, 64)
    expected = model(x)
    assert np.isnan(model(np.full_like(x, np.nan))).any()
    np.testing.assert_array_equal(model(x), expected)


def test_weights_are_not_changed():
    state = random_weights()
    before = {name: array.copy() for name, array in state.items()}
    type(detector()).from_state_dict(state)(picture(1, 3, 32, 32))
    for name, array in before.items():
        np.testing.assert_array_equal(state[name], array)


# ---- memory and threads -------------------------------------------------------------------------------------------------
def gathered_reach(x, out):
    """The least and the largest element, from a channel's first token, that a convolution of stride 2 loads."""
    first = last = 0
    for tile in range(out.tiles):
        row, lane = tile * out.lanes // out.pitch, 0
        column = tile * out.lanes - row * out.pitch
        while lane < out.lanes and row < out.height:
            upper_left = (2 * row - 1) * x.pitch + 2 * (column - lane) - 1
            first, last = min(first, upper_left), max(last, upper_left + 2 * x.pitch + 2 + 2 * out.lanes)
            row, lane, column = row + 1, lane + out.pitch - column, 0
    return first, last


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_nothing_outside_of_an_array_is_loaded(dtype):
    for height, width in itertools.product((*range(1, 12), 20, 31, 32, 33, 64, 333), repeat=2):
        x, out = (Frame(-(-height // step), -(-width // step), np.dtype(dtype)) for step in (1, 2))
        first, last = gathered_reach(x, out)
        assert x.origin + first >= 0
        assert x.origin + last <= x.elements(1)
        # Stride 1: the taps of the first and of the last vector; pools reach as far in memory of their own.
        assert x.border >= x.pitch + 1
        assert x.origin + x.tiles * x.lanes + x.pitch + 1 <= x.elements(1)


@pytest.mark.parametrize(("height", "width"), [(1, 1), (5, 7), (20, 20), (3, 64)])
def test_a_frame_holds_what_is_written_and_zeros_around_it(height, width):
    frame = Frame(height, width, np.dtype(np.float32))
    memory = np.zeros(frame.elements(3), np.float32)
    frame.view(memory, 3)[...] = 1 + np.arange(3 * height * width).reshape(3, height, width)
    assert np.count_nonzero(memory) == 3 * height * width
    for channel in range(3):
        framed = memory[frame.origin + channel * frame.plane :]
        image = framed[: height * frame.pitch].reshape(height, frame.pitch)
        np.testing.assert_array_equal(image[:, :width], frame.view(memory, 3)[channel])
        np.testing.assert_array_equal(image[:, width], 0)
        np.testing.assert_array_equal(framed[height * frame.pitch : height * frame.pitch + frame.pitch], 0)
    assert frame.inside.sum() == height * width


def test_the_same_bits_on_any_number_of_threads():
    model, x = detector("yolo11"), picture(1, 3, 96, 64)
    expected, threads = model(x), numba.get_num_threads()
    try:
        for count in range(1, threads + 1):
            numba.set_num_threads(count)
            np.testing.assert_array_equal(model(x), expected)
            model._plans.clear()
            np.testing.assert_array_equal(model(x), expected)
    finally:
        numba.set_num_threads(threads)


MANY_THREADS = """
import hashlib, sys
from yolo_cases import detector, picture
print(hashlib.sha256(detector("yolo11")(picture(1, 3, 96, 64)).tobytes()).hexdigest())
"""


def test_more_threads_than_cores():
    """Threads that the operating system puts aside are not waited for, and what is computed does not change."""
    found = {hashlib.sha256(detector("yolo11")(picture(1, 3, 96, 64)).tobytes()).hexdigest()}
    environment = os.environ | {"NUMBA_NUM_THREADS": "7", "PYTHONPATH": str(Path(__file__).parent)}
    run = subprocess.run(
        [sys.executable, "-c", MANY_THREADS], env=environment, capture_output=True, text=True, timeout=120, check=True
    )
    assert found == {run.stdout.strip()}


def test_calls_from_several_threads_at_once():
    model, xs = detector("yolo11"), [picture(1, 3, 64, 64, seed=seed) for seed in range(8)]
    expected = [model(x) for x in xs]
    with ThreadPoolExecutor(4) as pool:
        for y, truth in zip(pool.map(model, xs), expected, strict=True):
            np.testing.assert_array_equal(y, truth)
