"""Sizes, layouts and checks of shapes.py, against counting."""

import dataclasses

import numpy as np
import pytest
from hypothesis import given
from problems import attention_shapes, psa_shapes

from numba_psa import AttentionShape, PSAShape, ShapeError


@given(psa_shapes)
def test_every_layout_leads_back_to_the_shape(shape):
    size = (shape.num_heads, shape.height, shape.width)
    assert PSAShape.from_qkv(shape.qkv, shape.num_heads) == shape
    assert PSAShape.from_out(shape.out, shape.num_heads) == shape
    assert PSAShape.from_packed(shape.packed, *size) == shape
    assert PSAShape.from_section(shape.section, *size) == shape


@given(psa_shapes)
def test_layouts_of_one_tensor_have_one_size(shape):
    assert np.prod(shape.qkv) == np.prod(shape.packed) == np.prod(shape.heads) == 4 * np.prod(shape.section)
    assert np.prod(shape.out) == np.prod(shape.out_heads) == 2 * np.prod(shape.section)
    assert shape.qkv_h == 2 * shape.c == shape.num_heads * 2 * shape.head_dim
    assert shape.l == (shape.bh, shape.n) == (shape.batch * shape.num_heads, shape.height * shape.width)
    assert shape.softmax_scale == shape.attention.softmax_scale == shape.key_dim**-0.5


@given(attention_shapes)
def test_attention_shape_from_its_arrays(shape):
    assert AttentionShape.from_qkv(shape.q, shape.k, shape.v) == shape
    shape.check_saved(shape.o, shape.o, shape.l)


def test_shapes_are_frozen_and_hold_plain_ints():
    shape = PSAShape(np.int64(1), 2, 3, 4, 5)
    assert type(shape.batch) is int
    with pytest.raises(dataclasses.FrozenInstanceError):
        shape.batch = 2


@pytest.mark.parametrize("field", ["batch", "num_heads", "key_dim", "height", "width"])
@pytest.mark.parametrize(("value", "error"), [(-1, ValueError), (1.0, TypeError), (True, TypeError), ("1", TypeError)])
def test_a_bad_size_is_named(field, value, error):
    sizes = {"batch": 1, "num_heads": 1, "key_dim": 1, "height": 1, "width": 1, field: value}
    with pytest.raises(error, match=field):
        PSAShape(**sizes)


def test_the_message_says_what_would_fit():
    with pytest.raises(ShapeError, match=r"129 channels.*num_heads = 4.*multiple of 16, such as 128 or 144"):
        PSAShape.from_qkv((1, 129, 2, 2), 4)


def test_empty_is_a_shape():
    assert PSAShape(0, 2, 3, 4, 5).bh == 0
    assert AttentionShape(2, 0, 0, 1, 1).k == (2, 0, 1)
