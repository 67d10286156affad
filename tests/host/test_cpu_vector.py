"""The building blocks of the CPU kernels against their plain twins: the same programs, compiled with either."""

from __future__ import annotations

import inspect
import os
import platform
import subprocess
import sys
from types import FunctionType

import numpy as np
import pytest
from numba import njit, types
from numba.core import cgutils
from numba.extending import intrinsic

from numba_psa.cpu import vector, vector_twin
from numba_psa.cpu.vector import (
    ROWS,
    VECTOR_BYTES,
    advance,
    broadcast_rows,
    even_lanes,
    exp2,
    exp2_each,
    fma,
    fma_rows,
    lanes,
    load,
    load_rows,
    max_of_rows,
    maximum,
    multiply_each,
    odd_lanes,
    prefetch,
    splat,
    square_rows,
    store,
    store_rows,
    subtract_each,
    sum_of_rows,
    transpose_rows,
    where_greater,
    zero_rows,
)

FLOATS = (np.float32, np.float64)


@intrinsic
def pointer_to(_typing, array):
    """Pointer to the first element of an array."""

    def generate(context, builder, sig, arguments):
        return cgutils.create_struct_proxy(array)(context, builder, value=arguments[0]).data

    return types.CPointer(array.dtype)(array), generate


@njit
def array_itself(array):
    return array


def compiled(program, module):
    """`program`, its names taken from `module`: `vector` or `vector_twin`."""
    names = {**program.__globals__, **{k: v for k, v in vars(module).items() if k in vector_twin.__dict__}}
    names["at"] = pointer_to if module is vector else array_itself
    return njit(FunctionType(program.__code__, names))


at = pointer_to


def one_vector(x, y, z, out):
    a, b, c, o = load(at(x), 0), load(at(y), 0), load(at(z), 0), at(out)
    width = lanes(o)
    store(o, 0, fma(a, b, c))
    store(o, 1 * width, a + b)
    store(o, 2 * width, a - b)
    store(o, 3 * width, a * b)
    store(o, 4 * width, a / b)
    store(o, 5 * width, maximum(a, b))
    store(o, 6 * width, where_greater(a, b, c))
    store(o, 7 * width, splat(o, 0.1))
    store(advance(o, 8 * width), 0, load(advance(at(x), 3), 2))
    store(o, 9 * width, even_lanes(a, b))
    store(o, 10 * width, odd_lanes(a, b))
    prefetch(at(x), 2, 0)
    prefetch(o, 3, 1)


def full_rows(x, y, z, out):
    a, o = at(x), at(out)
    width = lanes(o)
    rows = load_rows(a, 1, width + 1, zero_rows(a, ROWS))
    rows = fma_rows(rows, at(y), 2, 3, load(at(z), 1))
    store_rows(o, 0, width, rows)
    rows = multiply_each(subtract_each(rows, broadcast_rows(at(y), 1, 2, rows)), load(at(z), 0))
    store_rows(o, ROWS * width, width, rows)
    store(o, 2 * ROWS * width, max_of_rows(rows))
    store(o, (2 * ROWS + 1) * width, sum_of_rows(rows))
    store_rows(o, (2 * ROWS + 2) * width, width, exp2_each(multiply_each(rows, splat(o, 0.01))))


def few_rows(x, y, z, out):
    a, o = at(x), at(out)
    rows = fma_rows(load_rows(a, 0, 3, zero_rows(a, 3)), at(y), 0, 2, load(at(z), 0))
    store(o, 0, max_of_rows(rows))
    store(o, lanes(o), sum_of_rows(rows))


def power(x, out):
    a, o = at(x), at(out)
    for i in range(0, len(x), lanes(o)):
        store(o, i, exp2(load(a, i)))


def transposed(x, out):
    a, o = at(x), at(out)
    width = lanes(o)
    store_rows(o, 0, width, transpose_rows(load_rows(a, 0, width, square_rows(a))))


def check_twins(program, dtype, special=False):
    """The outputs of `program` from both agree to rounding; NaN where one has NaN."""
    size = 4 * ROWS * VECTOR_BYTES
    rng = np.random.default_rng(5)
    x, y, z = (rng.standard_normal(size).astype(dtype) for _ in range(3))
    if special:
        x[::3], y[::5] = np.nan, np.nan
        x[1::7], y[1::7] = 0.5, 0.5
        x[2::11] = -np.inf
    outputs = []
    for module in (vector, vector_twin):
        outputs.append(np.zeros(size, dtype))
        compiled(program, module)(x, y, z, outputs[-1])
    assert np.any(outputs[1] != 0)
    np.testing.assert_allclose(*outputs, rtol=8 * np.finfo(dtype).eps, atol=8 * np.finfo(dtype).eps)


