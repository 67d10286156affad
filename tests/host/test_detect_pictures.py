"""Pictures into a network and boxes out of it: reading, letterbox, NMS, and the way there and back."""

import io

import numpy as np
import pytest
from detect_judges import brute_force
from detectors import COLOURS, NAMES, ColourDetector
from hypothesis import example, given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from PIL import Image, ImageDraw

from numba_psa.errors import NumbaPSAError, ParameterError, ShapeError
from numba_psa.nn import picture
from numba_psa.nn.yolo_pictures import Boxes, annotated, decoded, detect, final, nms

SIDES = st.integers(1, 5000)
SIZES = st.tuples(SIDES, SIDES)
IMGSZ = st.integers(1, 40).map(lambda count: 32 * count)
extremes = [((1, 5000), 640), ((20000, 10), 640), ((1, 1), 32), ((640, 640), 640), ((33, 1000), 32), ((427, 640), 320)]


def with_extremes(test):
    for size, imgsz in extremes:
        test = example(size=size, imgsz=imgsz)(test)
    return given(size=SIZES, imgsz=IMGSZ)(test)


# ---- reading ----------------------------------------------------------------------------------------------------------
PIXELS = np.random.default_rng(0).integers(0, 256, (5, 7, 3), np.uint8)
GREYS = np.random.default_rng(1).integers(0, 256, (5, 7), np.uint8)
FINE = np.random.default_rng(2).integers(0, 2**16, (5, 7), np.uint16)
"""Of 16 bits; what is white, 65535, is 257·255."""


def saved(image, kind="PNG", **options):
    file = io.BytesIO()
    image.save(file, kind, **options)
    return file.getvalue()


def read(tmp_path, content):
    (tmp_path / "picture").write_bytes(content)
    image = picture.read(tmp_path / "picture")
    assert image.mode == "RGB"
    return np.asarray(image)


ORIENTED = {  # EXIF 2.3, tag 0x0112: which side of what is stored is the top, and which the left, of what was seen
    1: lambda a: a,
    2: lambda a: a[:, ::-1],
    3: lambda a: a[::-1, ::-1],
    4: lambda a: a[::-1],
    5: lambda a: a.swapaxes(0, 1),
    6: lambda a: np.rot90(a, -1),
    7: lambda a: a[::-1, ::-1].swapaxes(0, 1),
    8: lambda a: np.rot90(a, 1),
}


@pytest.mark.parametrize("orientation", ORIENTED)
@pytest.mark.parametrize("kind", ["PNG", "TIFF", "WEBP"])
def test_pictures_are_turned_as_exif_says(tmp_path, orientation, kind):
    exif = Image.Exif()
    exif[0x0112] = orientation
    options = {"lossless": True} if kind == "WEBP" else {}
    content = saved(Image.fromarray(PIXELS), kind, exif=exif, **options)
    np.testing.assert_array_equal(read(tmp_path, content), ORIENTED[orientation](PIXELS))


def greys(values):
    return np.repeat(values[..., None], 3, axis=2)


def alpha(image):
    image.putalpha(Image.fromarray(GREYS))
    return image


