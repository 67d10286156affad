"""Trained detectors, layer by layer: YOLO26n against onnxruntime, YOLO11n against PyTorch.

Weights come from `scripts/fetch_models.sh` and are never committed; what PyTorch gave stands in `tests/data/yolo11n.json`.
"""

import json
from functools import cache
from pathlib import Path

import numpy as np
import pytest
from drawn import balls

from numba_psa.nn import onnx_graph, yolo
from numba_psa.nn.files import read_file
from numba_psa.numerics import relative_error

ROOT = Path(__file__).parents[2]
YOLO26N, YOLO11N = ROOT / ".models" / "yolo26n.onnx", ROOT / ".models" / "yolo11n.safetensors"
TORCH = json.loads((ROOT / "tests" / "data" / "yolo11n.json").read_text())["sizes"]
SIZES = [(640, 640), (448, 320)]
TAPS = [str(index) for index in range(23)]
LIMIT = 1e-5
"""Relative norm of a layer's error; measured: 4e-6 at most."""
PIXELS, SCORE = 0.5, 0.005

pytestmark = [
    pytest.mark.skipif(
        not YOLO26N.exists() or not YOLO11N.exists(), reason="no trained weights: bash scripts/fetch_models.sh"
    ),
    pytest.mark.parametrize("impl", ["cpu", "oracle"]),
    pytest.mark.parametrize("size", SIZES, ids=str),
]


def node_of(index: int) -> str:
    """The node of the graph whose output is the layer's."""
    last = {0: "act/Mul", 9: "Add", 11: "Resize", 12: "Concat", 14: "Resize", 15: "Concat", 18: "Concat", 21: "Concat"}
    plain = {1, 3, 5, 7, 17, 20}
    return f"/model.{index}/" + ("act/Mul" if index in plain else last.get(index, "cv2/act/Mul"))


@cache
def onnxruntime_says(size) -> dict[str, np.ndarray]:
    model = onnx_graph.parse(YOLO26N, YOLO26N.read_bytes())
    outputs = {node.name: node.output[0] for node in model.graph.node}
    names = {tap: outputs[node_of(int(tap))] for tap in TAPS}
    names |= {"dense": outputs["/model.23/Concat_26"], "logits": outputs["/model.23/Concat_7"], "output": "output0"}
    return dict(zip(names, onnx_graph.tensors(model, YOLO26N, list(names.values()), balls(*size)), strict=True))


def judge_boxes(got, expected):
    """Scores of all; boxes and classes of those whose place in the order is sure."""
    scores = expected[:, 4]
    np.testing.assert_allclose(got[:, 4], scores, rtol=1e-3, atol=1e-7)
    ends = np.concatenate(([np.inf], scores, [0]))
    sure = (scores > 1e-5) & (ends[:-2] > 1.05 * scores) & (scores > 1.05 * ends[2:])
    assert sure.any()
    assert np.abs(got[sure, :4] - expected[sure, :4]).max() <= PIXELS
    np.testing.assert_array_equal(got[sure, 5], expected[sure, 5])


def judge_yolo26n(size, impl, model=None):
    expected = onnxruntime_says(size)
    y, layers = (model or yolo.load(YOLO26N))(balls(*size), taps=TAPS, impl=impl)
    for tap in TAPS:
        assert layers[tap].shape == expected[tap].shape
        assert relative_error(layers[tap], expected[tap]) <= LIMIT, tap
    assert y.shape == expected["output"].shape == (1, 300, 6)
    judge_boxes(y[0], expected["output"][0])


def test_yolo26n_layer_by_layer(size, impl):
    judge_yolo26n(size, impl)


def test_yolo26n_head(size, impl):
    """All tokens of the one-to-one head before the best are chosen: its weights under the other head's names."""
    state, metadata = read_file(YOLO26N)
    state = {name.replace("one2one_", ""): array for name, array in state.items()}
    y = yolo.Detector.from_state_dict(state, metadata=metadata)(balls(*size), impl=impl)
    expected = onnxruntime_says(size)["dense"]
    first, last, scores = expected[:, :2], expected[:, 2:4], expected[:, 4:]
    centres = np.concatenate(((first + last) / 2, last - first), axis=1)
    assert relative_error(y[:, :4], centres) <= LIMIT
    # Of scores below 1e-7 onnxruntime's sigmoid gives 0 or 6e-8: the logits are what can be compared.
    p = y[:, 4:].astype(np.float64)
    assert relative_error(np.log(p / (1 - p)), onnxruntime_says(size)["logits"]) <= LIMIT
    assert np.abs(y[:, :4] - centres).max() <= PIXELS
    assert np.abs(y[:, 4:] - scores).max() <= SCORE


def judge_samples(got, expected):
    assert list(got.shape) == expected["shape"]
    spread = np.linspace(0, got.size - 1, len(expected["values"])).astype(int)
    assert relative_error(got.ravel()[spread], np.array(expected["values"])) <= LIMIT
    assert np.linalg.norm(got.astype(np.float64)) == pytest.approx(expected["norm"], rel=LIMIT)


def judge_yolo11n(size, impl, model=None):
    expected = TORCH["x".join(map(str, size))]
    y, layers = (model or yolo.load(YOLO11N))(balls(*size), taps=TAPS, impl=impl)
    for tap, layer in zip(TAPS, expected["layers"], strict=True):
        judge_samples(layers[tap], layer)
    judge_samples(y, expected["head"])
    surest = np.array(expected["surest"]["values"]).reshape(-1, y.shape[1])
    assert surest[:, 4].max() > 0.8  # it does find balls
    difference = np.abs(y[0][:, expected["surest"]["tokens"]].T - surest)
    assert difference[:, :4].max() <= PIXELS
    assert difference[:, 4:].max() <= SCORE


def test_yolo11n_layer_by_layer(size, impl):
    judge_yolo11n(size, impl)
