"""Trained weights: every attention layer and block of a YOLO26n against onnxruntime, on a drawn picture.

The weights come from `scripts/fetch_models.sh` and are never committed.
"""

import sys
from functools import cache
from pathlib import Path

import numpy as np
import pytest
from PIL import Image, ImageDraw
from typer.testing import CliRunner

from numba_psa.errors import WeightsError
from numba_psa.nn import onnx_graph, picture
from numba_psa.nn.discover import attention_layers, layer_class
from numba_psa.nn.files import read_state
from numba_psa.numerics import relative_error

MODELS = Path(__file__).parents[2] / ".models"
YOLO26N = MODELS / "yolo26n.onnx"
LIMIT = 1e-5
LAYERS = {
    "model.10": "/model.10/cv2/act/Mul",
    "model.10.m.0": "/model.10/m/m.0/Add_1",
    "model.10.m.0.attn": "/model.10/m/m.0/attn/proj/conv/Conv",
    "model.22": "/model.22/cv2/act/Mul",
    "model.22.m.0.1": "/model.22/m.0/m.0.1/Add_1",
    "model.22.m.0.1.attn": "/model.22/m.0/m.0.1/attn/proj/conv/Conv",
}
"""The node of the graph whose output is the layer's."""

pytestmark = pytest.mark.skipif(not YOLO26N.exists(), reason="no trained weights: bash scripts/fetch_models.sh")


def scene() -> Image.Image:
    """A house, a sun and a row of balls."""
    image = Image.new("RGB", (600, 420), (120, 170, 220))
    draw = ImageDraw.Draw(image)
    draw.rectangle((0, 260, 600, 420), fill=(90, 140, 70))
    draw.ellipse((380, 40, 460, 120), fill=(250, 220, 90))
    draw.rectangle((80, 150, 260, 330), fill=(170, 80, 60))
    draw.polygon([(60, 150), (170, 70), (280, 150)], fill=(90, 40, 40))
    for i in range(7):
        draw.ellipse((300 + 35 * i, 300 + 5 * i, 330 + 35 * i, 360 + 5 * i), fill=(30 * i, 40, 255 - 30 * i))
    return image


@cache
def tensors(size: tuple[int, int]) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """{layer: (its input, its output)} of the network on the scene, by onnxruntime."""
    model = onnx_graph.parse(YOLO26N, YOLO26N.read_bytes())
    outputs = {node.name: node.output[0] for node in model.graph.node}
    names = [name for prefix, node in LAYERS.items() for name in (onnx_graph.first_conv(model, prefix), outputs[node])]
    found = onnx_graph.tensors(model, YOLO26N, names, picture.network_input(picture.framed(scene(), 640, size)))
    return dict(zip(LAYERS, zip(found[::2], found[1::2], strict=True), strict=True))


@cache
def state():
    return read_state(YOLO26N)


@pytest.mark.parametrize("impl", ["cpu", "oracle"])
@pytest.mark.parametrize("prefix", LAYERS)
@pytest.mark.parametrize("size", [(640, 640), (448, 320)], ids=str)
def test_layers_agree_with_onnxruntime(size, prefix, impl):
    x, expected = tensors(size)[prefix]
    layer = layer_class(state(), prefix).from_state_dict(state(), prefix)
    assert x.shape[2:] == (size[0] // 32, size[1] // 32)
    assert relative_error(layer(x, impl), expected) <= LIMIT


def test_there_are_no_other_attention_layers():
    found = {prefix: layer.__name__ for prefix, layer in attention_layers(state()).items()}
    assert found == {"model.10": "C2PSA", "model.22": "C3k2"}


@pytest.mark.parametrize("with_onnxruntime", [False, True])
def test_infer_on_a_picture(tmp_path, monkeypatch, with_onnxruntime):
    from numba_psa.cli import app
    from numba_psa.nn.yolo.detector import Detector

    scene().save(tmp_path / "scene.png")
    x, y = tensors((448, 640))["model.10"]  # what the longer side 640 makes of 600×420
    if with_onnxruntime:  # as for a network that is none of ours

        def refuse(*_, **__):
            raise WeightsError("no detector")

        monkeypatch.setattr(Detector, "from_state_dict", refuse)
    else:
        monkeypatch.setitem(sys.modules, "onnxruntime", None)
    arguments = ["--input", tmp_path / "scene.png", "--output", tmp_path / "y.npy", "--heatmap", tmp_path / "map.png"]
    result = CliRunner().invoke(app, ["infer", "--weights", str(YOLO26N), *map(str, arguments), "--query", "9,5"])
    assert result.exit_code == 0, result.output
    assert ("by onnxruntime" if with_onnxruntime else "through yolo26n up to model.9") in result.output
    assert relative_error(np.load(tmp_path / "y.npy"), y) <= LIMIT
    assert Image.open(tmp_path / "map.png").size == (640, 448)
    assert x.shape[2:] == (14, 20)
