"""The layers' operations on mirror kernels: each launched as a layer asks for it, results in the dtype of x."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from numba_psa._numba_cuda import cuda, flat_copy, to_device, write_back
from numba_psa.cuda.launching import current_device
from numba_psa.mirror.convolution import convolve, transpose
from numba_psa.mirror.elements import ELEMENTS
from numba_psa.mirror.flash_attn2 import flash_attention2_forward
from numba_psa.nn.conv import Conv


class Mirrored:
    """Runs a layer at once, on Numba device arrays `[B, c, H, W]` of what `dtype` is stored as."""

    def __init__(self, dtype: np.dtype):
        self.dtype, self.element = dtype, ELEMENTS[dtype]

    def conv(self, conv: Conv, x: Any, add: Any = None) -> Any:
        """act(conv(x)) + add; several arrays are concatenated along channels."""
        if not hasattr(x, "shape"):
            x = self._concatenated(x)
        y = self._empty(len(x), conv.c_out, *(-(-size // conv.stride) for size in x.shape[2:]))
        convolve(self.element, x, *self._weights(conv), add, y, conv.stride, conv.silu)
        return y

    def split(self, x: Any, *channels: int) -> list[Any]:
        """x in parts of so many channels."""
        firsts = np.cumsum([0, *channels[:-1]]).tolist()
        return [x[:, first : first + count] for first, count in zip(firsts, channels, strict=True)]

    def attend(self, qkv: Any, num_heads: int, key_dim: int, pe: Conv) -> Any:
        """v · softmax_keys(key_dim^-½ · qᵀ k)ᵀ + pe(v)."""
        batch, channels, height, width = qkv.shape
        heads, n, head_dim = batch * num_heads, height * width, pe.c_out // num_heads
        head = qkv.reshape(heads, channels // num_heads, n)
        q, k, v = (
            self._transposed(head, first, n, count)
            for first, count in ((0, key_dim), (key_dim, key_dim), (2 * key_dim, head_dim))
        )
        o, _ = flash_attention2_forward(*(x.view(self.dtype) for x in (q, k, v)))
        shape = batch, pe.c_out, height, width
        out, v = (self._transposed(x, 0, head_dim, n).reshape(shape) for x in (o.view(self.element.storage), v))
        return self.conv(pe, v, out)

    def _empty(self, *shape: int) -> Any:
        return cuda.device_array(shape, self.element.storage)

    def _transposed(self, x: Any, first: int, rows: int, columns: int) -> Any:
        y = self._empty(len(x), rows, columns)
        transpose(x, first, y)
        return y

    def _concatenated(self, pieces: Sequence[Any]) -> Any:
        channels = [piece.shape[1] for piece in pieces]
        joined = self._empty(len(pieces[0]), sum(channels), *pieces[0].shape[2:])
        for target, piece in zip(self.split(joined, *channels), pieces, strict=True):
            write_back(flat_copy(piece), target)
        return joined

    def _weights(self, conv: Conv) -> tuple[Any, Any]:
        key = "mirror", current_device(), self.element.real
        if key not in conv.prepared:
            conv.prepared[key] = tuple(to_device(array.astype(self.element.real)) for array in (conv.weight, conv.bias))
        return conv.prepared[key]
