"""The fused CUDA forward on a GPU: every shape, dtype and kind of value against the oracle; streams, graphs, libraries."""

import kernel_checks
import ml_dtypes
import numpy as np
import pytest
from bad_input import BAD_CALLS
from hypothesis import example, given, settings
from hypothesis import strategies as st
from problems import seeds

from numba_psa import OPERATIONS, DTypeError, ParameterError, PSAShape, ShapeError, cuda, oracle
from numba_psa._numba_cuda import cuda as numba_cuda
from numba_psa._numba_cuda import to_device, to_host
from numba_psa.data import real_qkv
from numba_psa.numerics import FLOAT32_LIMIT
from numba_psa.shapes import AttentionShape
from numba_psa.testing.arguments import psa_arguments
from numba_psa.testing.check import check
from numba_psa.testing.strategies import cases

DTYPES = [np.dtype(np.float16), np.dtype(ml_dtypes.bfloat16), np.dtype(np.float32)]
FORWARD = ("flash_attention2_forward", "psa_pack_qkv", "psa_extract_v_nchw", "psa_merge_attn_nchw", "psa_attention")
ATTENTION = OPERATIONS["psa_attention"]


def attention_is_right(shape, dtype, seed=0, amplitude=1.0, **keywords):
    """psa_attention into a target full of NaN, judged by the oracle."""
    rng = np.random.default_rng(seed)
    qkv = (amplitude * rng.standard_normal(shape.qkv)).astype(dtype)
    out = to_device(np.full(shape.out, np.nan, dtype))
    cuda.psa_attention(to_device(qkv), shape.num_heads, out=out, **keywords)
    scale = {} if "softmax_scale" not in keywords else {"softmax_scale": keywords["softmax_scale"]}
    given = {"qkv": qkv, "num_heads": shape.num_heads} | scale
    (verdict,) = check(ATTENTION, given, {"out": to_host(out)}).values()
    assert verdict.passed, (shape, dtype, verdict)


# One shape for each kernel of the choice table and each way that rows can begin; at least two blocks of keys each.
CLASSES = [
    PSAShape(1, 2, 32, 20, 20),
    PSAShape(1, 2, 32, 19, 21),
    PSAShape(1, 2, 32, 14, 29),
    PSAShape(16, 4, 32, 20, 20),
    PSAShape(16, 4, 32, 19, 21),
    PSAShape(16, 4, 32, 7, 58),
    PSAShape(1, 4, 32, 40, 40),
    PSAShape(1, 4, 32, 39, 41),
    PSAShape(2, 16, 32, 40, 40),
    PSAShape(2, 16, 32, 39, 41),
    PSAShape(1, 3, 32, 64, 65),
    PSAShape(8, 8, 16, 20, 20),
    PSAShape(8, 8, 36, 19, 21),
    PSAShape(8, 8, 64, 20, 21),
    PSAShape(1, 1, 64, 31, 33),
    PSAShape(70_000, 1, 1, 1, 3),
]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", CLASSES, ids=lambda s: f"B{s.batch} h{s.num_heads} K{s.key_dim} {s.height}x{s.width}")
def test_every_kernel_of_the_choice_table(shape, dtype):
    attention_is_right(shape, dtype)


shapes = st.builds(
    PSAShape,
    batch=st.integers(1, 5),
    num_heads=st.integers(1, 5),
    key_dim=st.sampled_from((1, 5, 16, 31, 32, 36, 64)),
    height=st.integers(1, 24),
    width=st.integers(1, 24),
)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@settings(max_examples=25)
@given(shape=shapes, seed=seeds, amplitude=st.sampled_from((1.0, 4.0, 20.0)), scale=st.sampled_from((None, 0.0, -0.3, 2.0)))
@example(shape=PSAShape(1, 2, 32, 20, 20), seed=0, amplitude=20.0, scale=None)
def test_any_shape_and_amplitude(dtype, shape, seed, amplitude, scale):
    attention_is_right(shape, dtype, seed, amplitude, **({} if scale is None else {"softmax_scale": scale}))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    "shape",
    [
        AttentionShape(2, 70, 133, 64, 64),
        AttentionShape(1, 200, 257, 96, 40),
        AttentionShape(3, 100, 64, 19, 5),
        AttentionShape(1, 129, 300, 128, 128),
        AttentionShape(1, 5, 0, 8, 8),
        AttentionShape(66_000, 3, 5, 2, 2),
    ],
    ids=str,
)
def test_flash_forward_on_other_lengths_and_widths(shape, dtype):
    kernel_checks.agrees_on_flash(cuda, "flash_attention2_forward", shape, dtype)


