"""The fused CUDA backward on a GPU: every shape, dtype and kind of value against the oracle; the same bits on every run."""

import kernel_checks
import ml_dtypes
import numpy as np
import pytest
from bad_input import BAD_CALLS
from hypothesis import example, given, settings
from hypothesis import strategies as st
from problems import seeds

from numba_psa import OPERATIONS, PSAShape, ShapeError, cuda, oracle
from numba_psa._numba_cuda import cuda as numba_cuda
from numba_psa._numba_cuda import to_device, to_host
from numba_psa.data import real_qkv
from numba_psa.shapes import AttentionShape
from numba_psa.testing.arguments import psa_arguments
from numba_psa.testing.check import check
from numba_psa.testing.strategies import cases

DTYPES = [np.dtype(np.float16), np.dtype(ml_dtypes.bfloat16), np.dtype(np.float32)]
FLASH = ("flash_attention2_backward_dq", "flash_attention2_backward_dkv", "psa_fa2_backward")
LAYOUT = ("psa_pack_qkv_backward", "psa_extract_v_backward", "psa_merge_attn_backward")
BACKWARD = ("psa_attention_backward", *FLASH, *LAYOUT)
GRADIENT = OPERATIONS["psa_attention_backward"]


def verdict_of(arguments, d_qkv):
    (verdict,) = check(GRADIENT, arguments, {"d_qkv": d_qkv}).values()
    return verdict


def gradient_is_right(shape, dtype, seed=0, amplitude=1.0, d_amplitude=1.0, **keywords):
    """psa_attention_backward with o and l of the fused forward, and on its own: right, and the same bits."""
    rng = np.random.default_rng(seed)
    qkv = (amplitude * rng.standard_normal(shape.qkv)).astype(dtype)
    d_out = (d_amplitude * rng.standard_normal(shape.out)).astype(dtype)
    arrays = to_device(qkv), to_device(d_out)
    _, saved = cuda.psa_attention(arrays[0], shape.num_heads, save_for_backward=True, **keywords)
    d_qkv = to_host(cuda.psa_attention_backward(*arrays, shape.num_heads, saved=saved, **keywords))
    verdict = verdict_of({"qkv": qkv, "d_out": d_out, "num_heads": shape.num_heads} | keywords, d_qkv)
    assert verdict.passed, (shape, dtype, verdict)
    alone = to_host(cuda.psa_attention_backward(*arrays, shape.num_heads, **keywords))
    assert alone.tobytes() == d_qkv.tobytes()


# One shape for each kernel of the choice table and each way that rows can begin; at least two blocks of columns each.
CLASSES = [
    PSAShape(1, 2, 32, 20, 20),
    PSAShape(1, 2, 32, 19, 21),
    PSAShape(1, 2, 32, 14, 29),
    PSAShape(8, 4, 32, 20, 20),
    PSAShape(8, 4, 32, 19, 21),
    PSAShape(8, 4, 32, 7, 58),
    PSAShape(1, 2, 32, 40, 40),
    PSAShape(2, 2, 32, 39, 41),
    PSAShape(2, 4, 16, 20, 20),
    PSAShape(2, 4, 36, 19, 21),
    PSAShape(2, 4, 64, 20, 21),
    PSAShape(1, 1, 64, 31, 33),
    PSAShape(70_000, 1, 1, 1, 3),
]
ids = lambda s: f"B{s.batch} h{s.num_heads} K{s.key_dim} {s.height}x{s.width}"  # noqa: E731


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", CLASSES, ids=ids)
def test_every_kernel_of_the_choice_table(shape, dtype):
    gradient_is_right(shape, dtype)


shapes = st.builds(
    PSAShape,
    batch=st.integers(1, 3),
    num_heads=st.integers(1, 3),
    key_dim=st.sampled_from((5, 32, 36, 64)),
    height=st.integers(1, 20),
    width=st.integers(1, 20),
)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@settings(max_examples=8)
@given(
    shape=shapes,
    seed=seeds,
    amplitude=st.sampled_from((1.0, 4.0, 20.0)),
    d_amplitude=st.sampled_from((1.0, 1e-3, 100.0)),
    scale=st.sampled_from((None, 0.0, -0.3, 2.0)),
)
@example(shape=PSAShape(1, 2, 32, 20, 20), seed=0, amplitude=4.0, d_amplitude=1e-3, scale=None)
def test_any_shape_and_amplitude(dtype, shape, seed, amplitude, d_amplitude, scale):
    keywords = {} if scale is None else {"softmax_scale": scale}
    gradient_is_right(shape, dtype, seed, amplitude, d_amplitude, **keywords)


