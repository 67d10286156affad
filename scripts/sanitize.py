"""Every kernel of the choice table once, on small problems, for compute-sanitizer; checked against float64.

    for tool in memcheck racecheck; do compute-sanitizer --tool $tool --error-exitcode 1 python scripts/sanitize.py; done

Needs a GPU. What the table picks for a large problem runs here on two heads of a small one with the same remainders.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from numba_psa import cuda, oracle
from numba_psa._numba_cuda import to_device, to_host
from numba_psa.cuda.choice import Choice, Problem, choose
from numba_psa.cuda.launching import architecture, current_device
from numba_psa.cuda.plans import Launcher, device_scale, multiprocessors
from numba_psa.numerics import float_dtype
from numba_psa.shapes import PSAShape

LIMIT = {"float16": 2e-3, "bfloat16": 2e-2, "float32": 3e-6}
LARGE_AND_SMALL = [(2, 400, 144), (2, 399, 143), (12, 400, 144), (12, 399, 143), (4, 1600, 576), (4, 1599, 575)]
LARGE_AND_SMALL += [(128, 400, 144), (128, 399, 143), (32, 1600, 192), (32, 1599, 191), (16, 6400, 384)]
FLASH = [(2, 70, 133, 64, 64), (1, 65, 97, 128, 128), (1, 40, 33, 19, 5)]
LAYOUT = [(2, 3, 32, 8, 16), (1, 2, 36, 7, 19)]


def kernels() -> Iterator[tuple[Choice, Problem]]:
    """(a kernel of the choice table, a small problem for it), each kernel once."""
    device, seen = current_device(), set()
    for name in LIMIT:
        for heads, n, small in LARGE_AND_SMALL:
            for width in (32, 36, 64) if heads == 128 and name != "bfloat16" else (32,):
                problem = Problem(heads, n, n, width, 2 * width, float_dtype(name), saves_l=True)
                choice = choose(problem, architecture(device), multiprocessors(device))
                if choice not in seen:
                    seen.add(choice)
                    yield choice, replace(problem, heads=2, n_queries=small, n_keys=small)


def relative(found: np.ndarray, want: np.ndarray) -> float:
    return float(np.linalg.norm(found.astype(np.float64) - want) / np.linalg.norm(want))


def error_of(choice: Choice, problem: Problem) -> float:
    """Of one launch into memory full of NaN."""
    shape = PSAShape(1, problem.heads, problem.key_dim, 1, problem.n_keys)
    qkv = np.random.default_rng(shape.n).standard_normal(shape.qkv).astype(problem.dtype)
    arrays = [to_device(x) for x in (qkv, np.full(shape.out, np.nan, qkv.dtype), np.full(shape.l, np.nan, np.float32))]
    source, out, l = (x.__cuda_array_interface__["data"][0] for x in arrays)
    row = shape.key_dim * shape.n * qkv.itemsize
    launch = Launcher(problem, choice)
    launch(0, source, source + row, source + 2 * row, out, l, device_scale(shape.softmax_scale))
    return relative(to_host(arrays[1]), oracle.psa_attention(qkv, problem.heads, dtype=np.float64))


class Report:
    """Prints an error beside its name, and counts those that are not within their limit."""

    def __init__(self) -> None:
        self.failures = 0

    def __call__(self, name: str, error: float, limit: float) -> None:
        self.failures += not error <= limit
        print(f"{'ok' if error <= limit else 'WRONG':6s}{error:.1e}  {name}", flush=True)


def main() -> None:
    report = Report()
    for choice, problem in kernels():
        report(choice.config.name, error_of(choice, problem), LIMIT[problem.dtype.name])
    rng = np.random.default_rng(0)
    for name, limit in LIMIT.items():
        for heads, n_queries, n_keys, width, value_width in FLASH:
            sizes = (n_queries, width), (n_keys, width), (n_keys, value_width)
            q, k, v = (rng.standard_normal((heads, *size)).astype(float_dtype(name)) for size in sizes)
            found, want = (
                cuda.flash_attention2_forward(q, k, v)[0],
                oracle.flash_attention2_forward(q, k, v, dtype=np.float64),
            )
            report(f"flash_attention2_forward {name} {width} {value_width}", relative(found, want[0]), limit)
        for shape in (PSAShape(*sizes) for sizes in LAYOUT):
            qkv = rng.standard_normal(shape.qkv).astype(float_dtype(name))
            packed = cuda.psa_pack_qkv(qkv, shape.num_heads)
            report(f"psa_pack_qkv {name}", relative(packed, oracle.psa_pack_qkv(qkv, shape.num_heads)), 0)
            v = cuda.psa_extract_v_nchw(qkv, shape.num_heads)
            report(f"psa_extract_v_nchw {name}", relative(v, oracle.psa_extract_v_nchw(qkv, shape.num_heads)), 0)
            given = packed[2], packed[3], shape.num_heads, shape.height, shape.width
            merged = cuda.psa_merge_attn_nchw(*given)
            report(f"psa_merge_attn_nchw {name}", relative(merged, oracle.psa_merge_attn_nchw(*given)), 0)
    sys.exit(bool(report.failures))


if __name__ == "__main__":
    main()
