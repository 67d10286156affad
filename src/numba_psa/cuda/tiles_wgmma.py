"""Tiles of the kernels on warpgroup products (Hopper)."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

from numba_psa.cuda.tiles import TileConfig, padded


@dataclass(frozen=True)
class WarpgroupTileConfig(TileConfig):
    """Tiles of the wgmma forward: `warpgroups` x 64 queries, each by BN keys a step, `key_groups` of them at once.

    One key group ends with a narrower product of `tail` keys, N % BN up to a multiple of 16; several take turns with blocks
    of keys, and mask the last. Shared memory, from a multiple of 1024: for each group `stages` times BN/64 swizzled tiles
    [key_pad + value_pad][64 keys]. The queries borrow the last stage of group 0, which is filled first in iteration 1.
    """

    warpgroups: int = 1
    key_groups: int = 1
    BN: int = 64
    tail: int = 0
    bf16: bool = False
    smallest_arch = 90
    key_stride = value_stride = 128

    @property
    def BM(self) -> int:
        return 64 * self.warpgroups

    @property
    def threads(self) -> int:
        return 128 * self.warpgroups * self.key_groups

    @property
    def stagers(self) -> int:
        return 128 * self.warpgroups

    @property
    def packed(self) -> bool:
        """Whether keys and values come aligned from a kernel before this one, which this one may overlap."""
        return self.realigned

    overlaps = packed

    def aligned(self) -> WarpgroupTileConfig:
        """How keys and values are read."""
        return replace(self, realigned=False, copy=16) if self.packed else self

    @property
    def group_bytes(self) -> int:
        """All stages of a key group."""
        return self.stages * self.stage_bytes

    @property
    def query_warps(self) -> int:
        return 4 * self.warpgroups

    @property
    def key_warps(self) -> int:
        return self.key_groups

    @property
    def query_stride(self) -> int:
        return 2 * (self.BM + 8)

    output_stride = query_stride

    @property
    def values_offset(self) -> int:
        return 128 * self.key_pad

    @property
    def tile_bytes(self) -> int:
        return 128 * (self.key_pad + self.value_pad)

    @property
    def stage_bytes(self) -> int:
        return self.BN // 64 * self.tile_bytes

    @property
    def query_offset(self) -> int:
        return (self.stages - 1) * self.stage_bytes

    @property
    def zeros_offset(self) -> int:
        """Of 1024 bytes of zeros within a tile of the stage that the queries borrow: after them."""
        return padded(self.key_pad * self.query_stride, 1024)

    @property
    def merge_stride(self) -> int:
        return 4 * (self.BM + 4)

    @property
    def maxima_offset(self) -> int:
        return self.key_groups * self.value_pad * self.merge_stride

    @property
    def sums_offset(self) -> int:
        return self.maxima_offset + 4 * self.key_groups * self.BM

    @property
    def fragment_shapes(self) -> tuple[tuple[int, ...], ...]:
        """q, p, s, acc, rows as in MmaTileConfig, then p and s of the tail."""
        return (
            (1, self.key_pad // 16, 4),
            (self.BN // 16, 4),
            (1, self.BN // 8, 4),
            (1, self.value_pad // 8, 4),
            (1, 2),
            (max(self.tail // 16, 1), 4),
            (1, max(self.tail // 8, 1), 4),
        )

    @cached_property
    def shared_bytes(self) -> int:
        output = self.value_pad * self.query_stride
        merge = self.sums_offset + 4 * self.key_groups * self.BM
        # Zeros are read with a stride of 0; memcheck takes them for value_pad rows of 16 keys, one after the other.
        zeros = (self.key_groups - 1) * self.group_bytes + self.query_offset + self.stage_bytes - self.tile_bytes
        zeros += self.zeros_offset + 96 + 32 * self.value_pad
        return 1024 + max(self.key_groups * self.group_bytes, zeros, output if self.key_groups == 1 else merge)

    def rules(self):
        return [
            (not self.tokens_first, "the wgmma kernel reads channels first"),
            (self.BN in (64, 128, 192), "BN must be 64, 128 or 192: swizzled tiles hold 64 keys"),
            (3 <= self.stages <= 5, "stages must be 3, 4 or 5: the values of the block before are still being read"),
            (self.tail % 16 == 0 and 0 <= self.tail <= self.BN, f"tail must be a multiple of 16 up to BN = {self.BN}"),
            (self.key_groups == 1 or self.tail == 0, "several key groups mask the last block, they have no tail"),
            (self.zeros_offset + 1024 <= self.tile_bytes, "queries and zeros do not fit into the tile they borrow"),
            (self.warpgroups in (1, 2, 3, 4), "warpgroups must be 1 to 4"),
            (self.threads <= 1024, f"{self.threads} threads are not within the 1024 of a block"),
        ]


@dataclass(frozen=True)
class Tf32WarpgroupTileConfig(TileConfig):
    """Tiles of the float32 forward on wgmma: 64 queries a block, 32 keys a step, `key_groups` warpgroups that take turns.

    Shared memory of a key group, from a multiple of 1024: two blocks in high and low parts, K as [key][channel] and V as
    [channel][key], then two blocks as they come, [channel][key]; rows of 128 bytes, swizzled. The queries borrow the second
    split block of group 0.
    """

    key_groups: int = 1
    exact: bool = True
    copy: int = 16
    stages: int = 2
    item = 4
    smallest_arch = 90
    granule = 8
    BM, BN = 64, 32
    query_warps = 4
    key_stride = value_stride = 128

    @property
    def key_pad(self) -> int:
        return 32

    @property
    def key_warps(self) -> int:
        return self.key_groups

    @property
    def threads(self) -> int:
        return 128 * self.key_groups

    @property
    def stagers(self) -> int:
        return 128

    query_stride = 4 * (64 + 8)

    @property
    def values_offset(self) -> int:
        return 128 * self.key_pad

    @property
    def tile_bytes(self) -> int:
        return 128 * (self.key_pad + self.value_pad)

    @property
    def split_bytes(self) -> int:
        return 2 * self.tile_bytes

    @property
    def query_offset(self) -> int:
        return self.split_bytes

    @property
    def split_offset(self) -> int:
        return 0

    @property
    def keys_offset(self) -> int:
        return 2 * self.split_bytes

    @property
    def stage_bytes(self) -> int:
        """Of one key group, all its blocks."""
        return 2 * self.split_bytes + 2 * self.tile_bytes

    @property
    def merge_stride(self) -> int:
        return 4 * (self.BM + 4)

    @property
    def maxima_offset(self) -> int:
        return self.key_groups * self.value_pad * self.merge_stride

    @property
    def sums_offset(self) -> int:
        return self.maxima_offset + 4 * self.key_groups * self.BM

    @property
    def fragment_shapes(self) -> tuple[tuple[int, ...], ...]:
        """One lane's q, p, s, acc and rows; of q and p there is a high and a low part, and acc has a part of one block."""
        return (4, 4), (4, 4), (1, 4, 4), (1, self.value_pad // 8, 4), (1, 2)

    @cached_property
    def shared_bytes(self) -> int:
        merge = self.sums_offset + 4 * self.key_groups * self.BM
        return 1024 + max(self.key_groups * self.stage_bytes, merge if self.key_groups > 1 else 0)

    def rules(self):
        return [
            (not self.tokens_first, "the wgmma kernel reads channels first"),
            (self.key_dim <= 32, f"key_dim must be at most 32, one row of 128 bytes, got {self.key_dim}"),
            (self.stages == 2, "there are two stages, one split and one arriving"),
            (32 * self.query_stride <= self.split_bytes, "the queries do not fit into the block they borrow"),
            (1 <= self.key_groups <= 3, "key_groups must be 1 to 3"),
        ]
