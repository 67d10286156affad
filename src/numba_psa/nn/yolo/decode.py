"""From what the head says to boxes in pixels: NumPy, after every implementation alike."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from numba_psa.nn.yolo.architecture import STRIDES

MOST_BOXES = 300
"""That the end-to-end head gives."""


def map_sizes(height: int, width: int) -> list[tuple[int, int]]:
    """(H, W) of the three maps of an image."""
    return [(height // stride, width // stride) for stride in STRIDES]


def anchors(sizes: Sequence[tuple[int, int]]) -> tuple[np.ndarray, np.ndarray]:
    """Centres (x, y) of all tokens `[2, A]`, in tokens of their own map, and strides `[A]`; maps in order, rows first."""
    centres = [np.stack(np.meshgrid(np.arange(w) + 0.5, np.arange(h) + 0.5)).reshape(2, -1) for h, w in sizes]
    strides = np.repeat(STRIDES, [h * w for h, w in sizes])
    return np.concatenate(centres, axis=1).astype(np.float32), strides.astype(np.float32)


def corners_of(raw: np.ndarray, sizes: Sequence[tuple[int, int]]) -> tuple[np.ndarray, np.ndarray]:
    """(x1, y1) and (x2, y2) in pixels, each `[B, 2, A]`, of distances `raw[:, :4]`: centre − (l, t) and centre + (r, b)."""
    centres, strides = anchors(sizes)
    return (centres - raw[:, :2]) * strides, (centres + raw[:, 2:4]) * strides


def dense(raw: np.ndarray, sizes: Sequence[tuple[int, int]]) -> np.ndarray:
    """raw `[B, 4 + nc, A]`, its distances replaced by cx, cy, w, h in pixels."""
    first, last = corners_of(raw, sizes)
    raw[:, :2], raw[:, 2:4] = (first + last) / 2, last - first
    return raw


def end2end(raw: np.ndarray, sizes: Sequence[tuple[int, int]]) -> np.ndarray:
    """`[B, min(300, A), 6]` = x1, y1, x2, y2, score, class of raw `[B, 4 + nc, A]`, by falling score.

    The tokens with the largest best score are kept, then the largest scores among all classes of those: a token may give
    several boxes. Of equal scores the first counts.
    """
    nc, boxes = raw.shape[1] - 4, np.concatenate(corners_of(raw, sizes), axis=1)
    results = []
    for box, scores in zip(boxes, raw[:, 4:], strict=True):
        tokens = largest(scores.max(axis=0), MOST_BOXES)
        candidates = scores[:, tokens].T.ravel()
        chosen = largest(candidates, len(tokens))
        columns = box[:, tokens[chosen // nc]], candidates[None, chosen], (chosen % nc)[None]
        results.append(np.concatenate(columns).T)
    return np.stack(results).astype(raw.dtype)


def largest(values: np.ndarray, count: int) -> np.ndarray:
    """Indices of the `count` largest (or all), falling; of equal ones the first first."""
    if count < len(values):
        least = np.partition(values, len(values) - count)[len(values) - count]
        kept = np.flatnonzero(values >= least)
    else:
        kept = np.arange(len(values))
    return kept[np.argsort(-values[kept], kind="stable")][:count]