@pytest.mark.parametrize("name", FORWARD)
@settings(max_examples=20)
@given(data=st.data())
def test_cases_of_the_fuzzer(name, data):
    dtype = data.draw(st.sampled_from(("float16", "bfloat16", "float32")))
    case = data.draw(cases(name, dtype=dtype, max_tokens=200))
    width = case.shape.key_dim if isinstance(case.shape, PSAShape) else max(case.shape.head_dim, case.shape.value_dim)
    if width > (64 if isinstance(case.shape, PSAShape) else 128) and name in ("psa_attention", "flash_attention2_forward"):
        with pytest.raises(ShapeError, match="up to"):
            case.operation(cuda, case)
        return
    results = case.operation(cuda, case)
    verdicts = check(case.operation, case, results)
    assert all(verdict.passed for verdict in verdicts.values()), (case, verdicts)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", FORWARD)
def test_on_the_attention_of_a_trained_network(name, dtype):
    qkv, num_heads = real_qkv()
    given = psa_arguments(OPERATIONS[name], qkv.astype(dtype), num_heads, np.random.default_rng(0))
    kernel_checks.agrees(cuda, name, given, "two-pass")


def test_special_values():
    rng = np.random.default_rng(2)
    for dtype in DTYPES:
        q, k, v = (rng.standard_normal((2, 150, 16)).astype(dtype) for _ in range(3))
        q[0, :, 0], k[0, :, 0] = 1, -np.inf
        v[0, 5, 2], q[1, 40, 3] = np.inf, np.nan
        o, l = (np.asarray(x, np.float32) for x in cuda.flash_attention2_forward(q, k, v))
        assert (o[0] == 0).all()
        assert (l[0] == -np.inf).all()
        assert list(np.flatnonzero(np.isnan(o[1]).any(axis=1))) == [40]
    # A mask of -inf on single keys, in every kernel of the choice table.
    for shape in (
        PSAShape(1, 2, 32, 20, 20),
        PSAShape(16, 4, 32, 20, 20),
        PSAShape(1, 4, 32, 40, 40),
        PSAShape(1, 4, 32, 39, 41),
    ):
        for dtype in DTYPES:
            qkv = rng.standard_normal(shape.qkv).astype(dtype)
            heads = qkv.reshape(shape.heads)
            heads[:, 0, 0] = np.abs(heads[:, 0, 0]) + dtype.type(0.5)
            heads[:, 1, 0, 3] = -np.inf
            given = {"qkv": qkv, "num_heads": shape.num_heads}
            (verdict,) = check(ATTENTION, given, ATTENTION(cuda, given)).values()
            assert verdict.passed, (shape, dtype, verdict)


def test_an_infinite_value_stays_in_its_column():
    """p = 0 times an infinity of another block is NaN: block -1 of the pipelined kernel must not read one."""
    shape = PSAShape(16, 4, 32, 20, 20)
    qkv = np.random.default_rng(0).standard_normal(shape.qkv).astype(np.float16)
    qkv.reshape(shape.heads)[1, 2, 5, 3] = np.nan
    out = cuda.psa_attention(qkv, shape.num_heads).reshape(shape.out_heads)
    bad = np.isnan(out).any(axis=-1)
    assert bad[1, 0, 5]
    assert bad.sum() == 1


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_log_sums(dtype):
    for shape in CLASSES[:10]:
        qkv = np.random.default_rng(1).standard_normal(shape.qkv).astype(dtype)
        out, (saved, l) = cuda.psa_attention(qkv, shape.num_heads, save_for_backward=True)
        _, (_, want) = oracle.psa_attention(qkv, shape.num_heads, save_for_backward=True)
        assert l.dtype == np.float32
        np.testing.assert_allclose(l, want, rtol=2e-6, atol=2e-6)
        np.testing.assert_array_equal(out, saved)


