"""What must hold of any implementation of the contract, as functions: `tests/meta` feeds them planted bugs."""

import numpy as np
from problems import normal, ramp

from numba_psa import oracle
from numba_psa.shapes import PSAShape


def pack_then_merge_is_identity_on_v(shape: PSAShape, pack=oracle.psa_pack_qkv, merge=oracle.psa_merge_attn_nchw):
    qkv = ramp(shape.qkv)
    packed = pack(qkv, shape.num_heads)
    merged = merge(packed[2], packed[3], shape.num_heads, shape.height, shape.width)
    channels = [(4 * h + 2) * shape.key_dim + e for h in range(shape.num_heads) for e in range(2 * shape.key_dim)]
    np.testing.assert_array_equal(merged, qkv[:, channels])


def pack_matches_its_definition(shape: PSAShape, pack=oracle.psa_pack_qkv):
    """packed[section, bh, n, d] = qkv[b, (4h + section)·KEY_DIM + d, y, x], element by element."""
    qkv = ramp(shape.qkv)
    packed = pack(qkv, shape.num_heads)
    assert packed.shape == shape.packed
    for section, bh, n, d in np.ndindex(*shape.packed):
        b, h = divmod(bh, shape.num_heads)
        y, x = divmod(n, shape.width)
        assert packed[section, bh, n, d] == qkv[b, (4 * h + section) * shape.key_dim + d, y, x]


def is_adjoint(forward, backward, x, y):
    """⟨f(x), y⟩ = ⟨x, f*(y)⟩; x and y are tuples of arrays, as are results."""
    left = sum(np.vdot(a, b) for a, b in zip(forward(*x), y, strict=True))
    right = sum(np.vdot(a, b) for a, b in zip(x, backward(*y), strict=True))
    scale = sum(np.linalg.norm(a) for a in x) * sum(np.linalg.norm(a) for a in y)
    assert abs(left - right) <= 1e-12 * scale, (left, right)


def gradient_is_the_difference_quotient(loss, gradient, x, seed, tolerance=1e-6):
    """⟨gradient, u⟩ = (loss(x + εu) − loss(x − εu)) / 2ε along random directions u."""
    step = 1e-5
    for u in normal(seed, x.shape, x.shape):
        u /= np.linalg.norm(u) or 1.0
        quotient = (loss(x + step * u) - loss(x - step * u)) / (2 * step)
        assert abs(quotient - np.vdot(gradient, u)) <= tolerance * (1 + np.linalg.norm(gradient))


def keys_can_be_permuted(q, k, v, order, forward=oracle.flash_attention2_forward):
    o, l = forward(q, k, v)
    o_permuted, l_permuted = forward(q, k[:, order], v[:, order])
    np.testing.assert_allclose(o_permuted, o, rtol=1e-10, atol=1e-12)
    np.testing.assert_allclose(l_permuted, l, rtol=1e-10, atol=1e-12)


def probabilities_sum_to_one(q, k, v, scale, forward=oracle.flash_attention2_forward):
    _, l = forward(q, k, v, scale)
    p = np.exp(scale * q @ k.swapaxes(1, 2) - l[..., None])
    np.testing.assert_allclose(p.sum(-1), 1, rtol=1e-10)


def a_batch_is_its_images(qkv, num_heads, attention=oracle.psa_attention):
    together = attention(qkv, num_heads)
    for b in range(qkv.shape[0]):
        np.testing.assert_allclose(together[b : b + 1], attention(qkv[b : b + 1], num_heads), rtol=1e-12, atol=1e-14)
