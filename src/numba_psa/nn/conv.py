"""One convolution of a layer: weights with batch norm folded in, and its activation."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

BATCH_NORM_EPS = 1e-3
"""Of every BatchNorm in these networks; PyTorch's default of 1e-5 gives visibly different results."""
BATCH_NORM = ("weight", "bias", "running_mean", "running_var")


@dataclass(frozen=True, eq=False)
class Conv:
    """y = act(weight * x + bias), zero padding k//2, act SiLU or nothing.

    weight `[c_out, c_in/groups, k, k]` and bias `[c_out]`, in float64, or in float32 if that is exact; depthwise where
    groups = c_in.
    """

    weight: np.ndarray
    bias: np.ndarray
    silu: bool = False
    groups: int = 1
    stride: int = 1
    prepared: dict = field(default_factory=dict, repr=False)
    """What implementations made of the weights, by their own keys."""

    @property
    def c_in(self) -> int:
        return self.weight.shape[1] * self.groups

    @property
    def c_out(self) -> int:
        return self.weight.shape[0]

    @property
    def kernel_size(self) -> int:
        return self.weight.shape[-1]

    def parts(self, first: int) -> tuple[Conv, Conv]:
        """Two convolutions, of the `first` input channels and of the others, whose sum through act is this one.

        The first has the bias, the second the activation. The same two each time.
        """
        key = "parts", first
        if key not in self.prepared:
            bias = self.bias, np.zeros_like(self.bias)
            weights = self.weight[:, :first], self.weight[:, first:]
            self.prepared[key] = Conv(weights[0], bias[0], False), Conv(weights[1], bias[1], self.silu)
        return self.prepared[key]


def fold(weight: np.ndarray, batch_norm: Mapping[str, np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
    """(weight, bias), in float64, of the convolution that equals bn(weight * x), bn(y) = γ·(y − mean)/√(var + eps) + β."""
    gamma, beta, mean, var = (batch_norm[name].astype(np.float64) for name in BATCH_NORM)
    factor = gamma / np.sqrt(var + BATCH_NORM_EPS)
    return weight.astype(np.float64) * factor[:, None, None, None], beta - mean * factor
