"""The CPU path against onnxruntime, PyTorch and NumPy, side by side in one run: milliseconds, GFLOP/s, speed-up.

    python scripts/bench/cpu.py [--threads N] [--rounds N] [--json FILE] [--plot FILE]

Peers that are not installed are left out. Everything is checked against the float64 oracle before it is timed. A round
times each contender in a block of its own, in alternating order, after a pause and two calls that do not count: called in
turns, one library's spinning threads slow the next. A speed-up is the median over the rounds of (peer's block median / our
block median); the times are the median and the 10–90 % range of all calls.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path

import numba
import numpy as np

from numba_psa import cpu, oracle
from numba_psa.cpu.compiling import kernel
from numba_psa.cpu.vector import VECTOR_BYTES, fma, load, pointer, splat, store
from numba_psa.numerics import FLOAT32_LIMIT, relative_error
from numba_psa.shapes import PSAShape

SHAPES = [PSAShape(1, 2, 32, 20, 20), PSAShape(8, 4, 32, 20, 20), PSAShape(1, 4, 32, 40, 40)]
GRADIENT_SHAPES = [SHAPES[0], SHAPES[2]]
PAUSE, BLOCK = 0.05, 0.06
"""Seconds before a block, and of a block."""
OURS = "numba-psa"
Contenders = dict[str, Callable[[], np.ndarray]]


# ---- contenders -------------------------------------------------------------------------------------------------------
def plain_numpy(qkv: np.ndarray, shape: PSAShape) -> np.ndarray:
    """Two passes with batched matrix products in float32, as one writes it in NumPy."""
    q, k, v = np.split(qkv.reshape(shape.bh, -1, shape.n), (shape.key_dim, 2 * shape.key_dim), axis=1)
    s = (q.swapaxes(1, 2) @ k) * np.float32(shape.softmax_scale)
    np.exp(s - s.max(axis=-1, keepdims=True), out=s)
    s /= s.sum(axis=-1, keepdims=True)
    return (v @ s.swapaxes(1, 2)).reshape(shape.out)


def onnx_session(shape: PSAShape, threads: int):
    """The graph that Ultralytics exports for the attention, in onnxruntime."""
    import onnxruntime
    from onnx import TensorProto, helper

    def integers(name, values):
        return helper.make_tensor(name, TensorProto.INT64, [len(values)], values)

    nodes = [
        ("Reshape", ["qkv", "heads"], ["h"], {}),
        ("Split", ["h", "widths"], ["q", "k", "v"], {"axis": 2}),
        ("Transpose", ["q"], ["qt"], {"perm": [0, 1, 3, 2]}),
        ("MatMul", ["qt", "k"], ["products"], {}),
        ("Mul", ["products", "scale"], ["s"], {}),
        ("Softmax", ["s"], ["p"], {"axis": -1}),
        ("Transpose", ["p"], ["pt"], {"perm": [0, 1, 3, 2]}),
        ("MatMul", ["v", "pt"], ["o"], {}),
        ("Reshape", ["o", "nchw"], ["out"], {}),
    ]
    graph = helper.make_graph(
        [helper.make_node(kind, inputs, outputs, **attributes) for kind, inputs, outputs, attributes in nodes],
        "attention",
        [helper.make_tensor_value_info("qkv", TensorProto.FLOAT, shape.qkv)],
        [helper.make_tensor_value_info("out", TensorProto.FLOAT, shape.out)],
        [
            integers("heads", [shape.batch, shape.num_heads, 4 * shape.key_dim, shape.n]),
            integers("widths", [shape.key_dim, shape.key_dim, shape.head_dim]),
            helper.make_tensor("scale", TensorProto.FLOAT, [], [shape.softmax_scale]),
            integers("nchw", shape.out),
        ],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)])
    model.ir_version = 8
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    return onnxruntime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])


def torch_attention(qkv, shape: PSAShape, fused: bool):
    """As Ultralytics computes it, or by scaled_dot_product_attention."""
    from torch.nn.functional import scaled_dot_product_attention

    heads = qkv.view(shape.batch, shape.num_heads, 4 * shape.key_dim, shape.n)
    q, k, v = heads.split([shape.key_dim, shape.key_dim, shape.head_dim], dim=2)
    if fused:
        o = scaled_dot_product_attention(*(x.transpose(-2, -1) for x in (q, k, v))).transpose(-2, -1)
    else:
        o = v @ ((q.transpose(-2, -1) @ k) * shape.softmax_scale).softmax(dim=-1).transpose(-2, -1)
    return o.reshape(shape.out)


def forward_contenders(shape: PSAShape, qkv: np.ndarray, threads: int) -> Contenders:
    found: Contenders = {OURS: lambda: cpu.psa_attention(qkv, shape.num_heads)}
    if find_spec("onnxruntime") and find_spec("onnx"):
        session = onnx_session(shape, threads)
        found["onnxruntime"] = lambda: session.run(None, {"qkv": qkv})[0]
    if find_spec("torch"):
        import torch

        torch.set_num_threads(threads)
        tensor = torch.from_numpy(qkv)

        def run(fused):
            with torch.inference_mode():
                return torch_attention(tensor, shape, fused).numpy()

        found |= {"torch eager": lambda: run(False), "torch SDPA": lambda: run(True)}
    return found | {"NumPy": lambda: plain_numpy(qkv, shape)}


def gradient_contenders(shape: PSAShape, qkv: np.ndarray, d_out: np.ndarray, threads: int) -> Contenders:
    """The backward alone, from what the forward kept; ours also without, which computes the forward again."""
    _, saved = cpu.psa_attention(qkv, shape.num_heads, save_for_backward=True)
    found: Contenders = {
        OURS: lambda: cpu.psa_attention_backward(qkv, d_out, shape.num_heads, saved=saved),
        f"{OURS}, nothing saved": lambda: cpu.psa_attention_backward(qkv, d_out, shape.num_heads),
    }
    if find_spec("torch"):
        import torch

        torch.set_num_threads(threads)
        for name, fused in (("torch eager", False), ("torch SDPA", True)):
            leaf = torch.from_numpy(qkv).clone().requires_grad_()
            out, upstream = torch_attention(leaf, shape, fused), torch.from_numpy(d_out)

            def backward(out=out, leaf=leaf, upstream=upstream):
                return torch.autograd.grad(out, leaf, upstream, retain_graph=True)[0].numpy()

            found[name] = backward
    return found


def layout_contenders(shape: PSAShape, qkv: np.ndarray) -> dict[str, Contenders]:
    """Each layout kernel, and the transposed copy that one writes in NumPy instead."""
    packed = cpu.psa_pack_qkv(qkv, shape.num_heads)
    out = cpu.psa_extract_v_nchw(qkv, shape.num_heads)
    heads, halves, sizes = (
        qkv.reshape(shape.heads),
        out.reshape(shape.out_heads),
        (shape.num_heads, shape.height, shape.width),
    )
    target = np.zeros(shape.qkv, np.float32)
    by_section = target.reshape(shape.heads).transpose(1, 0, 3, 2)
    return {
        "psa_pack_qkv": {
            OURS: lambda: cpu.psa_pack_qkv(qkv, shape.num_heads),
            "NumPy": lambda: np.ascontiguousarray(heads.transpose(1, 0, 3, 2)),
        },
        "psa_extract_v_nchw": {
            OURS: lambda: cpu.psa_extract_v_nchw(qkv, shape.num_heads),
            "NumPy": lambda: np.ascontiguousarray(heads[:, 2:]).reshape(shape.out),
        },
        "psa_merge_attn_nchw": {
            OURS: lambda: cpu.psa_merge_attn_nchw(packed[2], packed[3], *sizes),
            "NumPy": lambda: np.stack((packed[2].swapaxes(1, 2), packed[3].swapaxes(1, 2)), axis=1).reshape(shape.out),
        },
        "psa_merge_attn_backward": {
            OURS: lambda: cpu.psa_merge_attn_backward(out, shape.num_heads)[1],
            "NumPy": lambda: [np.ascontiguousarray(halves[:, i].swapaxes(1, 2)) for i in (0, 1)][1],
        },
        "psa_pack_qkv_backward": {
            OURS: lambda: cpu.psa_pack_qkv_backward(packed, *sizes, d_qkv=target),
            "NumPy": lambda: np.add(by_section, packed, out=by_section),
        },
    }


# ---- timing -----------------------------------------------------------------------------------------------------------
def side_by_side(contenders: Contenders, rounds: int) -> dict[str, dict]:
    """{name: {median, p10, p90 in ms, speedup of ours over it}}."""
    calls: dict[str, list[list[float]]] = {name: [] for name in contenders}
    for turn in range(rounds):
        for name in list(contenders)[:: 1 if turn % 2 else -1]:
            call, times = contenders[name], []
            time.sleep(PAUSE)
            call()
            call()
            end = time.perf_counter() + BLOCK
            while len(times) < 3 or time.perf_counter() < end:
                start = time.perf_counter()
                call()
                times.append(1e3 * (time.perf_counter() - start))
            calls[name].append(times)
    ours = np.array([np.median(block) for block in calls[OURS]])
    rows = {}
    for name, blocks in calls.items():
        low, middle, high = np.percentile(np.concatenate(blocks), (10, 50, 90))
        ratio = np.median(np.array([np.median(block) for block in blocks]) / ours)
        rows[name] = {"ms": middle, "ms_p10": low, "ms_p90": high, "ms_best": min(map(min, blocks)), "speedup": ratio}
    return rows


def fma_peak(problem, like, scale, begin, end):
    """12 independent chains of multiply-adds in registers: problem = (steps, address of the result of each item)."""
    x, y = splat(like, 0.5), load(pointer(problem[1], like), 0)
    a = b = c = d = e = f = g = h = i = j = k = l = y
    for _ in range(problem[0]):
        a, b, c, d = fma(a, x, y), fma(b, x, y), fma(c, x, y), fma(d, x, y)
        e, f, g, h = fma(e, x, y), fma(f, x, y), fma(g, x, y), fma(h, x, y)
        i, j, k, l = fma(i, x, y), fma(j, x, y), fma(k, x, y), fma(l, x, y)
    total = a + b + c + d + e + f + g + h + i + j + k + l
    for item in range(begin, end):
        store(pointer(problem[1], like), (item + 1) * (VECTOR_BYTES // 4), total)


def measured_peak(threads: int) -> float:
    """Best GFLOP/s of multiply-adds on all threads."""
    steps, best, peak = 1_000_000, np.inf, kernel(fma_peak)
    result = np.zeros((threads + 1) * VECTOR_BYTES // 4, np.float32)
    for _ in range(10):
        start = time.perf_counter()
        peak.run(np.dtype(np.float32), threads, (steps, result.ctypes.data))
        best = min(best, time.perf_counter() - start)
    return threads * steps * 12 * 2 * (VECTOR_BYTES // 4) / best / 1e9


START = "import numpy, numba_psa; numba_psa.attention(numpy.ones((1, 256, 20, 20), 'f4'), 2)"


def start_seconds() -> dict[str, float]:
    """A fresh process up to its first result, imports included: with nothing compiled yet, and with Numba's cache."""
    with tempfile.TemporaryDirectory() as cache:
        seconds = []
        for _ in range(4):
            begin = time.perf_counter()
            subprocess.run([sys.executable, "-c", START], check=True, env=os.environ | {"NUMBA_CACHE_DIR": cache})
            seconds.append(time.perf_counter() - begin)
    return {"cold": seconds[0], "cached": float(np.median(seconds[1:]))}


