"""What runners that record a layer, instead of computing it, have in common: tensors that are channels of a buffer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np


@dataclass(frozen=True)
class Tensor:
    """Channels of a buffer `[B, …, H, W]`: where they begin and how far images are apart, in elements."""

    buffer: Any
    first: int
    batch_stride: int
    channels: int


class Recorder:
    """A layer's `forward` on one of these records what is to be done; splitting costs nothing."""

    tokens: int

    def split(self, x: Tensor, *channels: int) -> list[Tensor]:
        """x in parts of so many channels."""
        firsts = np.cumsum([0, *channels[:-1]]).tolist()
        parts = zip(firsts, channels, strict=True)
        return [Tensor(x.buffer, x.first + first * self.tokens, x.batch_stride, count) for first, count in parts]