@pytest.mark.parametrize("shape", [PSAShape(1, 2, 32, 20, 20), PSAShape(1, 2, 32, 40, 40)], ids=ids)
def test_float32_with_large_logits(shape):
    gradient_is_right(shape, np.dtype(np.float32), amplitude=4.0)


@pytest.mark.parametrize("d_amplitude", [1e-3, 1e-5])
@pytest.mark.parametrize("shape", [PSAShape(1, 2, 32, 20, 20), PSAShape(1, 1, 32, 64, 64)], ids=ids)
def test_float16_does_not_underflow(shape, d_amplitude):
    gradient_is_right(shape, np.dtype(np.float16), d_amplitude=d_amplitude)


@pytest.mark.parametrize("name", FLASH)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    "shape",
    [
        AttentionShape(2, 70, 133, 64, 64),
        AttentionShape(1, 200, 257, 96, 40),
        AttentionShape(3, 100, 64, 19, 5),
        AttentionShape(1, 129, 300, 128, 128),
        AttentionShape(1, 5, 0, 8, 8),
        AttentionShape(1, 0, 5, 8, 8),
        AttentionShape(66_000, 3, 5, 2, 2),
    ],
    ids=str,
)
def test_flash_backward_on_other_lengths_and_widths(name, shape, dtype):
    if name == "psa_fa2_backward":
        shape = AttentionShape(shape.bh, shape.n_ctx_k, shape.n_ctx_k, shape.head_dim, shape.value_dim)
    kernel_checks.agrees_on_flash(cuda, name, shape, dtype)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
@pytest.mark.parametrize("name", BACKWARD)
@settings(max_examples=6)
@given(data=st.data())
def test_cases_of_the_fuzzer(name, dtype, data):
    """Few examples: most widths compile kernels of their own."""
    case = data.draw(cases(name, dtype=dtype, max_tokens=200))
    width = case.shape.key_dim if isinstance(case.shape, PSAShape) else max(case.shape.head_dim, case.shape.value_dim)
    if width > (64 if isinstance(case.shape, PSAShape) else 128) and name not in LAYOUT:
        with pytest.raises(ShapeError, match="up to"):
            case.operation(cuda, case)
        return
    verdicts = check(case.operation, case, case.operation(cuda, case))
    assert all(verdict.passed for verdict in verdicts.values()), (case, verdicts)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", BACKWARD)
def test_on_the_attention_of_a_trained_network(name, dtype):
    qkv, num_heads = real_qkv()
    given = psa_arguments(OPERATIONS[name], qkv.astype(dtype), num_heads, np.random.default_rng(0))
    kernel_checks.agrees(cuda, name, given, "two-pass")


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_rows_without_keys_give_and_get_nothing(dtype):
    """Masked by -inf in every key, and by -inf in the query; do there is not even a number."""
    rng = np.random.default_rng(2)
    q, k, v, do = (rng.standard_normal((2, 150, 16)).astype(dtype) for _ in range(4))
    q[:, :, 0], k[0, :, 0] = 1, -np.inf
    k[1, :, 0], q[1, 40, :2] = 1, (-np.inf, 0)
    do[1, 40] = np.nan
    o, l = oracle.flash_attention2_forward(q, k, v)
    assert np.isneginf(l).sum() == 151
    for name in FLASH[:2]:
        kernel_checks.agrees(cuda, name, {"q": q, "k": k, "v": v, "o": o, "do": do, "l": l}, "two-pass")


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("at", [("q", 1, 40, 3), ("k", 1, 40, 3), ("v", 1, 40, 3), ("do", 1, 40, 3)], ids=lambda at: at[0])
@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_what_is_no_number_stays_where_it_belongs(dtype, at, value):
    rng = np.random.default_rng(3)
    arrays = {name: rng.standard_normal((2, 150, 16)).astype(dtype) for name in ("q", "k", "v")}
    if at[0] != "do":
        arrays[at[0]][at[1:]] = value
    arrays["o"], arrays["l"] = oracle.flash_attention2_forward(**arrays)
    arrays["do"] = rng.standard_normal((2, 150, 16)).astype(dtype)
    if at[0] == "do":
        arrays["do"][at[1:]] = value
    for name in FLASH[:2]:
        results = OPERATIONS[name](cuda, arrays)
        expected = OPERATIONS[name](oracle, arrays)
        for output, x in results.items():
            bad = [~np.isfinite(y.astype(np.float32)) for y in (x, expected[output])]
            np.testing.assert_array_equal(*bad)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_same_bits_on_every_run_and_stream(dtype):
    for shape in CLASSES[:8]:
        rng = np.random.default_rng(4)
        qkv, d_out = (to_device(rng.standard_normal(x).astype(dtype)) for x in (shape.qkv, shape.out))
        _, saved = cuda.psa_attention(qkv, shape.num_heads, save_for_backward=True)
        streams = [numba_cuda.stream() for _ in range(4)]
        numba_cuda.synchronize()
        found = [
            cuda.psa_attention_backward(qkv, d_out, shape.num_heads, saved=saved, stream=streams[i % 4]) for i in range(20)
        ]
        numba_cuda.synchronize()
        assert len({to_host(x).tobytes() for x in found}) == 1


