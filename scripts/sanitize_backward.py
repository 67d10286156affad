"""Every kernel of the gradients once, on small problems, for compute-sanitizer; checked against float64.

    compute-sanitizer --tool memcheck --error-exitcode 1 python scripts/sanitize_backward.py      and --tool racecheck

Needs a GPU. What the table picks for a large problem runs here on two heads of a small one with the same remainders.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import replace

import numpy as np
from sanitize import LIMIT, Report, relative

from numba_psa import OPERATIONS, cuda, oracle
from numba_psa._numba_cuda import to_device, to_host
from numba_psa.cuda.choice import Choice, Problem
from numba_psa.cuda.choice_backward import choose_backward
from numba_psa.cuda.launching import architecture, current_device
from numba_psa.cuda.plans import multiprocessors
from numba_psa.cuda.plans_backward import BackwardLauncher, exponent_scale
from numba_psa.cuda.tiles_backward import DKV, DQ
from numba_psa.numerics import float_dtype
from numba_psa.shapes import AttentionShape, PSAShape
from numba_psa.testing.arguments import flash_arguments, random_arguments

LARGE_AND_SMALL = [(2, 400, 144), (2, 399, 143), (128, 400, 144), (128, 399, 143), (32, 1600, 192)]
FLASH = [(2, 70, 133, 64, 64), (1, 65, 97, 128, 128), (1, 40, 33, 19, 5)]


def kernels() -> Iterator[tuple[Choice, Problem]]:
    """(a kernel of the choice table, a small problem for it), each kernel once."""
    device, seen = current_device(), set()
    for name in LIMIT:
        for heads, n, small in LARGE_AND_SMALL:
            for width in (32, 64) if heads == 128 and name != "bfloat16" else (32,):
                problem = Problem(heads, n, n, width, 2 * width, float_dtype(name))
                choice = choose_backward(problem, DQ | DKV, architecture(device), multiprocessors(device))
                if choice not in seen:
                    seen.add(choice)
                    yield choice, replace(problem, heads=2, n_queries=small, n_keys=small)


def error_of(choice: Choice, problem: Problem) -> float:
    """Of one launch into memory full of NaN."""
    shape, rng = PSAShape(1, problem.heads, problem.key_dim, 1, problem.n_keys), np.random.default_rng(problem.n_keys)
    qkv, d_out = (rng.standard_normal(x).astype(problem.dtype) for x in (shape.qkv, shape.out))
    out, (_, l) = oracle.psa_attention(qkv, problem.heads, save_for_backward=True)
    launcher = BackwardLauncher(problem, DQ | DKV, choice)
    poison = np.full(shape.qkv, np.nan, qkv.dtype), np.full(launcher.workspace_bytes // 4, np.nan, np.float32)
    arrays = [to_device(x) for x in (qkv, out, d_out, l, *poison)]
    first, *rest = (x.__cuda_array_interface__["data"][0] for x in arrays)
    part = shape.key_dim * shape.n * qkv.itemsize
    inputs = first, first + part, first + 2 * part, *rest[:3]
    gradients, scale = tuple(rest[3] + i * part for i in range(3)), shape.softmax_scale
    launcher(0, inputs, gradients, rest[4], scale, exponent_scale(scale, qkv.dtype))
    return relative(to_host(arrays[4]), oracle.psa_attention_backward(qkv, d_out, problem.heads, dtype=np.float64))


def main() -> None:
    report = Report()
    for choice, problem in kernels():
        report(choice.config.name, error_of(choice, problem), LIMIT[problem.dtype.name])
    rng = np.random.default_rng(0)
    for dtype, limit in LIMIT.items():
        for bh, n_queries, n_keys, width, value_width in FLASH:
            for name in ("flash_attention2_backward_dq", "flash_attention2_backward_dkv"):
                shape, operation = AttentionShape(bh, n_queries, n_keys, width, value_width), OPERATIONS[name]
                q, k, v = (rng.standard_normal(x).astype(float_dtype(dtype)) for x in (shape.q, shape.k, shape.v))
                given = flash_arguments(operation, q, k, v, rng)
                found, want = operation(cuda, given), operation(oracle, given, dtype=np.float64)
                for output, x in found.items():
                    report(f"{name} {output} {dtype} {width} {value_width}", relative(x, want[output]), limit)
        for name in ("psa_fa2_backward", "psa_pack_qkv_backward", "psa_extract_v_backward", "psa_merge_attn_backward"):
            operation = OPERATIONS[name]
            given = random_arguments(operation, PSAShape(1, 2, 36, 7, 19), float_dtype(dtype), rng)
            found, want = operation(cuda, given), operation(oracle, given)
            for output, x in found.items():
                report(f"{name} {output} {dtype}", relative(x, want[output].astype(np.float64)), limit)
    sys.exit(bool(report.failures))


if __name__ == "__main__":
    main()
