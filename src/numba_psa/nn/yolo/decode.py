"""From what the head says to boxes in pixels: NumPy, after every implementation alike."""

from __future__ import annotations

from functools import lru_cache

import numpy as np

from numba_psa.nn.layers import PLANS
from numba_psa.nn.yolo.architecture import STRIDES

MOST_BOXES = 300
"""That the end-to-end head gives."""


@lru_cache(maxsize=PLANS)
def anchors(height: int, width: int) -> tuple[np.ndarray, np.ndarray]:
    """Centres (x, y) of all tokens `[2, A]`, in tokens of their own map, and strides `[A]`; maps in order, rows first."""
    sizes = [(height // stride, width // stride) for stride in STRIDES]
    centres = [np.stack(np.meshgrid(np.arange(w) + 0.5, np.arange(h) + 0.5)).reshape(2, -1) for h, w in sizes]
    strides = np.repeat(STRIDES, [h * w for h, w in sizes])
    return np.concatenate(centres, axis=1).astype(np.float32), strides.astype(np.float32)


def corners(distances: np.ndarray, centres: np.ndarray, strides: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(x1, y1) and (x2, y2) in pixels of distances `[…, 4, A]`: centre − (l, t) and centre + (r, b)."""
    return (centres - distances[..., :2, :]) * strides, (centres + distances[..., 2:, :]) * strides


def dense(raw: np.ndarray, height: int, width: int) -> np.ndarray:
    """raw `[B, 4 + nc, A]`, its distances replaced by cx, cy, w, h in pixels."""
    first, last = corners(raw[:, :4], *anchors(height, width))
    raw[:, :2], raw[:, 2:4] = (first + last) / 2, last - first
    return raw


def end2end(raw: np.ndarray, height: int, width: int) -> np.ndarray:
    """`[B, min(300, A), 6]` = x1, y1, x2, y2, score, class of raw `[B, 4 + nc, A]`, by falling score.

    The tokens with the largest best score are kept, then the largest scores among all classes of those: a token may give
    several boxes. Of equal scores the first counts.
    """
    centres, strides = anchors(height, width)
    nc, results = raw.shape[1] - 4, np.empty((len(raw), min(MOST_BOXES, raw.shape[2]), 6), raw.dtype)
    for image, result in zip(raw, results, strict=True):
        tokens = largest(image[4:].max(axis=0), MOST_BOXES)
        candidates = image[4:, tokens].T.ravel()
        chosen = largest(candidates, len(tokens))
        at = tokens[chosen // nc]
        boxes = corners(image[:4, at], centres[:, at], strides[at])
        np.concatenate((*boxes, candidates[None, chosen], (chosen % nc)[None]), out=result.T)
    return results


def largest(values: np.ndarray, count: int) -> np.ndarray:
    """Indices of the `count` largest (or all), falling; of equal ones the first first; NaN counts as -inf."""
    values = np.where(np.isnan(values), -np.inf, values)
    if count < len(values):
        least = np.partition(values, len(values) - count)[len(values) - count]
        kept = np.flatnonzero(values >= least)
    else:
        kept = np.arange(len(values))
    return kept[np.argsort(-values[kept], kind="stable")][:count]
