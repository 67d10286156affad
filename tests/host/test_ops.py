"""The graph level: shapes with unknown sizes, geometry against counting, argument order, gradients, PTX."""

import math

import numpy as np
import pytest
from hypothesis import given
from problems import normal, psa_shapes, seeds

from numba_psa import BackendUnavailableError, DTypeError, ParameterError, PSAShape, ShapeError, oracle
from numba_psa.ops import FlashAttention2, FlashAttn2Psa, PsaAttentionGraph, PsaExtractV, PsaMergeAttn, PsaPackQkv, Tensor


def graph_of(shape: PSAShape, **keywords) -> PsaAttentionGraph:
    return PsaAttentionGraph(shape.num_heads, shape.key_dim, shape.height, shape.width, **keywords)


@given(psa_shapes)
def test_shapes_with_the_batch_unknown_and_known(shape):
    graph = graph_of(shape)
    for batch in (None, shape.batch):
        shapes = graph.infer_shapes(batch)
        assert shapes["packed"] == (batch, 4, shape.num_heads, shape.n, shape.key_dim)
        assert shapes["lo"] == shapes["hi"] == (batch, shape.num_heads, shape.n, shape.key_dim)
        assert shapes["attention"] == shapes["v"] == (batch, *shape.out[1:])


def test_unknown_image_sizes_stay_unknown():
    assert PsaPackQkv(4, 2).infer_output_shape([(None, 32, None, 5)]) == (None, 4, 2, None, 4)
    assert PsaExtractV(4, 2).infer_output_shape([(None, None, None, 5)]) == (None, 16, None, 5)


@given(psa_shapes)
def test_grids_are_one_block_a_token(shape):
    graph = graph_of(shape)
    shapes = graph.infer_shapes(shape.batch)
    tokens = [(bh, n) for bh in range(shape.bh) for n in range(shape.n)]
    assert graph.pack.grid(shapes["packed"]) == (4 * len(tokens), 1, 1)
    assert graph.merge.grid(shapes["attention"]) == graph.extract_v.grid(shapes["v"]) == (len(tokens), 1, 1)
    assert graph.attention_lo.grid(shapes["lo"]) == (shape.n, shape.bh, 1)
    for name, op, _ in graph.nodes:
        assert op.block == op.backward_block == (shape.key_dim, 1, 1)
        assert op.backward_grid([], shapes[name]) == op.grid(shapes[name])


def test_flash_attention_has_two_backward_grids():
    op = FlashAttention2(8)
    q, k = (3, 5, 8), (3, 7, 8)
    assert op.infer_output_shape([q, k, k]) == q
    assert op.param_shapes([q, k, k]) == [(15,)]
    assert op.backward_grid([q, k, k], q) == ((5, 3, 1), (7, 3, 1))
    assert op.backward_block == ((8, 1, 1), (8, 1, 1))


def values(arguments):
    return [(argument.name, argument.value) for argument in arguments]


def test_arguments_come_in_the_order_of_the_kernels():
    shape = PSAShape(2, 3, 5, 4, 7)
    qkv, label = Tensor(100, shape.qkv), (2, 4, 3, 28, 5)
    pack = PsaPackQkv(5, 3)
    sizes = [("qkv_h", 60), ("H", 4), ("W", 7), ("B", 2), ("num_heads", 3)]
    assert values(pack.pack_args([qkv], [], 200, label)) == [("qkv_ptr", 100), ("out_ptr", 200), *sizes]
    assert values(pack.pack_backward_args([qkv], [], 200, label, 300, [400]))[:2] == [
        ("d_packed_ptr", 300),
        ("d_qkv_ptr", 400),
    ]
    extract = values(PsaExtractV(5, 3).pack_args([qkv], [], 200, shape.out))
    assert extract == [("qkv_ptr", 100), ("v_ptr", 200), ("qkv_h", 60), ("c", 30), ("H", 4), ("W", 7), ("num_heads", 3)]
    half = (2, 3, 28, 5)
    merge = PsaMergeAttn(5, 3, 4, 7).pack_args([Tensor(1, half), Tensor(2, half)], [], 3, shape.out)
    assert values(merge)[:4] == [("lo_ptr", 1), ("hi_ptr", 2), ("out_ptr", 3), ("c", 30)]


@pytest.mark.parametrize(("op", "section"), [(FlashAttn2Psa.lo(5), 2), (FlashAttn2Psa.hi(5), 3)])
def test_sections_are_found_by_pointer_arithmetic(op, section):
    label, step = (2, 4, 3, 28, 5), 2 * 3 * 28 * 5 * 4
    packed = Tensor(1000, label)
    forward = values(op.pack_args([packed], [7], 8, op.infer_output_shape([label])))
    assert forward[:5] == [
        ("q_ptr", 1000),
        ("k_ptr", 1000 + step),
        ("v_ptr", 1000 + section * step),
        ("o_ptr", 8),
        ("l_ptr", 7),
    ]
    assert forward[5:7] == [("n_ctx_q", 28), ("n_ctx_k", 28)]
    assert forward[7][1] == pytest.approx(5**-0.5)
    assert forward[8] == ("neg_inf", -math.inf)
    backward = values(op.pack_backward_args([packed], [7], 8, (2, 3, 28, 5), 9, [2000]))
    assert backward[3:9] == [
        ("o_ptr", 8),
        ("do_ptr", 9),
        ("l_ptr", 7),
        ("dq_ptr", 2000),
        ("dk_ptr", 2000 + step),
        ("dv_ptr", 2000 + section * step),
    ]
    assert backward[9] == ("N", 28)
    assert op.param_shapes([label]) == [(2 * 3 * 28,)]


