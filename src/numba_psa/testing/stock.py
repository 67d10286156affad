"""The shapes that are really used: the PSA attention of stock YOLO models."""

from __future__ import annotations

from dataclasses import dataclass

from numba_psa.shapes import PSAShape


@dataclass(frozen=True)
class StockModel:
    """The attention of a stock YOLO: heads and KEY_DIM of its PSA blocks, at stride 32 of the image."""

    models: tuple[str, ...]
    num_heads: int
    key_dim: int


STOCK_MODELS = (
    StockModel(("yolov10n", "yolo11n", "yolo26n"), 2, 32),
    StockModel(("yolov10s", "yolov10b", "yolov10l"), 4, 32),
    StockModel(("yolo11s", "yolo11m", "yolo11l", "yolo26s", "yolo26m", "yolo26l"), 4, 32),
    StockModel(("yolov10m",), 4, 36),
    StockModel(("yolov10x",), 5, 32),
    StockModel(("yolo11x", "yolo26x"), 6, 32),
)
STOCK_SIDES = {640: 20, 224: 7}
"""{pixels: tokens a side}."""


def is_stock(shape: object) -> bool:
    """Whether `shape` is the PSA problem of a stock model."""
    return any(
        shape == PSAShape(1, model.num_heads, model.key_dim, side, side)
        for model in STOCK_MODELS
        for side in STOCK_SIDES.values()
    )
