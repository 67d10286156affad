"""Pictures to find things in, and a letterbox written from its definition alone.

The photographs come from `scripts/fetch_models.sh`.
"""

from functools import cache
from pathlib import Path

import numpy as np
from drawn import balls
from PIL import Image, ImageDraw

MODELS = Path(__file__).parents[2] / ".models"
PHOTOGRAPHS = "astronaut.png", "chelsea.png", "coffee.png", "rocket.jpg"


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
    image = Image.open(MODELS / "photographs" / photograph).convert("RGB")
    label = cover((260, 190), (8, 8), 240, 4)
    image.paste(label, (image.width - label.width - 40, image.height - label.height - 60))
    return image


BALLS = "balls"
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
    if name == BALLS:
        return Image.fromarray((balls(417, 600)[0].transpose(1, 2, 0) * 255).round().astype(np.uint8))
    return DRAWN[name]() if name in DRAWN else Image.open(MODELS / "photographs" / name).convert("RGB")


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
