"""One real tensor: the qkv of a trained YOLO26n on a photograph."""

from __future__ import annotations

from importlib.resources import files

import numpy as np

REAL_QKV_SOURCE = "yolo26n_astronaut"


def real_qkv() -> tuple[np.ndarray, int]:
    """(qkv `[1, 256, 20, 20]` float16, num_heads = 2): what enters the attention of a trained YOLO26n.

    Output of the qkv convolution of block `model.10.m.0.attn` (KEY_DIM 32, N 400) on the 640×640 photograph `astronaut`
    (NASA, public domain, from scikit-image), computed by onnxruntime 1.32.0 in float32 and rounded to float16.
    """
    with (files(__package__) / f"{REAL_QKV_SOURCE}.npz").open("rb") as file, np.load(file) as arrays:
        return arrays["qkv"], int(arrays["num_heads"])