def test_float32_means_float32_and_tf32_is_a_choice():
    shape = PSAShape(1, 2, 32, 20, 20)
    qkv = np.random.default_rng(3).standard_normal(shape.qkv).astype(np.float32)
    truth = oracle.psa_attention(qkv, 2, dtype=np.float64)
    errors = [
        np.linalg.norm(cuda.psa_attention(qkv, 2, precision=precision) - truth) / np.linalg.norm(truth)
        for precision in (None, "tf32")
    ]
    assert errors[0] < FLOAT32_LIMIT < errors[1] < 2e-3
    with pytest.raises(ParameterError, match="tf32"):
        cuda.psa_attention(qkv, 2, precision="half")
    with pytest.raises(ParameterError, match="float16"):
        cuda.psa_attention(qkv.astype(np.float16), 2, precision="tf32")


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_same_bits_on_every_run(dtype):
    for shape in CLASSES[:10]:
        qkv = to_device(np.random.default_rng(4).standard_normal(shape.qkv).astype(dtype))
        first = to_host(cuda.psa_attention(qkv, shape.num_heads))
        for _ in range(19):
            assert to_host(cuda.psa_attention(qkv, shape.num_heads)).tobytes() == first.tobytes()


def test_neighbours_of_the_output_are_not_touched():
    for shape in (PSAShape(1, 2, 32, 19, 21), PSAShape(16, 4, 32, 20, 20), PSAShape(1, 1, 5, 3, 3)):
        qkv = np.random.default_rng(5).standard_normal(shape.qkv).astype(np.float16)
        size = int(np.prod(shape.out))
        room = to_device(np.full(size + 6, 7, np.float16))
        out = room[3 : 3 + size].reshape(shape.out)
        cuda.psa_attention(to_device(qkv), shape.num_heads, out=out)
        found = to_host(room)
        assert (found[:3] == 7).all()
        assert (found[-3:] == 7).all()
        np.testing.assert_array_equal(found[3:-3].reshape(shape.out), cuda.psa_attention(qkv, shape.num_heads))


def test_offsets_beyond_32_bits():
    width = 8192
    height = 2**31 // (256 * width) + 1
    qkv = numba_cuda.device_array((1, 256, height, width), np.float16)
    qkv[0, 255, height - 1 :].copy_to_device(np.full((1, width), 3.0, np.float16))
    packed = cuda.psa_pack_qkv(qkv, 1)
    assert packed.size > 2**31
    assert (packed[3, 0, -width:].copy_to_host()[:, 63] == 3).all()
    del qkv, packed
    batch = 2**31 // (4 * 32 * 400) + 3
    small = np.random.default_rng(6).standard_normal((1, 128, 20, 20)).astype(np.float16)
    many = numba_cuda.device_array((batch, 128, 20, 20), np.float16)
    many[batch - 1 :].copy_to_device(small)
    out = cuda.psa_attention(many, 1)
    given = {"qkv": small, "num_heads": 1}
    (verdict,) = check(ATTENTION, given, {"out": out[batch - 1 :].copy_to_host()}).values()
    assert verdict.passed, verdict


