"""The layers' operations in NumPy, as their formulas say: the definition that the fast ones are compared with."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import DTypeLike

from numba_psa import oracle
from numba_psa.nn.conv import Conv


class Exact:
    """Runs a layer at once, on NumPy arrays `[B, c, H, W]` of the compute dtype.

    `qkvs` collects what enters each attention, in order.
    """

    def __init__(self, compute_dtype: DTypeLike = np.float64):
        self.compute_dtype = np.dtype(compute_dtype)
        self.qkvs: list[np.ndarray] = []

    def conv(self, conv: Conv, x: np.ndarray | Sequence[np.ndarray], add: np.ndarray | None = None) -> np.ndarray:
        """act(conv(x)) + add; several arrays are concatenated along channels."""
        if not isinstance(x, np.ndarray):
            x = np.concatenate(x, axis=1)
        weight, bias = (array.astype(self.compute_dtype) for array in (conv.weight, conv.bias))
        (batch, _, height, width), k, groups = x.shape, conv.kernel_size, conv.groups
        framed = np.pad(x, ((0, 0), (0, 0), (k // 2, k // 2), (k // 2, k // 2)))
        step, height, width = conv.stride, -(-height // conv.stride), -(-width // conv.stride)
        y = np.zeros((batch, groups, conv.c_out // groups, height * width), self.compute_dtype)
        for dy in range(k):
            for dx in range(k):
                moved = framed[:, :, dy : dy + step * height : step, dx : dx + step * width : step]
                moved = moved.reshape(batch, groups, conv.c_in // groups, height * width)
                y += weight[:, :, dy, dx].reshape(groups, conv.c_out // groups, -1) @ moved
        y = y.reshape(batch, conv.c_out, height, width) + bias[:, None, None]
        if conv.silu:
            y = y / (1 + np.exp(-y))
        return y if add is None else y + add

    def split(self, x: np.ndarray, *channels: int) -> list[np.ndarray]:
        """x in parts of so many channels."""
        return np.split(x, np.cumsum(channels)[:-1], axis=1)

    def upsample(self, x: np.ndarray) -> np.ndarray:
        """Each token as 2×2 of the same."""
        return x.repeat(2, axis=2).repeat(2, axis=3)

    def pools(self, x: np.ndarray) -> list[np.ndarray]:
        """Three results: the maximum over 5×5 around each token (what is outside does not count), of it again, and again."""
        results = []
        for _ in range(3):
            framed = np.pad(x, ((0, 0), (0, 0), (2, 2), (2, 2)), constant_values=-np.inf)
            x = np.lib.stride_tricks.sliding_window_view(framed, (5, 5), axis=(2, 3)).max(axis=(-2, -1))
            results.append(x)
        return results

    def expect(self, x: np.ndarray) -> np.ndarray:
        """`[B, 4, H, W]` of x `[B, 4·bins, H, W]`: Σ_b b · softmax_b(x), the expected bin of each of the four sides."""
        batch, channels, height, width = x.shape
        x = x.reshape(batch, 4, channels // 4, height, width)
        weights = np.exp(x - x.max(axis=2, keepdims=True))
        bins = np.arange(channels // 4, dtype=x.dtype)[:, None, None]
        return (weights * bins).sum(axis=2) / weights.sum(axis=2)

    def attend(self, qkv: np.ndarray, num_heads: int, key_dim: int, pe: Conv) -> np.ndarray:
        """v · softmax_keys(key_dim^-½ · qᵀ k)ᵀ + pe(v)."""
        self.qkvs.append(qkv)
        q, k, v = split_heads(qkv, num_heads, key_dim)
        tokens = [x.swapaxes(1, 2) for x in (q, k, v)]
        o, _ = oracle.flash_attention2_forward(*tokens, compute_dtype=self.compute_dtype)
        shape = len(qkv), pe.c_out, *qkv.shape[2:]
        return self.conv(pe, v.reshape(shape), add=o.swapaxes(1, 2).reshape(shape))


def split_heads(qkv: np.ndarray, num_heads: int, key_dim: int) -> list[np.ndarray]:
    """q, k `[BH, key_dim, N]` and v `[BH, head_dim, N]` of `[B, num_heads*(2*key_dim + head_dim), H, W]`."""
    batch, channels, height, width = qkv.shape
    heads = qkv.reshape(batch * num_heads, channels // num_heads, height * width)
    return np.split(heads, (key_dim, 2 * key_dim), axis=1)
