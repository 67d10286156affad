"""The mirror kernels against the original's own kernels in Triton, on one GPU: microseconds by CUDA graph replay.

    python scripts/bench/mirror.py [--json FILE --commit HASH]      needs torch and triton, for the peer only

Each Triton kernel here has the decomposition of vision-rs 0.1.1: one program a query or key row, a HEAD_DIM-wide tensor a
row, the online recurrence a key at a time. Every result is checked against the float64 oracle before anything is timed.
"""

import argparse
import json
import math
import platform
import subprocess
from importlib.metadata import version

import numpy as np
import torch
import triton
import triton.language as tl
from numba import cuda

from numba_psa import oracle
from numba_psa.contract import OPERATIONS
from numba_psa.mirror import flash_attn2_kernels as kernels
from numba_psa.mirror.elements import ELEMENTS
from numba_psa.mirror.launch import compiled
from numba_psa.testing.check import check


@triton.jit
def triton_forward(q_ptr, k_ptr, v_ptr, o_ptr, l_ptr, n_ctx_q, n_ctx_k, scale, HEAD_DIM: tl.constexpr):
    pid_m, pid_bh = tl.program_id(0), tl.program_id(1)
    d = tl.arange(0, HEAD_DIM)
    q = tl.load(q_ptr + (pid_bh * n_ctx_q + pid_m) * HEAD_DIM + d)
    acc = tl.zeros([HEAD_DIM], tl.float32)
    m_i = tl.full([HEAD_DIM], float("-inf"), tl.float32)
    l_i = tl.zeros([HEAD_DIM], tl.float32)
    for j in range(n_ctx_k):
        row = (pid_bh * n_ctx_k + j) * HEAD_DIM
        qk = tl.sum(q * tl.load(k_ptr + row + d), 0) * scale + tl.zeros([HEAD_DIM], tl.float32)
        m_new = tl.maximum(m_i, qk)
        alpha = tl.exp(m_i - m_new)
        p = tl.exp(qk - m_new)
        l_i = alpha * l_i + p
        acc = alpha * acc + p * tl.load(v_ptr + row + d)
        m_i = m_new
    tl.store(o_ptr + (pid_bh * n_ctx_q + pid_m) * HEAD_DIM + d, acc / l_i)
    tl.store(l_ptr + pid_bh * n_ctx_q + pid_m, tl.sum(m_i + tl.log(l_i), 0) / HEAD_DIM)


@triton.jit
def triton_backward_dq(q_ptr, k_ptr, v_ptr, o_ptr, do_ptr, l_ptr, dq_ptr, n_ctx_q, n_ctx_k, scale, HEAD_DIM: tl.constexpr):
    pid_m, pid_bh = tl.program_id(0), tl.program_id(1)
    d = tl.arange(0, HEAD_DIM)
    row = (pid_bh * n_ctx_q + pid_m) * HEAD_DIM
    q, o, do = tl.load(q_ptr + row + d), tl.load(o_ptr + row + d), tl.load(do_ptr + row + d)
    delta = tl.sum(o * do, 0)
    l = tl.load(l_ptr + pid_bh * n_ctx_q + pid_m)
    dq = tl.zeros([HEAD_DIM], tl.float32)
    for j in range(n_ctx_k):
        key = (pid_bh * n_ctx_k + j) * HEAD_DIM
        k, v = tl.load(k_ptr + key + d), tl.load(v_ptr + key + d)
        p = tl.exp(tl.sum(q * k, 0) * scale - l)
        dq += p * (tl.sum(do * v, 0) - delta) * k * scale
    tl.store(dq_ptr + row + d, dq)


@triton.jit
def triton_backward_dkv(
    q_ptr, k_ptr, v_ptr, o_ptr, do_ptr, l_ptr, dk_ptr, dv_ptr, n_ctx_q, n_ctx_k, scale, HEAD_DIM: tl.constexpr
):
    pid_n, pid_bh = tl.program_id(0), tl.program_id(1)
    d = tl.arange(0, HEAD_DIM)
    row = (pid_bh * n_ctx_k + pid_n) * HEAD_DIM
    k, v = tl.load(k_ptr + row + d), tl.load(v_ptr + row + d)
    dk = tl.zeros([HEAD_DIM], tl.float32)
    dv = tl.zeros([HEAD_DIM], tl.float32)
    for i in range(n_ctx_q):
        query = (pid_bh * n_ctx_q + i) * HEAD_DIM
        q, o, do = tl.load(q_ptr + query + d), tl.load(o_ptr + query + d), tl.load(do_ptr + query + d)
        delta = tl.sum(o * do, 0)
        p = tl.exp(tl.sum(q * k, 0) * scale - tl.load(l_ptr + pid_bh * n_ctx_q + i))
        dv += p * do
        dk += p * (tl.sum(do * v, 0) - delta) * q * scale
    tl.store(dk_ptr + row + d, dk)
    tl.store(dv_ptr + row + d, dv)