# ---- report -----------------------------------------------------------------------------------------------------------
def provenance(threads: int) -> dict:
    def installed(name):
        try:
            return version(name)
        except PackageNotFoundError:
            return None

    lines = Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []
    model = next((line.split(":")[1].strip() for line in lines if line.startswith("model name")), "unknown")
    commit = subprocess.run(["git", "rev-parse", "HEAD"], cwd=Path(__file__).parent, capture_output=True, text=True)
    blas = []
    if find_spec("threadpoolctl"):
        from threadpoolctl import threadpool_info

        blas = [f"{x['internal_api']} {x['version']} {x.get('architecture', '')}".strip() for x in threadpool_info()]
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "commit": commit.stdout.strip(),
        "cpu": model,
        "cores": os.cpu_count(),
        "threads": threads,
        "vector_bytes": VECTOR_BYTES,
        "threading_layer": cpu.threading_layer(),
        "libraries": blas,
        "load_average": os.getloadavg(),
        "python": sys.version.split()[0],
        "versions": {n: installed(n) for n in ("numba-psa", "numba", "llvmlite", "numpy", "onnxruntime", "torch")},
    }


def title(shape: PSAShape) -> str:
    return f"B{shape.batch} h{shape.num_heads} N{shape.n}"


def print_rows(heading: str, rows: dict[str, dict], work: float, unit: str) -> None:
    """work: floating-point operations, or bytes, of one call."""
    print(f"\n{heading:<34} {'ms':>9} {'10–90 %':>17} {unit:>9} {'ours is':>8}")
    for name, row in rows.items():
        spread = f"{row['ms_p10']:.3f}–{row['ms_p90']:.3f}"
        print(f"  {name:<32} {row['ms']:>9.3f} {spread:>17} {work / row['ms'] / 1e6:>9.1f} {row['speedup']:>7.2f}×")


