"""Every operation of every implementation against the oracle: what `numba-psa verify` runs."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import numpy as np

from numba_psa.contract import OPERATIONS, Operation
from numba_psa.data import REAL_QKV_SOURCE, real_qkv
from numba_psa.errors import NumbaPSAError
from numba_psa.shapes import AttentionShape, PSAShape
from numba_psa.testing.arguments import flash_arguments, psa_arguments
from numba_psa.testing.check import Plain, check

RAGGED = (PSAShape(2, 3, 5, 3, 7), PSAShape(1, 1, 36, 1, 1), PSAShape(3, 2, 8, 13, 5))
"""Synthetic problems: odd N, H ≠ W, KEY_DIM no power of two, one token, B ≠ num_heads."""
RAGGED_SMALL = (PSAShape(2, 3, 5, 1, 2), PSAShape(1, 1, 36, 1, 1))
"""The same for a simulator."""
CROP = (1, 3)
"""Height and width to which a real tensor is cut for a simulator."""


@dataclass(frozen=True)
class Problem:
    """One named input: a qkv, or q, k and v for the flash operations alone."""

    name: str
    qkv: np.ndarray | None = None
    num_heads: int = 1
    flash: tuple[np.ndarray, np.ndarray, np.ndarray] | None = None

    def has(self, operation: Operation) -> bool:
        if self.flash is None:
            return True
        shape = AttentionShape.from_qkv(*(x.shape for x in self.flash))
        return "q" in operation.arrays and (operation.name != "psa_fa2_backward" or shape.n_ctx_q == shape.n_ctx_k)

    def arguments(self, operation: Operation, rng: np.random.Generator) -> dict[str, Any]:
        if self.flash is not None:
            return flash_arguments(operation, *self.flash, rng)
        return psa_arguments(operation, self.qkv, self.num_heads, rng)

    @property
    def shape(self) -> str:
        """B,heads,key_dim,H,W, as the option --shape takes it, or the shapes of q, k and v."""
        if self.flash is not None:
            return " ".join("×".join(map(str, x.shape)) for x in self.flash)
        shape = PSAShape.from_qkv(self.qkv.shape, self.num_heads)
        return f"{shape.batch},{shape.num_heads},{shape.key_dim},{shape.height},{shape.width}"

    def cropped(self) -> Problem:
        """A corner small enough for a simulator."""
        if self.flash is not None:
            q, k, v = self.flash
            tokens = CROP[0] * CROP[1]
            return Problem(self.name, flash=(q[:2, :tokens], k[:2, :tokens], v[:2, :tokens]))
        return Problem(self.name, np.ascontiguousarray(self.qkv[:1, :, : CROP[0], : CROP[1]]), self.num_heads)


@dataclass(frozen=True)
class Row:
    """One operation of one implementation on one problem. `output` is the one nearest to, or furthest over, its budget."""

    operation: str
    implementation: str
    problem: str
    shape: str
    dtype: str
    output: str
    error: float
    budget: float
    seconds: float
    passed: bool
    reason: str = ""
    refused: bool = False
    """The implementation said, by a typed error, that it does not take this problem: neither passed nor failed."""


def problems(dtype: np.dtype, seed: int, shapes: Sequence[PSAShape]) -> list[Problem]:
    """The real tensor, and an N(0, 1) qkv of each shape, in `dtype`."""
    qkv, num_heads = real_qkv()
    return [Problem(REAL_QKV_SOURCE, qkv.astype(dtype), num_heads), *synthetic(dtype, seed, shapes)]


def synthetic(dtype: np.dtype, seed: int, shapes: Sequence[PSAShape]) -> list[Problem]:
    """An N(0, 1) qkv of each shape."""
    rng = np.random.default_rng(seed)
    return [Problem("normal", rng.standard_normal(shape.qkv).astype(dtype), shape.num_heads) for shape in shapes]


def verify(
    name: str,
    namespace: ModuleType,
    operations: Sequence[str],
    given: Sequence[Problem],
    *,
    seed: int = 0,
    warm: bool = True,
    plain: Plain = "two-pass",
) -> Iterator[Row]:
    """A row for each operation on each problem it applies to; `warm` times a second call, after compilation."""
    for problem in given:
        for operation in (OPERATIONS[x] for x in operations):
            if problem.has(operation):
                arguments = problem.arguments(operation, np.random.default_rng(seed))
                yield _row(name, namespace, operation, problem, arguments, warm, plain)


def _row(name, namespace, operation, problem, arguments, warm, plain) -> Row:
    about = (operation.name, name, problem.name, problem.shape, str(arguments[operation.arrays[0]].dtype))
    try:
        if warm:
            operation(namespace, arguments)
        start = time.perf_counter()
        results = operation(namespace, arguments)
        seconds = time.perf_counter() - start
    except NumbaPSAError as error:
        return Row(*about, "", float("nan"), 0.0, 0.0, False, str(error), refused=True)
    except Exception as error:  # a kernel that raises is a finding, and the others are still to be verified
        return Row(*about, "", float("nan"), 0.0, 0.0, False, f"{type(error).__name__}: {error}")
    verdicts = check(operation, arguments, results, plain)
    output, verdict = max(verdicts.items(), key=lambda item: (not item[1].passed, item[1].error - item[1].budget))
    reason = f"{verdict.misplaced} NaN or inf misplaced" if verdict.misplaced else ""
    return Row(*about, output, verdict.error, verdict.budget, seconds, verdict.passed, reason)
