"""The oracle against mathematics: adjoints, difference quotients, permutations, sums."""

import numpy as np
import properties
from hypothesis import example, given
from hypothesis import strategies as st
from problems import attention_shapes, flash_inputs, normal, psa_shapes, seeds

from numba_psa import PSAShape, oracle
from numba_psa.shapes import AttentionShape


@given(psa_shapes)
@example(PSAShape(2, 3, 5, 2, 3))
def test_pack_then_merge_is_identity_on_v(shape):
    properties.pack_then_merge_is_identity_on_v(shape)


@given(st.sampled_from([PSAShape(1, 1, 1, 1, 1), PSAShape(2, 3, 5, 2, 3), PSAShape(3, 2, 4, 3, 1), PSAShape(1, 2, 7, 1, 4)]))
def test_pack_matches_its_definition(shape):
    properties.pack_matches_its_definition(shape)


@given(psa_shapes)
def test_extract_v_is_the_value_channels(shape):
    qkv = np.arange(np.prod(shape.qkv), dtype=float).reshape(shape.qkv)
    v = oracle.psa_extract_v_nchw(qkv, shape.num_heads)
    for h in range(shape.num_heads):
        first, width = (4 * h + 2) * shape.key_dim, shape.head_dim
        np.testing.assert_array_equal(v[:, h * width : (h + 1) * width], qkv[:, first : first + width])


@given(psa_shapes, seeds)
def test_layout_backwards_are_adjoints(shape, seed):
    heads, size = shape.num_heads, (shape.num_heads, shape.height, shape.width)
    qkv, packed, v, lo, hi = normal(seed, shape.qkv, shape.packed, shape.out, shape.section, shape.section)
    properties.is_adjoint(
        lambda x: (oracle.psa_pack_qkv(x, heads),),
        lambda y: (oracle.psa_pack_qkv_backward(y, *size),),
        (qkv,),
        (packed,),
    )
    properties.is_adjoint(
        lambda x: (oracle.psa_extract_v_nchw(x, heads),),
        lambda y: (oracle.psa_extract_v_backward(y, heads),),
        (qkv,),
        (v,),
    )
    properties.is_adjoint(
        lambda a, b: (oracle.psa_merge_attn_nchw(a, b, *size),),
        lambda y: oracle.psa_merge_attn_backward(y, heads),
        (lo, hi),
        (v,),
    )


@given(psa_shapes, seeds)
def test_accumulating_backwards_add_and_leave_the_rest(shape, seed):
    size = (shape.num_heads, shape.height, shape.width)
    before, d_packed, d_v = normal(seed, shape.qkv, shape.packed, shape.out)
    target = before.copy()
    assert oracle.psa_pack_qkv_backward(d_packed, *size, d_qkv=target) is target
    np.testing.assert_array_equal(target, before + oracle.psa_pack_qkv_backward(d_packed, *size))
    target = before.copy()
    assert oracle.psa_extract_v_backward(d_v, shape.num_heads, d_qkv=target) is target
    np.testing.assert_array_equal(target, before + oracle.psa_extract_v_backward(d_v, shape.num_heads))
    of_q_and_k = target.reshape(shape.heads)[:, :2]
    np.testing.assert_array_equal(of_q_and_k, before.reshape(shape.heads)[:, :2])


@given(attention_shapes, seeds)
def test_flash_gradients_are_difference_quotients(shape, seed):
    q, k, v, do = flash_inputs(seed, shape)
    o, l = oracle.flash_attention2_forward(q, k, v)
    dq = oracle.flash_attention2_backward_dq(q, k, v, o, do, l)
    dk, dv = oracle.flash_attention2_backward_dkv(q, k, v, o, do, l)
    for name, x, gradient in (("q", q, dq), ("k", k, dk), ("v", v, dv)):

        def loss(moved, name=name):
            return np.vdot(oracle.flash_attention2_forward(**{**{"q": q, "k": k, "v": v}, name: moved})[0], do)

        properties.gradient_is_the_difference_quotient(loss, gradient, x, seed)


@given(psa_shapes.filter(lambda s: s.key_dim <= 16), seeds)
def test_psa_attention_gradient_is_the_difference_quotient(shape, seed):
    qkv, d_out = normal(seed, shape.qkv, shape.out)
    properties.gradient_is_the_difference_quotient(
        lambda x: np.vdot(oracle.psa_attention(x, shape.num_heads), d_out),
        oracle.psa_attention_backward(qkv, d_out, shape.num_heads),
        qkv,
        seed,
    )


@given(attention_shapes.map(lambda s: AttentionShape(s.bh, s.n_ctx_q, s.n_ctx_q, s.head_dim, s.value_dim)), seeds)
def test_psa_fa2_backward_adds_adds_and_stores(shape, seed):
    q, k, v, do = flash_inputs(seed, shape)
    o, l = oracle.flash_attention2_forward(q, k, v)
    dq, dk, _ = before = normal(seed + 1, shape.q, shape.k, shape.v)
    targets = [x.copy() for x in before]
    results = oracle.psa_fa2_backward(q, k, v, o, do, l, dq=targets[0], dk=targets[1], dv=targets[2])
    assert all(result is target for result, target in zip(results, targets, strict=True))
    dk_alone, dv_alone = oracle.flash_attention2_backward_dkv(q, k, v, o, do, l)
    np.testing.assert_array_equal(targets[0], dq + oracle.flash_attention2_backward_dq(q, k, v, o, do, l))
    np.testing.assert_array_equal(targets[1], dk + dk_alone)
    np.testing.assert_array_equal(targets[2], dv_alone)


@given(attention_shapes, seeds, st.randoms(use_true_random=False))
def test_keys_can_be_permuted(shape, seed, random):
    q, k, v, _ = flash_inputs(seed, shape)
    order = list(range(shape.n_ctx_k))
    random.shuffle(order)
    properties.keys_can_be_permuted(q, k, v, order)


@given(attention_shapes, seeds, st.sampled_from((0.1, 1.0, -0.5)))
def test_probabilities_sum_to_one(shape, seed, scale):
    q, k, v, _ = flash_inputs(seed, shape)
    properties.probabilities_sum_to_one(q, k, v, scale)


@given(psa_shapes, seeds)
def test_a_batch_is_its_images(shape, seed):
    properties.a_batch_is_its_images(normal(seed, shape.qkv)[0], shape.num_heads)


@given(attention_shapes, seeds, st.sampled_from((1.0, 30.0)))
def test_online_recurrence_agrees_with_two_passes(shape, seed, spread):
    q, k, v, _ = flash_inputs(seed, shape)
    o, l = oracle.flash_attention2_forward(q * spread, k, v)
    o_online, l_online = oracle.flash_attention2_forward_online(q * spread, k, v, dtype=np.float64)
    np.testing.assert_allclose(o_online, o, rtol=1e-11, atol=1e-13)
    np.testing.assert_allclose(l_online, l, rtol=1e-11, atol=1e-13)


@given(psa_shapes, seeds)
def test_the_original_pipeline_gives_the_whole_attention(shape, seed):
    (qkv,) = normal(seed, shape.qkv)
    packed = oracle.psa_pack_qkv(qkv, shape.num_heads)
    lo, _ = oracle.flash_attention2_forward(packed[0], packed[1], packed[2])
    hi, _ = oracle.flash_attention2_forward(packed[0], packed[1], packed[3])
    merged = oracle.psa_merge_attn_nchw(lo, hi, shape.num_heads, shape.height, shape.width)
    np.testing.assert_allclose(oracle.psa_attention(qkv, shape.num_heads), merged, rtol=1e-12, atol=1e-14)
