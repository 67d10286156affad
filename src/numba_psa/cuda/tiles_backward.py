"""How the backward kernels cut the problem.

A block of a pass owns BM rows and meets all columns, BN at a time. In the pass for dq rows are queries, with q and do, and
columns are keys, with k and v; in the pass for dk and dv it is the other way round. So one operand is key_dim wide (q or k)
and its partner value_dim wide (do or v), on both sides, and one set of constants serves both passes.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from functools import cached_property
from typing import NamedTuple

from numba_psa.cuda.device import REVISION
from numba_psa.cuda.tiles import Tile, TileConfig
from numba_psa.errors import ParameterError

DQ, DKV = 1, 2
"""The passes, as bits: a kernel runs either or both, in blocks of their own."""
SUMS_PAD = 64
"""Queries in a row of l and delta come in multiples of this: zeros from the last query on."""


@dataclass(frozen=True)
class BackwardTileConfig(TileConfig):
    """What the backward kernels have in common. value_stride, query_stride …: of the operand value_dim wide and of the rows.

    Shared memory: the rows of both operands, then `stages` times the columns of both and their l and delta.
    """

    passes: int = DQ | DKV
    row_warps: int = 4
    BN: int = 32

    @property
    def BM(self) -> int:
        return 16 * self.row_warps

    @property
    def query_warps(self) -> int:
        return self.row_warps

    @property
    def threads(self) -> int:
        return 32 * self.row_warps

    @property
    def overlaps(self) -> bool:
        """Whether the kernel starts as the one of l and delta ends, and waits for it itself."""
        return self.arch >= 90

    @property
    def scales_gradients(self) -> bool:
        """Whether dS is brought to the range of its type, by a power of two for each head: only float16's is so small."""
        return self.item == 2 and not self.bf16

    def widths_swapped(self) -> Tile:
        """The constants with the operands' widths in each other's place: for the products that take them so."""
        tile = self.constants()
        return tile._replace(
            key_dim=tile.value_dim,
            value_dim=tile.key_dim,
            key_pad=tile.value_pad,
            value_pad=tile.key_pad,
            query_stride=int(self.wide_query_stride),
            key_stride=tile.value_stride,
            value_stride=tile.key_stride,
            output_stride=int(self.narrow_output_stride),
        )

    narrow_output_stride = 0

    def rules(self):
        return [
            (self.passes in (DQ, DKV, DQ | DKV), f"passes must be 1 (dq), 2 (dk and dv) or 3, got {self.passes}"),
            (0 < self.threads <= 1024, f"{self.threads} threads are not within the 1024 of a block"),
            (2 <= self.stages <= 4, "stages must be 2, 3 or 4: one is read while the others fill"),
            (not self.realigned and not self.saves_l, "realigned and saves_l are for the forward"),
        ]


