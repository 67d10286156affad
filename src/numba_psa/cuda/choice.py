"""Which kernel runs a problem, by architecture, dtype and shape class: the one table.

The choices for Hopper are the fastest of scripts/bench/tune_gpu.py on one H200 (scripts/bench/results/tune_h200.json); for
wgmma where N is no multiple of 8 they are those of the even neighbour (timed in gpu_h200.json). Other architectures have
not been timed: they get the mma.sync kernels with tiles that fit.
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
from numba_psa.cuda.forward_wgmma_tf32 import make_forward_wgmma_tf32
from numba_psa.cuda.tiles import MmaTileConfig, Tf32TileConfig, TileConfig, padded
from numba_psa.cuda.tiles_wgmma import Tf32WarpgroupTileConfig, WarpgroupTileConfig
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
    def realigned(self) -> bool:
        """Whether 16-bit channel rows begin at odd places."""
        return not self.tokens_first and self.dtype.itemsize == 2 and self.copy < 16

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
        "realigned": problem.realigned,
        "arch": arch,
    }


Candidate = tuple[Callable[[Any], Callable], type[TileConfig], dict[str, Any]]


def candidates(problem: Problem, arch: int, multiprocessors: int) -> Iterator[Candidate]:
    """(factory, config class, tile sizes), best first.

    Blocks of 16 queries whose warps share the keys, while all of them run at once; then blocks of 64 whose warpgroups
    share the keys; then, with more of them than multiprocessors, blocks that share a multiprocessor.
    """
    few = problem.heads * -(-problem.n_queries // 16) <= multiprocessors
    some = problem.heads * -(-problem.n_queries // 64) <= multiprocessors
    if problem.dtype == FLOAT32:
        yield from _float32(problem, arch, few, some)
        return
    if few and not problem.tokens_first:
        fields = {"key_warps": 8, "BN": 32} if problem.realigned else {"key_warps": 4, "BN": 64}
        yield make_forward, MmaTileConfig, fields | {"query_warps": 1, "stages": 3}
        yield make_forward, MmaTileConfig, {"query_warps": 1, "key_warps": 4, "BN": 32}
    if arch == 90 and not problem.tokens_first:
        if some:
            fields = {"key_groups": 3, "stages": 5} if problem.n_keys > 512 else {"key_groups": 2}
            yield make_forward_wgmma, WarpgroupTileConfig, {"stages": 3} | fields
            yield make_forward_wgmma, WarpgroupTileConfig, {"key_groups": 2, "stages": 3}
        yield from _warpgroups(problem)
    yield make_forward, MmaTileConfig, {"query_warps": 4, "BN": 64, "blocks_per_sm": 1 if problem.key_dim > 32 else 3}
    yield make_forward, MmaTileConfig, {"query_warps": 4, "BN": 32}
    yield make_forward, MmaTileConfig, {"query_warps": 2, "BN": 16}


def _warpgroups(problem: Problem) -> Iterator[Candidate]:
    """Blocks of 64 queries, three or four to a multiprocessor."""
    wide, tail = problem.key_dim > 32, padded(problem.n_keys % 64, 16)
    if problem.n_keys >= 4096 and not wide:
        fields = {"BN": 128, "tail": padded(problem.n_keys % 128, 16), "stages": 3, "blocks_per_sm": 3}
        yield make_forward_wgmma, WarpgroupTileConfig, fields
    else:
        fields = {"tail": tail, "stages": 4, "blocks_per_sm": 3} if tail else {"stages": 3, "blocks_per_sm": 4}
        fields |= {"blocks_per_sm": 2} if wide else {}
        yield make_forward_wgmma, WarpgroupTileConfig, fields
    yield make_forward_wgmma, WarpgroupTileConfig, {"tail": tail, "stages": 3, "blocks_per_sm": 1}


def _float32(problem: Problem, arch: int, few: bool, some: bool) -> Iterator[Candidate]:
    if few and not problem.tokens_first:
        yield make_forward_tf32, Tf32TileConfig, {"query_warps": 1, "key_warps": 7 if problem.key_dim <= 32 else 4}
        yield make_forward_tf32, Tf32TileConfig, {"query_warps": 1, "key_warps": 4}
        yield make_forward_tf32, Tf32TileConfig, {"query_warps": 1, "key_warps": 2}
    if arch == 90:  # up to KEY_DIM = 32
        split = some or problem.n_keys >= 1024
        groups, blocks = (3 if problem.copy == 16 else 2, 1) if split else (1, 3 if problem.copy == 16 else 2)
        yield make_forward_wgmma_tf32, Tf32WarpgroupTileConfig, {"key_groups": groups, "blocks_per_sm": blocks}
    yield make_forward_tf32, Tf32TileConfig, {"query_warps": 4, "blocks_per_sm": 2 if problem.key_dim <= 32 else 1}
    yield make_forward_tf32, Tf32TileConfig, {"query_warps": 2}
    yield make_forward_tf32, Tf32TileConfig, {"query_warps": 1}