STORED = {
    "RGB": (lambda: saved(Image.fromarray(PIXELS)), PIXELS),
    "RGBA": (lambda: saved(alpha(Image.fromarray(PIXELS))), PIXELS),
    "grey": (lambda: saved(Image.fromarray(GREYS)), greys(GREYS)),
    "grey and alpha": (lambda: saved(alpha(Image.fromarray(GREYS))), greys(GREYS)),
    "black and white": (lambda: saved(Image.fromarray(GREYS > 99)), greys(np.uint8(255) * (GREYS > 99))),
    "palette": (lambda: saved(Image.fromarray(PIXELS).quantize(64)), PIXELS),
    "16 bits": (lambda: saved(Image.fromarray(FINE)), greys(FINE // 257)),
    "16 bits, TIFF": (lambda: saved(Image.fromarray(FINE), "TIFF"), greys(FINE // 257)),
    "16 bits, PGM": (lambda: b"P5 7 5 65535\n" + FINE.astype(">u2").tobytes(), greys(FINE // 257)),
    "32 bits": (lambda: saved(Image.fromarray(FINE.astype(np.int32)), "TIFF"), greys(FINE // 257)),
    "CMYK": (lambda: saved(Image.fromarray(255 - np.dstack((PIXELS, PIXELS[..., :1] | 255)), "CMYK"), "TIFF"), PIXELS),
    "animation": (
        lambda: saved(Image.fromarray(GREYS), "GIF", save_all=True, append_images=[Image.fromarray(255 - GREYS)]),
        greys(GREYS),
    ),
}


@pytest.mark.filterwarnings("ignore:'mode' parameter is deprecated")
@pytest.mark.parametrize("kind", STORED)
def test_all_kinds_of_pixels(tmp_path, kind):
    content, expected = STORED[kind]
    np.testing.assert_array_equal(read(tmp_path, content()), expected)


def bomb():
    """A PNG that says it has 60000×60000 pixels."""
    content = bytearray(saved(Image.new("1", (8, 8))))
    content[16:24] = (60000).to_bytes(4, "big") * 2
    import zlib

    content[29:33] = zlib.crc32(content[12:29]).to_bytes(4, "big")
    return bytes(content)


BROKEN = {
    "empty": lambda: b"",
    "text": lambda: b"no picture at all",
    "cut": lambda: saved(Image.fromarray(PIXELS).resize((300, 200)), "JPEG")[:-1000],
    "cut PNG": lambda: saved(Image.fromarray(PIXELS))[:60],
    "head alone": lambda: saved(Image.fromarray(PIXELS), "JPEG")[:20],
    "bomb": bomb,
    "floats": lambda: saved(Image.fromarray(GREYS.astype(np.float32)), "TIFF"),
    "negative": lambda: saved(Image.fromarray(GREYS.astype(np.int32) - 1000), "TIFF"),
}


@pytest.mark.parametrize("kind", BROKEN)
def test_broken_pictures_are_one_error_that_names_them(tmp_path, kind):
    (tmp_path / "picture").write_bytes(BROKEN[kind]())
    with pytest.raises(ParameterError, match="picture is no picture"):
        picture.read(tmp_path / "picture")


@given(st.data())
def test_damage_is_no_other_error(data):
    kind = data.draw(st.sampled_from(["PNG", "JPEG", "GIF", "TIFF", "WEBP", "BMP", "PPM"]))
    content = bytearray(saved(Image.fromarray(PIXELS), kind))
    for _ in range(data.draw(st.integers(1, 4))):
        content[data.draw(st.integers(0, len(content) - 1))] = data.draw(st.integers(0, 255))
    import tempfile

    with tempfile.NamedTemporaryFile() as file:
        file.write(content)
        file.flush()
        try:
            assert picture.read(file.name).mode == "RGB"
        except ParameterError as error:
            assert file.name in str(error)  # noqa: PT017 - it may also be read


# ---- letterbox --------------------------------------------------------------------------------------------------------
def judge_fit(size, imgsz, letterbox):
    for axis, (side, inner, offset, frame) in enumerate(
        zip(size, letterbox.inner, letterbox.offset, letterbox.frame, strict=True)
    ):
        assert frame % 32 == 0, axis
        assert 1 <= inner <= frame < inner + 32
        assert abs(inner - side * imgsz / max(size)) <= 0.5 or inner == 1
        assert 0 <= frame - inner - 2 * offset <= 1  # in the middle; what is odd comes after
    assert max(letterbox.inner) == imgsz == max(letterbox.frame)


@with_extremes
def test_a_letterbox_is_as_small_as_can_be(size, imgsz):
    judge_fit(size, imgsz, picture.Letterbox.fit(size, imgsz))


def judge_there_and_back(size, letterbox, boxes):
    """Corners of the picture and points inside it come back, and what is outside it comes to its edge."""
    expected = np.concatenate((boxes, np.roll(boxes, 2, axis=1))) * np.tile(size, 2)
    ratio = np.array(letterbox.inner) / size
    there = np.tile(letterbox.offset, 2) + expected * np.tile(ratio, 2)
    np.testing.assert_allclose(letterbox.to_picture(there), expected, rtol=0, atol=1e-9 * max(size))
    edges = np.array([letterbox.offset, np.add(letterbox.offset, letterbox.inner)]).reshape(1, 4)
    np.testing.assert_allclose(letterbox.to_picture(edges), [[0, 0, *size]], atol=1e-9 * max(size))
    far = np.array([[-1e6, -50, 1e6, 1e5]])
    np.testing.assert_array_equal(letterbox.to_picture(far), [[0, 0, *size]])
    grey = edges + np.array([-1, -1, 1, 1])
    np.testing.assert_array_equal(letterbox.to_picture(grey), [[0, 0, *size]])


POINTS = arrays(np.float64, (3, 4), elements=st.floats(0, 1), fill=st.nothing())


@given(SIZES, IMGSZ, POINTS)
@example((1, 5000), 640, np.full((3, 4), 0.5))
def test_boxes_come_back_to_where_they_were(size, imgsz, boxes):
    judge_there_and_back(size, picture.Letterbox.fit(size, imgsz), boxes)


def judge_apply(fit):
    """The picture stands where the letterbox says, and 114 everywhere else."""
    for size, imgsz in (((50, 30), 64), ((30, 50), 96), ((64, 64), 64), ((7, 100), 32), ((100, 3), 64)):
        letterbox = fit(size, imgsz)
        image = Image.new("RGB", size, (250, 10, 20))
        pixels = np.asarray(letterbox.apply(image))
        assert pixels.shape == (*letterbox.frame[::-1], 3)
        (left, top), (width, height) = letterbox.offset, letterbox.inner
        inside = np.zeros(pixels.shape[:2], bool)
        inside[top : top + height, left : left + width] = True
        np.testing.assert_array_equal(pixels[inside], np.broadcast_to((250, 10, 20), (inside.sum(), 3)))
        np.testing.assert_array_equal(pixels[~inside], 114)


def test_the_frame_is_grey():
    judge_apply(picture.Letterbox.fit)


def test_a_given_frame():
    letterbox = picture.Letterbox.fit((100, 50), 640, (64, 96))
    assert (letterbox.inner, letterbox.offset, letterbox.frame) == ((64, 32), (0, 32), (64, 96))
    assert picture.framed(Image.new("RGB", (100, 50)), 640, (96, 64)).size == (64, 96)


def test_the_network_sees_rgb_from_0_to_1():
    x = picture.network_input(Image.fromarray(PIXELS))
    np.testing.assert_array_equal(x, (PIXELS / np.float32(255)).transpose(2, 0, 1)[None])
    assert x.flags.c_contiguous


# ---- NMS --------------------------------------------------------------------------------------------------------------
@st.composite
def candidates(draw):
    """Boxes on a coarse grid, so that they touch, coincide, contain each other and are empty; scores with ties."""
    count = draw(st.integers(0, 12))
    corners = draw(arrays(np.int64, (count, 4), elements=st.integers(0, 6), fill=st.nothing()))
    xyxy = np.concatenate((np.minimum(corners[:, :2], corners[:, 2:]), np.maximum(corners[:, :2], corners[:, 2:])), axis=1)
    scores = draw(arrays(np.int64, count, elements=st.integers(1, 5), fill=st.nothing())) / 5
    classes = draw(arrays(np.int64, count, elements=st.integers(0, 1), fill=st.nothing()))
    return xyxy.astype(np.float32), scores.astype(np.float32), classes


THRESHOLDS = st.sampled_from([0, 0.25, 1 / 3, 0.5, 0.7, 1])


def judge_nms(suppress, found, iou, most):
    np.testing.assert_array_equal(suppress(*found, iou, most), brute_force(*found, iou, most))


@given(candidates(), THRESHOLDS, st.sampled_from([0, 1, 3, 300]))
@example((np.array([[0, 0, 2, 1], [1, 0, 2, 1]], np.float32), np.ones(2, np.float32), np.zeros(2, int)), 0.5, 300)
def test_nms_is_its_definition(found, iou, most):
    judge_nms(nms, found, iou, most)


def test_nms_of_many():
    rng = np.random.default_rng(0)
    corner, size = rng.uniform(0, 300, (400, 2)), rng.uniform(5, 60, (400, 2))
    found = np.concatenate((corner, corner + size), axis=1), rng.uniform(0, 1, 400), rng.integers(0, 2, 400)
    judge_nms(nms, found, 0.3, 300)
    assert 50 < len(nms(*found, 0.3)) < 300


def test_heads_are_cut_at_the_score():
    head = np.array([[10, 20, 4, 8, 0.1, 0.6], [10, 20, 4, 8, 0.25, 0.2], [1, 2, 2, 4, 0.5, 0.3]], np.float32).T
    xyxy, scores, classes = decoded(head, 0.25)
    np.testing.assert_array_equal(xyxy, [[8, 16, 12, 24], [0, 0, 2, 4]])
    np.testing.assert_array_equal(scores, np.array([0.6, 0.5], np.float32))
    np.testing.assert_array_equal(classes, [1, 0])
    rows = np.array([[0, 1, 2, 3, 0.9, 2], [4, 5, 6, 7, 0.25, 1]], np.float32)
    xyxy, scores, classes = final(rows, 0.25)
    np.testing.assert_array_equal(xyxy, [[0, 1, 2, 3]])
    assert (scores.tolist(), classes.tolist()) == ([np.float32(0.9)], [2])


# ---- the whole way ----------------------------------------------------------------------------------------------------
def scene(size, **boxes):
    """A grey picture with rectangles in the colours of classes: c0=(x1, y1, x2, y2) and so on, right and bottom outside."""
    image = Image.new("RGB", size, (90, 90, 90))
    for name, (x1, y1, x2, y2) in boxes.items():
        ImageDraw.Draw(image).rectangle((x1, y1, x2 - 1, y2 - 1), fill=COLOURS[int(name[1])])
    return image


def judge_detect(find, size, imgsz, end2end, image=None, box=None):
    """A rectangle is found where it was drawn, but for what one pixel of the frame is."""
    width, height = size
    box = box or (width // 4, height // 5, width // 4 + max(width // 2, 1), height // 5 + max(height // 3, 1))
    found = find(ColourDetector(end2end), image or scene(size, c1=box), imgsz=imgsz)
    assert found.size == size
    assert found.labels == ["зелёная"]
    assert found.classes.tolist() == [1]
    assert found.scores.tolist() == [np.float32(0.8)]
    pixel = np.tile(np.array(size) / picture.Letterbox.fit(size, imgsz).inner, 2)
    assert (np.abs(found.xyxy[0] - box) <= np.maximum(pixel, 1) * 0.75 + 1e-3).all(), (found.xyxy[0], box)


FOUND = [((640, 480), 640), ((480, 641), 640), ((100, 77), 640), ((1999, 1500), 320), ((300, 40), 640), ((40, 301), 96)]


@pytest.mark.parametrize("end2end", [True, False])
@pytest.mark.parametrize(("size", "imgsz"), FOUND)
def test_boxes_are_in_pixels_of_the_picture(size, imgsz, end2end):
    judge_detect(detect, size, imgsz, end2end)


@pytest.mark.parametrize("size", [(1, 1), (1, 5000), (20000, 10), (32, 32)])
def test_extreme_pictures(size):
    found = detect(ColourDetector(), Image.new("RGB", size, COLOURS[2]))
    np.testing.assert_allclose(found.xyxy, [[0, 0, *size]])
    assert found.labels == ["blue"]


def test_files_and_lists(tmp_path):
    image = scene((200, 100), c0=(10, 20, 60, 70), c2=(100, 10, 190, 90))
    image.save(tmp_path / "a.png")
    model = ColourDetector(end2end=False)
    one = detect(model, tmp_path / "a.png")
    assert one.labels == ["red thing", "blue"]
    assert one.scores.tolist() == [np.float32(0.9), np.float32(0.7)]
    both = detect(model, [str(tmp_path / "a.png"), image])
    for found in both:
        np.testing.assert_array_equal(found.xyxy, one.xyxy)
    assert detect(model, []) == []
    assert len(detect(model, image, conf=0.8)) == 1
    assert detect(model, image, most=1).labels == ["red thing"]
    assert len(detect(model, image, iou=1)) == 4
    assert len(detect(ColourDetector(), image, conf=1)) == 0


def test_json():
    found = detect(ColourDetector(), scene((640, 320), c0=(10, 20, 60, 70)))
    assert found.as_json() == [{"xyxy": [10.0, 20.0, 60.0, 70.0], "score": 0.9, "class": 0, "name": "red thing"}]


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"imgsz": 0}, ShapeError, "imgsz must be at least 32, got 0"),
        ({"imgsz": -32}, ShapeError, "at least 32"),
        ({"imgsz": 33}, ShapeError, "32 or 64 would do"),
        ({"imgsz": 100_000}, ShapeError, "8192 would do"),
        ({"imgsz": 640.0}, TypeError, "must be an int"),
        ({"conf": float("nan")}, ParameterError, "conf must be 0 to 1, got nan"),
        ({"conf": -0.1}, ParameterError, "conf must be 0 to 1"),
        ({"iou": 1.5}, ParameterError, "iou must be 0 to 1"),
        ({"most": -1}, ShapeError, "most must be at least 0"),
    ],
)
def test_options_that_make_no_sense(options, error, message):
    model = ColourDetector()
    with pytest.raises(error, match=message) as caught:
        detect(model, Image.new("RGB", (9, 9)), **options)
    assert isinstance(caught.value, NumbaPSAError)
    assert not model.seen


def test_a_network_that_gives_nan_is_told():
    model = ColourDetector()
    model.predict = lambda x: np.full((1, 2, 6), np.nan, np.float32)
    with pytest.raises(ParameterError, match="NaN"):
        detect(model, Image.new("RGB", (9, 9)))


def test_annotated_pictures():
    image = scene((300, 200), c0=(50, 60, 150, 160))
    boxes = Boxes(
        np.array([[50, 60, 150, 160], [0, 0, 300, 200], [299, 199, 300, 200]], np.float32),
        np.array([0.9, 0.5, 0.3], np.float32),
        np.array([0, 1, 77]),
        NAMES,
        image.size,
    )
    before = np.asarray(image).copy()
    drawn = np.asarray(annotated(image, boxes))
    np.testing.assert_array_equal(np.asarray(image), before)
    assert drawn.shape == before.shape
    assert (drawn[100, 50] != before[100, 50]).any()  # a side of the first box
    np.testing.assert_array_equal(drawn[130, 100], before[130, 100])  # its middle
    assert boxes.labels[2] == "77"