@dataclass(frozen=True)
class MmaBackwardConfig(BackwardTileConfig):
    """Tiles of the mma.sync backward: row_warps warps of 16 rows each, BN columns a step.

    Tiles lie in shared memory as in global memory, rows of it padded by 16 bytes, and are read both ways: S and dP sum over
    the channels, the gradients over the tokens.
    """

    bf16: bool = False

    @property
    def keeps_query(self) -> bool:
        """Whether the rows stay in registers; wide ones are read again for every block of columns."""
        return self.key_pad + self.value_pad <= 128

    def _stride(self, tokens: int, channels: int) -> int:
        return 2 * ((channels if self.tokens_first else tokens) + 8)

    def _bytes(self, tokens: int, channels: int) -> int:
        return self._stride(tokens, channels) * (tokens if self.tokens_first else channels)

    @property
    def longest_row(self) -> int:
        """Elements of the longest row that is moved at once."""
        return max(self.key_pad, self.value_pad) if self.tokens_first else max(self.BM, self.BN)

    @property
    def query_stride(self) -> int:
        return self._stride(self.BM, self.key_pad)

    @property
    def wide_query_stride(self) -> int:
        return self._stride(self.BM, self.value_pad)

    @property
    def output_stride(self) -> int:
        return self.wide_query_stride

    @property
    def narrow_output_stride(self) -> int:
        return self.query_stride

    @property
    def key_stride(self) -> int:
        return self._stride(self.BN, self.key_pad)

    @property
    def value_stride(self) -> int:
        return self._stride(self.BN, self.value_pad)

    @property
    def query_offset(self) -> int:
        """Of the rows' second operand."""
        return self._bytes(self.BM, self.key_pad)

    @property
    def keys_offset(self) -> int:
        return self.query_offset + self._bytes(self.BM, self.value_pad)

    @property
    def values_offset(self) -> int:
        return self._bytes(self.BN, self.key_pad)

    @property
    def sums_offset(self) -> int:
        """Of the columns' l and delta within a stage."""
        return self.values_offset + self._bytes(self.BN, self.value_pad)

    @property
    def stage_bytes(self) -> int:
        return self.sums_offset + 8 * self.BN

    @cached_property
    def shared_bytes(self) -> int:
        return self.keys_offset + self.stages * self.stage_bytes

    @property
    def fragment_shapes(self) -> tuple[tuple[int, ...], ...]:
        """One lane's rows of either operand, an A operand of 16 columns, s and dp, and the gradients of either width."""
        return (
            (1, self.key_pad // 16 if self.keeps_query else 1, 4),
            (1, self.value_pad // 16 if self.keeps_query else 1, 4),
            (1, 4),
            (1, self.BN // 8, 4),
            (1, self.key_pad // 8, 4),
            (1, self.value_pad // 8, 4),
            (1, 2),
        )

    def rules(self):
        return [
            *super().rules(),
            (self.BN % 16 == 0 and self.BN > 0, "BN must be a multiple of 16: columns are consumed 16 at a time"),
            (
                self.threads >= self.longest_row * self.item // self.copy,
                f"{self.threads} threads are fewer than a row has chunks",
            ),
        ]


@dataclass(frozen=True)
class Tf32BackwardConfig(BackwardTileConfig):
    """Tiles of the float32 backward on mma.sync, as MmaBackwardConfig; [channel][token] floats in shared memory."""

    exact: bool = True
    item = 4
    granule = 8
    keeps_query = False

    @property
    def query_stride(self) -> int:
        return 4 * (self.BM + 8)

    wide_query_stride = query_stride

    @property
    def key_stride(self) -> int:
        return 4 * (self.BN + 4)

    value_stride = key_stride

    @property
    def query_offset(self) -> int:
        return self.key_pad * self.query_stride

    @property
    def keys_offset(self) -> int:
        return self.query_offset + self.value_pad * self.query_stride

    @property
    def values_offset(self) -> int:
        return self.key_pad * self.key_stride

    @property
    def sums_offset(self) -> int:
        return self.values_offset + self.value_pad * self.value_stride

    @property
    def stage_bytes(self) -> int:
        return self.sums_offset + 8 * self.BN

    @cached_property
    def shared_bytes(self) -> int:
        return self.keys_offset + self.stages * self.stage_bytes

    @property
    def apart(self) -> bool:
        """Whether a block computes dv first and then dk: registers cannot hold both of wide heads."""
        return self.key_pad + self.value_pad > 160

    def together(self, pad: int) -> int:
        """Column tiles of a gradient in flight at once, as in the forward."""
        return 2 if pad % 16 == 0 else 1

    @property
    def fragment_shapes(self) -> tuple[tuple[int, ...], ...]:
        """One lane's a, b, p, s, the two gradients, for each a block's part and its operand, a part of s, rows."""
        narrow, wide = self.together(self.key_pad), self.together(self.value_pad)
        return (
            (1, 4),
            (2, 4),
            (self.BN // 8, 4),
            (1, self.BN // 8, 4),
            (1, self.key_pad // 8, 4),
            (1, self.value_pad // 8, 4),
            (narrow, 4),
            (narrow, 2, 4),
            (wide, 4),
            (wide, 2, 4),
            (4, 4),
            (1, 2),
        )

    def rules(self):
        return [
            *super().rules(),
            (self.BN % 32 == 0 and self.BN > 0, "BN must be a multiple of 32: columns are permuted within 32"),
        ]


class SumsTile(NamedTuple):
    """The integers that the kernel of l and delta needs."""

    key_dim: int
    value_dim: int
    item: int
    bf16: int
    tokens_first: int
    scales_gradients: int
    copy: int
    tokens: int  # of a thread, side by side
    threads: int
    revision: int


@dataclass(frozen=True)
class SumsConfig:
    """The kernel of l and delta: 64 tokens a block, whose threads share the channels."""

    key_dim: int
    value_dim: int
    item: int = 2
    bf16: bool = False
    tokens_first: bool = False
    copy: int = 16
    arch: int = 80
    threads: int = 256
    blocks_per_sm: int = 4
    revision = REVISION

    def __post_init__(self) -> None:
        if self.item not in (2, 4) or self.threads % 64 or self.threads > 1024:
            raise ParameterError(f"{self}: item must be 2 or 4 bytes, threads a multiple of 64 up to 1024")

    @property
    def tokens(self) -> int:
        return 1 if self.tokens_first else 16 // self.item

    @property
    def starts_next(self) -> bool:
        """Whether the kernel of the gradients may start as this one ends."""
        return self.arch >= 90

    @property
    def scales_gradients(self) -> bool:
        return self.item == 2 and not self.bf16

    @property
    def shared_bytes(self) -> int:
        return 3 * 4 * SUMS_PAD * (self.threads // max(SUMS_PAD // self.tokens, 32))

    @property
    def name(self) -> str:
        return f"Sums_{'_'.join(f'{field.name}{int(getattr(self, field.name))}' for field in fields(self))}"

    def constants(self) -> SumsTile:
        """The config as device code sees it."""
        return SumsTile(*(int(getattr(self, field)) for field in SumsTile._fields))
