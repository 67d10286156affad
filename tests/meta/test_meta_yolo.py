"""Planted bugs in the detectors, each of which a test of `tests/host/test_yolo_*.py` must catch."""

from dataclasses import replace

import pytest
import test_yolo_decode as decode_tests
import test_yolo_network as network_tests
import test_yolo_trained as trained_tests
import test_yolo_weights as weight_tests
from mutation import mutant
from yolo_cases import LIMIT, Small, detector, judge_small, picture

from numba_psa.cpu import framed, framed_passes, frames, in_order
from numba_psa.nn import exact, layers
from numba_psa.nn.exact import Exact
from numba_psa.nn.yolo import architecture, blocks, decode, plan
from numba_psa.nn.yolo import detector as detectors
from numba_psa.numerics import relative_error


def strided():
    judge_small(Small(20, (3, 2), (3, 2)), 40, 56)


def plain():
    judge_small(Small(35, (3, 1), (1, 1), shortcut=True, nc=17), 9, 21)


def pooled():
    judge_small(Small(5, (3, 1), (1, 1), pooled=True, silu=False), 11, 19)


def deep():
    judge_small(Small(18, (3, 1), (3, 1), deep=True), 24, 40)


def bins():
    judge_small(Small(6, (3, 2), (1, 1), bins=16), 12, 30)


def attended():
    """A detector whose layers 10 and 22 attend to 2×3 tokens."""
    network_tests.judge_detector(detector("yolo26", "n", 2), picture(1, 3, 64, 96))


@pytest.mark.parametrize("property_", [strided, plain, pooled, deep, bins, attended])
def test_the_detectors_themselves_pass(property_):
    property_()


# ---- kernels -----------------------------------------------------------------------------------------------------------
CONVOLUTION_BUGS = {
    "the frame is not put back to zero": (plain, "where_greater(present, zero, x))", "x)"),
    "columns to the right are those above": (
        plain,
        "at + 2 * height, 1, load(source, tap + 2))",
        "at + 2 * height, 1, load(source, tap))",
    ),
    "bias of the first work item for all": (plain, "advance(bias, row), advance", "bias, advance"),
    "a residual before the activation": (plain, "problem[1] != 0 and problem[15] == 0", "False"),
    "no SiLU": (plain, "        if silu:\n            silu_rows(", "        if False:\n            silu_rows("),
    "rows in a vector are taken for one": (strided, "lane += out_pitch - column", "lane += step"),
    "even and odd columns exchanged": (strided, "begun, even_lanes(a, b))", "begun, odd_lanes(a, b))"),
    "a tile is gathered once": (strided, "if token != loaded:", "if loaded < 0:"),
    "the enlarged part is not added": (deep, "        if early:\n", "        if early and False:\n"),
    "the enlarged part is added twice": (deep, "problem[1] != 0 and problem[15] == 0", "problem[1] != 0"),
    "depthwise weights of the first channel": (deep, "broadcast_rows(weights, 9 * c, 1,", "broadcast_rows(weights, 0, 1,"),
    "the middle row twice": (deep, "upper + pitch, upper + 2 * pitch", "upper + pitch, upper + pitch"),
    "values of the first head": (
        attended,
        "zero_rows(like, 9)), c // head_dim",
        "zero_rows(like, 9)), 0",
    ),
}


@pytest.mark.parametrize("bug", CONVOLUTION_BUGS)
def test_a_wrong_convolution_is_caught(bug, monkeypatch):
    property_, *change = CONVOLUTION_BUGS[bug]
    wrong = mutant(framed, *change)
    for name in ("convolve", "depthwise"):
        monkeypatch.setattr(framed, name, wrong[name])
    with pytest.raises(AssertionError):
        property_()


PASS_BUGS = {
    "what is outside counts as 0": (
        pooled,
        "splat(like, 0.5), splat(like, -math.inf)",
        "splat(like, 0.5), splat(like, 0.0)",
    ),
    "3×3 instead of 5×5": (
        pooled,
        "            _pool_3x3(map_, rows, inside, pitch, tokens)\n            _pool_3x3(",
        "            _pool_3x3(",
    ),
    "each pool of the first map": (pooled, "problem[1 + turn]", "problem[1]"),
    "bins count from one": (bins, "splat(like, b)", "splat(like, b + 1)"),
    "the first side's bins for all": (bins, "side * bins * plane + token", "token"),
    "each row enlarged once": (deep, "lower[2 * x + 1] = value", "lower[2 * x + 1] = 0"),
    "the rest of a row has no sigmoid": (plain, "target[x] = 1.0 / (1.0 + math.exp(-source[x]))", "target[x] = source[x]"),
}


