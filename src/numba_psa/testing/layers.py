"""Layers with random weights, and when a layer's result is right."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace

import numpy as np

from numba_psa.nn.conv import Conv
from numba_psa.nn.exact import Exact
from numba_psa.nn.layers import Layer
from numba_psa.nn.weights import Wanted
from numba_psa.numerics import FLOAT32, FORWARD_FACTOR, HALVES, accumulator_dtype, machine_epsilon, relative_error

EPSILONS = 32
"""Relative error that any whole layer may have, in epsilons of the type it is computed in; plain NumPy mostly has 10."""
FACTOR = 4
"""What it may have beyond that, in errors of plain NumPy: where attention is sharp, every rounding error before it grows."""


def random_state(
    layer: type[Layer], sizes: Mapping[str, int], units: int = 1, *, folded: bool = False, seed: int = 0
) -> dict[str, np.ndarray]:
    """Weights in float32 under Ultralytics' names, such that activations neither grow nor vanish.

    `sizes` are those that the layer's weights decide: c and qkv, with c_in for C2PSA, and c_out and e for C3k2 as well.
    """
    return random_arrays(layer._wanted([f"m.{units - 1}."]), sizes, folded=folded, seed=seed)


def random_arrays(
    convs: Iterable[Wanted], sizes: Mapping[str, int], *, folded: bool = False, seed: int = 0
) -> dict[str, np.ndarray]:
    """`random_state` of any convolutions."""
    rng, state = np.random.default_rng(seed), {}

    def normal(name: str, *shape: int, mean: float = 0.0, spread: float = 0.2) -> None:
        state[name] = (mean + spread * rng.standard_normal(shape)).astype(np.float32)

    for conv in convs:
        shape = [factor * {"": 1, **sizes}[symbol] for factor, symbol in conv.weight_axes]
        normal(f"{conv.path}.weight", *shape, spread=1 / np.prod(shape[1:]) ** 0.5)
        if folded or conv.plain:
            normal(f"{conv.path}.bias", shape[0])
        else:
            for part, mean in (("weight", 1.0), ("bias", 0.0), ("running_mean", 0.0)):
                normal(f"{conv.name}.bn.{part}", shape[0], mean=mean)
            variances = np.exp(rng.uniform(-0.5, 0.5, shape[0]))
            variances[::5] = 0.02  # not large beside eps: there, another eps shows
            state[f"{conv.name}.bn.running_var"] = variances.astype(np.float32)
            state[f"{conv.name}.bn.weight"] *= state[f"{conv.name}.bn.running_var"] ** 0.5
            state[f"{conv.name}.bn.num_batches_tracked"] = np.array(1, np.int64)
    return state


def exact(layer: Layer, x: np.ndarray, run: Exact | None = None) -> np.ndarray:
    """The layer's result in float64, not rounded; `run` may be another runner."""
    with np.errstate(all="ignore"):
        return layer.forward(run or Exact(), x.astype(np.float64))


def limit(dtype: np.dtype) -> float:
    """The relative error that a layer may have."""
    return EPSILONS * machine_epsilon(accumulator_dtype(dtype)) + (machine_epsilon(dtype) if dtype in HALVES else 0.0)


def plain_error(layer: Layer, x: np.ndarray) -> float:
    """The relative error of plain NumPy in the type that x is computed in: measured in float32, for float64 scaled."""
    x, compute = x.astype(np.float32), accumulator_dtype(x.dtype)
    with np.errstate(all="ignore"):
        plain = layer.forward(Exact(np.float32), x)
    return relative_error(plain, exact(layer, x)) * machine_epsilon(compute) / machine_epsilon(FLOAT32)


def agrees(y: np.ndarray, expected: np.ndarray, plain: float = 0.0) -> bool:
    """Whether y, in its dtype, is the layer's result `expected`; `plain` is the `plain_error`."""
    return y.shape == expected.shape and relative_error(y, expected) <= limit(y.dtype) + FACTOR * plain


class Rounded(Exact):
    """Plain NumPy as a GPU computes in half precision: weights and every result are rounded, sums are in float32."""

    def __init__(self, dtype: np.dtype):
        super().__init__(np.float32)
        self.dtype = dtype

    def conv(self, conv: Conv, x, add: np.ndarray | None = None) -> np.ndarray:
        y = super().conv(replace(conv, weight=conv.weight.astype(self.dtype).astype(np.float64), prepared={}), x, add)
        return y.astype(self.dtype).astype(np.float32)


def agrees_rounded(layer: Layer, x: np.ndarray, y: np.ndarray) -> bool:
    """Whether y, with intermediate results in the dtype of x, is layer(x): as `numerics.judge` in half precision."""
    if x.dtype not in HALVES:
        return agrees(y, exact(layer, x), plain_error(layer, x))
    with np.errstate(all="ignore"):
        plain = layer.forward(Rounded(x.dtype), x.astype(np.float32)).astype(x.dtype)
    truth = exact(layer, x)
    budget = FORWARD_FACTOR * relative_error(plain, truth) + machine_epsilon(x.dtype)
    return y.shape == truth.shape and relative_error(y, truth) <= budget
