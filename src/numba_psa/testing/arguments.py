"""Argument sets for any operation of the contract, derived from one qkv tensor or from q, k and v."""

from __future__ import annotations

from typing import Any

import numpy as np

from numba_psa import oracle
from numba_psa.contract import Operation
from numba_psa.shapes import V_LO, K, PSAShape, Q


def psa_arguments(operation: Operation, qkv: np.ndarray, num_heads: int, rng: np.random.Generator) -> dict[str, Any]:
    """Arguments of `operation` on the problem of `qkv` `[B, num_heads*4*KEY_DIM, H, W]`.

    The flash operations get its Q, K and V_lo, merge its V_lo and V_hi, backwards what the forward saves, N(0, 1) upstream
    gradients, and N(0, 1) targets to add into or overwrite.
    """
    shape = PSAShape.from_qkv(qkv.shape, num_heads)
    normal = _normal(qkv.dtype, rng)
    packed = oracle.psa_pack_qkv(qkv, num_heads)
    arguments = {"qkv": qkv, "num_heads": num_heads, "height": shape.height, "width": shape.width}
    arguments |= {"lo": packed[V_LO], "hi": packed[V_LO + 1], "d_packed": normal(shape.packed)}
    arguments |= {name: normal(shape.out) for name in ("d_v", "d_merged", "d_out")}
    arguments |= {"d_qkv": normal(shape.qkv)}
    if "q" in operation.arrays:
        return flash_arguments(operation, packed[Q], packed[K], packed[V_LO], rng)
    return _only(operation, arguments)


def flash_arguments(
    operation: Operation, q: np.ndarray, k: np.ndarray, v: np.ndarray, rng: np.random.Generator
) -> dict[str, Any]:
    """Arguments of a flash operation on q `[BH, n_ctx_q, D]`, k `[BH, n_ctx_k, D]`, v `[BH, n_ctx_k, Dv]`."""
    normal = _normal(q.dtype, rng)
    arguments = {"q": q, "k": k, "v": v, "dq": normal(q.shape), "dk": normal(k.shape), "dv": normal(v.shape)}
    if "o" in operation.arrays:
        arguments["o"], arguments["l"] = oracle.flash_attention2_forward(q, k, v)
        arguments["do"] = normal(arguments["o"].shape)
    return _only(operation, arguments)


def random_arguments(operation: Operation, shape: PSAShape, dtype: np.dtype, rng: np.random.Generator) -> dict[str, Any]:
    """`psa_arguments` of an N(0, 1) qkv of this shape and dtype."""
    return psa_arguments(operation, _normal(dtype, rng)(shape.qkv), shape.num_heads, rng)


def _normal(dtype: np.dtype, rng: np.random.Generator):
    return lambda shape: rng.standard_normal(shape).astype(dtype)


def _only(operation: Operation, arguments: dict[str, Any]) -> dict[str, Any]:
    wanted = operation.arrays + operation.sizes + operation.adds + operation.stores
    return {name: arguments[name] for name in wanted}
