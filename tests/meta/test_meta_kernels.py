"""Each check of tests/host/kernel_checks.py must catch the bug it is there for, planted in a copy of the oracle."""

from types import SimpleNamespace

import kernel_checks
import numpy as np
import pytest

from numba_psa import OPERATIONS, PSAShape, oracle

SHAPE = PSAShape(2, 2, 3, 2, 3)


def broken(**functions):
    """The oracle with some functions replaced."""
    return SimpleNamespace(**({name: getattr(oracle, name) for name in OPERATIONS} | functions))


def adds_where_it_should_store(*arguments, dq=None, dk=None, dv=None):
    results = oracle.psa_fa2_backward(*arguments, dq=dq, dk=dk)
    return *results[:2], results[2] + dv


def stores_where_it_should_add(*arguments, d_qkv=None):
    return oracle.psa_pack_qkv_backward(*arguments)


def scales_by_head_dim(q, k, v, softmax_scale=None):
    return oracle.flash_attention2_forward(q, k, v, (2 * q.shape[-1]) ** -0.5)


def overwrites_its_input(qkv, num_heads):
    packed = oracle.psa_pack_qkv(qkv, num_heads)
    qkv[...] = 0
    return packed


def in_half_precision(q, k, v, softmax_scale=None):
    o, l = oracle.flash_attention2_forward(*(x.astype(np.float16) for x in (q, k, v)))
    return o.astype(q.dtype), l


def returns_float64(qkv, num_heads):
    return oracle.psa_attention(qkv, num_heads, dtype=np.float64)


@pytest.mark.parametrize(
    ("name", "function"),
    [
        ("psa_fa2_backward", adds_where_it_should_store),
        ("psa_pack_qkv_backward", stores_where_it_should_add),
        ("flash_attention2_forward", scales_by_head_dim),
        ("flash_attention2_forward", in_half_precision),
        ("psa_pack_qkv", overwrites_its_input),
        ("psa_attention", returns_float64),
        ("psa_merge_attn_nchw", lambda lo, hi, *size: oracle.psa_merge_attn_nchw(hi, lo, *size)),
        ("psa_extract_v_nchw", lambda *x: np.full_like(oracle.psa_extract_v_nchw(*x), np.nan)),
    ],
)
def test_agreement(name, function):
    kernel_checks.agrees_on(broken(), name, SHAPE, np.float32)
    with pytest.raises(AssertionError):
        kernel_checks.agrees_on(broken(**{name: function}), name, SHAPE, np.float32)


def without_guards(q, k, v, softmax_scale=None):
    """The original's recurrence, which has no guard for rows of -inf."""
    scale = np.float32(q.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale)
    m_i = np.full(q.shape[:2], -np.inf, np.float32)
    l_i, acc = np.zeros_like(m_i), np.zeros((*q.shape[:2], v.shape[-1]), np.float32)
    with np.errstate(all="ignore"):
        for j in range(k.shape[1]):
            s = np.sum(q.astype(np.float32) * k[:, j : j + 1], -1) * scale
            m_new = np.maximum(m_i, s)
            alpha, p = np.exp(m_i - m_new), np.exp(s - m_new)
            l_i, acc, m_i = alpha * l_i + p, alpha[..., None] * acc + p[..., None] * v[:, j : j + 1], m_new
        return (acc / l_i[..., None]).astype(q.dtype), m_i + np.log(l_i)


def test_special_values():
    kernel_checks.special_values(oracle)
    with pytest.raises(AssertionError):
        kernel_checks.special_values(broken(flash_attention2_forward=without_guards))


def test_strides():
    kernel_checks.strided_arrays_are_honoured(oracle, on_device=False)

    def reads_memory_order(qkv, num_heads):
        return oracle.psa_pack_qkv(qkv.ravel(order="K").reshape(qkv.shape), num_heads)

    with pytest.raises(AssertionError):
        kernel_checks.strided_arrays_are_honoured(broken(psa_pack_qkv=reads_memory_order), on_device=False)


def test_empty():
    kernel_checks.empty_problems_are_empty(oracle)
    with pytest.raises((AssertionError, ZeroDivisionError)):
        kernel_checks.empty_problems_are_empty(broken(psa_attention=lambda qkv, heads: qkv[:1] / qkv.size))
