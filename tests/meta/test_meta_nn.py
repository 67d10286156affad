"""Planted bugs in the layers, each of which a test of `tests/host/test_nn_*` must catch."""

import numpy as np
import pytest
import test_nn_layers as layer_tests
import test_nn_plan as plan_tests
import test_nn_weights as weight_tests
from layer_cases import FIXTURES, build, normal
from mutation import mutant

from numba_psa import nn
from numba_psa.cpu import convolution
from numba_psa.nn import conv, exact, layers, planned, recording, weights
from numba_psa.nn.exact import Exact

FIXTURE = {path.stem: path for path in FIXTURES}


# ---- the definition, against Ultralytics -------------------------------------------------------------------------------
EXACT_BUGS = {
    "q and k exchanged": ("q, k, v = split_heads(", "k, q, v = split_heads("),
    "sections before heads": (
        "heads = qkv.reshape(batch * num_heads, channels // num_heads, height * width)",
        "heads = qkv.reshape(batch, -1, num_heads, height * width).swapaxes(1, 2)\n"
        "    heads = heads.reshape(batch * num_heads, -1, height * width)",
    ),
    "no positional term": ("return self.conv(pe, v.reshape(shape), add=o", "return (o"),
    "padding repeats the border": (
        "(k // 2, k // 2), (k // 2, k // 2)))",
        '(k // 2, k // 2), (k // 2, k // 2)), mode="edge")',
    ),
    "rows and columns of the kernel exchanged": ("weight[:, :, dy, dx]", "weight[:, :, dx, dy]"),
    "no SiLU": ("if conv.silu:", "if False:"),
    "SiLU after the residual": (
        "return y if add is None else y + add",
        "return y if add is None else (y + add) / (1 + np.exp(-y - add))",
    ),
    "pieces concatenated the other way round": ("np.concatenate(x, axis=1)", "np.concatenate(x[::-1], axis=1)"),
    "scale of head_dim": ("compute_dtype=self.compute_dtype)\n", "v.shape[1] ** -0.5, compute_dtype=self.compute_dtype)\n"),
}


@pytest.mark.parametrize("bug", EXACT_BUGS)
def test_a_wrong_definition_is_caught(bug):
    run = mutant(exact, *EXACT_BUGS[bug])["Exact"]
    with pytest.raises(AssertionError):
        judge_definition(run)


def judge_definition(run):
    for name in ("attention_d128_h2", "c2psa_c128_n2"):
        layer_tests.judge_fixture(FIXTURE[name], run())


def test_the_definition_itself_passes():
    judge_definition(Exact)


LAYER_BUGS = {
    "no first residual": (
        "x if self.shortcut else None)\n        return run.conv(self.contract",
        "None)\n        return run.conv(self.contract",
    ),
    "no second residual": ("run.conv(self.expand, t), t if self.shortcut else None)", "run.conv(self.expand, t), None)"),
    "b passes by, a is attended": ("a, b = run.split(", "b, a = run.split("),
    "blocks side by side": (
        "            b = block.forward(run, b)\n        return",
        "            c = block.forward(run, b)\n            b = c if block is self.blocks[-1] else b\n        return",
    ),
}


@pytest.mark.parametrize("bug", LAYER_BUGS)
def test_a_wrong_layer_is_caught(bug, monkeypatch):
    wrong = mutant(layers, *LAYER_BUGS[bug])
    for name in ("PSABlock", "C2PSA"):
        monkeypatch.setattr(getattr(nn, name), "forward", wrong[name].forward)
    with pytest.raises(AssertionError):
        layer_tests.judge_fixture(FIXTURE["c2psa_c128_n2"])


def test_another_eps_is_caught(monkeypatch):
    monkeypatch.setattr(conv, "BATCH_NORM_EPS", 1e-5)
    with pytest.raises(AssertionError):
        layer_tests.judge_fixture(FIXTURE["attention_d64_h1"])
    with pytest.raises(AssertionError):
        weight_tests.test_folding_is_batch_norm_after_the_convolution()


# ---- the CPU path, against the definition ------------------------------------------------------------------------------
def c3k2():
    layer_tests.judge_layer(build(nn.C3k2, units=2), normal(2, 17, 5, 20))


def c2psa():
    layer_tests.judge_layer(build(num_heads=2, key_dim=3, head_dim=35), normal(2, 75, 4, 9))


def two_inputs():
    layer, first, second = build(), normal(1, 17, 4, 9, seed=1), normal(1, 17, 4, 9, seed=2)
    layer_tests.judge_layer(layer, first)
    layer_tests.judge_layer(layer, second)


def chained():
    plan_tests.judge_chain(plan_tests.Chain(3, 65, 67, 3, 1), normal(2, 3, 5, 20))
    plan_tests.judge_chain(plan_tests.Chain(3, 65, 67, 1, 5), normal(2, 3, 5, 20))


def in_parts():
    plan_tests.test_many_images_are_computed_in_parts()


