"""Pictures in and out, with Pillow: a network's input from an image file, and where a token looks drawn over it."""

from __future__ import annotations

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


def _pillow() -> Any:
    try:
        import PIL.Image
        import PIL.ImageDraw
        import PIL.ImageOps
    except ImportError as error:
        raise BackendUnavailableError("pictures need pillow: pip install 'numba-psa[models]'") from error
    return PIL


def read(path: Path) -> Any:
    """The picture as RGB, turned as its EXIF data says. Raises ParameterError where it is none."""
    pil = _pillow()
    try:
        with pil.Image.open(path) as image:
            return pil.ImageOps.exif_transpose(image).convert("RGB")
    except (pil.UnidentifiedImageError, pil.Image.DecompressionBombError, SyntaxError, ValueError) as error:
        raise ParameterError(f"{path} is no picture: {error}") from error


def framed(image: Any, longest: int, frame: tuple[int, int] | None = None) -> Any:
    """The picture, resized with its proportions kept, in the middle of a grey frame of (rows, columns).

    Without `frame`, its longer side becomes `longest` and the frame is what then remains to multiples of STRIDE.
    """
    pil = _pillow()
    width, height = image.size
    if frame is None:
        ratio = longest / max(width, height)
        frame = tuple(-(-max(round(side * ratio), 1) // STRIDE) * STRIDE for side in (height, width))
    else:
        ratio = min(frame[0] / height, frame[1] / width)
    size = max(round(width * ratio), 1), max(round(height * ratio), 1)
    result = pil.Image.new("RGB", frame[::-1], (GREY,) * 3)
    resized = image.resize(size, pil.Image.Resampling.BILINEAR)
    result.paste(resized, ((frame[1] - size[0]) // 2, (frame[0] - size[1]) // 2))
    return result


def network_input(image: Any) -> np.ndarray:
    """`[1, 3, H, W]` float32 in [0, 1]."""
    return np.ascontiguousarray(np.asarray(image, np.float32).transpose(2, 0, 1)[None] / 255)


def heatmap(weights: np.ndarray, query: tuple[int, int], image: Any = None) -> Any:
    """The attention map `[H, W]` in colour, brightest at its largest weight, the query token framed in white.

    Over `image` in grey where there is one; else STRIDE pixels for each token.
    """
    pil = _pillow()
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
    pil = _pillow()
    return pil.Image.fromarray(values.round().astype(np.uint8)).resize(size, pil.Image.Resampling.NEAREST)