def draw(tables: list[dict], file: Path, about: dict) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(1, len(tables), figsize=(3.2 * len(tables), 3.6), layout="constrained")
    for axis, table in zip(np.atleast_1d(axes), tables, strict=True):
        names = list(table["rows"])[::-1]
        rows = [table["rows"][name] for name in names]
        middle = np.array([row["ms"] for row in rows])
        spread = [middle - [row["ms_p10"] for row in rows], [row["ms_p90"] for row in rows] - middle]
        axis.barh(names, middle, xerr=spread, color=["#d1495b" if n.startswith(OURS) else "#8d99ae" for n in names])
        axis.set_title(table["heading"], fontsize=9)
        axis.set_xlabel("ms (median, 10–90 %)", fontsize=8)
        axis.tick_params(labelsize=8)
    figure.suptitle(f"float32, {about['threads']} threads of {about['cpu']}, lower is better", fontsize=10)
    figure.savefig(file, dpi=120)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=numba.get_num_threads())
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--plot", type=Path)
    options = parser.parse_args()
    numba.set_num_threads(options.threads)
    rng, tables = np.random.default_rng(0), []

    for shape in SHAPES:
        qkv = rng.standard_normal(shape.qkv).astype(np.float32)
        contenders = forward_contenders(shape, qkv, options.threads)
        truth = oracle.psa_attention(qkv, shape.num_heads, dtype=np.float64)
        for name, call in contenders.items():
            assert relative_error(call(), truth) < FLOAT32_LIMIT, name
        rows = side_by_side(contenders, options.rounds)
        flops = 2 * 3 * shape.key_dim * shape.bh * shape.n**2
        tables.append({"kind": "forward", "heading": f"forward {title(shape)}", "flops": flops, "rows": rows})
        print_rows(tables[-1]["heading"], rows, flops, "GFLOP/s")

    for shape in GRADIENT_SHAPES:
        qkv, d_out = (rng.standard_normal(x).astype(np.float32) for x in (shape.qkv, shape.out))
        contenders = gradient_contenders(shape, qkv, d_out, options.threads)
        truth = oracle.psa_attention_backward(qkv, d_out, shape.num_heads, dtype=np.float64)
        for name, call in contenders.items():
            assert relative_error(call(), truth) < 2 * FLOAT32_LIMIT, name
        contenders["numba-psa forward"] = lambda x=qkv, h=shape.num_heads: cpu.psa_attention(x, h)
        rows = side_by_side(contenders, options.rounds)
        flops = 2 * 7 * shape.key_dim * shape.bh * shape.n**2
        tables.append({"kind": "backward", "heading": f"backward {title(shape)}", "flops": flops, "rows": rows})
        print_rows(tables[-1]["heading"], rows, flops, "GFLOP/s")

    shape = SHAPES[1]
    qkv = rng.standard_normal(shape.qkv).astype(np.float32)
    for name, contenders in layout_contenders(shape, qkv).items():
        if not name.endswith("qkv_backward"):  # which adds into a target, again and again
            np.testing.assert_array_equal(contenders[OURS](), contenders["NumPy"]())
        rows = side_by_side(contenders, options.rounds)
        moved = qkv.nbytes * {"psa_pack_qkv": 2, "psa_pack_qkv_backward": 3}.get(name, 1)
        tables.append({"kind": "layout", "heading": f"{name} {title(shape)}", "bytes": moved, "rows": rows})
        print_rows(tables[-1]["heading"], rows, moved, "GB/s")

    about = provenance(options.threads) | {"fma_peak_gflops": measured_peak(options.threads), "start_s": start_seconds()}
    print(f"\nFMA peak {about['fma_peak_gflops']:.0f} GFLOP/s on {options.threads} threads")
    print(
        f"first result in a fresh process: {about['start_s']['cold']:.1f} s cold, {about['start_s']['cached']:.2f} s cached"
    )
    print(json.dumps(about, indent=1))
    if options.json:
        options.json.write_text(json.dumps({"provenance": about, "tables": tables}, indent=1) + "\n")
    if options.plot:
        draw([table for table in tables if table["kind"] != "layout"], options.plot, about)


if __name__ == "__main__":
    main()
