"""What `import numba_psa` costs and touches, and how implementations are chosen."""

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import numba_psa
from numba_psa.errors import BackendUnavailableError, DTypeError, NumbaPSAError, ParameterError, ShapeError


def python(code: str) -> str:
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout


def test_import_is_light():
    loaded = "import sys, numba_psa; print([m for m in ('numba', 'hypothesis', 'numba.cuda', 'typer') if m in sys.modules])"
    assert python(loaded).strip() == "[]"


def test_import_is_fast():
    timed = "import time; t = time.perf_counter(); import numba_psa; print(time.perf_counter() - t)"
    assert min(float(python(timed)) for _ in range(3)) < 0.3


def test_the_package_is_typed():
    assert (Path(numba_psa.__file__).parent / "py.typed").exists()


def test_errors_are_builtins_too():
    for error, builtin in (
        (ShapeError, ValueError),
        (ParameterError, ValueError),
        (DTypeError, TypeError),
        (BackendUnavailableError, RuntimeError),
    ):
        assert issubclass(error, NumbaPSAError)
        assert issubclass(error, builtin)


@pytest.mark.parametrize("impl", numba_psa.IMPLEMENTATIONS)
def test_every_implementation_has_the_twelve_operations(impl):
    try:
        namespace = numba_psa.implementation(impl)
    except BackendUnavailableError as error:
        pytest.skip(str(error))
    assert len(numba_psa.OPERATIONS) == 12
    for name in numba_psa.OPERATIONS:
        assert callable(getattr(namespace, name))


def test_the_front_door():
    qkv = np.random.default_rng(0).standard_normal((1, 16, 2, 3)).astype(np.float32)
    out, saved = numba_psa.attention(qkv, 2, impl="oracle", save_for_backward=True)
    d_qkv = numba_psa.attention_backward(qkv, out, 2, impl="oracle", saved=saved)
    np.testing.assert_array_equal(out, numba_psa.oracle.psa_attention(qkv, 2))
    assert d_qkv.shape == qkv.shape
    np.testing.assert_allclose(numba_psa.attention(qkv, 2), out, rtol=1e-5, atol=1e-6)


def test_an_unknown_implementation_is_refused():
    with pytest.raises(ParameterError, match="oracle, mirror, cpu, cuda, got 'gpu'"):
        numba_psa.implementation("gpu")


def test_without_a_gpu_the_mirror_says_so():
    from numba_psa.devices import gpu_problem

    if gpu_problem() is None:
        pytest.skip("there is a GPU")
    with pytest.raises(BackendUnavailableError, match="NUMBA_ENABLE_CUDASIM=1"):
        numba_psa.attention(np.zeros((1, 8, 1, 1), np.float32), 2, impl="mirror")
