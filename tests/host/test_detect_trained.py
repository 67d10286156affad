"""Boxes of trained detectors: YOLO26n against onnxruntime, on photographs and drawn covers; YOLO11n with NMS by definition.

Weights and photographs come from `scripts/fetch_models.sh` and are never committed. The YOLO26n finds barcodes of books, the
YOLO11n bright balls.
"""

import json
from functools import cache
from pathlib import Path

import numpy as np
import pytest
from detect_judges import brute_force
from PIL import Image, ImageDraw
from typer.testing import CliRunner

from numba_psa.cli import app
from numba_psa.nn import onnx_graph, picture, yolo
from numba_psa.nn.yolo_pictures import detect

MODELS = Path(__file__).parents[2] / ".models"
YOLO26N, YOLO11N = MODELS / "yolo26n.onnx", MODELS / "yolo11n.safetensors"
PHOTOGRAPHS = "astronaut.png", "chelsea.png", "coffee.png", "rocket.jpg"
CONF = 1e-3
PIXELS, SCORE = 0.5, 0.005
"""How far a box, in pixels of the picture, and its score may be from what onnxruntime gives."""

pytestmark = pytest.mark.skipif(not YOLO11N.exists(), reason="no trained weights: bash scripts/fetch_models.sh")


def cover(size, place, width, seed):
    """Part of a book cover: bars and digits under them on a white label, its upper left corner at `place`."""
    image = Image.new("RGB", size, (200, 190, 170))
    draw = ImageDraw.Draw(image)
    x, y = place
    draw.rectangle((x, y, x + width, y + 0.7 * width), fill=(255, 255, 255))
    rng, bar, end = np.random.default_rng(seed), x + 0.07 * width, x + 0.9 * width
    while bar < end:
        thick, gap = rng.integers(1, 4, 2) * width / 150
        draw.rectangle((bar, y + 0.07 * width, bar + thick - 1, y + 0.53 * width), fill=(0, 0, 0))
        bar += thick + gap
    draw.text((x + 0.07 * width, y + 0.56 * width), "9 783161 484100", fill=(0, 0, 0), font_size=0.09 * width)
    return image


def with_cover(photograph):
    """A photograph in which a part of a cover stands."""
    image = picture.read(MODELS / "photographs" / photograph)
    label = cover((260, 190), (8, 8), 240, 4)
    image.paste(label, (image.width - label.width - 40, image.height - label.height - 60))
    return image


DRAWN = {
    "cover": lambda: cover((600, 400), (150, 80), 300, 3),
    "upright": lambda: cover((500, 800), (60, 420), 380, 1),
    "small": lambda: cover((1400, 1000), (800, 300), 500, 2),
    "odd": lambda: cover((411, 333), (55, 62), 280, 7),
    "turned": lambda: cover((640, 480), (150, 80), 300, 1).rotate(5, Image.Resampling.BICUBIC, fillcolor=(90, 60, 40)),
    **{f"{name.split('.')[0]} with cover": lambda name=name: with_cover(name) for name in PHOTOGRAPHS},
}


@cache
def image(name):
    return DRAWN[name]() if name in DRAWN else picture.read(MODELS / "photographs" / name)


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


def resized(pixels, size):
    """A triangle filter as wide as what one new pixel covers, along rows and then columns, each rounded to 8 bits."""
    for axis, (new, old) in ((1, (size[0], pixels.shape[1])), (0, (size[1], pixels.shape[0]))):
        if new == old:
            continue
        scale = max(old / new, 1)
        centres = (np.arange(new) + 0.5) * old / new
        weights = np.maximum(1 - np.abs(np.arange(old) + 0.5 - centres[:, None]) / scale, 0)
        weights /= weights.sum(axis=1, keepdims=True)
        pixels = np.floor(np.moveaxis(np.tensordot(weights, pixels, (1, axis)), 0, axis) + 0.5)
    return pixels


def own_letterbox(image, imgsz):
    """(x, function back to the picture), written from the definition, without `picture`."""
    width, height = image.size
    ratio = imgsz / max(width, height)
    new_width, new_height = round(width * ratio), round(height * ratio)
    rows, columns = (32 * ((side + 31) // 32) for side in (new_height, new_width))
    top, left = (rows - new_height) // 2, (columns - new_width) // 2
    frame = np.full((rows, columns, 3), 114.0)
    frame[top : top + new_height, left : left + new_width] = resized(np.asarray(image, float), (new_width, new_height))

    def back(rows):
        rows = rows.astype(np.float64)
        for column, shift, ratio, end in (
            (0, left, new_width / width, width),
            (1, top, new_height / height, height),
            (2, left, new_width / width, width),
            (3, top, new_height / height, height),
        ):
            rows[:, column] = ((rows[:, column] - shift) / ratio).clip(0, end)
        return rows

    return (frame / 255).transpose(2, 0, 1)[None].astype(np.float32), back


def judge_same(found, rows, pixels=PIXELS, score=SCORE):
    """Each box surer than CONF by more than `score` has a partner of its class, of those found and of those expected."""
    ours = np.column_stack((found.xyxy, found.scores, found.classes))
    for first, second in ((ours, rows), (rows, ours)):
        waiting = second.copy()
        for row in first[first[:, 4] > CONF + score]:
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


@pytest.mark.parametrize("name", [*PHOTOGRAPHS, "small"])
def test_yolo11n_gives_what_nms_leaves_of_its_output(name):
    """The head's output, cut at conf, through the definition of NMS, and back to the picture with the letterbox above."""
    x, back = own_letterbox(image(name), 640)
    head = model(YOLO11N).predict(x)[0]
    head = head[:, head[4:].max(axis=0) > CONF]
    (x, y, width, height), scores = head[:4].astype(np.float64), head[4:]
    xyxy = np.stack((x - width / 2, y - height / 2, x + width / 2, y + height / 2), axis=1)
    kept = brute_force(xyxy, scores.max(axis=0), scores.argmax(axis=0), 0.7, 300)
    rows = back(np.column_stack((xyxy, scores.max(axis=0), scores.argmax(axis=0)))[kept])
    found = detect(model(YOLO11N), image(name), conf=CONF)
    judge_same(found, rows)
    assert len(found) > 0


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
