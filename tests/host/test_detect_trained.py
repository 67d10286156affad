"""Boxes of trained detectors on photographs and drawn scenes: YOLO26n against onnxruntime, YOLO11n against PyTorch.

Weights and photographs come from `scripts/fetch_models.sh` and are never committed. The YOLO26n finds barcodes of books, the
YOLO11n bright balls.
"""

import json
import re
from functools import cache
from pathlib import Path

import numpy as np
import pytest
from detect_scenes import DRAWN, MODELS, PHOTOGRAPHS, image, own_letterbox
from PIL import Image
from typer.testing import CliRunner

from numba_psa.cli import app
from numba_psa.nn import onnx_graph, picture, yolo
from numba_psa.nn.yolo_pictures import detect

YOLO26N, YOLO11N = MODELS / "yolo26n.onnx", MODELS / "yolo11n.safetensors"
REFERENCE = json.loads((Path(__file__).parents[1] / "data" / "yolo11n_boxes.json").read_text())
TORCH, TORCH_CONF = REFERENCE["boxes"], REFERENCE["conf"]
CONF = 1e-3
PIXELS, SCORE = 0.5, 0.005
"""How far a box, in pixels of the picture, and its score may be from what onnxruntime gives."""

LINE = r"the whole: ([\d.]+) ms; onnxruntime: ([\d.]+) ms, ([\d.]+) times ours \(\d+ threads each\)"

pytestmark = pytest.mark.skipif(not YOLO11N.exists(), reason="no trained weights: bash scripts/fetch_models.sh")


@cache
def graph():
    return onnx_graph.parse(YOLO26N, YOLO26N.read_bytes())


@cache
def model(path=YOLO26N):
    return yolo.load(path)


def by_onnxruntime(x):
    """[n, 6] x1, y1, x2, y2, score, class of the ONNX graph, end to end, in pixels of x."""
    (rows,) = onnx_graph.tensors(graph(), YOLO26N, ["output0"], x)
    return rows[0]


def judge_same(found, rows, pixels=PIXELS, score=SCORE, conf=CONF):
    """Each box surer than conf by more than `score` has a partner of its class, of those found and of those expected."""
    ours = np.column_stack((found.xyxy, found.scores, found.classes))
    for first, second in ((ours, rows), (rows, ours)):
        waiting = second.copy()
        for row in first[first[:, 4] > conf + score]:
            near = (np.abs(waiting[:, :4] - row[:4]).max(axis=1) <= pixels) & (np.abs(waiting[:, 4] - row[4]) <= score)
            near = np.flatnonzero(near & (waiting[:, 5] == row[5]))
            assert near.size, f"{row} has no partner among\n{second[:8]}"
            waiting = np.delete(waiting, near[0], axis=0)


@pytest.mark.parametrize("imgsz", [640, 320])
@pytest.mark.parametrize("name", [*PHOTOGRAPHS, *DRAWN])
def test_yolo26n_gives_the_boxes_of_onnxruntime(name, imgsz):
    found = detect(model(), image(name), imgsz=imgsz, conf=CONF)
    letterbox = picture.Letterbox.fit(image(name).size, imgsz)
    rows = by_onnxruntime(picture.network_input(letterbox.apply(image(name))))
    rows[:, :4] = letterbox.to_picture(rows[:, :4])
    judge_same(found, rows[rows[:, 4] > CONF], pixels=0.02, score=1e-4)  # the very same input: nothing but rounding

    x, back = own_letterbox(image(name), imgsz)
    rows = back(by_onnxruntime(x))
    judge_same(found, rows[rows[:, 4] > CONF])


@pytest.mark.parametrize("name", DRAWN)
def test_barcodes_are_found(name):
    """Else the test above would compare nothing but noise."""
    assert len(detect(model(), image(name))) > 0


@pytest.mark.parametrize("name", TORCH)
def test_yolo11n_gives_the_boxes_of_pytorch(name):
    """The head's output by PyTorch, through NMS by its definition: written down by `scripts/reference_yolo11_boxes.py`."""
    rows = np.array(TORCH[name])
    assert rows[:, 4].min() > TORCH_CONF
    judge_same(detect(model(YOLO11N), image(name), conf=TORCH_CONF), rows, conf=TORCH_CONF)


def test_a_model_is_called_with_a_file():
    path = MODELS / "photographs" / "coffee.png"
    found, expected = model(YOLO11N)(str(path), conf=0.3), detect(model(YOLO11N), path, conf=0.3)
    np.testing.assert_array_equal(found.xyxy, expected.xyxy)
    assert found.labels == ["item"] * len(expected) != []


def test_the_command(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in DRAWN:
        image(name).save(f"{name}.png")
    (tmp_path / "broken.jpg").write_bytes(b"")
    names = [f"{name}.png" for name in DRAWN]
    options = ["--weights", str(YOLO26N), "--json", "boxes.json", "--out", "seen", "--imgsz", "320"]
    result = CliRunner().invoke(app, ["detect", *names, "broken.jpg", *options])
    assert result.exit_code == 1
    assert len(result.stderr.splitlines()) == 1
    found = json.loads((tmp_path / "boxes.json").read_text())["images"]
    assert [one["image"] for one in found] == [*names, "broken.jpg"]
    for name, one in zip(DRAWN, found, strict=False):
        assert one["boxes"] == detect(model(), image(name), imgsz=320).as_json()
        with Image.open(tmp_path / "seen" / f"{name}.png") as seen:
            assert seen.size == image(name).size


def test_a_profile_compares_with_onnxruntime(tmp_path):
    image(next(iter(DRAWN))).save(tmp_path / "scene.png")
    arguments = ["detect", str(tmp_path / "scene.png"), "--weights", str(YOLO26N), "--profile", "--imgsz", "160"]
    *_, last = CliRunner().invoke(app, arguments, catch_exceptions=False).stdout.splitlines()
    whole, theirs, ratio = map(float, re.fullmatch(LINE, last).groups())
    assert ratio == pytest.approx(theirs / whole, abs=0.1 * ratio + 0.1)
