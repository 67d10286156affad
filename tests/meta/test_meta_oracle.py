"""Each property of tests/host/properties.py must catch the bug it is there for."""

import numpy as np
import properties
import pytest
from problems import normal

from numba_psa import PSAShape, oracle

SHAPE = PSAShape(2, 3, 5, 2, 3)
RNG = np.random.default_rng(0)


def caught(check, *arguments, **keywords):
    with pytest.raises(AssertionError):
        check(*arguments, **keywords)


def swapped_merge(lo, hi, *size):
    return oracle.psa_merge_attn_nchw(hi, lo, *size)


def transposed_merge(lo, hi, heads, height, width):
    flipped = oracle.psa_merge_attn_nchw(lo, hi, heads, width, height)
    return flipped.swapaxes(2, 3)


def test_pack_then_merge():
    caught(properties.pack_then_merge_is_identity_on_v, SHAPE, merge=swapped_merge)
    caught(properties.pack_then_merge_is_identity_on_v, SHAPE, merge=transposed_merge)


def section_major_pack(qkv, num_heads):
    b, channels, h, w = qkv.shape
    sections = qkv.reshape(b, 4, num_heads, channels // (4 * num_heads), h * w)
    return np.ascontiguousarray(sections.transpose(1, 0, 2, 4, 3).reshape(4, b * num_heads, h * w, -1))


def heads_before_batch_pack(qkv, num_heads):
    packed = oracle.psa_pack_qkv(qkv, num_heads)
    four, bh, n, key_dim = packed.shape
    return packed.reshape(four, bh // num_heads, num_heads, n, key_dim).swapaxes(1, 2).reshape(packed.shape)


def test_pack_definition():
    caught(properties.pack_matches_its_definition, SHAPE, pack=section_major_pack)
    caught(properties.pack_matches_its_definition, SHAPE, pack=heads_before_batch_pack)
    caught(properties.pack_matches_its_definition, SHAPE, pack=lambda *x: oracle.psa_pack_qkv(*x)[[1, 0, 2, 3]])


def test_adjoint():
    v, merged = normal(1, SHAPE.qkv, SHAPE.out)
    caught(
        properties.is_adjoint,
        lambda x: (oracle.psa_extract_v_nchw(x, 3),),
        lambda y: (oracle.psa_extract_v_backward(y[:, ::-1], 3),),
        (v,),
        (merged,),
    )


@pytest.mark.parametrize("factor", [0.5, 1.01, -1.0])
def test_difference_quotient(factor):
    (x,) = normal(2, (3, 4))
    caught(properties.gradient_is_the_difference_quotient, lambda y: (y**2).sum(), factor * 2 * x, x, 0)


def test_permuted_keys():
    q, k, v = normal(3, (2, 3, 4), (2, 5, 4), (2, 5, 4))

    def forgets_the_last_key(q, k, v):
        return oracle.flash_attention2_forward(q, k[:, :-1], v[:, :-1])

    caught(properties.keys_can_be_permuted, q, k, v, [4, 3, 2, 1, 0], forward=forgets_the_last_key)


@pytest.mark.parametrize("wrong", [lambda l: l / np.log(2), lambda l: l + 1e-6, lambda l: np.zeros_like(l)])
def test_sum_of_probabilities(wrong):
    def forward(q, k, v, scale):
        o, l = oracle.flash_attention2_forward(q, k, v, scale)
        return o, wrong(l)

    caught(properties.probabilities_sum_to_one, *normal(4, (2, 3, 4), (2, 5, 4), (2, 5, 4)), 0.5, forward=forward)


def test_batch_and_images():
    def first_image_for_all(qkv, num_heads):
        return np.broadcast_to(oracle.psa_attention(qkv[:1], num_heads), (len(qkv), *SHAPE.out[1:]))

    caught(properties.a_batch_is_its_images, normal(5, SHAPE.qkv)[0], 3, attention=first_image_for_all)