def test_packed_arguments_match_the_parameters_of_the_kernels():
    import inspect

    from numba_psa.mirror.elements import ELEMENTS

    shape = PSAShape(1, 2, 3, 2, 2)
    graph = graph_of(shape)
    shapes = graph.infer_shapes(1)
    for name, op, inputs in graph.nodes:
        tensors = [Tensor(1, shapes[x]) for x in inputs]
        packed = [
            op.pack_args(tensors, [2], 3, shapes[name]),
            op.pack_backward_args(tensors, [2], 3, shapes[name], 4, [5] * len(tensors)),
        ]
        for factory, arguments in zip(op.factories(), packed, strict=True):
            kernel = factory(*op.constants, ELEMENTS[op.dtype])
            assert [argument.name for argument in arguments] == list(inspect.signature(kernel).parameters)


@given(psa_shapes.filter(lambda s: s.key_dim <= 8), seeds)
def test_the_graph_is_psa_attention_with_v(shape, seed):
    graph = graph_of(shape, dtype="float64")
    qkv, d_attention, d_v = normal(seed, shape.qkv, shape.out, shape.out)
    attention, v, tape = graph.forward(qkv, impl="oracle")
    np.testing.assert_allclose(attention, oracle.psa_attention(qkv, shape.num_heads), rtol=1e-12, atol=1e-14)
    np.testing.assert_array_equal(v, oracle.psa_extract_v_nchw(qkv, shape.num_heads))
    alone = graph.backward(tape, d_attention, np.zeros_like(d_v), impl="oracle")
    expected = oracle.psa_attention_backward(qkv, d_attention, shape.num_heads)
    np.testing.assert_allclose(alone, expected, rtol=1e-9, atol=1e-11)
    both = graph.backward(tape, d_attention, d_v, impl="oracle")
    of_v = oracle.psa_extract_v_backward(d_v, shape.num_heads)
    np.testing.assert_allclose(both, expected + of_v, rtol=1e-9, atol=1e-11)


def test_the_label_of_packed_moves_nothing():
    (qkv,) = normal(0, (2, 24, 3, 2))
    packed, _ = PsaPackQkv(3, 2).run([qkv], impl="oracle")
    assert packed.shape == (2, 4, 2, 6, 3)
    np.testing.assert_array_equal(packed.reshape(4, 4, 6, 3), oracle.psa_pack_qkv(qkv, 2))
    with pytest.raises(ParameterError, match="C order"):
        FlashAttn2Psa.lo(3).run([np.asfortranarray(packed)], impl="oracle")


def test_flash_attention_runs_back_into_given_gradients():
    q, k, v, do = normal(1, (2, 3, 4), (2, 5, 4), (2, 5, 4), (2, 3, 4))
    op = FlashAttention2(4, dtype="float64")
    o, params = op.run([q, k, v], impl="oracle")
    gradients = op.run_backward([q, k, v], o, params, do, impl="oracle")
    targets = [np.full_like(x, 9) for x in (q, k, v)]
    assert op.run_backward([q, k, v], o, params, do, grad_inputs=targets, impl="oracle")[0] is targets[0]
    for got, want in zip(targets, gradients, strict=True):
        np.testing.assert_array_equal(got, want)


def test_wrong_shapes_and_values_are_refused():
    with pytest.raises(ShapeError, match=r"qkv_h = 30.*expected 32"):
        PsaPackQkv(4, 2).infer_output_shape([(1, 30, 2, 2)])
    with pytest.raises(ShapeError, match="N = 5"):
        PsaMergeAttn(4, 2, 2, 3).infer_output_shape([(1, 2, 5, 4), (1, 2, 5, 4)])
    with pytest.raises(ShapeError, match="32-bit"):
        PsaPackQkv(4, 2).pack_args([Tensor(0, (1, 32, 2**31, 1))], [], 0, ())
    with pytest.raises(DTypeError):
        PsaPackQkv(4, 2, dtype="int8")
    with pytest.raises(ParameterError, match="v_section"):
        FlashAttn2Psa(4, v_section=1)
    with pytest.raises(ParameterError, match="2 inputs, got 1"):
        PsaMergeAttn(4, 2, 1, 1).run([np.zeros((1, 2, 1, 4))], impl="oracle")


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16", "float64"])
def test_every_kernel_compiles_to_ptx_without_a_device(dtype):
    ops = [op for _, op, _ in PsaAttentionGraph(2, 5, 3, 5, dtype=dtype).nodes] + [FlashAttention2(5, dtype=dtype)]
    try:
        texts = [op.ptx((8, 0)) for op in ops]
    except BackendUnavailableError as error:
        pytest.skip(str(error))
    for op in ops:
        backward = op.ptx((9, 0), backward=True)
        texts += backward if isinstance(backward, tuple) else [backward]
    assert len(texts) == 13
    for text in texts:
        assert ".visible .entry" in text
        assert ".extern .func" not in text
        if dtype != "float64":
            assert ".f64" not in text


def test_lowering_names_kernel_and_source():
    lowered = PsaMergeAttn(4, 2, 1, 1).lower()
    assert lowered.name == "psa_merge_attn_nchw"
    assert f"def {lowered.entry_point}(lo_ptr, hi_ptr, out_ptr" in lowered.source
    assert len(FlashAttention2(4).backward_source()) == 2
