"""What is asked of kernels on a device and in the simulator alike; sizes are the caller's."""

import numpy as np

from numba_psa import OPERATIONS, oracle
from numba_psa._numba_cuda import to_device, to_host
from numba_psa.numerics import accumulator_dtype
from numba_psa.testing.arguments import flash_arguments, random_arguments
from numba_psa.testing.check import check


def poisoned(name, arguments):
    """The same arguments with targets that are stored to full of NaN: what is not written shows."""
    stores = OPERATIONS[name].stores
    return {key: np.full_like(x, np.nan) if key in stores else x for key, x in arguments.items()}


def agrees(namespace, name, arguments, plain="online"):
    """Results within the tolerance rule, of the right dtype, with inputs left alone."""
    operation = OPERATIONS[name]
    arguments = poisoned(name, arguments)
    before = {key: x.copy() for key, x in arguments.items() if isinstance(x, np.ndarray)}
    results = operation(namespace, arguments)
    for key, x in before.items():
        assert arguments[key].tobytes() == x.tobytes(), f"{name} changed its input {key}"
    dtype = before[operation.arrays[0]].dtype
    for output, verdict in check(operation, arguments, results, plain).items():
        assert verdict.passed, (name, output, verdict)
        assert results[output].dtype == (accumulator_dtype(dtype) if output == "l" else dtype)


def agrees_on(namespace, name, shape, dtype, seed=0):
    agrees(namespace, name, random_arguments(OPERATIONS[name], shape, np.dtype(dtype), np.random.default_rng(seed)))


def agrees_on_flash(namespace, name, shape, dtype, seed=0):
    rng = np.random.default_rng(seed)
    q, k, v = (rng.standard_normal(x).astype(dtype) for x in (shape.q, shape.k, shape.v))
    agrees(namespace, name, flash_arguments(OPERATIONS[name], q, k, v, rng))


def device_arrays_stay_on_the_device(namespace, name, shape, dtype):
    """Device arrays in, device arrays out, targets changed in place."""
    operation = OPERATIONS[name]
    arguments = random_arguments(operation, shape, np.dtype(dtype), np.random.default_rng(1))
    on_device = {key: to_device(x) if isinstance(x, np.ndarray) else x for key, x in arguments.items()}
    targets = {key: on_device[key] for key in operation.adds + operation.stores}
    results = getattr(namespace, name)(*(on_device[key] for key in operation.arrays + operation.sizes), **targets)
    results = results if isinstance(results, tuple) else (results,)
    for key, result in zip(operation.outputs, results, strict=True):
        assert not isinstance(result, np.ndarray)
        if key in targets:
            assert result is targets[key]
    found = {key: to_host(x) for key, x in zip(operation.outputs, results, strict=True)}
    for output, verdict in check(operation, arguments, found, "online").items():
        assert verdict.passed, (name, output, verdict)


def special_values(namespace):
    """Masked rows, no keys, the NaN of the original's recurrence, half overflow, NaN in one key."""
    rng = np.random.default_rng(2)
    q, k, v, do = (rng.standard_normal(x).astype(np.float32) for x in ((1, 3, 4), (1, 5, 4), (1, 5, 4), (1, 3, 4)))
    k[..., 0] = 1
    q[0, 1] = (-np.inf, 0, 0, 0)
    o, l = namespace.flash_attention2_forward(q, k, v)
    assert (o[0, 1] == 0).all()
    assert l[0, 1] == -np.inf
    for name in ("flash_attention2_forward", "flash_attention2_backward_dq", "flash_attention2_backward_dkv"):
        agrees(namespace, name, {"q": q, "k": k, "v": v, "o": o, "do": do, "l": l})

    o, l = namespace.flash_attention2_forward(q, k[:, :0], v[:, :0])
    assert (o == 0).all()
    assert (l == -np.inf).all()
    assert (namespace.flash_attention2_backward_dq(q, k[:, :0], v[:, :0], o, do, l) == 0).all()

    large = np.array([[[1e20]]], np.float32)
    keys, values = np.array([[[-1e20], [0]]], np.float32), np.array([[[3], [7]]], np.float32)
    assert namespace.flash_attention2_forward(large, keys, values)[0][0, 0, 0] == 7

    half = np.full((1, 2, 32), 46, np.float16)
    agrees(namespace, "flash_attention2_forward", {"q": half, "k": half, "v": half})

    k, v = np.repeat(k, 2, axis=0), np.repeat(v, 2, axis=0)
    q = np.ones((2, 3, 4), np.float32)
    k[0, 3, 2] = np.nan
    o, l = namespace.flash_attention2_forward(q, k, v)
    assert np.isnan(o[0]).all()
    assert np.isnan(l[0]).all()
    assert np.isfinite(o[1]).all()


def strided_arrays_are_honoured(namespace, on_device):
    """Reversed, strided and Fortran inputs, and a strided target between whose elements nothing changes."""
    place = to_device if on_device else lambda x: x
    back = to_host if on_device else lambda x: x
    rng = np.random.default_rng(3)
    room = rng.standard_normal((1, 16, 4, 6)).astype(np.float32)
    view = place(room)[:, :, ::2, 1:4]
    want = oracle.psa_attention(room[:, :, ::2, 1:4], 2)
    np.testing.assert_allclose(back(namespace.psa_attention(view, 2)), want, rtol=1e-5, atol=1e-6)
    if not on_device:
        for changed in (np.asfortranarray(room), room[:, ::-1], room[..., ::-1]):
            np.testing.assert_array_equal(namespace.psa_pack_qkv(changed, 2), oracle.psa_pack_qkv(changed, 2))
    d_packed = rng.standard_normal((4, 2, 6, 2)).astype(np.float32)
    expected, target = room.copy(), place(room.copy())
    oracle.psa_pack_qkv_backward(d_packed, 2, 2, 3, d_qkv=expected[:, :, ::2, 1:4])
    namespace.psa_pack_qkv_backward(place(d_packed), 2, 2, 3, d_qkv=target[:, :, ::2, 1:4])
    np.testing.assert_array_equal(back(target), expected)


def empty_problems_are_empty(namespace):
    for shape in ((0, 16, 2, 3), (2, 16, 0, 3)):
        qkv, d_out = np.zeros(shape, np.float32), np.zeros((shape[0], 8, *shape[2:]), np.float32)
        assert namespace.psa_attention(qkv, 2).shape == d_out.shape
        assert namespace.psa_attention_backward(qkv, d_out, 2).shape == shape
        assert namespace.psa_pack_qkv(qkv, 2).size == 0
        assert namespace.psa_extract_v_backward(d_out, 2).shape == shape
