"""Feature maps with a frame of zeros: the layout that makes a 3×3 convolution as cheap as a matrix product.

A channel `[H, W]` is stored in rows of W + 1 elements: after each row stands one zero, which is the right border of its row
and the left border of the next, and rows of zeros stand before the first and after the last. The token (y, x) is element
y·(W + 1) + x, and its neighbour (y + dy, x + dx) is always dy·(W + 1) + dx elements further, in the image or in the frame.
Whole vectors are computed, with what they hold of the frame; a table of 1 (token) and 0 (frame) puts that back to zero.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from numba_psa.cpu.vector import VECTOR_BYTES

SLACK = 4
"""Vectors that are readable before and after an array of frames: stride 2 loads whole vectors of what it needs a part of."""


@dataclass(frozen=True)
class Frame:
    """The layout of maps of one size."""

    height: int
    width: int
    dtype: np.dtype

    @property
    def lanes(self) -> int:
        return VECTOR_BYTES // self.dtype.itemsize

    @property
    def pitch(self) -> int:
        """Elements from a token to the one below it."""
        return self.width + 1

    @property
    def tiles(self) -> int:
        """Vectors of tokens, with those of the frame between them."""
        return -(-self.height * self.pitch // self.lanes)

    @property
    def border(self) -> int:
        """Elements before the first token of a channel: a row of zeros, in whole vectors."""
        return -(-(self.pitch + 1) // self.lanes) * self.lanes

    @property
    def plane(self) -> int:
        """Elements from channel to channel: odd in vectors, so that channels do not crowd in the same lines of the L1."""
        vectors = self.tiles + self.border // self.lanes
        return (vectors + 1 - vectors % 2) * self.lanes

    def elements(self, channels: int) -> int:
        """Of an array of so many channels: its border, the channels, each with the border of the next, and the slack."""
        return self.border + channels * self.plane + 2 * SLACK * self.lanes

    @property
    def origin(self) -> int:
        """The first token of the first channel."""
        return SLACK * self.lanes + self.border

    @cached_property
    def inside(self) -> np.ndarray:
        """1 for tokens, 0 for the frame; whole vectors."""
        table = np.zeros(self.tiles * self.lanes, self.dtype)
        self.view(table, 1, 0)[...] = 1
        return table

    def view(self, memory: np.ndarray, channels: int, origin: int | None = None) -> np.ndarray:
        """`[channels, H, W]` of an array of frames whose first token is element `origin`."""
        first = self.origin if origin is None else origin
        size = self.dtype.itemsize
        strides = self.plane * size, self.pitch * size, size
        return np.lib.stride_tricks.as_strided(memory[first:], (channels, self.height, self.width), strides)
