"""Detectors that find what is drawn, to test everything around a network with."""

import numpy as np

COLOURS = {0: (255, 0, 0), 1: (0, 255, 0), 2: (0, 0, 255)}
NAMES = {0: "red thing", 1: "зелёная", 2: "blue"}


class ColourDetector:
    """Finds the rectangle around all pixels of each pure colour: class k is COLOURS[k], the score 0.9 − k/10.

    end2end False gives what a head before NMS gives, with each box twice, once smaller, less sure and of the same class.
    """

    family, scale, stride, nc, names = "yolo26", "n", 32, 3, NAMES

    def __init__(self, end2end=True):
        self.end2end = end2end
        self.seen = []

    def predict(self, x):
        assert x.dtype == np.float32
        assert x.shape[:2] == (1, 3)
        assert x.shape[2] % 32 == x.shape[3] % 32 == 0
        assert 0 <= x.min() <= x.max() <= 1
        self.seen.append(x.shape)
        found = []
        for number, colour in COLOURS.items():
            near = (np.abs(x[0] - np.array(colour)[:, None, None] / 255) < 0.5).all(axis=0)
            if near.any():
                (top, *_, bottom), (left, *_, right) = (np.repeat(np.flatnonzero(near.any(axis=a)), 2) for a in (1, 0))
                found.append((left, top, right + 1, bottom + 1, 0.9 - number / 10, number))
        rows = np.array(found, np.float32).reshape(-1, 6)
        if self.end2end:
            return np.concatenate((rows, np.zeros((5, 6), np.float32)))[None]
        x1, y1, x2, y2, score, number = rows.T
        scores = np.zeros((3, len(rows)), np.float32)
        scores[number.astype(int), range(len(rows))] = score
        centre, size = np.array([(x1 + x2) / 2, (y1 + y2) / 2]), np.array([x2 - x1, y2 - y1])
        twice = [np.concatenate((centre, size * part, scores * part)) for part in (0.95, 1)]
        return np.concatenate(twice, axis=1)[None].astype(np.float32)

    def profile(self, x):
        from types import SimpleNamespace as Row

        rows = [
            ("0", "Conv", (16, x.shape[2] // 2, x.shape[3] // 2), 3.0, 0.75, 0.5),
            ("decode", "Decode", None, 1.0, 0.25, 0),
        ]
        return [Row(**dict(zip(("layer", "kind", "shape", "ms", "share", "gflop"), row, strict=True))) for row in rows]
