"""From a picture to the boxes of what a detector sees in it, in pixels of that picture."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from os import PathLike
from typing import Any

import numpy as np

from numba_psa.errors import ParameterError, ShapeError
from numba_psa.nn import picture
from numba_psa.shapes import check_count

IMGSZ = 640
CONF = 0.25
IOU = 0.7
MOST = 300
LARGEST = 8192
"""Of `imgsz`: on a square picture of this size, a YOLO26n takes 6.7 GiB."""


@dataclass(frozen=True, eq=False)
class Boxes:
    """What was found in one picture, the surest first.

    xyxy `[n, 4]` float32 (x1, y1, x2, y2) in pixels of the upright picture, inside it; scores `[n]` float32, 0 to 1;
    classes `[n]` int64; names of the classes; size (width, height) of the picture.
    """

    xyxy: np.ndarray
    scores: np.ndarray
    classes: np.ndarray
    names: Mapping[int, str]
    size: tuple[int, int]

    def __len__(self) -> int:
        return len(self.scores)

    @property
    def labels(self) -> list[str]:
        """The name of each box's class."""
        return [self.names.get(number, str(number)) for number in self.classes.tolist()]

    def as_json(self) -> list[dict[str, Any]]:
        """One object a box: xyxy, in thousandths of a pixel, score, class and name."""
        rows = zip(self.xyxy.tolist(), self.scores.tolist(), self.classes.tolist(), self.labels, strict=True)
        return [
            {"xyxy": [round(side, 3) for side in xyxy], "score": round(score, 6), "class": number, "name": name}
            for xyxy, score, number, name in rows
        ]


def detect(
    model: Any, pictures: Any, *, imgsz: int = IMGSZ, conf: float = CONF, iou: float = IOU, most: int = MOST
) -> Boxes | list[Boxes]:
    """The boxes that `model`, of `numba_psa.nn.yolo.load`, finds in a picture: a file, a Pillow image, or a list of these.

    The longer side of the picture is resized to `imgsz`, a multiple of the model's stride, and what remains to such a
    multiple is grey (`picture.Letterbox`). Boxes with score > conf are kept; where the model has no end-to-end head, of
    those `nms` keeps the ones that overlap none surer of their class by more than `iou`; of these the `most` surest.

    Raises ParameterError (no picture, a threshold out of range), ShapeError (imgsz), OSError, BackendUnavailableError.
    """
    check_options(model.stride, imgsz, conf, iou, most)
    if isinstance(pictures, list | tuple):
        return [detect(model, one, imgsz=imgsz, conf=conf, iou=iou, most=most) for one in pictures]
    image = picture.read(pictures) if isinstance(pictures, str | PathLike) else picture.rgb(pictures)
    letterbox = picture.Letterbox.fit(image.size, imgsz)
    output = model.predict(picture.network_input(letterbox.apply(image)))[0]
    if not np.isfinite(output).all():
        raise ParameterError("the network gives numbers that are NaN or infinite: its weights are no trained ones")
    xyxy, scores, classes = final(output, conf) if model.end2end else decoded(output, conf)
    kept = surest(scores, most) if model.end2end else nms(xyxy, scores, classes, iou, most)
    boxes = letterbox.to_picture(xyxy[kept]).astype(np.float32)
    return Boxes(boxes, scores[kept].astype(np.float32), classes[kept].astype(np.int64), model.names, image.size)


def check_options(stride: int, imgsz: int, conf: float, iou: float = IOU, most: int = MOST) -> None:
    """The errors of `detect` that depend on no picture."""
    check_count("imgsz", imgsz, stride)
    if imgsz % stride or imgsz > LARGEST:
        below = min(imgsz, LARGEST) // stride * stride
        fits = f"{below}" if imgsz > LARGEST else f"{below} or {below + stride}"
        raise ShapeError(f"imgsz must be a multiple of {stride} up to {LARGEST}, got {imgsz}: {fits} would do")
    for name, value in (("conf", conf), ("iou", iou)):
        if not 0 <= value <= 1:  # not so of NaN either
            raise ParameterError(f"{name} must be 0 to 1, got {value}")
    check_count("most", most, 0)


