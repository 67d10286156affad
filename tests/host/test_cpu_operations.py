"""`numba_psa.cpu` against the oracle: cases, threads, memory layouts, chunk borders, errors, compilation and caching."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings

from numba_psa import attention, cpu, oracle
from numba_psa.contract import OPERATIONS
from numba_psa.cpu import compiling, flash_attn2, forward, psa
from numba_psa.errors import NumbaPSAError, ParameterError
from numba_psa.numerics import BFLOAT16, FLOAT32_LIMIT, FLOATS, relative_error
from numba_psa.shapes import AttentionShape, PSAShape
from numba_psa.testing.check import check
from numba_psa.testing.strategies import cases
from numba_psa.testing.values import make_case

RNG = np.random.default_rng(11)


def normal(*shape, dtype=np.float32):
    return RNG.standard_normal(shape).astype(dtype)


def judge_case(case, namespace=cpu):
    """What every call must do: pass the tolerance rule, in the right shape and dtype, and leave its inputs alone."""
    before = {name: np.copy(x).tobytes() for name, x in case.items() if isinstance(x, np.ndarray)}
    results = case.operation(namespace, case)
    for name, content in before.items():
        assert np.copy(case[name]).tobytes() == content, f"{name} was changed"
    for name, verdict in check(case.operation, case, results).items():
        assert verdict.passed, (name, verdict)
        assert results[name].dtype == case.result_dtype(name)


# ---- the contract -----------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("name", OPERATIONS)
def test_cases(name):
    @settings(max_examples=30, deadline=None, database=None, suppress_health_check=list(HealthCheck))
    @given(cases(name, dtype=None))
    def judge(case):
        judge_case(case)

    judge()


DATA = Path(__file__).parents[1] / "data"


@pytest.mark.parametrize("path", sorted((DATA / "torch_float64").glob("*.npz")), ids=lambda path: path.stem)
def test_tensors_of_pytorch(path):
    with np.load(path) as file:
        expected = dict(file)
    precisions = [(np.float64, 1e-10)] if "shift1024" in path.stem else [(np.float64, 1e-10), (np.float32, 2e-5)]
    for dtype, limit in precisions:
        x = {name: value.astype(dtype) for name, value in expected.items() if value.ndim}
        if path.stem.startswith("psa"):
            heads = int(expected["num_heads"])
            x["out"], saved = cpu.psa_attention(x["qkv"], heads, save_for_backward=True)
            x["d_qkv"] = cpu.psa_attention_backward(x["qkv"], x["d_out"], heads, saved=saved)
        else:
            scale = float(expected["scale"])
            x["o"], x["l"] = cpu.flash_attention2_forward(x["q"], x["k"], x["v"], scale)
            saved = [x[name] for name in ("q", "k", "v", "o", "do", "l")]
            x["dq"] = cpu.flash_attention2_backward_dq(*saved, scale)
            x["dk"], x["dv"] = cpu.flash_attention2_backward_dkv(*saved, scale)
        for name, got in x.items():
            assert relative_error(got, expected[name], np.linalg.norm(expected.get("do", 1))) < limit, name


def test_a_trained_network_s_tensor():
    with np.load(DATA / "yolo26n_astronaut_448x320.npz") as file:
        got = cpu.psa_attention(file["qkv"], int(file["num_heads"]))
        assert relative_error(got, file["attn_out"]) < FLOAT32_LIMIT


BORDERS = (1, forward.KEYS - 1, forward.KEYS, forward.KEYS + 1, 2 * forward.KEYS + 17)


def judge_borders(n_ctx_k, namespace=cpu):
    """Chunks of keys, and of queries, end where they should; the maximum grows in the last chunk."""
    for name in ("flash_attention2_forward", "flash_attention2_backward_dq", "flash_attention2_backward_dkv"):
        for n_q, n_k in ((19, n_ctx_k), (n_ctx_k, 19)):
            shape = AttentionShape(2, n_q, n_k, 5, 7)
            case = make_case(name, shape, np.dtype(np.float32), values="normal", seed=n_ctx_k)
            case["k"][:, -1] *= 30
            if name != "flash_attention2_forward":
                case["o"][...], case["l"][...] = oracle.flash_attention2_forward(case["q"], case["k"], case["v"])
            judge_case(case, namespace)


@pytest.mark.parametrize("n_ctx_k", BORDERS)
def test_chunk_borders(n_ctx_k):
    judge_borders(n_ctx_k)


def judge_real_size(height, width, namespace=cpu):
    """Also rows that lie a power of two apart (N = 512, 1024); gradients on one thread, by heads, and on many, by tiles."""
    shape = PSAShape(1, 2, 32, height, width)
    for name in ("psa_attention", "psa_attention_backward"):
        case = make_case(name, shape, np.dtype(np.float32), values="normal", seed=2)
        for threads in (1, 64):
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(compiling.numba, "get_num_threads", lambda threads=threads: threads)
                judge_case(case, namespace)


@pytest.mark.parametrize("side", [(32, 32), (32, 16), (19, 20)])
def test_real_sizes(side):
    cpu.threading_layer()
    judge_real_size(*side)


def test_float32_error_at_a_model_s_size():
    qkv = normal(1, 256, 20, 20)
    assert relative_error(cpu.psa_attention(qkv, 2), oracle.psa_attention(qkv, 2, dtype=np.float64)) < FLOAT32_LIMIT


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_masked_queries_and_special_values(dtype):
    judge_masked(dtype)


def judge_masked(dtype, namespace=cpu):
    for values in ("masked-rows", "nan"):
        for name in ("flash_attention2_forward", "flash_attention2_backward_dq", "flash_attention2_backward_dkv"):
            judge_case(make_case(name, AttentionShape(2, 37, 23, 4, 6), dtype, values=values, seed=1), namespace)


def test_first_masked_key_does_not_spoil_the_row():
    q, k = np.full((1, 1, 1), 1e20, np.float32), np.array([-1e20, 0], np.float32).reshape(1, 2, 1)
    v = np.array([3, 5], np.float32).reshape(1, 2, 1)
    o, l = cpu.flash_attention2_forward(q, k, v, 1.0)
    assert (o, l) == (5, 0)


# ---- determinism ------------------------------------------------------------------------------------------------------
def results_of_everything(namespace):
    """The bits of every kind of result on one ragged problem."""
    rng = np.random.default_rng(4)
    qkv, d_out = (rng.standard_normal((2, c, 9, 7)).astype(np.float32) for c in (3 * 4 * 9, 3 * 2 * 9))
    out, saved = namespace.psa_attention(qkv, 3, save_for_backward=True)
    d_qkv = namespace.psa_attention_backward(qkv, d_out, 3, saved=saved)
    packed = namespace.psa_pack_qkv(qkv, 3)
    q, k, v = packed[:3]
    o, l = namespace.flash_attention2_forward(q, k, v)
    gradients = namespace.psa_fa2_backward(q, k, v, o, o, l)
    everything = b"".join(np.ascontiguousarray(x).tobytes() for x in (out, *saved, d_qkv, packed, o, l, *gradients))
    return hashlib.sha256(everything).hexdigest()  # of which a failing comparison prints no difference, for minutes


def judge_threads(monkeypatch, namespace=cpu):
    cpu.threading_layer()
    monkeypatch.setattr(flash_attn2, "_worthwhile", lambda bh, sizes: 1000)  # small as the problem is
    monkeypatch.setattr(psa, "BYTES_A_THREAD", 1)
    expected = results_of_everything(namespace)
    for threads in (1, 2, 3, 7, 1000):
        monkeypatch.setattr(compiling.numba, "get_num_threads", lambda threads=threads: threads)
        assert results_of_everything(namespace) == expected, f"{threads} threads give other bits"


def test_any_number_of_threads_gives_the_same_bits(monkeypatch):
    judge_threads(monkeypatch)


def test_callers_in_several_threads_get_their_own_results():
    inputs = [normal(1, 128, 16, 16) for _ in range(4)]  # large enough to be shared out
    expected, wrong = [cpu.psa_attention(x, 1) for x in inputs], []

    def call(x, want):
        for _ in range(20):
            if not np.array_equal(cpu.psa_attention(x, 1), want):
                wrong.append(1)

    workers = [threading.Thread(target=call, args=pair) for pair in zip(inputs, expected, strict=True)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert not wrong


# ---- memory -----------------------------------------------------------------------------------------------------------
def judge_strides(namespace=cpu):
    """Any strides in, also of the tokens, where kernels read the caller's memory directly."""
    q, k, v = normal(2, 23, 10), normal(2, 40, 10), normal(2, 40, 14)
    want, _ = namespace.flash_attention2_forward(*(x.copy() for x in (q[:, ::-2, ::2], k[:, 3::2, :5], v[:, 3::2, ::-2])))
    got, _ = namespace.flash_attention2_forward(q[:, ::-2, ::2], k[:, 3::2, :5], v[:, 3::2, ::-2])
    np.testing.assert_array_equal(got, want)


