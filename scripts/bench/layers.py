"""A C2PSA on the CPU against onnxruntime and PyTorch, side by side in one run: milliseconds, GFLOP/s, speed-up.

    python scripts/bench/layers.py [--threads N] [--rounds N] [--json FILE]

Every contender gets the same float32 weights, batch norm folded. onnxruntime runs the nodes that Ultralytics exports, in
one graph; PyTorch the same operations, attention once as Ultralytics writes it and once by scaled_dot_product_attention.
Peers that are not installed are left out; timing as in `cpu.py`. OpenBLAS is not used by the CPU path. Where other processes
are busy, `chrt -r 1` before the command keeps them from the cores.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path

import numba
import numpy as np
from cpu import OURS, print_rows, provenance, side_by_side

from numba_psa.nn import C2PSA
from numba_psa.nn.conv import Conv
from numba_psa.numerics import relative_error
from numba_psa.testing.layers import exact, limit, random_state

SIZES = [(1, 20, 20), (8, 20, 20), (1, 14, 10)]
"""B, H, W of the 256 channels in and out: YOLO11n and YOLO26n at 640×640, and at 448×320."""


class OnnxNodes:
    """Writes a layer down as ONNX nodes instead of computing it; tensors are (name, channels)."""

    def __init__(self, batch: int, height: int, width: int):
        self.batch, self.height, self.width = batch, height, width
        self.nodes, self.constants = [], []

    def node(self, kind: str, inputs, outputs: int = 1, **attributes):
        from onnx import helper

        names = [f"{kind}_{len(self.nodes)}_{i}" for i in range(outputs)]
        self.nodes.append(helper.make_node(kind, list(inputs), names, **attributes))
        return names if outputs > 1 else names[0]

    def constant(self, array) -> str:
        from onnx import numpy_helper

        self.constants.append(numpy_helper.from_array(np.asarray(array), f"constant_{len(self.constants)}"))
        return self.constants[-1].name

    def conv(self, conv: Conv, x, add=None):
        name = x[0] if isinstance(x[0], str) else self.node("Concat", [piece for piece, _ in x], axis=1)
        weights = [self.constant(array.astype(np.float32)) for array in (conv.weight, conv.bias)]
        k = conv.kernel_size
        y = self.node("Conv", [name, *weights], kernel_shape=[k, k], pads=[k // 2] * 4, group=conv.groups)
        if conv.silu:
            y = self.node("Mul", [y, self.node("Sigmoid", [y])])
        return y if add is None else self.node("Add", [add[0], y]), conv.c_out

    def split(self, x, *channels: int):
        names = self.node("Split", [x[0], self.constant(np.array(channels))], len(channels), axis=1)
        return list(zip(names, channels, strict=True))

    def attend(self, qkv, num_heads: int, key_dim: int, pe: Conv):
        head_dim, n = pe.c_out // num_heads, self.height * self.width
        heads = self.node("Reshape", [qkv[0], self.constant([self.batch, num_heads, 2 * key_dim + head_dim, n])])
        q, k, v = self.node("Split", [heads, self.constant([key_dim, key_dim, head_dim])], 3, axis=2)
        q = self.node("Transpose", [self.node("Mul", [q, self.constant(np.float32(key_dim**-0.5))])], perm=[0, 1, 3, 2])
        p = self.node("Softmax", [self.node("MatMul", [q, k])], axis=-1)
        o = self.node("MatMul", [v, self.node("Transpose", [p], perm=[0, 1, 3, 2])])
        nchw = self.constant([self.batch, pe.c_out, self.height, self.width])
        o, v = (self.node("Reshape", [x, nchw]) for x in (o, v))
        return self.conv(pe, (v, pe.c_out), (o, pe.c_out))


def onnx_session(layer, shape: tuple[int, ...], threads: int):
    import onnxruntime
    from onnx import TensorProto, helper

    run = OnnxNodes(shape[0], *shape[2:])
    y, channels = layer.forward(run, ("x", shape[1]))
    x = helper.make_tensor_value_info("x", TensorProto.FLOAT, shape)
    out = helper.make_tensor_value_info(y, TensorProto.FLOAT, (shape[0], channels, *shape[2:]))
    model = helper.make_model(
        helper.make_graph(run.nodes, "layer", [x], [out], run.constants), opset_imports=[helper.make_opsetid("", 17)]
    )
    model.ir_version = 8
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    return onnxruntime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])


class Torch:
    """Runs a layer on PyTorch tensors."""

    def __init__(self, fused: bool):
        self.fused, self.weights = fused, {}

    def conv(self, conv: Conv, x, add=None):
        import torch
        from torch.nn.functional import conv2d, silu

        if conv not in self.weights:
            self.weights[conv] = [torch.from_numpy(array.astype(np.float32)) for array in (conv.weight, conv.bias)]
        x = torch.cat(x, 1) if isinstance(x, tuple) else x
        y = conv2d(x, *self.weights[conv], padding=conv.kernel_size // 2, groups=conv.groups)
        y = silu(y, inplace=True) if conv.silu else y
        return y if add is None else add + y

    def split(self, x, *channels: int):
        return x.split(channels, 1)

    def attend(self, qkv, num_heads: int, key_dim: int, pe: Conv):
        from torch.nn.functional import scaled_dot_product_attention

        batch, _, height, width = qkv.shape
        heads = qkv.view(batch, num_heads, -1, height * width)
        q, k, v = heads.split([key_dim, key_dim, pe.c_out // num_heads], dim=2)
        if self.fused:
            o = scaled_dot_product_attention(*(x.transpose(-2, -1) for x in (q, k, v))).transpose(-2, -1)
        else:
            o = v @ ((q.transpose(-2, -1) @ k) * key_dim**-0.5).softmax(dim=-1).transpose(-2, -1)
        shape = batch, pe.c_out, height, width
        return o.reshape(shape) + self.conv(pe, v.reshape(shape))


def contenders(layer, x: np.ndarray, threads: int) -> dict[str, Callable[[], np.ndarray]]:
    found: dict[str, Callable[[], np.ndarray]] = {OURS: lambda: layer(x)}
    if find_spec("onnxruntime") and find_spec("onnx"):
        session = onnx_session(layer, x.shape, threads)
        found["onnxruntime"] = lambda: session.run(None, {"x": x})[0]
    if find_spec("torch"):
        import torch

        torch.set_num_threads(threads)
        tensor, runners = torch.from_numpy(x), {"torch eager": Torch(False), "torch SDPA": Torch(True)}

        def run(name):
            with torch.inference_mode():
                return layer.forward(runners[name], tensor).numpy()

        found |= {name: lambda name=name: run(name) for name in runners}
    return found


def work(layer, shape: tuple[int, ...]) -> int:
    """Floating-point operations of a call: two for each multiply-add of convolutions and attention."""
    tokens, total = shape[2] * shape[3], 0
    attention, block = layer.attentions[0], layer.blocks[0]
    convs = [layer.cv1, layer.cv2, attention.qkv, attention.pe, attention.proj, block.expand, block.contract]
    total = sum(conv.weight.size for conv in convs) + attention.num_heads * tokens * (attention.key_dim + attention.head_dim)
    return 2 * shape[0] * tokens * total


def shares(layer, x: np.ndarray, calls: int = 50) -> dict[str, float]:
    """{step of the plan: median milliseconds}, each timed alone on the first images that are computed together."""
    compute = np.dtype(x.dtype)
    plan, y = layer._plan(x.shape, compute), layer(x)
    plan(x[: plan.batch], y[: plan.batch])
    names = ["cv1", "qkv", "attention", "pe", "proj", "ffn.0", "ffn.1", "cv2"]
    found = {}
    for name, step in zip(names, plan.steps, strict=True):
        times = []
        for _ in range(calls):
            start = time.perf_counter()
            plan.launch(step, plan.batch)
            times.append(1e3 * (time.perf_counter() - start))
        found[name] = float(np.median(times))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=numba.get_num_threads())
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    numba.set_num_threads(options.threads)

    layer = C2PSA.from_state_dict(random_state(C2PSA, {"c": 128, "qkv": 256, "c_in": 256}))
    rng, tables = np.random.default_rng(0), []
    for batch, height, width in SIZES:
        x = rng.standard_normal((batch, layer.c_in, height, width)).astype(np.float32)
        calls, truth = contenders(layer, x, options.threads), exact(layer, x)
        for name, call in calls.items():
            assert relative_error(call(), truth) <= limit(x.dtype), name
        rows = side_by_side(calls, options.rounds)
        heading, flops = f"C2PSA 256 B{batch} {height}×{width}", work(layer, x.shape)
        steps = shares(layer, x)
        tables.append({"heading": heading, "flops": flops, "rows": rows, "steps_ms": steps})
        print_rows(heading, rows, flops, "GFLOP/s")
        print("  steps, ms: " + ", ".join(f"{name} {ms:.3f}" for name, ms in steps.items()))
        plan = layer._plan(x.shape, x.dtype)
        print(f"  buffers kept: {plan.nbytes / 2**20:.2f} MiB, for {plan.batch} of {batch} images at a time")
    about = provenance(options.threads)
    print(json.dumps(about, indent=1))
    if options.json:
        options.json.write_text(json.dumps({"provenance": about, "tables": tables}, indent=1) + "\n")


if __name__ == "__main__":
    main()
