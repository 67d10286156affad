"""The fused CUDA forward against its peers on one GPU: checked against float64 first, then GPU and host time.

    python scripts/bench/gpu.py [--out results.json] [--commit HASH]      needs torch and triton, for the peers

Work: qkv [B, heads*4*KEY_DIM, H, W] -> out [B, heads*2*KEY_DIM, H, W]. GPU microseconds by CUDA graph replay (median), host
microseconds a call. A "core" peer works on tensors that are already packed (and padded), layout work not counted: a
handicap in its favour.
"""

from __future__ import annotations

import argparse
import json
import math
import multiprocessing
import os
import platform
import subprocess
import time
from concurrent.futures import ProcessPoolExecutor
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import numba
import torch
import torch.nn.functional as functional
import triton
import triton.language as tl
from mirror import bench as bench_mirror
from mirror import triton_forward
from numba import float32
from torch.nn.attention import SDPBackend, sdpa_kernel

from numba_psa import PSAShape
from numba_psa import cuda as fused
from numba_psa._numba_cuda import cuda

KEY_DIM = 32
SHAPES = [
    (1, 2, 20, 20),
    (1, 2, 19, 21),
    (32, 4, 20, 20),
    (32, 4, 19, 21),
    (1, 4, 40, 40),
    (8, 4, 40, 40),
    (8, 4, 39, 41),
    (4, 4, 80, 80),
]
WIDTHS = [(8, 4, 40, 40, key_dim) for key_dim in (16, 36, 64)]  # and KEY_DIM other than 32
LIMIT = {"float32": 2e-6, "tf32": 2e-3, "float16": 1e-3, "bfloat16": 1e-2}


# ---- peers ------------------------------------------------------------------------------------------------------------
def split(qkv, heads):
    """q, k and v, [batch, heads, width, N]."""
    batch, channels, height, width = qkv.shape
    key_dim = channels // (4 * heads)
    return qkv.view(batch, heads, 4 * key_dim, height * width).split([key_dim, key_dim, 2 * key_dim], dim=2)