@pytest.mark.parametrize("bug", PASS_BUGS)
def test_a_wrong_pass_is_caught(bug, monkeypatch):
    property_, *change = PASS_BUGS[bug]
    wrong = mutant(framed_passes, *change)
    for name in ("move", "upsample", "pool", "expect"):
        monkeypatch.setattr(framed_passes, name, wrong[name])
    with pytest.raises(AssertionError):
        property_()


# ---- the plan ----------------------------------------------------------------------------------------------------------
PLAN_BUGS = {
    "buffers that live together share a place": (attended, "other.dies >= buffer.born", "other.dies > buffer.born + 3"),
    "a buffer's last reader is forgotten": (attended, "number.buffer.dies = len(self._recorded)", "pass"),
    "the second piece reads the first": (plain, "Map(x.buffer, x.first + first, count)", "Map(x.buffer, x.first, count)"),
    "values are taken from the keys": (attended, "qkv.first + 2 * key_dim, pe.c_out", "qkv.first + key_dim, pe.c_out"),
    "scale of head_dim": (attended, "* num_heads, key_dim**-0.5)", "* num_heads, head_dim**-0.5)"),
    "levels of the head one over the other": (attended, "row * count + first)", "row * count)"),
    "half the weights on the enlarged map": (
        deep,
        "self._conv(first, [large.source])",
        "self._conv(second, [large.source])",
    ),
    "the image's place is kept from the first call": (
        plain,
        "                    self._problem[index] = address(array) + offset\n            first = 0",
        "                    self._problem[index] = self._problem[index] or address(array) + offset\n            first = 0",
    ),
}


@pytest.mark.parametrize("bug", PLAN_BUGS)
def test_a_wrong_plan_is_caught(bug, monkeypatch):
    property_, *change = PLAN_BUGS[bug]
    monkeypatch.setattr(plan, "NetworkPlan", mutant(plan, *change)["NetworkPlan"])
    with pytest.raises((AssertionError, ValueError)):
        property_()


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("other.dies >= buffer.born", "other.dies > buffer.born"),
        ("if buffer.place + buffer.channels <= other.place:", "if True:"),
    ],
)
def test_wrong_places_are_caught(old, new):
    place = mutant(plan, old, new)["_place"]
    with pytest.raises(AssertionError):
        network_tests.judge_places([(4, 0, 2), (4, 1, 3), (4, 2, 4), (2, 4, 5), (4, 5, 6)], place)


def test_a_frame_without_a_border_is_caught(monkeypatch):
    """Channels that follow each other without a row of zeros between them."""
    monkeypatch.setattr(frames.Frame, "border", property(lambda self: self.lanes))
    with pytest.raises(AssertionError):
        judge_small(Small(9, (3, 1), (3, 1)), 16, 63)


def test_items_that_nobody_does_are_caught(monkeypatch):
    wrong = mutant(in_order, "scales[i], at, until)", "scales[i], at + (thread == 1), until)")
    monkeypatch.setattr(plan, "run_in_order", wrong["run_in_order"])
    with pytest.raises(AssertionError):
        strided()


# ---- layers, decoding, weights -----------------------------------------------------------------------------------------
def trained():
    for judge in (trained_tests.judge_yolo26n, trained_tests.judge_yolo11n):
        judge((448, 320), "oracle")


BLOCK_BUGS = {
    "no residual around SPPF": (blocks, "x if self.shortcut else None)", "None)", ("SPPF",)),
    "SPPF in another order": (blocks, "(y, *run.pools(y))", "(*run.pools(y), y)", ("SPPF",)),
    "Concat the other way round": (blocks, "return tuple(x)", "return tuple(x)[::-1]", ("Concat",)),
    "the maps' heads exchanged": (blocks, "for level in range(3))", "for level in (1, 0, 2))", ("Detect",)),
    "the other head": (blocks, 'f"one2one_{branch}" if end2end else branch', "branch", ("Detect",)),
    "C3k passes by what it should compute": (layers, "(y, run.conv(self.cv2, x))", "(run.conv(self.cv2, x), y)", ("C3k2",)),
    "one Bottleneck of a C3k is left out": (
        layers,
        "for i in range(2))\n\n    def forward",
        "for i in range(1))\n\n    def forward",
        ("C3k2",),
    ),
    "skip connections exchanged": (architecture, "sources=(-1, 6)", "sources=(-1, 5)", ("FAMILIES",)),
    "boxes by falling class": (decode, "tokens[chosen // nc]", "tokens[chosen % nc]", ("decode",)),
}


