"""The mirror kernels on a GPU against the oracle, at full size."""

from pathlib import Path

import kernel_checks
import numpy as np
import pytest
from bad_input import BAD_CALLS
from hypothesis import given, settings
from problems import attention_shapes, psa_shapes, seeds

from numba_psa import OPERATIONS, PSAShape, mirror, oracle
from numba_psa.data import real_qkv
from numba_psa.numerics import FLOATS
from numba_psa.shapes import AttentionShape
from numba_psa.testing.arguments import psa_arguments

FLASH = [name for name in OPERATIONS if name.startswith("flash")]


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("name", OPERATIONS)
def test_on_the_attention_of_a_trained_network(name, dtype):
    qkv, num_heads = real_qkv()
    kernel_checks.agrees(
        mirror, name, psa_arguments(OPERATIONS[name], qkv.astype(dtype), num_heads, np.random.default_rng(0))
    )


@pytest.mark.parametrize("name", OPERATIONS)
@pytest.mark.parametrize("shape", [PSAShape(2, 3, 36, 13, 7), PSAShape(1, 1, 64, 1, 1), PSAShape(3, 2, 1, 5, 1)], ids=str)
def test_ragged(name, shape):
    kernel_checks.agrees_on(mirror, name, shape, np.float32)


@pytest.mark.parametrize("name", OPERATIONS)
@settings(max_examples=6)  # each new KEY_DIM compiles a kernel
@given(shape=psa_shapes, seed=seeds)
def test_any_shape(name, shape, seed):
    kernel_checks.agrees_on(mirror, name, shape, np.float32, seed)


@pytest.mark.parametrize("name", FLASH)
@settings(max_examples=10)
@given(shape=attention_shapes, seed=seeds)
def test_any_flash_shape(name, shape, seed):
    kernel_checks.agrees_on_flash(mirror, name, shape, np.float32, seed)


@pytest.mark.parametrize("name", FLASH)
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_1024_columns(name, dtype):
    kernel_checks.agrees_on_flash(mirror, name, AttentionShape(1, 3, 5, 1024, 1024), dtype)


@pytest.mark.parametrize(
    "path", sorted((Path(__file__).parent.parent / "data" / "torch_float64").glob("*.npz")), ids=lambda p: p.stem
)
def test_tensors_of_pytorch(path):
    with np.load(path) as file:
        want = dict(file)
    if path.name.startswith("psa"):
        out, saved = mirror.psa_attention(want["qkv"], int(want["num_heads"]), save_for_backward=True)
        d_qkv = mirror.psa_attention_backward(want["qkv"], want["d_out"], int(want["num_heads"]), saved=saved)
        got = {"out": out, "d_qkv": d_qkv}
    else:
        scale = float(want["scale"])
        o, l = mirror.flash_attention2_forward(want["q"], want["k"], want["v"], scale)
        saved = (want["q"], want["k"], want["v"], o, want["do"], l, scale)
        dk, dv = mirror.flash_attention2_backward_dkv(*saved)
        got = {"o": o, "l": l, "dq": mirror.flash_attention2_backward_dq(*saved), "dk": dk, "dv": dv}
    for name, array in got.items():
        norm = np.linalg.norm(want[name]) or np.linalg.norm(want["do"])
        assert np.linalg.norm(array - want[name]) < 1e-10 * norm, name


@pytest.mark.parametrize("name", OPERATIONS)
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_device_arrays_stay_on_the_device(name, dtype):
    kernel_checks.device_arrays_stay_on_the_device(mirror, name, PSAShape(2, 2, 8, 3, 5), dtype)


def test_special_values():
    kernel_checks.special_values(mirror)


@pytest.mark.parametrize("on_device", [False, True])
def test_strides(on_device):
    kernel_checks.strided_arrays_are_honoured(mirror, on_device)


def test_empty():
    kernel_checks.empty_problems_are_empty(mirror)


@pytest.mark.parametrize("case", BAD_CALLS)
def test_bad_input_is_refused(case):
    name, arguments, keywords, error, message = BAD_CALLS[case]
    with pytest.raises(error, match=message):
        getattr(mirror, name)(*arguments, **keywords)


def test_more_batch_heads_than_a_grid_has_rows():
    kernel_checks.agrees_on_flash(mirror, "flash_attention2_forward", AttentionShape(70_000, 3, 3, 2, 2), np.float32)


def test_offsets_beyond_32_bits():
    from numba_psa._numba_cuda import cuda

    width = 8192
    height = 2**31 // (256 * width) + 1
    qkv = cuda.device_array((1, 256, height, width), np.float16)
    last = np.full((1, width), 3.0, np.float16)
    qkv[0, 255, height - 1 :].copy_to_device(last)
    packed = mirror.psa_pack_qkv(qkv, 1)
    assert packed.size > 2**31
    corner = packed[3, 0, -width:].copy_to_host()
    np.testing.assert_array_equal(corner[:, 63], last[0])


def test_the_same_bits_on_every_run():
    qkv, num_heads = real_qkv()
    qkv = qkv.astype(np.float32)
    first = [mirror.psa_attention(qkv, num_heads), mirror.psa_attention_backward(qkv, qkv[:, :128], num_heads)]
    for _ in range(5):
        again = [mirror.psa_attention(qkv, num_heads), mirror.psa_attention_backward(qkv, qkv[:, :128], num_heads)]
        for a, b in zip(first, again, strict=True):
            np.testing.assert_array_equal(a, b)


def test_arrays_of_another_library():
    torch = pytest.importorskip("torch")
    qkv = torch.randn(1, 64, 3, 5, device="cuda")
    want = oracle.psa_attention(qkv.cpu().numpy(), 1)
    np.testing.assert_allclose(mirror.psa_attention(qkv, 1).copy_to_host(), want, rtol=1e-4, atol=1e-5)
