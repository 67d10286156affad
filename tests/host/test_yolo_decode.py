"""From distances and scores to boxes, against the definition written out in Python."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from numba_psa.nn.yolo import decode

SIZES = [(32, 32), (64, 32), (32, 96), (160, 128)]


def raw_of(height, width, nc, batch=1, seed=0, ties=False):
    tokens = sum((height // s) * (width // s) for s in (8, 16, 32))
    raw = np.random.default_rng(seed).random((batch, 4 + nc, tokens)).astype(np.float32)
    raw[:, :4] *= 7
    return raw.round(1) if ties else raw


def tokens_of(height, width):
    """(x, y, stride) of each token."""
    return [
        (x + 0.5, y + 0.5, stride) for stride in (8, 16, 32) for y in range(height // stride) for x in range(width // stride)
    ]


def box_of(raw, token, place):
    x, y, stride = place
    left, top, right, bottom = map(float, raw[:4, token])
    return [(x - left) * stride, (y - top) * stride, (x + right) * stride, (y + bottom) * stride]


def judge_dense(height, width, function=decode.dense):
    raw = raw_of(height, width, 3, batch=2)
    boxes = [[box_of(image, t, place) for t, place in enumerate(tokens_of(height, width))] for image in raw]
    scores = raw[:, 4:].copy()
    y = function(raw.copy(), height, width)
    x1, y1, x2, y2 = np.moveaxis(np.array(boxes), 2, 0)
    np.testing.assert_allclose(
        y[:, :4].swapaxes(0, 1), [(x1 + x2) / 2, (y1 + y2) / 2, x2 - x1, y2 - y1], rtol=1e-5, atol=1e-4
    )
    np.testing.assert_array_equal(y[:, 4:], scores)


def judge_end2end(height, width, nc, seed=0, ties=False, function=decode.end2end):
    """Sorting with Python's stable sort, which keeps equal scores in order."""
    raw = raw_of(height, width, nc, batch=2, seed=seed, ties=ties)
    y, places = function(raw.copy(), height, width), tokens_of(height, width)
    count = min(300, len(places))
    assert y.shape == (2, count, 6)
    assert y.dtype == np.float32
    for image, rows in zip(raw, y, strict=True):
        tokens = sorted(range(len(places)), key=lambda t: -image[4:, t].max())[:count]
        pairs = sorted(((t, c) for t in tokens for c in range(nc)), key=lambda pair: -image[4 + pair[1], pair[0]])[:count]
        expected = [[*box_of(image, t, places[t]), image[4 + c, t], c] for t, c in pairs]
        np.testing.assert_allclose(rows, expected, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize(("height", "width"), SIZES)
def test_dense(height, width):
    judge_dense(height, width)


@given(st.sampled_from(SIZES), st.integers(1, 4), st.integers(0, 2**16), st.booleans())
@settings(max_examples=25)
def test_end2end(size, nc, seed, ties):
    judge_end2end(*size, nc, seed, ties)


@given(st.lists(st.integers(0, 5), min_size=1, max_size=60), st.integers(1, 70))
def test_the_largest_come_in_order(values, count):
    values = np.array(values, np.float32)
    expected = sorted(range(len(values)), key=lambda i: -values[i])[:count]
    assert decode.largest(values, count).tolist() == expected


@pytest.mark.parametrize("count", [1, 3, 4, 9])
def test_nan_is_no_score(count):
    values = np.array([np.nan, 0.5, np.inf, np.nan, -1, np.nan], np.float32)
    assert decode.largest(values, count).tolist() == [2, 1, 4, 0, 3, 5][:count]