def test_neighbours_of_the_gradient_are_not_touched():
    for shape in (PSAShape(1, 2, 32, 19, 21), PSAShape(8, 4, 32, 20, 20), PSAShape(1, 1, 5, 3, 3)):
        for dtype in DTYPES:
            rng = np.random.default_rng(5)
            qkv, d_out = (to_device(rng.standard_normal(x).astype(dtype)) for x in (shape.qkv, shape.out))
            out, (_, l) = cuda.psa_attention(qkv, shape.num_heads, save_for_backward=True)
            want = to_host(cuda.psa_attention_backward(qkv, d_out, shape.num_heads, saved=(out, l)))
            size, edge = want.size, 16 // want.itemsize
            room = to_device(np.full(size + 2 * edge, 7, dtype))
            plan = cuda.plan_psa_attention_backward(shape, dtype)
            workspace = to_device(np.full(plan.workspace_bytes // 4, np.nan, np.float32))
            plan(qkv, d_out, out, l, room[edge : edge + size].reshape(shape.qkv), workspace)
            found = to_host(room)
            assert (found[:edge] == 7).all()
            assert (found[-edge:] == 7).all()
            assert found[edge:-edge].tobytes() == want.tobytes()


def test_offsets_beyond_32_bits():
    batch = 2**31 // (4 * 32 * 400) + 3
    rng = np.random.default_rng(6)
    small, d_small = (rng.standard_normal(x).astype(np.float16) for x in ((1, 128, 20, 20), (1, 64, 20, 20)))
    qkv = numba_cuda.device_array((batch, 128, 20, 20), np.float16)
    d_out = numba_cuda.device_array((batch, 64, 20, 20), np.float16)
    qkv[batch - 1 :].copy_to_device(small)
    d_out[batch - 1 :].copy_to_device(d_small)
    d_qkv = cuda.psa_attention_backward(qkv, d_out, 1)[batch - 1 :].copy_to_host()
    verdict = verdict_of({"qkv": small, "d_out": d_small, "num_heads": 1}, d_qkv)
    assert verdict.passed, verdict


@pytest.mark.parametrize("name", BACKWARD)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_device_arrays_stay_on_the_device(name, dtype):
    kernel_checks.device_arrays_stay_on_the_device(cuda, name, PSAShape(2, 2, 8, 3, 5), dtype)


def test_strided_arrays():
    kernel_checks.strided_arrays_are_honoured(cuda, on_device=True)


def test_a_cuda_graph_and_torch():
    torch = pytest.importorskip("torch")
    for dtype in (torch.float16, torch.bfloat16, torch.float32):
        qkv = torch.randn(2, 256, 20, 20, device="cuda").to(dtype)
        d_out = torch.randn(2, 128, 20, 20, device="cuda").to(dtype)
        cuda.psa_attention_backward(qkv, d_out, 2)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            d_qkv = cuda.psa_attention_backward(qkv, d_out, 2)
        qkv.copy_(torch.randn_like(qkv))
        graph.replay()
        again = cuda.psa_attention_backward(qkv, d_out, 2)
        assert isinstance(again, torch.Tensor)
        assert torch.equal(again, d_qkv)


def test_special_values_and_empty():
    kernel_checks.special_values(cuda)
    kernel_checks.empty_problems_are_empty(cuda)


@pytest.mark.parametrize("case", [case for case in BAD_CALLS if BAD_CALLS[case][0] in BACKWARD])
def test_bad_input_is_refused(case):
    name, arguments, keywords, error, message = BAD_CALLS[case]
    with pytest.raises(error, match=message):
        getattr(cuda, name)(*arguments, **keywords)