PLAN_BUGS = {
    "the residual is forgotten": (chained, "((add, add.batch_stride) if add else (0, 0))", "(0, 0)"),
    "images of a piece are apart by its own size": (
        chained,
        "numbers += [piece, piece.batch_stride, piece.channels]",
        "numbers += [piece, piece.channels * self.tokens, piece.channels]",
    ),
    "values are taken from the keys": (c2psa, "for count in (key_dim, 2 * key_dim))", "for count in (key_dim, key_dim))"),
    "scale of head_dim": (c2psa, "scale=key_dim**-0.5", "scale=head_dim**-0.5"),
    "the positional term replaces the attention": (
        c2psa,
        "head_dim, out, out, *self._weights(pe)",
        "head_dim, out, v, *self._weights(pe)",
    ),
    "a neighbour is read before it is there": (
        chained,
        "across = [piece.buffer for piece in pieces] if side > 1 else []",
        "across = []",
    ),
    "weights not packed": (c2psa, "convolution.packed(rows)", "rows.ravel()"),
    "every part is the first one": (in_parts, "self._run(x[images], y[images])", "self._run(x[: self.batch], y[images])"),
    "the input's place is kept from the first call": (
        two_inputs,
        "            self._point(self._x, address(x))\n",
        "            self._x.uses, _ = [], self._point(self._x, address(x))\n",
    ),
}


@pytest.mark.parametrize("bug", PLAN_BUGS)
def test_a_wrong_plan_is_caught(bug, monkeypatch):
    property_, *change = PLAN_BUGS[bug]
    wrong = mutant(planned, *change)["Plan"]
    monkeypatch.setattr(planned, "Plan", wrong)
    monkeypatch.setattr(plan_tests, "Plan", wrong)
    monkeypatch.setattr(plan_tests.judge_chain, "__defaults__", (wrong,))
    with pytest.raises(AssertionError):
        property_()


def test_a_wrong_split_is_caught(monkeypatch):
    wrong = mutant(recording, "x.first + first * self.tokens, x.batch_stride", "x.first, x.batch_stride")
    monkeypatch.setattr(recording.Recorder, "split", wrong["Recorder"].split)
    monkeypatch.setattr(planned, "Tensor", wrong["Tensor"])
    with pytest.raises(AssertionError):
        chained()


KERNEL_BUGS = {
    "no SiLU": (c2psa, "if silu:", "if False:"),
    "bias of the first work item for all": (chained, "advance(bias, row), advance", "bias, advance"),
    "a tile is loaded for the first image only": (
        chained,
        "block - b * blocks) * step\n        present",
        "block % blocks) * step\n        b = 0\n        present",
    ),
    "no zero padding in depthwise and 3×3": (
        c3k2,
        "return where_greater(inside, splat(padding, 0.0), moved)",
        "return moved",
    ),
    "columns are not shifted": (c3k2, "+ kx - side // 2)", ")"),
    "the last tokens are not left alone": (
        chained,
        "tokens, 1, first, present, acc, count)",
        "tokens, 1, first, min(step, present + 1), acc, count)",
    ),
    "the next image's items come first": (c2psa, "((b * rows + row) * blocks", "((row * rows + b) * blocks"),
    "SiLU of -x": (c2psa, "x * splat(acc, -LOG2E)", "x * splat(acc, LOG2E)"),
    "values of the first head": (c2psa, "h = c // head_dim\n", "h = 0\n"),
}


@pytest.mark.parametrize("bug", KERNEL_BUGS)
def test_a_wrong_kernel_is_caught(bug, monkeypatch):
    property_, *change = KERNEL_BUGS[bug]
    wrong = mutant(convolution, *change)
    for name in ("convolve", "depthwise", "in_turn"):
        monkeypatch.setattr(convolution, name, wrong[name])
    with pytest.raises(AssertionError):
        property_()


@pytest.mark.parametrize("property_", [c3k2, c2psa, two_inputs, chained, in_parts])
def test_the_cpu_path_itself_passes(property_):
    property_()


# ---- weights ----------------------------------------------------------------------------------------------------------
WEIGHT_BUGS = {
    "only the first problem": (
        'problems:\n        raise WeightsError(f"these',
        'problems:\n        problems = problems[:1]\n        raise WeightsError(f"these',
    ),
    "unexpected arrays are ignored": ("set(state) - used - ignored", "set()"),
    "NaN is accepted": ("elif not np.isfinite(array.astype(np.float64)).all():", "elif False:"),
    "shapes are not compared": ("size not in (None, got) for size, got", "False for size, got"),
}


@pytest.mark.parametrize("bug", WEIGHT_BUGS)
def test_wrong_reporting_is_caught(bug, monkeypatch):
    monkeypatch.setattr(layers, "build", mutant(weights, *WEIGHT_BUGS[bug])["build"])
    with pytest.raises((AssertionError, ValueError, IndexError, pytest.fail.Exception)):
        weight_tests.test_everything_wrong_is_listed_at_once()


def test_loading_a_pickle_is_caught(tmp_path, monkeypatch):
    from numba_psa.nn import files

    monkeypatch.setattr(weight_tests, "read_state", mutant(files, "allow_pickle=False", "allow_pickle=True")["read_state"])
    with pytest.raises((AssertionError, pytest.fail.Exception)):
        weight_tests.test_pickles_inside_npz_are_not_loaded(tmp_path)


def test_agreement_is_not_too_kind():
    """A relative error of 1e-5 in float32 is none."""
    layer, x = build(), normal(1, 17, 3, 4)
    truth = layer_tests.exact(layer, x)
    assert layer_tests.agrees(truth.astype(np.float32), truth)
    assert not layer_tests.agrees((truth * (1 + 1e-5)).astype(np.float32), truth)
