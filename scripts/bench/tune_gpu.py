"""Time every candidate tile config of the CUDA forward at the shapes of the choice table, each checked first.

    python scripts/bench/tune_gpu.py [--out results.json] [--only float16]

Needs a GPU and PyTorch (for memory, the float64 reference and graph replay). Feeds numba_psa/cuda/choice.py.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path

import torch
import triton

from numba_psa.cuda.choice import Choice, Problem
from numba_psa.cuda.forward import make_forward
from numba_psa.cuda.forward_tf32 import make_forward_tf32
from numba_psa.cuda.forward_wgmma import make_forward_wgmma
from numba_psa.cuda.forward_wgmma_tf32 import make_forward_wgmma_tf32
from numba_psa.cuda.launching import architecture
from numba_psa.cuda.plans import Launcher, device_scale
from numba_psa.cuda.tiles import MmaTileConfig, Tf32TileConfig
from numba_psa.cuda.tiles_wgmma import Tf32WarpgroupTileConfig, WarpgroupTileConfig
from numba_psa.numerics import float_dtype

MAKERS = {
    "mma": (make_forward, MmaTileConfig),
    "wgmma": (make_forward_wgmma, WarpgroupTileConfig),
    "tf32": (make_forward_tf32, Tf32TileConfig),
    "wgmma_tf32": (make_forward_wgmma_tf32, Tf32WarpgroupTileConfig),
}

CASES = json.loads((Path(__file__).parent / "tune_gpu.json").read_text())
"""[{dtype, batch, heads, n, key_dim, candidates: [[kind, {field: value}]]}]"""


def reference(qkv, heads, key_dim):
    """float64 attention, a slice of queries at a time."""
    batch, _, n = qkv.shape
    q, k, v = qkv.double().view(batch, heads, 4 * key_dim, n).split([key_dim, key_dim, 2 * key_dim], dim=2)
    parts = []
    for first in range(0, n, 1024):
        p = ((q[..., first : first + 1024].transpose(-2, -1) @ k) * key_dim**-0.5).softmax(-1)
        parts.append(v @ p.transpose(-2, -1))
    return torch.cat(parts, -1).reshape(batch, heads * 2 * key_dim, n)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path)
    parser.add_argument("--only")
    options = parser.parse_args()
    rows, arch = [], architecture(0)
    for case in CASES:
        if options.only and case["dtype"] not in options.only.split(","):
            continue
        batch, heads, n, key_dim = case["batch"], case["heads"], case["n"], case.get("key_dim", 32)
        dtype = getattr(torch, case["dtype"])
        qkv = torch.randn(batch, heads * 4 * key_dim, n, device="cuda").to(dtype)
        truth = reference(qkv, heads, key_dim)
        problem = Problem(batch * heads, n, n, key_dim, 2 * key_dim, float_dtype(case["dtype"]))
        for kind, fields in case["candidates"]:
            make, config_type = MAKERS[kind]
            precision = (
                {"exact": fields.pop("exact", True)} if case["dtype"] == "float32" else {"bf16": case["dtype"] == "bfloat16"}
            )
            row = {key: case.get(key, 32) for key in ("dtype", "batch", "heads", "n", "key_dim")} | {
                "kind": kind,
                **fields,
                **precision,
            }
            try:
                config = config_type(
                    key_dim=key_dim, value_dim=2 * key_dim, copy=problem.copy, arch=arch, **precision, **fields
                )
                start = time.perf_counter()
                run = Launcher(problem, Choice(make, config))
                row["compile_s"] = round(time.perf_counter() - start, 2)
                out = torch.full((batch, heads * 2 * key_dim, n), float("nan"), device="cuda", dtype=dtype)
                part, scale = key_dim * n * qkv.element_size(), device_scale(key_dim**-0.5)
                at = qkv.data_ptr()

                def launch(run=run, at=at, part=part, out=out, scale=scale):
                    run(torch.cuda.current_stream().cuda_stream, at, at + part, at + 2 * part, out.data_ptr(), 0, scale)

                launch()
                torch.cuda.synchronize()
                row["error"] = float((out.double() - truth).norm() / truth.norm())
                row["us"] = round(1e3 * triton.testing.do_bench_cudagraph(launch, rep=20, return_mode="median"), 2)
                again = out.clone()
                out.fill_(float("nan"))
                launch()
                row["same_bits"] = bool(torch.equal(out, again))
            except Exception as error:
                row["failed"] = f"{type(error).__name__}: {error}"[:300]
            rows.append(row)
            settings = " ".join(f"{key}={value}" for key, value in fields.items())
            result = (
                row.get("failed")
                or f"{row['us']:8.2f} us  error {row['error']:.1e}  {'' if row['same_bits'] else 'NOT THE SAME BITS'}"
            )
            print(f"{case['dtype']:9s} B{batch} h{heads} N{n} K{key_dim} {kind:10s} {settings:60s} {result}", flush=True)
    if options.out:
        options.out.write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