CASES = {  # operation: (its Triton kernel, our factory, inputs, outputs)
    "flash_attention2_forward": (triton_forward, kernels.flash_attention2_forward_kernel, "qkv", ("o", "l")),
    "flash_attention2_backward_dq": (
        triton_backward_dq,
        kernels.flash_attention2_backward_dq_kernel,
        ("q", "k", "v", "o", "do", "l"),
        ("dq",),
    ),
    "flash_attention2_backward_dkv": (
        triton_backward_dkv,
        kernels.flash_attention2_backward_dkv_kernel,
        ("q", "k", "v", "o", "do", "l"),
        ("dk", "dv"),
    ),
}


def microseconds(function) -> float:
    return 1e3 * triton.testing.do_bench_cudagraph(function, rep=20, return_mode="median")


def bench(name: str, bh: int, n: int, key_dim: int) -> dict:
    rng = np.random.default_rng()
    q, k, v, do = (rng.standard_normal((bh, n, key_dim)).astype(np.float32) for _ in range(4))
    o, l = oracle.flash_attention2_forward(q, k, v)
    arguments = {"q": q, "k": k, "v": v, "o": o, "do": do, "l": l}
    triton_kernel, factory, inputs, outputs = CASES[name]
    tensors = [torch.from_numpy(arguments[x]).cuda() for x in inputs]
    scale = key_dim**-0.5
    like = {"o": o, "l": l, "dq": q, "dk": k, "dv": v}

    def run_triton(warps):
        return lambda results: triton_kernel[(n, bh)](*tensors, *results, n, n, scale, HEAD_DIM=key_dim, num_warps=warps)

    kernel = compiled(factory, key_dim, key_dim, ELEMENTS[q.dtype])
    scalars = (n, n, np.float32(scale)) + ((np.float32(-math.inf),) if "o" in outputs else ())

    def run_mirror(results):
        stream = cuda.external_stream(torch.cuda.current_stream().cuda_stream)
        arrays = [cuda.as_cuda_array(x).reshape(x.numel()) for x in (*tensors, *results)]
        kernel[(n, bh), key_dim, stream](*arrays, *scalars)

    row = {"operation": name, "bh": bh, "n": n, "key_dim": key_dim, "dtype": "float32"}
    runs = {f"triton_{warps}_warps": run_triton(warps) for warps in (1, 4)}  # 4 is Triton's default
    for label, run in (runs | {"mirror": run_mirror}).items():
        results = [torch.full(like[x].shape, math.nan, device="cuda") for x in outputs]
        run(results)
        torch.cuda.synchronize()
        got = {x: r.cpu().numpy() for x, r in zip(outputs, results, strict=True)}
        verdicts = check(OPERATIONS[name], arguments, got, "online")
        assert all(v.passed for v in verdicts.values()), (label, verdicts)
        row[label + "_us"] = round(microseconds(lambda run=run, results=results: run(results)), 2)
        row[label + "_error"] = max(v.error for v in verdicts.values())
    return row


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--json")
    parser.add_argument("--commit", help="of these sources, for the record")
    options = parser.parse_args()
    rows = [
        bench(name, bh, n, kd) for name in CASES for bh, n, kd in ((2, 400, 32), (2, 399, 32), (8, 400, 32), (2, 400, 64))
    ]
    columns = ("operation", "bh", "n", "key_dim", "triton_1_warps_us", "triton_4_warps_us", "mirror_us", "mirror_error")
    print(*columns)
    for row in rows:
        print(*(row[column] for column in columns))
    if options.json:
        driver = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
        about = {
            "gpu": torch.cuda.get_device_name(),
            "driver": subprocess.run(driver, capture_output=True, text=True, check=True).stdout.strip(),
            "python": platform.python_version(),
            "versions": {p: version(p) for p in ("numpy", "numba", "numba-cuda", "torch", "triton")},
            "commit": options.commit,
        }
        with open(options.json, "w") as file:
            json.dump({"about": about, "rows": rows}, file, indent=1)


if __name__ == "__main__":
    main()