@pytest.mark.parametrize(
    ("program", "dtype"),
    [(one_vector, np.float32), (one_vector, np.float64), (full_rows, np.float32), (few_rows, np.float64)],
)
def test_every_block_does_what_its_plain_twin_does(program, dtype):
    check_twins(program, dtype)


def test_comparisons_treat_nan_and_ties_like_their_twins():
    check_twins(one_vector, np.float32, special=True)


def test_every_block_has_a_twin():
    code_only = {"pointer", "keep", "intrinsic", "lower_builtin", "register_model", "infer_global", "signature"}
    blocks = {name for name, x in vars(vector).items() if not name.startswith("_") and type(x).__name__ == "_Intrinsic"}
    twins = {name for name, x in vars(vector_twin).items() if hasattr(x, "py_func")}
    assert blocks - code_only == twins


def check_exp2(function, dtype):
    """Within 1 ulp of the exact 2**x wherever that is a normal number; 0 below, inf above, NaN for NaN."""
    least = int(np.finfo(dtype).minexp)
    x = np.random.default_rng(3).uniform(least, -least, 1 << 18).astype(dtype)
    x[: 1 << 16] /= dtype(-least)  # many small ones, where most of the softmax is
    got, exact = np.empty_like(x), np.exp2(x.astype(np.longdouble))
    function(x, got)
    assert np.max(np.abs(got - exact) / np.spacing(exact.astype(dtype))) < 1.0
    x = np.zeros(64, dtype)
    x[:9] = np.nan, -np.inf, np.inf, -1e30, 1e30, 0.0, least, least - 1.0, 2 - least
    x[9:10] = np.array([0x7FC00001], np.uint32).view(np.float32) if dtype == np.float32 else np.nan
    got = np.empty_like(x)
    function(x, got)
    np.testing.assert_array_equal(got[:10], [np.nan, 0, np.inf, 0, np.inf, 1, 2.0**least, 0, np.inf, np.nan])


@pytest.mark.parametrize("dtype", FLOATS)
def test_exp2_is_within_one_ulp_and_keeps_special_values(dtype):
    check_exp2(compiled(power, vector), dtype)


@pytest.mark.parametrize("dtype", [np.uint16, np.uint32, np.uint64, np.float32, np.float64])
def test_transpose(dtype):
    size = vector_twin.lanes(np.zeros(1, dtype))
    x = np.arange(size * size).astype(dtype)
    out = np.zeros_like(x)
    compiled(transposed, vector)(x, out)
    np.testing.assert_array_equal(out.reshape(size, size), x.reshape(size, size).T)


NEEDS_AVX2 = pytest.mark.skipif(VECTOR_BYTES < 32, reason="the host has no AVX2")


@pytest.mark.skipif(platform.machine() != "x86_64", reason="the other targets here are x86-64 CPUs")
@pytest.mark.parametrize(
    ("cpu", "features", "width"),
    [pytest.param("haswell", "+avx,+avx2,+fma,+f16c", 32, marks=NEEDS_AVX2), ("x86-64", "+sse2", 16)],
)
def test_narrower_vectors_compute_the_same(cpu, features, width, tmp_path):
    """The kernels compiled for a CPU with narrower vectors, in a process of their own, as Numba's variables ask."""
    program = inspect.getsource(_attention_and_gradient) + "_attention_and_gradient()"
    variables = {"NUMBA_CPU_NAME": cpu, "NUMBA_CPU_FEATURES": features, "NUMBA_CACHE_DIR": str(tmp_path)}
    done = subprocess.run([sys.executable, "-c", program], env=os.environ | variables, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) == width


def _attention_and_gradient():
    import numpy as np

    from numba_psa import cpu, oracle
    from numba_psa.cpu.vector import VECTOR_BYTES

    rng = np.random.default_rng(1)
    qkv, d_out = (rng.standard_normal((1, c, 7, 11)).astype(np.float32) for c in (4 * 36, 2 * 36))
    for name, arguments in (("psa_attention", (qkv, 1)), ("psa_attention_backward", (qkv, d_out, 1))):
        got, exact = getattr(cpu, name)(*arguments), getattr(oracle, name)(*arguments, dtype=np.float64)
        assert np.linalg.norm(got - exact) < 1e-6 * np.linalg.norm(exact), name
    np.testing.assert_array_equal(cpu.psa_pack_qkv(qkv, 1), oracle.psa_pack_qkv(qkv, 1))
    print(VECTOR_BYTES)