@pytest.mark.skipif(not trained_tests.YOLO11N.exists(), reason="no trained weights: bash scripts/fetch_models.sh")
@pytest.mark.parametrize("bug", BLOCK_BUGS)
def test_a_wrong_network_is_caught(bug, monkeypatch):
    module, old, new, names = BLOCK_BUGS[bug]
    wrong = mutant(module, old, new)
    for name in names:
        monkeypatch.setattr(detectors, name, type("module", (), wrong) if name == "decode" else wrong[name])
    with pytest.raises((AssertionError, ValueError, KeyError, IndexError)):
        trained()


EXACT_BUGS = {
    "every second token of stride 1": ("dy : dy + step * height : step, dx", "dy : dy + height, dx"),
    "columns are not repeated": (
        "x.repeat(2, axis=2).repeat(2, axis=3)",
        "x.repeat(2, axis=3).repeat(2, axis=2)[:, :, ::-1]",
    ),
    "pools of the first map": (
        "            results.append(x)\n",
        "            results.append(results[0] if results else x)\n",
    ),
    "padding of pools counts": ("constant_values=-np.inf", "constant_values=0"),
    "bins count from one": ("np.arange(channels // 4, dtype=x.dtype)", "np.arange(1, channels // 4 + 1, dtype=x.dtype)"),
}


@pytest.mark.skipif(not trained_tests.YOLO11N.exists(), reason="no trained weights: bash scripts/fetch_models.sh")
@pytest.mark.parametrize("bug", EXACT_BUGS)
def test_a_wrong_definition_is_caught(bug, monkeypatch):
    monkeypatch.setattr(detectors, "Exact", mutant(exact, *EXACT_BUGS[bug])["Exact"])
    with pytest.raises((AssertionError, ValueError)):
        trained()


DECODE_BUGS = {
    "corners are tokens": ("np.arange(w) + 0.5", "np.arange(w)"),
    "x and y exchanged": (
        "np.meshgrid(np.arange(w) + 0.5, np.arange(h) + 0.5)",
        "np.meshgrid(np.arange(h) + 0.5, np.arange(w) + 0.5)",
    ),
    "right and bottom are subtracted": ("(centres + distances[..., 2:, :])", "(centres - distances[..., 2:, :])"),
    "no strides": ("[..., :2, :]) * strides, (", "[..., :2, :]), ("),
    "centre of the upper left corner": ("(first + last) / 2, last - first", "first, last - first"),
    "the last of equal scores": (
        'kept[np.argsort(-values[kept], kind="stable")]',
        'kept[np.argsort(values[kept], kind="stable")[::-1]]',
    ),
    "best of the first class only": ("image[4:].max(axis=0)", "image[4]"),
    "classes and tokens exchanged": ("image[4:, tokens].T.ravel()", "image[4:, tokens].ravel()"),
    "one box for a token": ("chosen = largest(candidates, len(tokens))", "chosen = np.arange(len(tokens)) * nc"),
}


def judge_decoding(dense, end2end):
    decode_tests.judge_dense(160, 128, dense)
    decode_tests.judge_end2end(160, 128, 3, ties=True, function=end2end)


@pytest.mark.parametrize("bug", DECODE_BUGS)
def test_wrong_decoding_is_caught(bug):
    wrong = mutant(decode, *DECODE_BUGS[bug])
    with pytest.raises((AssertionError, ValueError)):
        judge_decoding(wrong["dense"], wrong["end2end"])


WEIGHT_BUGS = {
    "every map's channels are the first one's": ('"boxes": max(16, c_in[0] // 4', '"boxes": max(16, c_in[1] // 4'),
    "scales repeat alike": ('"l": Scale(1.0, 1.0', '"l": Scale(0.5, 1.0'),
    "C3k at no scale": ("row.c3k or scale.every_c3k", "row.c3k"),
    "channels are not limited": ("int(min(full, self.most_channels) * self.width)", "int(full * self.width)"),
    "classes are not limited": ("min(self.nc, 100)", "self.nc + 100"),
}


def judge_scales():
    for family in weight_tests.FAMILIES:
        for scale in weight_tests.SCALES:
            weight_tests.test_every_scale_has_the_published_number_of_parameters(family, scale)


@pytest.mark.parametrize("bug", WEIGHT_BUGS)
def test_a_wrong_architecture_is_caught(bug, monkeypatch):
    monkeypatch.setattr(weight_tests, "Architecture", mutant(architecture, *WEIGHT_BUGS[bug])["Architecture"])
    with pytest.raises((AssertionError, KeyError)):
        judge_scales()


def test_agreement_is_not_too_kind():
    """A convolution whose weights are off by 5e-5 of themselves is noticed."""
    x, conv = picture(1, 3, 32, 32), detector().layers[0].conv
    truth, close = (Exact().conv(replace(conv, weight=conv.weight * factor), x) for factor in (1, 1 + 5e-5))
    assert relative_error(close, truth) > LIMIT
