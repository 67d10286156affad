"""Layers on one GPU against PyTorch: checked against float64 first, then GPU time, time of a call, and peak memory.

    python scripts/bench/layers_gpu.py [--out results.json] [--commit HASH]      needs torch, for the peers

Every contender gets the same weights, batch norm folded, and a tensor that lies on the device. PyTorch runs the operations
that Ultralytics writes, eager, through torch.compile, and with its own CUDA graphs (mode="reduce-overhead"; and eager
captured by torch.cuda.graph, whose replay has no Python and copies no input). GPU µs: a stream of calls between two events,
divided by their number, where the device and not Python is what limits: for a contender that launches many kernels from
Python, its calls are captured in a CUDA graph first. Call µs: wall clock of one call after another, with a synchronisation
at the end of all. TF32 is off.
"""

from __future__ import annotations

import argparse
import functools
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from layers import Torch
from torch.fx.experimental.proxy_tensor import make_fx

from gpu import provenance
from numba_psa import nn
from numba_psa.numerics import relative_error
from numba_psa.testing.layers import exact, random_state

SIZES = {"c": 128, "qkv": 256, "c_in": 256, "c_out": 256, "e": 64}
LAYERS = {
    "C2PSA 256": (nn.C2PSA, SIZES),
    "PSABlock 128": (nn.PSABlock, SIZES),
    "Attention 128": (nn.Attention, SIZES),
    "C3k2 384 -> 256": (nn.C3k2, SIZES | {"c_in": 384}),
}
SHAPES = [(1, 20, 20), (1, 14, 10), (8, 20, 20), (1, 40, 40)]
OURS = "numba-psa"
LIMIT = {torch.float32: 1e-5, torch.float16: 5e-3, torch.bfloat16: 5e-2}
"""Relative error beyond which a peer is not timed."""


class OnDevice(Torch):
    """Runs a layer on CUDA tensors of one dtype."""

    def __init__(self, layer: nn.Layer, dtype: torch.dtype, fused: bool = False):
        super().__init__(fused)
        self.layer = layer
        with torch.inference_mode(False), torch.no_grad():  # once on the CPU, which makes the weights
            layer.forward(self, torch.zeros(1, layer.c_in, 4, 4))
        self.weights = {conv: [array.to("cuda", dtype) for array in arrays] for conv, arrays in self.weights.items()}

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer.forward(self, x)


def captured(run: Callable[[], Any]) -> Callable[[], Any]:
    """The replay of a CUDA graph of run()."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            run()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    return graph.replay


def traced(peer: OnDevice, x: torch.Tensor) -> torch.fx.GraphModule:
    """The peer's operations on x as one graph."""
    with torch.inference_mode(False), torch.no_grad():
        return make_fx(peer)(x)


def contenders(layer: nn.Layer, x: torch.Tensor, modes: list[str]) -> dict[str, tuple[Callable, Callable | None]]:
    """{name: (call, what to time on the GPU: the same if None)}."""
    out = layer(x)
    peer, fused = OnDevice(layer, x.dtype), OnDevice(layer, x.dtype, fused=True)
    replay = captured(lambda: peer(x))
    found = {
        OURS: (lambda: layer(x), None),
        f"{OURS}, out given": (lambda: layer(x, out=out), None),
        "torch eager": (lambda: peer(x), replay),
        "torch eager in a CUDA graph": (replay, None),
        "torch SDPA in a CUDA graph": (captured(lambda: fused(x)), None),
    }
    for mode in modes:
        compiled = torch.compile(traced(peer, x), mode=mode, fullgraph=True, dynamic=False)
        call = functools.partial(compiled, x)
        for _ in range(4):
            call()
        found[f"torch.compile, {mode}"] = call, captured(call) if mode == "default" else None
        torch.cuda.synchronize()
    return found


def gpu_us(run: Callable[[], Any], calls: int = 200) -> float:
    """Median of 7 means of calls one after another."""
    for _ in range(10):
        run()
    times = []
    for _ in range(7):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        for _ in range(calls):
            run()
        end.record()
        end.synchronize()
        times.append(1e3 * start.elapsed_time(end) / calls)
    return float(np.median(times))


def call_us(run: Callable[[], Any], calls: int = 200) -> float:
    """Median of 7 means of the wall clock."""
    for _ in range(10):
        run()
    times = []
    for _ in range(7):
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(calls):
            run()
        torch.cuda.synchronize()
        times.append(1e6 * (time.perf_counter() - start) / calls)
    return float(np.median(times))


def peak_bytes(run: Callable[[], Any]) -> int:
    """What torch allocates during a call beyond what it holds before; a CUDA graph has memory of its own, not counted."""
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    run()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before


def measure(layer: nn.Layer, shape: tuple[int, ...], dtype: torch.dtype, modes: list[str]) -> list[dict]:
    rng = np.random.default_rng(0)
    x = torch.from_numpy(rng.standard_normal((shape[0], layer.c_in, *shape[1:])).astype(np.float32)).to("cuda", dtype)
    truth, rows = exact(layer, x.float().cpu().numpy()), []
    with torch.inference_mode():
        for name, (call, on_device) in contenders(layer, x, modes).items():
            row = {"name": name}
            result = call()
            if result is not None:
                row["error"] = relative_error(result.float().cpu().numpy(), truth)
                assert row["error"] <= LIMIT[dtype], (name, row["error"])
            row |= {"gpu_us": round(gpu_us(on_device or call), 2), "call_us": round(call_us(call), 2)}
            row["peak_bytes"] = peak_bytes(call)
            if name.startswith(OURS):
                row["peak_bytes"] += next(reversed(layer._plans.values())).nbytes
            rows.append(row)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--commit", default="")
    parser.add_argument("--layers", default=",".join(LAYERS))
    parser.add_argument("--dtypes", default="float16,float32,bfloat16")
    parser.add_argument("--shapes", type=int, default=len(SHAPES), help="how many of the shapes")
    parser.add_argument("--modes", default="default,reduce-overhead", help="of torch.compile, for the first shape only")
    parser.add_argument("--compiled", default=",".join(LAYERS), help="layers that torch.compile is tried on")
    options = parser.parse_args()
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    torch.cuda.set_stream(torch.cuda.Stream())  # the legacy default stream cannot be captured
    report = {"provenance": provenance(options.commit), "tables": []}
    for name in options.layers.split(","):
        layer_class, sizes = LAYERS[name]
        layer = layer_class.from_state_dict(random_state(layer_class, sizes))
        for shape in SHAPES[: options.shapes]:
            for dtype in options.dtypes.split(","):
                if dtype == "bfloat16" and shape != SHAPES[0]:
                    continue
                compiled = shape == SHAPES[0] and dtype != "bfloat16" and name in options.compiled.split(",")
                modes = options.modes.split(",") if compiled else []
                rows = measure(layer, shape, getattr(torch, dtype), modes)
                report["tables"].append({"layer": name, "shape": shape, "dtype": dtype, "rows": rows})
                print(f"{name}, B={shape[0]} {shape[1]}×{shape[2]}, {dtype}", flush=True)
                for row in rows:
                    error = f"error {row['error']:.1e}" if "error" in row else ""
                    memory = f"peak {row['peak_bytes'] / 2**20:.2f} MiB" if row["peak_bytes"] else ""
                    times = f"GPU {row['gpu_us']:8.2f} µs  call {row['call_us']:8.2f} µs"
                    print(f"  {row['name']:30s} {times}  {error}  {memory}", flush=True)
                if options.out:
                    options.out.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
