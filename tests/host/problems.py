"""Strategies for the sizes of a problem, and arrays for it."""

import numpy as np
from hypothesis import strategies as st

from numba_psa import PSAShape
from numba_psa.shapes import AttentionShape

seeds = st.integers(0, 2**32 - 1)
psa_shapes = st.builds(
    PSAShape,
    batch=st.integers(1, 3),
    num_heads=st.integers(1, 3),
    key_dim=st.sampled_from((1, 2, 3, 4, 5, 7, 8, 16, 31, 32, 36, 64)),
    height=st.integers(1, 5),
    width=st.integers(1, 7),
)
attention_shapes = st.builds(
    AttentionShape,
    bh=st.integers(1, 3),
    n_ctx_q=st.integers(1, 9),
    n_ctx_k=st.integers(1, 9),
    head_dim=st.sampled_from((1, 2, 3, 8, 16, 33)),
    value_dim=st.sampled_from((1, 2, 5, 16, 34)),
)


def normal(seed: int, *shapes, dtype=np.float64):
    """An N(0, 1) array for each shape."""
    rng = np.random.default_rng(seed)
    return [rng.standard_normal(shape).astype(dtype) for shape in shapes]


def ramp(shape, dtype=np.float64):
    """Every element different: no permutation of it goes unnoticed."""
    return np.arange(1, np.prod(shape) + 1, dtype=dtype).reshape(shape)


def flash_inputs(seed: int, shape: AttentionShape, dtype=np.float64):
    """q, k, v and an upstream gradient do."""
    return normal(seed, shape.q, shape.k, shape.v, shape.o, dtype=dtype)
