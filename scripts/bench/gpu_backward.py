"""The fused CUDA backward against its peers on one GPU: checked against float64 first, then GPU and host time.

    python scripts/bench/gpu_backward.py [--out results.json] [--commit HASH]      needs torch and triton, for the peers

Work: qkv, d_out, out and l of a forward -> d_qkv, NCHW throughout, KEY_DIM 32. GPU microseconds by CUDA graph replay
(median), host microseconds a call. A "core" peer has all that its forward saved, works on tensors that are already packed
(and padded) and leaves its gradients so, layout work not counted: a handicap in its favour.
"""

from __future__ import annotations

import argparse
import json
import math
import re
from pathlib import Path

import torch
import triton
import triton.language as tl

from gpu import KEY_DIM, attention_inputs, eager, gpu_us, host_us, provenance, split
from numba_psa import PSAShape
from numba_psa import cuda as fused

SHAPES = [(1, 2, 20, 20), (32, 4, 20, 20), (8, 4, 40, 40), (4, 4, 80, 80), (8, 4, 39, 41)]
LIMIT = {"float32": 2e-6, "float16": 1e-3, "bfloat16": 1e-2}
HEAD_DIM, SCALE = 2 * KEY_DIM, KEY_DIM**-0.5
aten = torch.ops.aten


class Problem:
    """qkv and d_out, what a forward saves of them, and the true gradient."""

    def __init__(self, batch, heads, height, width, dtype):
        self.shape = PSAShape(batch, heads, KEY_DIM, height, width)
        self.heads = heads
        self.qkv = torch.randn(self.shape.qkv, device="cuda").to(dtype)
        self.d_out = torch.randn(self.shape.out, device="cuda").to(dtype)
        self.out, (_, self.l) = fused.psa_attention(self.qkv, heads, save_for_backward=True)
        self.truth = self.exact()

    def tokens(self, x):
        """`[B, c, H, W]` as `[B, heads, N, HEAD_DIM]`."""
        return x.view(self.shape.batch, self.heads, HEAD_DIM, self.shape.n).mT

    def exact(self):
        """float64, a slice of queries at a time."""
        q, k, v = (x.mT for x in split(self.qkv.double(), self.heads))
        do, out = self.tokens(self.d_out).double(), []
        dq, dk, dv = torch.empty_like(q), torch.zeros_like(k), torch.zeros_like(v)
        for i in range(0, self.shape.n, 800):
            rows = slice(i, i + 800)
            p = ((q[:, :, rows] @ k.mT) * SCALE).softmax(-1)
            dp = do[:, :, rows] @ v.mT
            ds = p * (dp - (p * dp).sum(-1, keepdim=True)) * SCALE
            dv += p.mT @ do[:, :, rows]
            dq[:, :, rows] = ds @ k
            dk += ds.mT @ q[:, :, rows]
        out = torch.cat((dq, dk, dv), -1)
        return out.mT.reshape(self.shape.qkv)


