"""What PyTorch makes of the trained YOLO11n, written down small for `tests/host/test_yolo_trained.py`.

    numba-psa convert .models/yolo11n.pt --output yolo11n.safetensors
    python scripts/reference_yolo11.py yolo11n.safetensors tests/data/yolo11n.json      # needs torch, safetensors

The network is written with `torch.nn.functional` alone, from the description in the checkpoint, batch norm not folded:
nothing of this package computes here. Of each layer: its shape, norm, and SAMPLES of its values, evenly spread; of the head:
the values of the surest tokens.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from safetensors.torch import load_file

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "host"))
from drawn import balls

SIZES = (640, 640), (448, 320)
SAMPLES = 64
SUREST = 20
BINS = 16


class Network:
    def __init__(self, path: str):
        self.state = {name: array.float() for name, array in load_file(path).items()}

    def conv(self, x, name: str, stride: int = 1, act: bool = True):
        weight = self.state[f"{name}.conv.weight"]
        parts = (self.state[f"{name}.bn.{part}"] for part in ("running_mean", "running_var", "weight", "bias"))
        y = F.conv2d(x, weight, stride=stride, padding=weight.shape[-1] // 2, groups=x.shape[1] // weight.shape[1])
        y = F.batch_norm(y, *parts, eps=1e-3)
        return F.silu(y) if act else y

    def plain(self, x, name: str):
        return F.conv2d(x, self.state[f"{name}.weight"], self.state[f"{name}.bias"])

    def bottleneck(self, x, name: str):
        return x + self.conv(self.conv(x, f"{name}.cv1"), f"{name}.cv2")

    def c3k(self, x, name: str):
        y = self.conv(x, f"{name}.cv1")
        for i in range(2):
            y = self.bottleneck(y, f"{name}.m.{i}")
        return self.conv(torch.cat((y, self.conv(x, f"{name}.cv2")), 1), f"{name}.cv3")

    def c3k2(self, x, name: str, inner):
        parts = list(self.conv(x, f"{name}.cv1").chunk(2, 1))
        parts.append(inner(parts[-1], f"{name}.m.0"))
        return self.conv(torch.cat(parts, 1), f"{name}.cv2")

    def sppf(self, x, name: str):
        # this checkpoint's first convolution has an Identity for its activation
        parts = [self.conv(x, f"{name}.cv1", act=False)]
        for _ in range(3):
            parts.append(F.max_pool2d(parts[-1], 5, 1, 2))
        return self.conv(torch.cat(parts, 1), f"{name}.cv2")

    def attention(self, x, name: str, heads: int):
        b, c, h, w = x.shape
        qkv = self.conv(x, f"{name}.qkv", act=False).view(b, heads, -1, h * w)
        q, k, v = qkv.split([c // heads // 2, c // heads // 2, c // heads], 2)
        p = ((q.transpose(-2, -1) @ k) * q.shape[2] ** -0.5).softmax(-1)
        o = (v @ p.transpose(-2, -1)).reshape(x.shape)
        o = o + self.conv(v.reshape(x.shape), f"{name}.pe", act=False)
        return self.conv(o, f"{name}.proj", act=False)

    def c2psa(self, x, name: str):
        a, b = self.conv(x, f"{name}.cv1").chunk(2, 1)
        b = b + self.attention(b, f"{name}.m.0.attn", b.shape[1] // 64)
        b = b + self.conv(self.conv(b, f"{name}.m.0.ffn.0"), f"{name}.m.0.ffn.1", act=False)
        return self.conv(torch.cat((a, b), 1), f"{name}.cv2")

    def level(self, x, level: int):
        boxes, classes = (f"model.23.{branch}.{level}" for branch in ("cv2", "cv3"))
        distances = self.plain(self.conv(self.conv(x, f"{boxes}.0"), f"{boxes}.1"), f"{boxes}.2")
        for part in ("0.0", "0.1", "1.0", "1.1"):
            x = self.conv(x, f"{classes}.{part}")
        logits = self.plain(x, f"{classes}.2")
        b, _, h, w = distances.shape
        bins = distances.view(b, 4, BINS, h * w).softmax(2)
        left, top, right, bottom = (bins * torch.arange(BINS)[:, None]).sum(2).unbind(1)
        y, x = (axis.reshape(-1) + 0.5 for axis in torch.meshgrid(torch.arange(h), torch.arange(w), indexing="ij"))
        corners = x - left, y - top, x + right, y + bottom
        x1, y1, x2, y2 = (corner * 8 * 2**level for corner in corners)
        box = torch.stack(((x1 + x2) / 2, (y1 + y2) / 2, x2 - x1, y2 - y1), 1)
        return torch.cat((box, logits.sigmoid().flatten(2)), 1)

    def __call__(self, x):
        """What each layer gives."""
        y = []
        y.append(self.conv(x, "model.0", 2))
        y.append(self.conv(y[-1], "model.1", 2))
        y.append(self.c3k2(y[-1], "model.2", self.bottleneck))
        y.append(self.conv(y[-1], "model.3", 2))
        y.append(self.c3k2(y[-1], "model.4", self.bottleneck))
        y.append(self.conv(y[-1], "model.5", 2))
        y.append(self.c3k2(y[-1], "model.6", self.c3k))
        y.append(self.conv(y[-1], "model.7", 2))
        y.append(self.c3k2(y[-1], "model.8", self.c3k))
        y.append(self.sppf(y[-1], "model.9"))
        y.append(self.c2psa(y[-1], "model.10"))
        y.append(F.interpolate(y[-1], scale_factor=2, mode="nearest"))
        y.append(torch.cat((y[-1], y[6]), 1))
        y.append(self.c3k2(y[-1], "model.13", self.bottleneck))
        y.append(F.interpolate(y[-1], scale_factor=2, mode="nearest"))
        y.append(torch.cat((y[-1], y[4]), 1))
        y.append(self.c3k2(y[-1], "model.16", self.bottleneck))
        y.append(self.conv(y[-1], "model.17", 2))
        y.append(torch.cat((y[-1], y[13]), 1))
        y.append(self.c3k2(y[-1], "model.19", self.bottleneck))
        y.append(self.conv(y[-1], "model.20", 2))
        y.append(torch.cat((y[-1], y[10]), 1))
        y.append(self.c3k2(y[-1], "model.22", self.c3k))
        y.append(torch.cat([self.level(y[source], i) for i, source in enumerate((16, 19, 22))], 2))
        return y


def rounded(values) -> list[float]:
    return [float(f"{value:.8g}") for value in np.asarray(values, np.float64).ravel()]


def main(weights: str, target: str) -> None:
    network, found = Network(weights), {"torch": torch.__version__, "sizes": {}}
    for size in SIZES:
        with torch.inference_mode():
            *layers, head = (y.double().numpy() for y in network(torch.from_numpy(balls(*size))))
        rows = []
        for y in [*layers, head]:
            spread = np.linspace(0, y.size - 1, SAMPLES).astype(int)
            rows.append({"shape": y.shape, "norm": float(np.linalg.norm(y)), "values": rounded(y.ravel()[spread])})
        surest = np.sort(np.argsort(-head[0, 4:].max(0), kind="stable")[:SUREST])
        found["sizes"]["x".join(map(str, size))] = {
            "layers": rows[:-1],
            "head": rows[-1],
            "surest": {"tokens": surest.tolist(), "values": rounded(head[0][:, surest].T)},
        }
    Path(target).write_text(json.dumps(found) + "\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
