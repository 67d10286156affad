"""Which kernel runs a problem, by architecture, dtype and shape class: the one table, with the run it came from.

Classes count a block's unit of work, 64 query rows of a head, against the multiprocessors of the GPU: with few of them,
warps share the keys of a row. Timings: scripts/bench/results/, one H200.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from math import gcd
from typing import Any

import numpy as np

from numba_psa.cuda.forward import make_forward
from numba_psa.cuda.forward_tf32 import make_forward_tf32
from numba_psa.cuda.forward_wgmma import make_forward_wgmma
from numba_psa.cuda.tiles import MmaTileConfig, Tf32TileConfig, TileConfig, WarpgroupTileConfig, padded
from numba_psa.errors import ParameterError, ShapeError
from numba_psa.numerics import BFLOAT16, FLOAT32

WIDEST = 128


@dataclass(frozen=True)
class Problem:
    """One attention: sizes, element type, layout, and what addresses are multiples of."""

    heads: int
    n_queries: int
    n_keys: int
    key_dim: int
    value_dim: int
    dtype: np.dtype
    tokens_first: bool = False
    saves_l: bool = False
    exact: bool = True
    alignment: int = 16

    def check_widths(self) -> None:
        """ShapeError for widths that these kernels do not reach."""
        limit = WIDEST if self.tokens_first else WIDEST // 2
        names = ("D", "Dv") if self.tokens_first else ("KEY_DIM",)
        for name, width in zip(names, (self.key_dim, self.value_dim), strict=False):
            if width > limit:
                raise ShapeError(
                    f"impl='cuda' takes {name} up to {limit}, got {width}: impl='cpu' and 'oracle' have no limit"
                )
        for name, n in (("queries", self.n_queries), ("keys", self.n_keys)):
            if n >= 2**31 - 1024:
                raise ShapeError(f"impl='cuda' takes fewer than 2**31 - 1024 {name} a head, got {n}")

    @property
    def copy(self) -> int:
        """Bytes of one access: what divides every address, row and head."""
        item = self.dtype.itemsize
        rows = (self.key_dim, self.value_dim) if self.tokens_first else (self.n_keys, self.n_queries)
        if self.tokens_first and item == 4:
            return 4  # copied element by element, across
        return gcd(16, self.alignment, *(item * row for row in rows))


@dataclass(frozen=True)
class Choice:
    """A kernel factory and the config for it."""

    make: Callable[[Any], Callable]
    config: TileConfig


def choose(problem: Problem, arch: int, multiprocessors: int) -> Choice:
    """The first candidate of the table that can run; there always is one."""
    problem.check_widths()
    for make, config, fields in candidates(problem, arch, multiprocessors):
        try:
            return Choice(make, config(**_common(problem, arch), **fields))
        except ParameterError:
            continue
    raise ShapeError(f"no kernel of impl='cuda' takes {problem} on sm_{arch}: impl='mirror' and impl='cpu' do")


def _common(problem: Problem, arch: int) -> dict[str, Any]:
    precision = {"exact": problem.exact} if problem.dtype == FLOAT32 else {"bf16": problem.dtype == BFLOAT16}
    return precision | {
        "key_dim": problem.key_dim,
        "value_dim": problem.value_dim,
        "tokens_first": problem.tokens_first,
        "saves_l": problem.saves_l,
        "copy": problem.copy,
        "arch": arch,
    }


def candidates(
    problem: Problem, arch: int, multiprocessors: int
) -> Iterator[tuple[Callable, type[TileConfig], dict[str, Any]]]:
    """(factory, config class, tile sizes), best first."""
    units = problem.heads * -(-problem.n_queries // 64)
    few, some = 2 * units <= multiprocessors, units <= multiprocessors
    wide = problem.key_dim > 32
    if problem.dtype == FLOAT32:
        yield from _float32(problem, few, some)
        return
    if arch == 90 and not problem.tokens_first:
        if some and not few and problem.n_keys > 512:
            yield make_forward_wgmma, WarpgroupTileConfig, {"key_groups": 4, "stages": 4}
        if not few:
            tail = padded(problem.n_keys % 64, 16)
            blocks = 2 if wide else 4
            if problem.n_keys >= 4096 and not wide:
                fields = {"BN": 128, "tail": padded(problem.n_keys % 128, 16), "stages": 3, "blocks_per_sm": 3}
                yield make_forward_wgmma, WarpgroupTileConfig, fields
            stages = 4 if tail == 0 else 3
            yield make_forward_wgmma, WarpgroupTileConfig, {"tail": tail, "stages": stages, "blocks_per_sm": blocks}
            yield make_forward_wgmma, WarpgroupTileConfig, {"tail": tail, "stages": 3, "blocks_per_sm": 1}
    if few and not problem.tokens_first:
        yield make_forward, MmaTileConfig, {"query_warps": 1, "key_warps": 4, "BN": 64}
        yield make_forward, MmaTileConfig, {"query_warps": 1, "key_warps": 4, "BN": 32}
    yield make_forward, MmaTileConfig, {"query_warps": 4, "BN": 64, "blocks_per_sm": 1 if wide else 3}
    yield make_forward, MmaTileConfig, {"query_warps": 4, "BN": 32}
    yield make_forward, MmaTileConfig, {"query_warps": 2, "BN": 16}


def _float32(problem: Problem, few: bool, some: bool):
    if few and not problem.tokens_first:
        yield make_forward_tf32, Tf32TileConfig, {"query_warps": 1, "key_warps": 8}
    if (few or some) and not problem.tokens_first:
        yield make_forward_tf32, Tf32TileConfig, {"query_warps": 1, "key_warps": 4}
        yield make_forward_tf32, Tf32TileConfig, {"query_warps": 1, "key_warps": 2}
    yield make_forward_tf32, Tf32TileConfig, {"query_warps": 4, "blocks_per_sm": 2 if problem.key_dim <= 32 else 1}
    yield make_forward_tf32, Tf32TileConfig, {"query_warps": 2}
    yield make_forward_tf32, Tf32TileConfig, {"query_warps": 1}
