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
        y = np.zeros((batch, groups, conv.c_out // groups, height * width), self.compute_dtype)
        for dy in range(k):
            for dx in range(k):
                moved = framed[:, :, dy : dy + height, dx : dx + width]
                moved = moved.reshape(batch, groups, conv.c_in // groups, height * width)
                y += weight[:, :, dy, dx].reshape(groups, conv.c_out // groups, -1) @ moved
        y = y.reshape(batch, conv.c_out, height, width) + bias[:, None, None]
        if conv.silu:
            y = y / (1 + np.exp(-y))
        return y if add is None else y + add

    def split(self, x: np.ndarray, *channels: int) -> list[np.ndarray]:
        """x in parts of so many channels."""
        return np.split(x, np.cumsum(channels)[:-1], axis=1)

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