def nchw(o, qkv):
    """[batch, heads, width, N] as the output lies."""
    return o.reshape(qkv.shape[0], qkv.shape[1] // 2, *qkv.shape[2:])


def eager(qkv, heads):
    q, k, v = split(qkv, heads)
    p = ((q.transpose(-2, -1) @ k) * q.shape[-2] ** -0.5).softmax(dim=-1)
    return nchw(v @ p.transpose(-2, -1), qkv)


def attention_inputs(qkv, heads, pad):
    q, k, v = (x.transpose(-2, -1).contiguous() for x in split(qkv, heads))
    if pad:  # FlashAttention wants one width
        q, k = (functional.pad(x, (0, v.shape[-1] - x.shape[-1])).contiguous() for x in (q, k))
    return q, k, v


def sdpa(backend, pad):
    """Scaled dot product attention with the layout work that PSA's tensors ask for."""

    def run(qkv, heads):
        scale = (qkv.shape[1] // (4 * heads)) ** -0.5
        with sdpa_kernel(backend):
            o = functional.scaled_dot_product_attention(*attention_inputs(qkv, heads, pad), scale=scale)
        return nchw(o.transpose(-2, -1), qkv)

    return run


def sdpa_core(backend, pad):
    """Attention alone."""
    packed = {}

    def run(qkv, heads):
        if qkv.data_ptr() not in packed:
            packed.clear()
            packed[qkv.data_ptr()] = attention_inputs(qkv, heads, pad)
        scale = (qkv.shape[1] // (4 * heads)) ** -0.5
        with sdpa_kernel(backend):
            return functional.scaled_dot_product_attention(*packed[qkv.data_ptr()], scale=scale)

    return run


TILES = [
    triton.Config({"BM": m, "BN": n}, num_warps=w, num_stages=2)
    for m, n, w in ((32, 64, 4), (64, 64, 4), (128, 64, 4), (128, 64, 8), (128, 32, 4), (64, 128, 4))
]


def quick(run, quantiles):
    return triton.testing.do_bench(run, warmup=5, rep=20, quantiles=quantiles)


@triton.autotune(TILES, key=["N", "BH"], do_bench=quick)
@triton.jit(do_not_specialize=["BH"])
def triton_attention(
    qkv, out, N, BH, scale2, PRECISION: tl.constexpr, K: tl.constexpr, V: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr
):
    bh = tl.program_id(1).to(tl.int64)
    base = qkv + bh * (2 * K + V) * N
    m = tl.program_id(0) * BM + tl.arange(0, BM)
    dk, dv = tl.arange(0, K), tl.arange(0, V)
    q = tl.load(base + dk[None, :] * N + m[:, None], mask=(m < N)[:, None], other=0.0)
    acc, l_i, m_i = tl.zeros([BM, V], tl.float32), tl.zeros([BM], tl.float32), tl.full([BM], float("-inf"), tl.float32)
    for first in range(0, N, BN):
        n = first + tl.arange(0, BN)
        k = tl.load(base + (K + dk[:, None]) * N + n[None, :], mask=(n < N)[None, :], other=0.0)
        s = tl.where((n < N)[None, :], tl.dot(q, k, input_precision=PRECISION) * scale2, float("-inf"))
        m_new = tl.maximum(m_i, tl.max(s, 1))
        alpha, p = tl.exp2(m_i - m_new), tl.exp2(s - m_new[:, None])
        v = tl.load(base + (2 * K + dv[None, :]) * N + n[:, None], mask=(n < N)[:, None], other=0.0)
        l_i = l_i * alpha + tl.sum(p, 1)
        acc = tl.dot(p.to(v.dtype), v, acc * alpha[:, None], input_precision=PRECISION)
        m_i = m_new
    target = out + bh * V * N + dv[None, :] * N + m[:, None]
    tl.store(target, (acc / l_i[:, None]).to(out.dtype.element_ty), mask=(m < N)[:, None])


def sizes(qkv, heads):
    """N, BH, KEY_DIM and room for the output."""
    batch, channels, height, width = qkv.shape
    return height * width, batch * heads, channels // (4 * heads), torch.empty_like(qkv[:, : channels // 2])


def triton_fused(precision):
    def run(qkv, heads):
        n, bh, key_dim, out = sizes(qkv, heads)
        scale = key_dim**-0.5 * math.log2(math.e)
        grid = lambda tile: (triton.cdiv(n, tile["BM"]), bh)  # noqa: E731
        triton_attention[grid](qkv, out, n, bh, scale, precision, key_dim, 2 * key_dim)
        return out

    return run


@triton.jit
def triton_pack(qkv, packed, N, BH, K: tl.constexpr):
    i = tl.program_id(0).to(tl.int64)  # section, bh, n
    section, bh, n, d = i // (BH * N), i // N % BH, i % N, tl.arange(0, K)
    tl.store(packed + i * K + d, tl.load(qkv + ((bh * 4 + section) * K + d) * N + n))


@triton.jit
def triton_merge(lo, hi, out, N, K: tl.constexpr):
    i = tl.program_id(0).to(tl.int64)  # bh, n
    bh, n, d = i // N, i % N, tl.arange(0, K)
    tl.store(out + (bh * 2 * K + d) * N + n, tl.load(lo + i * K + d))
    tl.store(out + (bh * 2 * K + K + d) * N + n, tl.load(hi + i * K + d))


def original(warps):
    """The pipeline of vision-rs 0.1.1: pack, attention over V_lo and over V_hi, a program a query row, merge."""

    def run(qkv, heads):
        n, bh, key_dim, out = sizes(qkv, heads)
        packed = torch.empty((4, bh, n, key_dim), device="cuda", dtype=qkv.dtype)
        halves, l = torch.empty_like(packed[:2]), torch.empty((bh, n), device="cuda")
        triton_pack[(4 * bh * n,)](qkv, packed, n, bh, key_dim)
        q, k, *values = packed
        for v, o in zip(values, halves, strict=True):
            triton_forward[(n, bh)](q, k, v, o, l, n, n, key_dim**-0.5, HEAD_DIM=key_dim, num_warps=warps)
        triton_merge[(bh * n,)](*halves, out, n, key_dim)
        return out

    return run


def ours(precision=None):
    def run(qkv, heads):
        return fused.psa_attention(qkv, heads, precision=precision)

    return run


def contestants(dtype, n, key_dim):
    """{name: (function, precision class)}."""
    b = SDPBackend
    if key_dim != KEY_DIM:
        peer, name = (b.EFFICIENT_ATTENTION, "mem-efficient") if dtype == "float32" else (b.FLASH_ATTENTION, "flash")
        core = sdpa_core(peer, dtype != "float32")
        return {"numba-psa": (ours(), dtype), "torch eager": (eager, dtype), f"SDPA {name}, core": (core, dtype)}
    if dtype == "float32":
        return {
            "numba-psa": (ours(), dtype),
            "torch eager": (eager, dtype),
            "SDPA mem-efficient, core": (sdpa_core(b.EFFICIENT_ATTENTION, False), dtype),
            "Triton fused": (triton_fused("ieee"), dtype),
            **({"original in Triton": (original(4), dtype)} if n < 1000 else {}),
            **({"original in Triton, 1 warp": (original(1), dtype)} if n < 1000 else {}),
            "numba-psa, TF32": (ours("tf32"), "tf32"),
            "Triton fused, TF32": (triton_fused("tf32"), "tf32"),
        }
    return {
        "numba-psa": (ours(), dtype),
        "torch eager": (eager, dtype),
        "SDPA flash": (sdpa(b.FLASH_ATTENTION, True), dtype),
        "SDPA flash, core": (sdpa_core(b.FLASH_ATTENTION, True), dtype),
        "SDPA cuDNN": (sdpa(b.CUDNN_ATTENTION, False), dtype),
        "SDPA cuDNN, core": (sdpa_core(b.CUDNN_ATTENTION, False), dtype),
        "Triton fused": (triton_fused("tf32"), dtype),
    }


# ---- measuring --------------------------------------------------------------------------------------------------------
def gpu_us(run):
    return round(1e3 * triton.testing.do_bench_cudagraph(run, rep=20, return_mode="median"), 2)


def host_us(run, calls=400):
    """The least of five means: what a call costs the host while the device keeps up."""
    for _ in range(20):
        run()
    means = []
    for _ in range(5):
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(calls // 5):
            run()
        means.append((time.perf_counter() - start) / (calls // 5))
    torch.cuda.synchronize()
    return round(1e6 * min(means), 1)


def truth_of(qkv, heads):
    """float64, a slice of queries at a time."""
    q, k, v = split(qkv.double(), heads)
    scale = q.shape[-2] ** -0.5
    parts = [v @ ((q[..., i : i + 1024].mT @ k) * scale).softmax(-1).mT for i in range(0, q.shape[-1], 1024)]
    return nchw(torch.cat(parts, -1), qkv)


def measure(name, run, kind, qkv, heads, truth):
    batch, _, height, width = qkv.shape
    row = {
        "name": name,
        "dtype": str(qkv.dtype).removeprefix("torch."),
        "precision": kind,
        "batch": batch,
        "heads": heads,
        "height": height,
        "width": width,
        "n": height * width,
        "key_dim": qkv.shape[1] // (4 * heads),
    }
    try:
        result = run(qkv, heads)
        if result.shape != truth.shape:  # a core peer's [B, heads, N, width]
            result = nchw(result.transpose(-2, -1), qkv)
        row["error"] = float((result.double() - truth).norm() / truth.norm())
        if not row["error"] < LIMIT[kind] * (1 if name.startswith("numba-psa") else 10):
            raise ValueError(f"error {row['error']:.1e}")
        row["gpu_us"] = gpu_us(lambda: run(qkv, heads))
        row["host_us"] = host_us(lambda: run(qkv, heads), 400 if row["gpu_us"] < 60 else 20)
        row["tflops"] = round(2 * batch * heads * row["n"] ** 2 * 3 * row["key_dim"] / row["gpu_us"] / 1e6, 1)
    except Exception as error:
        row["failed"] = f"{type(error).__name__}: {error}"[:200]
    return row


@cuda.jit(fastmath=True)
def exponentials(out, rounds):
    x0, x1 = float32(cuda.threadIdx.x), float32(cuda.blockIdx.x)
    x2, x3 = x0 * float32(0.5), x1 * float32(0.5)
    for _ in range(rounds):
        x0, x1, x2, x3 = math.exp2(-x0), math.exp2(-x1), math.exp2(-x2), math.exp2(-x3)
    out[cuda.blockIdx.x] = x0 + x1 + x2 + x3


# ---- compiling --------------------------------------------------------------------------------------------------------
def compile_one(job):
    """One of Triton's variants, or one of our kernels, into its cache on disk."""
    dtype, height, width, heads, precision, i, key_dim = job
    qkv = torch.zeros(1, heads * 4 * key_dim, height, width, device="cuda", dtype=getattr(torch, dtype))
    if i is None:
        fused.plan_psa_attention(PSAShape.from_qkv(qkv.shape, heads), dtype, precision=precision)
        return
    n, bh, key_dim, out = sizes(qkv, heads)
    tile = TILES[i]
    options = {"num_warps": tile.num_warps, "num_stages": tile.num_stages}
    triton_attention.fn[(1, 1)](qkv, out, n, bh, 1.0, precision, key_dim, 2 * key_dim, **tile.kwargs, **options)


def compile_all(processes):
    """Everything that the bench runs, side by side: one after the other it would take minutes."""
    jobs = []
    for dtype in LIMIT:
        if dtype != "tf32":
            precisions = ("ieee", "tf32") if dtype == "float32" else ("tf32",)
            jobs += [(dtype, 4, w, 2, p, i, KEY_DIM) for w in (8, 9) for p in precisions for i in range(len(TILES))]
            ours = (None, "tf32") if dtype == "float32" else (None,)
            jobs += [(dtype, *x[2:4], x[0] * x[1], p, None, (*x, KEY_DIM)[4]) for x in SHAPES + WIDTHS for p in ours]
    with ProcessPoolExecutor(processes, mp_context=multiprocessing.get_context("spawn")) as pool:
        list(pool.map(compile_one, jobs))


def ceilings():
    """What the device does at best: copy, matrix products, exponentials."""
    x = torch.empty(2**28, device="cuda", dtype=torch.float32).normal_()
    y = torch.empty_like(x)
    found = {"copy_GB_s": round(2 * x.nbytes / gpu_us(lambda: torch.neg(x, out=y)) / 1e3)}
    a, b = (torch.randn(8192, 8192, device="cuda", dtype=torch.float16) for _ in range(2))
    found["matmul_f16_TFLOP_s"] = round(2 * 8192**3 / gpu_us(lambda: a @ b) / 1e6)
    out, rounds = torch.empty(132 * 16, device="cuda"), 4096
    view = cuda.as_cuda_array(out)
    exponentials[132 * 16, 128](view, rounds)
    torch.cuda.synchronize()
    start = time.perf_counter()
    exponentials[132 * 16, 128](view, rounds)
    torch.cuda.synchronize()
    found["exp2_T_s"] = round(132 * 16 * 128 * 4 * rounds / (time.perf_counter() - start) / 1e12, 2)
    return found


def layout_rows():
    """The layout kernels as a share of a device copy's bandwidth for as many bytes."""
    rows = []
    for dtype in (torch.float16, torch.bfloat16, torch.float32):
        qkv = torch.randn(32, 512, 40, 40, device="cuda").to(dtype)
        half = fused.psa_pack_qkv(qkv, 4)[2].clone()
        other = torch.empty_like(qkv)
        runs = {
            "psa_pack_qkv": (lambda qkv=qkv: fused.psa_pack_qkv(qkv, 4), 2 * qkv.nbytes),
            "psa_extract_v_nchw": (lambda qkv=qkv: fused.psa_extract_v_nchw(qkv, 4), qkv.nbytes),
            "psa_merge_attn_nchw": (lambda half=half: fused.psa_merge_attn_nchw(half, half, 4, 40, 40), qkv.nbytes),
            "copy": (lambda qkv=qkv, other=other: other.copy_(qkv), 2 * qkv.nbytes),
            "copy of half": (lambda qkv=qkv, other=other: other[:16].copy_(qkv[:16]), qkv.nbytes),
        }
        for name, (run, moved) in runs.items():
            us = gpu_us(run)
            rows.append({"name": name, "dtype": str(dtype)[6:], "gpu_us": us, "GB_s": round(moved / us / 1e3)})
    return rows


def plan_rows():
    shape = PSAShape(1, 2, KEY_DIM, 20, 20)
    qkv = torch.randn(shape.qkv, device="cuda", dtype=torch.float16)
    out = torch.empty(shape.out, device="cuda", dtype=torch.float16)
    plan, stream = fused.plan_psa_attention(shape, "float16"), torch.cuda.current_stream().cuda_stream
    source, target = qkv.data_ptr(), out.data_ptr()
    return {
        "plan, addresses": host_us(lambda: plan(source, target, stream), 4000),
        "plan, torch tensors and stream": host_us(lambda: plan(qkv, out, stream), 4000),
        "plan, torch tensors": host_us(lambda: plan(qkv, out), 4000),
        "psa_attention": host_us(lambda: fused.psa_attention(qkv, 2), 4000),
        "psa_attention, out given": host_us(lambda: fused.psa_attention(qkv, 2, out=out), 4000),
    }


def provenance(commit):
    packages = {}
    for package in ("numba", "numba-cuda", "llvmlite", "cuda-core", "torch", "triton", "numpy"):
        try:
            packages[package] = version(package)
        except PackageNotFoundError:
            packages[package] = "-"
    driver = subprocess.run(
        ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"], capture_output=True, text=True
    )
    return {
        "gpu": torch.cuda.get_device_name(),
        "driver": driver.stdout.strip(),
        "python": platform.python_version(),
        "cuda": torch.version.cuda,
        "packages": packages,
        "commit": commit,
        "numba": numba.__version__,
        "utc": time.strftime("%Y-%m-%d %H:%M", time.gmtime()),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--commit", default="")
    parser.add_argument("--processes", type=int, default=min(14, os.cpu_count() or 1), help="that compile")
    parser.add_argument("--dtypes", default="float16,float32,bfloat16")
    options = parser.parse_args()
    torch.backends.cuda.matmul.allow_tf32 = False
    start = time.perf_counter()
    compile_all(options.processes)
    report = {
        "provenance": provenance(options.commit),
        "ceilings": ceilings(),
        "layout": layout_rows(),
        "mirror": [bench_mirror("flash_attention2_forward", bh, 400, KEY_DIM) for bh in (2, 8)],
        "rows": [],
    }
    print(json.dumps({key: report[key] for key in report if key != "rows"}), flush=True)
    for dtype in options.dtypes.split(","):
        for batch, heads, height, width, *other in SHAPES + WIDTHS if dtype != "bfloat16" else SHAPES[4:6]:
            key_dim = other[0] if other else KEY_DIM
            qkv = torch.randn(batch, heads * 4 * key_dim, height, width, device="cuda").to(getattr(torch, dtype))
            truth = truth_of(qkv, heads)
            for name, (run, kind) in contestants(dtype, height * width, key_dim).items():
                row = measure(name, run, kind, qkv, heads, truth)
                report["rows"].append(row)
                result = row.get("failed") or " ".join(
                    f"{key} {row[key]:.3g}" for key in ("gpu_us", "host_us", "tflops", "error")
                )
                print(f"{dtype} B{batch} h{heads} N{row['n']} K{key_dim} {name:26s} {result}", flush=True)
            keep(report, start, options.out)
    report["host_us"] = plan_rows()  # at the end: the host is quiet, long after the processes that compiled
    print(report["host_us"])
    keep(report, start, options.out)


def keep(report, start, path) -> None:
    report["seconds"] = round(time.perf_counter() - start, 1)
    if path:
        path.write_text(json.dumps(report, indent=1))


if __name__ == "__main__":
    main()
