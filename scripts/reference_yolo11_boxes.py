"""The boxes that PyTorch gives for the trained YOLO11n, written down for `tests/host/test_detect_trained.py`.

    bash scripts/fetch_models.sh
    python scripts/reference_yolo11_boxes.py tests/data/yolo11n_boxes.json      # needs torch, pillow, safetensors

The network is that of `reference_yolo11.py`, the letterbox and NMS are the tests' own, by their definitions: nothing of this
package computes here. Each box is x1, y1, x2, y2 in pixels of the picture, score, class.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np
import torch
from reference_yolo11 import Network

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "host"))
from detect_judges import brute_force
from detect_scenes import BALLS, MODELS, PHOTOGRAPHS, image, own_letterbox

CONF, IOU, MOST, IMGSZ = 0.05, 0.7, 300, 640


def boxes(network: Network, name: str) -> np.ndarray:
    x, back = own_letterbox(image(name), IMGSZ)
    with torch.inference_mode():
        head = network(torch.from_numpy(x))[-1][0].double().numpy()
    head = head[:, head[4:].max(axis=0) > CONF]
    (x, y, width, height), scores = head[:4], head[4:]
    xyxy = np.stack((x - width / 2, y - height / 2, x + width / 2, y + height / 2), axis=1)
    kept = brute_force(xyxy, scores.max(axis=0), scores.argmax(axis=0), IOU, MOST)
    return back(np.column_stack((xyxy, scores.max(axis=0), scores.argmax(axis=0)))[kept])


def main(target: str) -> None:
    network = Network(str(MODELS / "yolo11n.safetensors"))
    found = {name: boxes(network, name).round(5).tolist() for name in (*PHOTOGRAPHS, BALLS)}
    Path(target).write_text(json.dumps({"torch": torch.__version__, "conf": CONF, "boxes": found}) + "\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