@pytest.mark.parametrize("name", FORWARD)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_device_arrays_stay_on_the_device(name, dtype):
    kernel_checks.device_arrays_stay_on_the_device(cuda, name, PSAShape(2, 2, 8, 3, 5), dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_strided_arrays(dtype):
    room = np.random.default_rng(7).standard_normal((2, 32, 8, 12)).astype(dtype)
    view = to_device(room)[:, :, ::2, 1:7]
    want = cuda.psa_attention(np.ascontiguousarray(room[:, :, ::2, 1:7]), 2)
    np.testing.assert_array_equal(to_host(cuda.psa_attention(view, 2)), want)
    target = to_device(np.full((2, 16, 8, 6), 7, dtype))
    cuda.psa_attention(view, 2, out=target[:, :, ::2])
    np.testing.assert_array_equal(to_host(target)[:, :, ::2], want)
    assert (to_host(target)[:, :, 1::2] == 7).all()


def test_streams_and_plans():
    shape = PSAShape(2, 2, 32, 9, 9)
    qkv = to_device(np.random.default_rng(8).standard_normal(shape.qkv).astype(np.float32))
    want = to_host(cuda.psa_attention(qkv, 2))
    stream = numba_cuda.stream()
    plan = cuda.plan_psa_attention(shape, "float32")
    for run in (lambda out: cuda.psa_attention(qkv, 2, out=out, stream=stream), lambda out: plan(qkv, out, stream)):
        out = to_device(np.full(shape.out, np.nan, np.float32))
        run(out)
        stream.synchronize()
        np.testing.assert_array_equal(to_host(out), want)
    with pytest.raises(ShapeError, match="B = 2"):
        cuda.plan_psa_attention(PSAShape(1, 2, 32, 9, 9), "float32")(qkv, out)
    with pytest.raises(DTypeError, match="plan is for float16"):
        cuda.plan_psa_attention(shape, "float16")(qkv, out)


def test_a_cuda_graph_and_torch():
    torch = pytest.importorskip("torch")
    for dtype, width in ((torch.float16, 20), (torch.float16, 21), (torch.bfloat16, 20), (torch.float32, 20)):
        qkv = torch.randn(8, 256, 19, width, device="cuda").to(dtype)
        out = torch.full((8, 128, 19, width), float("nan"), device="cuda", dtype=dtype)
        cuda.psa_attention(qkv, 2, out=out)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            cuda.psa_attention(qkv, 2, out=out)
        qkv.copy_(torch.randn_like(qkv))
        graph.replay()
        again = cuda.psa_attention(qkv, 2)
        assert isinstance(again, torch.Tensor)
        assert torch.equal(again, out)
        strided = torch.randn(2, 20, 20, 256, device="cuda", dtype=dtype).permute(0, 3, 1, 2)
        assert torch.equal(cuda.psa_attention(strided, 2), cuda.psa_attention(strided.contiguous(), 2))
    with pytest.raises(DTypeError, match="cpu"):
        cuda.psa_attention(qkv.cpu(), 2)


def test_cupy():
    cupy = pytest.importorskip("cupy")
    qkv = np.random.default_rng(9).standard_normal((1, 64, 5, 7)).astype(np.float32)
    result = cuda.psa_attention(cupy.asarray(qkv), 1)
    assert isinstance(result, cupy.ndarray)
    np.testing.assert_array_equal(cupy.asnumpy(result), cuda.psa_attention(qkv, 1))


def test_jax(monkeypatch):
    monkeypatch.setenv("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    jax = pytest.importorskip("jax")
    if jax.default_backend() != "gpu":
        pytest.skip(f"jax runs on {jax.default_backend()}")
    qkv = np.random.default_rng(9).standard_normal((1, 64, 5, 7)).astype(np.float32)
    for dtype in (jax.numpy.float32, jax.numpy.float16, jax.numpy.bfloat16):
        array = jax.numpy.asarray(qkv).astype(dtype)
        result = cuda.psa_attention(array, 1)
        assert isinstance(result, jax.Array)
        assert result.dtype == dtype
        doubled = result + result  # on jax's own stream, which must wait for ours
        want = cuda.psa_attention(np.asarray(array), 1)
        np.testing.assert_array_equal(np.asarray(result), want)
        np.testing.assert_array_equal(np.asarray(doubled), want + want)


@pytest.mark.parametrize("shape", [(0, 16, 2, 3), (2, 16, 0, 3)])
def test_empty(shape):
    qkv = np.zeros(shape, np.float32)
    assert cuda.psa_attention(qkv, 2).shape == (shape[0], 8, *shape[2:])
    assert cuda.psa_pack_qkv(qkv, 2).size == 0
    assert cuda.psa_extract_v_nchw(qkv, 2).size == 0


@pytest.mark.parametrize("case", [case for case in BAD_CALLS if BAD_CALLS[case][0] in FORWARD])
def test_bad_input_is_refused(case):
    name, arguments, keywords, error, message = BAD_CALLS[case]
    with pytest.raises(error, match=message):
        getattr(cuda, name)(*arguments, **keywords)
