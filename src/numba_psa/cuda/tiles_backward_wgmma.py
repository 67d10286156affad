"""Tiles of the backward on warpgroup products (Hopper)."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from numba_psa.cuda.tiles_backward import BackwardTileConfig


@dataclass(frozen=True)
class WarpgroupBackwardConfig(BackwardTileConfig):
    """Tiles of the wgmma backward: 64 rows for each warpgroup, 64 columns a stage, key_step or query_step of them a product.

    Shared memory, from a multiple of 1024: `stages` swizzled tiles [key_pad + value_pad][64 columns] and their l and delta.
    The rows borrow the last two stages, which are filled first in iterations 1 and 2.
    """

    key_step: int = 64
    query_step: int = 32
    bf16: bool = False
    BN: int = 64
    stages: int = 4
    smallest_arch = 90
    key_stride = value_stride = 128

    @property
    def query_stride(self) -> int:
        return 2 * (self.BM + 8)

    wide_query_stride = output_stride = narrow_output_stride = query_stride

    @property
    def stagers(self) -> int:
        return self.threads

    @property
    def values_offset(self) -> int:
        return 128 * self.key_pad

    @property
    def tile_bytes(self) -> int:
        return 128 * (self.key_pad + self.value_pad)

    sums_offset = tile_bytes

    @property
    def stage_bytes(self) -> int:
        return self.tile_bytes + 1024

    @property
    def rows_offset(self) -> int:
        return (self.stages - 2) * self.stage_bytes

    @property
    def query_offset(self) -> int:
        """Of the rows' second operand, from the first."""
        return self.key_pad * self.query_stride

    @cached_property
    def shared_bytes(self) -> int:
        return 1024 + self.stages * self.stage_bytes

    @property
    def fragment_shapes(self) -> tuple[tuple[int, ...], ...]:
        """One lane's rows of either operand; for keys and for queries P as an A operand, and s; the gradients; rows."""
        return (
            (1, self.key_pad // 16, 4),
            (1, self.value_pad // 16, 4),
            (self.key_step // 16, 4),
            (1, self.key_step // 8, 4),
            (self.query_step // 16, 4),
            (1, self.query_step // 8, 4),
            (1, self.key_pad // 8, 4),
            (1, self.value_pad // 8, 4),
            (1, 2),
        )

    def rules(self):
        rows = (self.key_pad + self.value_pad) * self.query_stride
        return [
            *super().rules(),
            (not self.tokens_first, "the wgmma kernel reads channels first"),
            (self.row_warps in (4, 8), "row_warps must be 4 or 8: one or two warpgroups"),
            (self.BN == 64, "BN must be 64: swizzled tiles hold 64 columns"),
            (self.key_step in (32, 64) and self.query_step in (32, 64), "key_step and query_step must be 32 or 64"),
            (3 <= self.stages <= 4, "stages must be 3 or 4: the columns of the step before are still being read"),
            (rows <= 2 * self.stage_bytes, "the rows do not fit into the two stages they borrow"),
            (self.key_pad + self.value_pad <= 112, "wider heads are more than registers hold"),
        ]


@dataclass(frozen=True)
class Tf32WarpgroupBackwardConfig(BackwardTileConfig):
    """Tiles of the float32 backward on wgmma: 64 rows for each warpgroup, 32 columns a step.

    Shared memory, from a multiple of 1024: three blocks of columns as they come, [channel][token], with their l and delta;
    two in parts, [token][channel] high and low and [channel][token] low; then the rows key_dim wide, [row][channel] high and
    low, of each warpgroup. Rows of 128 bytes, swizzled.
    """

    exact: bool = True
    row_warps: int = 8
    stages: int = 3
    item = 4
    granule = 32
    smallest_arch = 90
    key_stride = value_stride = 128
    query_stride = wide_query_stride = 0

    @property
    def values_offset(self) -> int:
        return 128 * self.key_pad

    @property
    def tile_bytes(self) -> int:
        return 128 * (self.key_pad + self.value_pad)

    sums_offset = tile_bytes

    @property
    def stage_bytes(self) -> int:
        return self.tile_bytes + 1024

    @property
    def split_offset(self) -> int:
        return self.stages * self.stage_bytes

    @property
    def split_bytes(self) -> int:
        return 3 * self.tile_bytes

    @property
    def query_offset(self) -> int:
        return self.split_offset + 2 * self.split_bytes

    @cached_property
    def shared_bytes(self) -> int:
        return 1024 + self.query_offset + 2 * 128 * self.BM

    @property
    def fragment_shapes(self) -> tuple[tuple[int, ...], ...]:
        """One lane's rows, P or dS (each a high and a low part), s and dp, the gradients, words to split, sums of rows."""
        return (
            (self.key_pad // 8, 4),
            (self.value_pad // 8, 4),
            (4, 4),
            (1, 4, 4),
            (1, self.key_pad // 8, 4),
            (1, self.value_pad // 8, 4),
            (4,),
            (1, 2),
        )

    def rules(self):
        return [
            *super().rules(),
            (not self.tokens_first, "the wgmma kernel reads channels first"),
            (self.exact, "it computes exactly"),
            (self.row_warps in (4, 8), "row_warps must be 4 or 8: one or two warpgroups"),
            (self.BN == 32 and self.stages == 3, "BN must be 32 and stages 3"),
            (self.key_dim <= 32, f"key_dim must be at most 32, one row of 128 bytes, got {self.key_dim}"),
            (self.value_dim <= 64, f"value_dim must be at most 64, got {self.value_dim}"),
        ]
