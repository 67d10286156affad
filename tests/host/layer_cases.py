"""Layers and inputs for the tests of `numba_psa.nn`."""

import json
from pathlib import Path

import numpy as np
from hypothesis import strategies as st
from safetensors import safe_open

from numba_psa import nn
from numba_psa.numerics import FLOATS
from numba_psa.testing.layers import random_state

FIXTURES = sorted((Path(__file__).parents[1] / "data" / "ultralytics_modules").glob("*.safetensors"))


def fixture(path):
    """(layer, x, y in float32, y in float64) of a module that Ultralytics ran."""
    with safe_open(path, "np") as file:
        name = json.loads(file.metadata()["module"])["class"]
    with np.load(path.with_suffix(".npz")) as file:
        arrays = dict(file)
    heads = next(int(array) for key, array in arrays.items() if key.endswith("num_heads"))
    layer = getattr(nn, name).from_file(path, "", num_heads=heads)
    return layer, arrays["x"], arrays["y"], arrays["y64"]


def build(layer=nn.C2PSA, *, num_heads=2, key_dim=3, head_dim=6, units=1, seed=0, shortcut=True, folded=False):
    """A layer with random weights; channels in and out that differ from all others."""
    c = num_heads * head_dim
    sizes = {"c": c, "qkv": c + 2 * num_heads * key_dim, "c_in": c + 5, "c_out": c + 7, "e": c // 2 + 1}
    options = {"num_heads": num_heads} | ({} if layer is nn.Attention else {"shortcut": shortcut})
    return layer.from_state_dict(random_state(layer, sizes, units, folded=folded, seed=seed), **options)


def normal(*shape, dtype=np.float32, seed=0):
    return np.random.default_rng(seed).standard_normal(shape).astype(dtype)


@st.composite
def layers_with_input(draw):
    """(layer, x): every class, widths that fill no vector, head_dim != 2·key_dim, all dtypes."""
    layer = build(
        draw(st.sampled_from((nn.Attention, nn.PSABlock, nn.C2PSA, nn.PSA, nn.C3k2))),
        num_heads=draw(st.integers(1, 3)),
        key_dim=draw(st.sampled_from((1, 3, 8, 17))),
        head_dim=draw(st.sampled_from((1, 2, 6, 16, 35))),
        units=draw(st.integers(1, 2)),
        seed=draw(st.integers(0, 2**16)),
        shortcut=draw(st.booleans()),
        folded=draw(st.booleans()),
    )
    shape = draw(st.integers(1, 3)), layer.c_in, draw(st.integers(1, 7)), draw(st.integers(1, 19))
    return layer, normal(*shape, dtype=draw(st.sampled_from(FLOATS)), seed=draw(st.integers(0, 2**16)))