def test_strided_input():
    judge_strides()


def test_unaligned_and_read_only_input():
    qkv = normal(1, 128, 5, 3)
    raw = np.zeros(qkv.nbytes + 1, np.uint8)
    unaligned = raw[1:].view(np.float32).reshape(qkv.shape)
    unaligned[...] = qkv
    qkv.setflags(write=False)
    assert not unaligned.flags.aligned
    np.testing.assert_array_equal(cpu.psa_attention(unaligned, 1), cpu.psa_attention(qkv, 1))
    np.testing.assert_array_equal(cpu.psa_pack_qkv(unaligned, 1), cpu.psa_pack_qkv(qkv, 1))


@pytest.mark.parametrize("dtype", [np.dtype(np.float32), BFLOAT16], ids=str)
def test_out(dtype):
    qkv = normal(2, 64, 5, 3, dtype=dtype)
    want = cpu.psa_attention(qkv, 2)
    for target in (
        np.empty_like(want),
        np.empty((2, 32, 3, 5), dtype).swapaxes(2, 3),
        np.empty((2, 64, 5, 3), dtype)[:, ::2],
    ):
        assert cpu.psa_attention(qkv, 2, out=target) is target
        np.testing.assert_array_equal(target, want)
    _, (saved, _) = cpu.psa_attention(qkv, 2, out=target, save_for_backward=True)
    assert saved is target
    np.testing.assert_array_equal(cpu.psa_attention(qkv, 2, out=qkv[:, 16:48]), want)  # over its own input


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_targets_of_any_strides_are_added_into_in_place(dtype):
    d_v, d_packed = normal(2, 24, 5, 3, dtype=dtype), normal(4, 4, 15, 6, dtype=dtype)
    for name, arguments in (("psa_extract_v_backward", (d_v, 2)), ("psa_pack_qkv_backward", (d_packed, 2, 5, 3))):
        start = normal(2, 48, 3, 5, dtype=dtype).swapaxes(2, 3)
        want = getattr(oracle, name)(*arguments, d_qkv=start.copy())
        got = getattr(cpu, name)(*arguments, d_qkv=start)
        assert got is start
        np.testing.assert_array_equal(got, want)


