"""Detectors with random weights, small networks of every operation, and when what a plan computes is right."""

from dataclasses import dataclass

import numpy as np

from numba_psa.nn import yolo
from numba_psa.nn.conv import Conv
from numba_psa.nn.exact import Exact
from numba_psa.nn.yolo import plan
from numba_psa.nn.yolo.architecture import Architecture
from numba_psa.nn.yolo.blocks import Level
from numba_psa.numerics import relative_error
from numba_psa.testing.layers import random_arrays

LIMIT = 1e-5
"""Relative error of a float32 network against float64: some ten layers of a few epsilons each, 1e-6 in practice."""


def random_weights(family="yolo26", scale="n", nc=3, *, end2end=None, folded=False, seed=0):
    end2end = family == "yolo26" if end2end is None else end2end
    wanted, sizes = Architecture(family, scale, nc, end2end, sppf_silu=family == "yolo11").wanted()
    return random_arrays(wanted, {"": 1, **sizes}, folded=folded, seed=seed)


def detector(*arguments, metadata=None, **options):
    return yolo.Detector.from_state_dict(random_weights(*arguments, **options), metadata=metadata)


def picture(*shape, seed=0, dtype=np.float32):
    return np.random.default_rng(seed).random(shape, np.float32).astype(dtype)


def random_conv(c_out, c_in, k=1, *, stride=1, silu=True, depthwise=False, rng=None):
    rng = rng or np.random.default_rng(0)
    fan_in = k * k * (1 if depthwise else c_in)
    weight = rng.standard_normal((c_out, 1 if depthwise else c_in, k, k)) * (2 / fan_in) ** 0.5
    return Conv(weight, rng.standard_normal(c_out), silu, c_in if depthwise else 1, stride)


@dataclass
class Small:
    """A network of two to a dozen layers that ends in one map: all operations that a plan has, on maps of any size.

    image → `first` (k, stride) → `second` (k, stride) → y; with `pooled`, y is a 1×1 of y and its three pools; with `deep`,
    a depthwise 3×3, a 3×3 of stride 2, and, of that enlarged beside y, a 1×1; with `bins`, distances are expected bins.
    """

    width: int
    first: tuple[int, int] = (3, 2)
    second: tuple[int, int] = (3, 1)
    nc: int = 2
    bins: int = 1
    pooled: bool = False
    deep: bool = False
    shortcut: bool = False
    silu: bool = True
    seed: int = 0

    def __post_init__(self):
        rng, c = np.random.default_rng(self.seed), self.width

        def conv(*arguments, **options):
            return random_conv(*arguments, rng=rng, **options)

        self.convs = {
            "first": conv(c, 3, self.first[0], stride=self.first[1], silu=self.silu),
            "second": conv(c + 3, c, self.second[0], stride=self.second[1]),
            "again": conv(c + 3, c + 3, 3, silu=self.silu),
            "pools": conv(c, 4 * (c + 3), silu=False),
            "depthwise": conv(c, c, 3, depthwise=True, silu=self.silu),
            "down": conv(5, c, 3, stride=2),
            "up": conv(c, 5 + c, silu=self.silu),
            "across": conv(c, c + 3),
            "distances": conv(4 * self.bins, c, silu=False),
            "logits": conv(self.nc, c, silu=False),
        }

    def record(self, run, image):
        convs, given = self.convs, []
        given.append(run.conv(convs["first"], image))
        y = run.conv(convs["second"], given[-1])
        given.append(run.conv(convs["again"], y, y) if self.shortcut else y)
        y = given[-1]
        if self.pooled:
            y = run.conv(convs["pools"], (y, *run.pools(y)))
        else:
            a, b = run.split(y, 2, self.width + 1)
            y = run.conv(convs["across"], (b, a))
        given.append(y)
        if self.deep:
            y = run.conv(convs["depthwise"], y, y)
            low = run.conv(convs["down"], y)
            given.append(run.upsample(low))
            y = run.conv(convs["up"], (given[-1], y))
        distances = run.conv(convs["distances"], y)
        given.append([Level(run.expect(distances) if self.bins > 1 else distances, run.conv(convs["logits"], y))])
        return given


def judge_small(network, height, width, dtype=np.float32):
    """Two images one after the other through one plan, against float64 by the formulas."""
    planned = plan.NetworkPlan(network.record, height, width, np.dtype(dtype))
    for seed in (1, 2):
        image = np.random.default_rng(seed).standard_normal((3, height, width)).astype(dtype)
        raw = np.full(planned.raw_shape, np.nan, dtype)
        planned.run(image, raw)
        *_, levels = network.record(Exact(), image[None].astype(np.float64))
        distances, logits = (part[0].reshape(part.shape[1], -1) for part in levels[0])
        for got, expected in ((raw[:4], distances), (raw[4:], 1 / (1 + np.exp(-logits)))):
            assert relative_error(got, expected) <= (LIMIT if dtype == np.float32 else 1e-13)