def final(output: np.ndarray, conf: float) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(xyxy, scores, classes) with score > conf of an end-to-end head, `[n, 6]` = x1, y1, x2, y2, score, class."""
    rows = output[output[:, 4] > conf]
    return rows[:, :4], rows[:, 4], rows[:, 5]


def decoded(output: np.ndarray, conf: float) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(xyxy, scores, classes) with score > conf, the class that of the highest score.

    output `[4 + nc, A]` = centre x, centre y, width, height, and the score of each class.
    """
    classes = output[4:].argmax(axis=0)
    scores = np.take_along_axis(output[4:], classes[None], axis=0)[0]
    sure = scores > conf
    centre, half = output[:2, sure].T, output[2:4, sure].T / 2
    return np.concatenate((centre - half, centre + half), axis=1), scores[sure], classes[sure]


def surest(scores: np.ndarray, most: int) -> np.ndarray:
    """Indices of the `most` highest scores, descending; of equal ones the first comes first."""
    return np.argsort(-scores, kind="stable")[:most]


def nms(xyxy: np.ndarray, scores: np.ndarray, classes: np.ndarray, iou: float = IOU, most: int = MOST) -> np.ndarray:
    """Indices of the boxes that are kept, the surest first: greedy non-maximum suppression in each class.

    In descending order of score, i is kept iff no j kept before has class_j = class_i and IoU(i, j) > iou, where
    IoU(a, b) = |a ∩ b| / |a ∪ b|, of areas (x2 − x1)·(y2 − y1), is 0 where the union is empty. It ends with `most` boxes.
    xyxy `[n, 4]`, scores and classes `[n]`.
    """
    order = surest(scores, len(scores))
    left, top, right, bottom = xyxy[order].astype(np.float64).T
    area, kind = (right - left) * (bottom - top), classes[order]
    waiting, kept = np.arange(len(order)), []
    while waiting.size and len(kept) < most:
        i, waiting = waiting[0], waiting[1:]
        kept.append(i)
        width = np.minimum(right[i], right[waiting]) - np.maximum(left[i], left[waiting])
        height = np.minimum(bottom[i], bottom[waiting]) - np.maximum(top[i], top[waiting])
        both = np.maximum(width, 0) * np.maximum(height, 0)
        # both / union > iou without the division, which an empty union does not allow
        waiting = waiting[(both <= iou * (area[i] + area[waiting] - both)) | (kind[waiting] != kind[i])]
    return order[kept]


def annotated(image: Any, boxes: Boxes) -> Any:
    """A copy of the RGB picture with the boxes drawn on it, in one colour a class, with name and score."""
    pil = picture.pillow()
    import PIL.ImageColor
    import PIL.ImageFont

    result = image.copy()
    draw = pil.ImageDraw.Draw(result)
    line = max(round(sum(image.size) / 800), 2)
    font = PIL.ImageFont.load_default(max(6 * line, 12))
    for (x1, y1, x2, y2), score, number, label in list(
        zip(boxes.xyxy, boxes.scores, boxes.classes, boxes.labels, strict=True)
    )[::-1]:
        # The golden angle keeps the hues of any number of classes apart.
        colour = PIL.ImageColor.getrgb(f"hsv({math.fmod(137.508 * number, 360):.0f},80%,95%)")
        draw.rectangle((x1, y1, x2, y2), outline=colour, width=line)
        text = f"{label} {score:.2f}"
        x, y = x1, max(y1 - font.size - 2 * line, 0)
        draw.rectangle(draw.textbbox((x + line, y), text, font), outline=colour, fill=colour, width=line)
        dark = np.dot(colour, (0.299, 0.587, 0.114)) < 128
        draw.text((x + line, y), text, fill=(255, 255, 255) if dark else (0, 0, 0), font=font)
    return result