# ---- errors -----------------------------------------------------------------------------------------------------------
def test_wrong_out_is_refused():
    qkv = np.zeros((1, 16, 2, 3), np.float32)
    with pytest.raises(NumbaPSAError, match="out has c = 16"):
        cpu.psa_attention(qkv, 2, out=qkv)
    with pytest.raises(ParameterError, match="read-only"):
        cpu.psa_attention(qkv, 2, out=np.broadcast_to(qkv[:, :8], (1, 8, 2, 3)))


# ---- compilation ------------------------------------------------------------------------------------------------------
def test_numpy_input_means_cpu():
    qkv = normal(1, 32, 3, 5)
    np.testing.assert_array_equal(attention(qkv, 2), cpu.psa_attention(qkv, 2))


def test_new_shapes_and_widths_do_not_compile(monkeypatch):
    results_of_everything(cpu)
    cpu.psa_attention(normal(8, 256, 16, 16), 4)  # enough work to be shared out
    monkeypatch.setattr(compiling.Kernel, "_compile", lambda self, element: pytest.fail(f"compiled {self.function}"))
    signatures = len(compiling._share.signatures)
    for heads, key_dim, height, width in ((1, 3, 2, 2), (5, 33, 3, 11)):
        cpu.psa_attention(normal(2, heads * key_dim * 4, height, width), heads)
    assert len(compiling._share.signatures) == signatures == 1


CACHED = """
from numba_psa.cpu import compiling, layout
import numpy as np
{change}
from numba_psa import cpu
cpu.psa_pack_qkv(np.ones((1, 4, 3, 5), np.float32), 1)
print(sum(kernel.cache_hits for kernel in layout.move._compiled.values()), cpu.threading_layer())
"""


def run_python(program, **variables):
    done = subprocess.run([sys.executable, "-c", program], env=os.environ | variables, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout.split()


def test_kernels_are_kept_on_disk_until_a_source_changes(tmp_path):
    hits = [
        run_python(CACHED.format(change=change), NUMBA_CACHE_DIR=str(tmp_path))[0]
        for change in ("", "", "compiling._SOURCES = ((0, 0),)")
    ]
    assert hits == ["0", "1", "0"]


CALLERS = """
import threading
import numpy as np
from numba_psa import cpu
x = np.ones((1, 128, 16, 16), np.float32)
callers = [threading.Thread(target=lambda: [cpu.psa_attention(x, 1) for _ in range(20)]) for _ in range(3)]
for caller in callers: caller.start()
for caller in callers: caller.join()
print(cpu.threading_layer())
"""


def test_the_user_s_threading_layer_is_kept_and_workqueue_takes_one_caller_at_a_time():
    assert run_python(CALLERS, NUMBA_THREADING_LAYER="workqueue") == [
        "workqueue"
    ]  # which ends a process that calls it twice
    assert cpu.threading_layer() in ("omp", "tbb", "workqueue")
