"""The layers of a detector that are not attention layers, each written once as what it computes on a runner.

`forward(run, x)`: run is `Exact` or a plan; x is a tensor, or several, which stand for their concatenation along channels.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from numba_psa.nn.conv import Conv
from numba_psa.nn.layers import below


@dataclass(frozen=True, eq=False)
class Convolution:
    """y = SiLU(conv(x)), 3×3 of stride 2."""

    conv: Conv

    def forward(self, run, x):
        return run.conv(self.conv, x)


@dataclass(frozen=True, eq=False)
class SPPF:
    """y = SiLU(cv2(concat(p_0, p_1, p_2, p_3))) (+ x, YOLO26), p_0 = cv1(x), p_i = max over 5×5 of p_{i-1}; both 1×1."""

    cv1: Conv
    cv2: Conv
    shortcut: bool

    def forward(self, run, x):
        y = run.conv(self.cv1, x)
        return run.conv(self.cv2, (y, *run.pools(y)), x if self.shortcut else None)


@dataclass(frozen=True, eq=False)
class Upsample:
    """Each token as 2×2 of the same."""

    def forward(self, run, x):
        return run.upsample(x)


@dataclass(frozen=True, eq=False)
class Concat:
    """Concatenation along channels: nothing is copied, whoever reads it reads the parts."""

    def forward(self, run, x):
        return tuple(x)


class Level(NamedTuple):
    """What the head says on a map: distances `[B, 4, H, W]` left, top, right, bottom in strides; logits `[B, nc, H, W]`."""

    distances: Any
    logits: Any


@dataclass(frozen=True, eq=False)
class Detect:
    """Boxes and classes of every token of three maps, each from a short chain of convolutions of its own.

    boxes: 3×3, 3×3, 1×1 (plain); classes: depthwise 3×3, 1×1, depthwise 3×3, 1×1, 1×1 (plain). With bins, a distance is
    given as a distribution over 0, 1, …, bins - 1 and is its mean.
    """

    boxes: tuple[tuple[Conv, ...], ...]
    classes: tuple[tuple[Conv, ...], ...]
    bins: int

    @classmethod
    def assemble(cls, convs: Mapping[str, Conv], bins: int, end2end: bool) -> Detect:
        def chains(branch: str) -> tuple[tuple[Conv, ...], ...]:
            levels = below(convs, f"one2one_{branch}" if end2end else branch)
            return tuple(tuple(below(levels, str(level)).values()) for level in range(3))

        return cls(chains("cv2"), chains("cv3"), bins)

    def forward(self, run, x: Sequence) -> list[Level]:
        return [Level(*level) for level in map(self._level, [run] * 3, x, self.boxes, self.classes)]

    def _level(self, run, x, boxes, classes):
        distances = logits = x
        for conv in boxes:
            distances = run.conv(conv, distances)
        for conv in classes:
            logits = run.conv(conv, logits)
        return run.expect(distances) if self.bins > 1 else distances, logits
