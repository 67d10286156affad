"""Pictures in and out, with Pillow: a network's input from an image file, and where a token looks drawn over it."""

from __future__ import annotations

import io
import warnings
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import Any

import numpy as np

from numba_psa.errors import BackendUnavailableError, ParameterError

GREY = 114
"""What these networks are trained to see around a picture that does not fill its frame."""
STRIDE = 32
"""Pixels of the picture along one side of a token."""
_COLOURS = np.array([(0, 0, 4), (87, 16, 110), (188, 55, 84), (249, 142, 9), (252, 255, 164)], np.float64)
"""Dark to bright, with lightness that grows evenly."""


def pillow() -> Any:
    """The package PIL with its parts; BackendUnavailableError where it is not installed."""
    try:
        import PIL.Image
        import PIL.ImageDraw
        import PIL.ImageOps
    except ImportError as error:
        raise BackendUnavailableError("pictures need pillow: pip install 'numba-psa[models]'") from error
    return PIL


def read(path: str | PathLike[str]) -> Any:
    """The picture as RGB, turned as its EXIF data says. Raises ParameterError where it is none, OSError."""
    path = Path(path)
    content = path.read_bytes()
    pil = pillow()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # what is damaged is an error, or can be seen past
            with pil.Image.open(io.BytesIO(content)) as image:
                return rgb(image)
    except Exception as error:  # Pillow's readers raise whatever a damaged file makes them trip over
        text = f"{type(error).__name__}: {error}" if content else "it is empty"
        raise ParameterError(f"{path} is no picture that can be read: {text}") from error


def rgb(image: Any) -> Any:
    """A Pillow image as RGB, upright; 16 bits become 8, transparency is dropped, of an animation the first picture stays.

    Raises ParameterError where the values do not say what is white.
    """
    pil = pillow()
    image = pil.ImageOps.exif_transpose(image)
    if image.mode.startswith(("I", "F")):
        values = np.asarray(image)
        if image.mode == "F" or not 0 <= values.min() <= values.max() < 2**16:
            raise ParameterError(f"pixels of mode {image.mode} do not say what is white: convert them to 8 or 16 bits")
        image = pil.Image.fromarray((values // 257).astype(np.uint8))
    return image.convert("RGB")


@dataclass(frozen=True)
class Letterbox:
    """A picture in a frame: resized to `inner`, its upper left corner at `offset`; each (horizontal, vertical), in pixels.

    A point moves as x_frame = x·inner/size + offset. Rounding makes the two ratios inner/size differ a little.
    """

    size: tuple[int, int]
    inner: tuple[int, int]
    offset: tuple[int, int]
    frame: tuple[int, int]

    @classmethod
    def fit(cls, size: tuple[int, int], longest: int, frame: tuple[int, int] | None = None) -> Letterbox:
        """`size` in the middle of `frame`, as large as it gets with its proportions kept, but not thinner than a pixel.

        Without a frame, the longer side becomes `longest`, and the frame what then remains to multiples of STRIDE.
        """
        if frame is None:
            ratio = longest / max(size)
            frame = tuple(-(-max(round(side * ratio), 1) // STRIDE) * STRIDE for side in size)
        else:
            ratio = min(whole / side for whole, side in zip(frame, size, strict=True))
        inner = tuple(max(round(side * ratio), 1) for side in size)
        return cls(size, inner, tuple((whole - side) // 2 for whole, side in zip(frame, inner, strict=True)), frame)

    def apply(self, image: Any) -> Any:
        """The picture, RGB, in its frame of grey; bilinear, over all pixels that one new pixel covers."""
        pil = pillow()
        result = pil.Image.new("RGB", self.frame, (GREY,) * 3)
        result.paste(image.resize(self.inner, pil.Image.Resampling.BILINEAR), self.offset)
        return result

    def to_picture(self, xyxy: np.ndarray) -> np.ndarray:
        """Boxes `[…, 4]` (x1, y1, x2, y2) in pixels of the frame, as pixels of the picture, clipped to it; float64."""
        size, inner, offset = (np.tile(np.array(pair, np.float64), 2) for pair in (self.size, self.inner, self.offset))
        return np.clip((xyxy - offset) * (size / inner), 0, size)


def framed(image: Any, longest: int, frame: tuple[int, int] | None = None) -> Any:
    """The picture in the middle of a grey frame of (rows, columns), see `Letterbox.fit`."""
    return Letterbox.fit(image.size, longest, frame and frame[::-1]).apply(image)


def network_input(image: Any) -> np.ndarray:
    """`[1, 3, H, W]` float32 in [0, 1]."""
    return np.ascontiguousarray(np.asarray(image, np.float32).transpose(2, 0, 1)[None] / 255)


def heatmap(weights: np.ndarray, query: tuple[int, int], image: Any = None) -> Any:
    """The attention map `[H, W]` in colour, brightest at its largest weight, the query token framed in white.

    Over `image` in grey where there is one; else STRIDE pixels for each token.
    """
    pil = pillow()
    height, width = weights.shape
    size = image.size if image is not None else (width * STRIDE, height * STRIDE)
    level = np.asarray(weights / max(weights.max(), np.finfo(np.float64).tiny))
    stops = np.linspace(0, 1, len(_COLOURS))
    colours = np.stack([np.interp(level, stops, channel) for channel in _COLOURS.T], axis=2)
    result = _cells(colours, size)
    if image is not None:
        opacity = _cells(255 * (0.15 + 0.7 * level), size)
        result = pil.Image.composite(result, image.convert("L").convert("RGB"), opacity)
    x, y = size[0] / width, size[1] / height
    corners = query[1] * x, query[0] * y, (query[1] + 1) * x - 1, (query[0] + 1) * y - 1
    pil.ImageDraw.Draw(result).rectangle(corners, outline=(255, 255, 255), width=2)
    return result


def _cells(values: np.ndarray, size: tuple[int, int]) -> Any:
    """A picture of `size` in which each token is a rectangle of one colour."""
    pil = pillow()
    return pil.Image.fromarray(values.round().astype(np.uint8)).resize(size, pil.Image.Resampling.NEAREST)