# ---- contestants: prepare(problem) -> (run, result as a gradient of qkv) --------------------------------------------------
def ours(problem):
    plan = fused.plan_psa_attention_backward(problem.shape, str(problem.qkv.dtype).removeprefix("torch."))
    d_qkv = torch.full_like(problem.qkv, math.nan)
    workspace = torch.empty(plan.workspace_bytes // 4, device="cuda")
    arrays = problem.qkv, problem.d_out, problem.out, problem.l, d_qkv, workspace
    return lambda: plan(*arrays), lambda _: d_qkv


def ours_as_a_function(problem):
    saved = problem.out, problem.l

    def run():
        return fused.psa_attention_backward(problem.qkv, problem.d_out, problem.heads, saved=saved)

    return run, lambda result: result


def torch_eager(problem):
    qkv = problem.qkv.detach().requires_grad_(True)
    out = eager(qkv, problem.heads)

    def run():
        return torch.autograd.grad(out, qkv, problem.d_out, retain_graph=True)[0]

    return run, lambda result: result


def core(forward, backward, pad):
    """Attention's backward alone, by the operation that autograd calls. pad: FlashAttention wants one width."""

    def prepare(problem):
        q, k, v = attention_inputs(problem.qkv, problem.heads, pad)
        do = problem.tokens(problem.d_out).contiguous()
        kept = forward(q, k, v)

        def as_gradient(results):
            dq, dk, dv = (x[..., :width] for x, width in zip(results, (KEY_DIM, KEY_DIM, HEAD_DIM), strict=False))
            return torch.cat((dq, dk, dv), -1).mT.reshape(problem.shape.qkv)

        return lambda: backward(do, q, k, v, *kept), as_gradient

    return prepare


def flash_backward(do, q, k, v, o, l, cum_q, cum_k, max_q, max_k, seed, offset, _):
    return aten._scaled_dot_product_flash_attention_backward(
        do, q, k, v, o, l, cum_q, cum_k, max_q, max_k, 0.0, False, seed, offset, scale=SCALE
    )


def cudnn_backward(do, q, k, v, o, l, cum_q, cum_k, max_q, max_k, seed, offset, _):
    return aten._scaled_dot_product_cudnn_attention_backward(
        do, q, k, v, o, l, seed, offset, None, cum_q, cum_k, max_q, max_k, 0.0, False, scale=SCALE
    )


def efficient_backward(do, q, k, v, o, l, seed, offset):
    return aten._scaled_dot_product_efficient_attention_backward(
        do, q, k, v, None, o, l, seed, offset, 0.0, [True, True, True, False], False, scale=SCALE
    )


flash_core = core(
    lambda *x: aten._scaled_dot_product_flash_attention(*x, 0.0, False, False, scale=SCALE), flash_backward, True
)
cudnn_core = core(
    lambda *x: aten._scaled_dot_product_cudnn_attention(*x, None, True, 0.0, False, False, scale=SCALE),
    cudnn_backward,
    False,
)
efficient_core = core(
    lambda *x: aten._scaled_dot_product_efficient_attention(*x, None, True, 0.0, False, scale=SCALE),
    efficient_backward,
    False,
)

TILES = [
    triton.Config({"BM": m, "BN": n}, num_warps=w, num_stages=s)
    for m, n, w, s in ((64, 32, 4, 2), (64, 64, 4, 2), (128, 64, 8, 2))
]


@triton.autotune(TILES, key=["N", "BH"])
@triton.jit
def triton_pass(
    qkv, do, l, delta, d_qkv, N, BH, scale, KEYS: tl.constexpr, PRECISION: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr
):
    """The rows of a block, keys if KEYS, meet all columns; NCHW, KEY_DIM 32."""
    bh = tl.program_id(1).to(tl.int64)
    slab, grad, do = qkv + bh * 128 * N, d_qkv + bh * 128 * N, do + bh * 64 * N
    m, d, e = tl.program_id(0) * BM + tl.arange(0, BM), tl.arange(0, 32), tl.arange(0, 64)
    row = (m < N)[:, None]
    narrow, columns = slab + (32 * N if KEYS else 0), slab + (0 if KEYS else 32 * N)
    wide, columns_wide = (slab + 64 * N, do) if KEYS else (do, slab + 64 * N)
    a = tl.load(narrow + d[None, :] * N + m[:, None], mask=row, other=0.0)
    b = tl.load(wide + e[None, :] * N + m[:, None], mask=row, other=0.0)
    acc, acc_wide = tl.zeros([BM, 32], tl.float32), tl.zeros([BM, 64], tl.float32)
    if not KEYS:
        l_m = tl.load(l + bh * N + m, mask=m < N, other=0.0)[:, None]
        delta_m = tl.load(delta + bh * N + m, mask=m < N, other=0.0)[:, None]
    for first in range(0, N, BN):
        n = first + tl.arange(0, BN)
        column = (n < N)[None, :]
        c = tl.load(columns + d[:, None] * N + n[None, :], mask=column, other=0.0)
        x = tl.load(columns_wide + e[:, None] * N + n[None, :], mask=column, other=0.0)
        if KEYS:
            l_m = tl.load(l + bh * N + n, mask=n < N, other=0.0)[None, :]
            delta_m = tl.load(delta + bh * N + n, mask=n < N, other=0.0)[None, :]
        s = tl.dot(a, c, input_precision=PRECISION) * scale
        p = tl.where(column, tl.exp2((s - l_m) * 1.4426950408889634), 0.0)
        ds = p * (tl.dot(b, x, input_precision=PRECISION) - delta_m)
        if KEYS:
            acc_wide = tl.dot(p.to(x.dtype), tl.trans(x), acc_wide, input_precision=PRECISION)
        acc = tl.dot(ds.to(c.dtype), tl.trans(c), acc, input_precision=PRECISION)
    target = grad + (32 * N if KEYS else 0) + d[None, :] * N + m[:, None]
    tl.store(target, (acc * scale).to(d_qkv.dtype.element_ty), mask=row)
    if KEYS:
        tl.store(grad + (64 + e[None, :]) * N + m[:, None], acc_wide.to(d_qkv.dtype.element_ty), mask=row)


def triton_fused(problem):
    n, bh = problem.shape.n, problem.shape.bh
    d_qkv = torch.full_like(problem.qkv, math.nan)

    def run():
        halves = (x.view(bh, HEAD_DIM, n).float() for x in (problem.out, problem.d_out))
        delta = torch.linalg.vecdot(*halves, dim=1)
        for keys in (True, False):
            triton_pass[lambda tile: (triton.cdiv(n, tile["BM"]), bh)](
                problem.qkv, problem.d_out, problem.l, delta, d_qkv, n, bh, SCALE, keys, "ieee"
            )

    return run, lambda _: d_qkv


def contestants(dtype):
    common = {
        "numba-psa": ours,
        "numba-psa, function": ours_as_a_function,
        "torch eager": torch_eager,
        "Triton": triton_fused,
    }
    if dtype == "float32":
        return common | {"mem-efficient, core": efficient_core}
    return common | {"flash, core": flash_core, "cuDNN, core": cudnn_core}


def measure(name, prepare, problem):
    shape, dtype = problem.shape, str(problem.qkv.dtype).removeprefix("torch.")
    row = {"name": name, "dtype": dtype, "batch": shape.batch, "heads": shape.num_heads, "n": shape.n}
    row |= {"height": shape.height, "width": shape.width}
    try:
        run, as_gradient = prepare(problem)
        found = split(as_gradient(run()).double(), problem.heads)
        wanted = split(problem.truth, problem.heads)
        errors = [float((x - y).norm() / y.norm()) for x, y in zip(found, wanted, strict=True)]
        row |= dict(zip(("error_dq", "error_dk", "error_dv"), errors, strict=True))
        if not max(errors) < LIMIT[dtype] * (1 if name.startswith("numba-psa") else 10):
            raise ValueError(f"errors {errors}")
        if name == "torch eager":  # autograd cannot be captured on its own: with its launches
            row["gpu_us"], row["timed"] = round(1e3 * triton.testing.do_bench(run, return_mode="median"), 1), "events"
        else:
            row["gpu_us"], row["timed"] = gpu_us(run), "graph replay"
        if name.startswith("numba-psa") and row["gpu_us"] < 60:
            row["host_us"] = host_us(run)
        row["tflops"] = round(2 * shape.bh * shape.n**2 * (3 * KEY_DIM + 2 * HEAD_DIM) / row["gpu_us"] / 1e6, 1)
    except Exception as error:
        row["failed"] = f"{type(error).__name__}: {error}"[:200]
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--commit", default="")
    parser.add_argument("--dtypes", default="float16,float32,bfloat16")
    parser.add_argument("--only", default="", help="a regular expression that names of contestants must match")
    options = parser.parse_args()
    torch.backends.cuda.matmul.allow_tf32 = False
    report = {"provenance": provenance(options.commit), "rows": []}
    for dtype in options.dtypes.split(","):
        for sizes in SHAPES if dtype != "bfloat16" else SHAPES[2:3]:
            problem = Problem(*sizes, getattr(torch, dtype))
            for name, prepare in contestants(dtype).items():
                if not re.search(options.only, name):
                    continue
                row = measure(name, prepare, problem)
                report["rows"].append(row)
                keys = ("gpu_us", "host_us", "error_dq", "error_dk", "error_dv")
                result = row.get("failed") or " ".join(f"{key} {row[key]:.3g}" for key in keys if key in row)
                print(f"{dtype} B{row['batch']} h{row['heads']} N{row['n']} {name:20s} {result}", flush=True)
            if options.out:
                options.out.write_text(json.dumps(report, indent=1))


if __name__ == "__main__":
    main()
