"""How a kernel cuts the problem: frozen configs, validated on the host, handed to device code as constants."""

from __future__ import annotations

from dataclasses import dataclass, fields
from functools import cached_property
from math import prod
from typing import NamedTuple

from numba_psa.cuda.device import REVISION
from numba_psa.errors import ParameterError

SHARED_LIMIT = {80: 163, 86: 99, 87: 163, 89: 99, 90: 227, 100: 227, 103: 227, 110: 227, 120: 99, 121: 99}
"""KiB of shared memory that a block can have, by architecture."""


def padded(n: int, multiple: int) -> int:
    """The first multiple of `multiple` from n on."""
    return -(-n // multiple) * multiple


class Place(NamedTuple):
    """Where a thread works; made on the device by `place`."""

    tid: int
    lane: int
    query_warp: int
    key_warp: int


class Tile(NamedTuple):
    """The integers that device code needs, all in one constant argument. Strides and offsets in bytes."""

    key_dim: int
    value_dim: int
    key_pad: int  # key_dim, value_dim up to what the tensor cores take; the padding is zeros
    value_pad: int
    item: int  # bytes of an element
    bf16: int
    exact: int  # float32 as three TF32 products
    tokens_first: int  # [token][channel] in memory, FlashAttention's layout; else [channel][token], NCHW
    saves_l: int
    keeps_query: int
    realigned: int  # rows begin at odd places: see realign.py
    stores_matrices: int
    copy: int  # bytes of one global access: every address is a multiple of it
    threads: int
    stagers: int  # threads that bring a block of keys together
    BM: int  # query rows of a block
    BN: int  # keys a warp takes at a time
    query_warps: int
    key_warps: int
    stages: int
    query_stride: int
    key_stride: int
    value_stride: int
    values_offset: int  # of the values within a stage
    stage_bytes: int
    keys_offset: int
    output_stride: int
    merge_stride: int
    maxima_offset: int
    sums_offset: int
    packed: int  # keys and values have been aligned before: see align.py
    raw_stride: int  # mma.sync: rows as they lie
    raw_gap: int
    tile_bytes: int  # wgmma: 64 keys and their values
    query_offset: int
    zeros_offset: int
    tail: int
    split_offset: int  # TF32 wgmma: where the blocks in high and low parts begin
    split_bytes: int
    group_bytes: int
    scales_gradients: int  # backward of float16
    revision: int  # of the sources: Numba caches by what a kernel closes over


@dataclass(frozen=True)
class TileConfig:
    """What all kernels have in common. A config that cannot run raises ParameterError, which says why.

    `blocks_per_sm` is what the register allocator is told to make room for.
    """

    key_dim: int = 32
    value_dim: int = 64
    tokens_first: bool = False
    saves_l: bool = False
    copy: int = 16
    realigned: bool = False
    stages: int = 2
    blocks_per_sm: int = 1
    arch: int = 80

    # What a kernel that does not use it has.
    bf16 = exact = scales_gradients = packed = overlaps = False
    keeps_query = True
    item = 2
    query_warps = key_warps = 1
    BN = value_stride = values_offset = keys_offset = output_stride = merge_stride = maxima_offset = sums_offset = 0
    tile_bytes = query_offset = zeros_offset = tail = split_offset = split_bytes = group_bytes = query_stride = (
        key_stride
    ) = 0
    revision = REVISION
    granule = 16
    smallest_arch = 80

    def __post_init__(self) -> None:
        reason = self.why_invalid()
        if reason:
            raise ParameterError(f"{self}: {reason}")

    @property
    def key_pad(self) -> int:
        return padded(self.key_dim, self.granule)

    @property
    def value_pad(self) -> int:
        return padded(self.value_dim, self.granule)

    @property
    def stagers(self) -> int:
        return self.threads

    @property
    def stores_matrices(self) -> bool:
        """Whether there is stmatrix."""
        return self.arch >= 90

    block_keys = 0
    raw_gap = 0
    """Rows between those of the keys and those of the values."""

    @property
    def raw_stride(self) -> int:
        """Keys of a row and 16 bytes more: they may begin anywhere within the first 16."""
        return 2 * self.block_keys + 16 if self.realigned else 0

    @property
    def name(self) -> str:
        """Every field, short: names the kernel's file in the cache, and the config in benchmarks."""
        values = (f"{field.name}{int(getattr(self, field.name))}" for field in fields(self))
        return f"{type(self).__name__.removesuffix('Config')}_{'_'.join(values)}"

    def constants(self) -> Tile:
        """The config as device code sees it."""
        return Tile(*(int(getattr(self, field)) for field in Tile._fields))

    def why_invalid(self) -> str | None:
        """The first rule that this configuration breaks, in words; None when it breaks none."""
        limit = 1024 * SHARED_LIMIT.get(self.arch, 99)
        rules = [
            (self.arch >= self.smallest_arch, f"this kernel needs sm_{self.smallest_arch}, not sm_{self.arch}"),
            (1 <= self.key_dim <= 128, f"key_dim must be 1 to 128, got {self.key_dim}"),
            (1 <= self.value_dim <= 128, f"value_dim must be 1 to 128, got {self.value_dim}"),
            (self.copy in (2, 4, 8, 16) and self.copy >= self.item, f"copy must be 16, 8, 4 or an element, got {self.copy}"),
            (
                not self.realigned or (self.item == 2 and not self.tokens_first and self.copy < 16),
                "only 16-bit channel rows that begin at odd places are realigned",
            ),
            (1 <= self.blocks_per_sm <= 16, f"blocks_per_sm must be 1 to 16, got {self.blocks_per_sm}"),
            *self.rules(),
        ]
        found = next((reason for holds, reason in rules if not holds), None)
        if found is None and not self.shared_bytes <= limit:
            return f"{self.shared_bytes} bytes of shared memory exceed the {limit} of sm_{self.arch}"
        return found


@dataclass(frozen=True)
class MmaTileConfig(TileConfig):
    """Tiles of the mma.sync forward: query_warps x key_warps warps, each 16*query_tiles queries by BN keys a step.

    Shared memory: queries, then `stages` times keys and values, each as its tokens or channels lie in memory, rows padded
    by 16 bytes, which keeps ldmatrix free of bank conflicts. The output and the merge of key splits reuse all of it.
    """

    query_warps: int = 4
    key_warps: int = 1
    query_tiles: int = 1
    BN: int = 64
    bf16: bool = False

    @property
    def BM(self) -> int:
        return 16 * self.query_tiles * self.query_warps

    @property
    def step_keys(self) -> int:
        return self.BN * self.key_warps

    @property
    def threads(self) -> int:
        return 32 * self.query_warps * self.key_warps

    @property
    def block_keys(self) -> int:
        return self.step_keys

    @property
    def raw_gap(self) -> int:
        return self.key_pad - self.key_dim

    def _stride(self, tokens: int, channels: int) -> int:
        return 2 * ((channels if self.tokens_first else tokens) + 8)

    def _bytes(self, tokens: int, channels: int) -> int:
        return self._stride(tokens, channels) * (tokens if self.tokens_first else channels)

    @property
    def query_stride(self) -> int:
        return self._stride(self.BM, self.key_pad)

    @property
    def key_stride(self) -> int:
        return self._stride(self.step_keys, self.key_pad)

    @property
    def value_stride(self) -> int:
        return self._stride(self.step_keys, self.value_pad)

    @property
    def output_stride(self) -> int:
        return self._stride(self.BM, self.value_pad)

    @property
    def keys_offset(self) -> int:
        return self._bytes(self.BM, self.key_pad)

    @property
    def values_offset(self) -> int:
        return self._bytes(self.step_keys, self.key_pad)

    @property
    def stage_bytes(self) -> int:
        return self.values_offset + self._bytes(self.step_keys, self.value_pad)

    @property
    def merge_stride(self) -> int:
        return 4 * (self.BM + 4)

    @property
    def maxima_offset(self) -> int:
        return self.key_warps * self.value_pad * self.merge_stride

    @property
    def sums_offset(self) -> int:
        return self.maxima_offset + 4 * self.key_warps * self.BM

    @cached_property
    def shared_bytes(self) -> int:
        staging = self.keys_offset + self.stages * self.stage_bytes
        output = self._bytes(self.BM, self.value_pad)
        merge = self.sums_offset + 4 * self.key_warps * self.BM
        return max(staging, output if self.key_warps == 1 else merge)

    @property
    def fragment_shapes(self) -> tuple[tuple[int, ...], ...]:
        """q, p, s, acc, and the per-row m_i, l_i, alpha, of one lane: [row tile of 16][tile of 8 or 16][4]."""
        t = self.query_tiles
        return (t, self.key_pad // 16, 4), (t, 4), (t, self.BN // 8, 4), (t, self.value_pad // 8, 4), (t, 2)

    def rules(self):
        registers = sum(prod(shape) for shape in self.fragment_shapes[:4])
        return [
            (self.BN % 16 == 0 and self.BN > 0, "BN must be a multiple of 16: values are consumed 16 keys at a time"),
            (2 <= self.stages <= 4, "stages must be 2, 3 or 4: one is read while the others fill"),
            (self.threads >= self.step_keys // 8, f"{self.threads} threads are fewer than a row has chunks"),
            (0 < self.threads <= 1024, f"{self.threads} threads are not within the 1024 of a block"),
            (registers <= 190, f"{registers} fragment registers would spill (limit 190)"),
            (self.key_warps == 1 or not self.tokens_first, "keys can be split over warps only with channels first"),
        ]


@dataclass(frozen=True)
class Tf32TileConfig(TileConfig):
    """Tiles of the float32 forward on mma.sync: query_warps x key_warps warps, each 16 queries by BN keys a step.

    exact: three TF32 products for one of float32; without it TF32's own precision. Shared memory: [channel][token] floats,
    queries, then `stages` times keys and values; padding keeps the 16-byte loads free of bank conflicts.
    """

    query_warps: int = 4
    key_warps: int = 1
    BN: int = 32
    exact: bool = True
    item = 4
    granule = 8

    @property
    def key_pad(self) -> int:
        narrow = padded(self.key_dim, self.granule)
        return 104 if narrow == 96 and self.value_pad == 128 else narrow  # with 96, ptxas spills

    @property
    def BM(self) -> int:
        return 16 * self.query_warps

    @property
    def step_keys(self) -> int:
        return self.BN * self.key_warps

    @property
    def threads(self) -> int:
        return 32 * self.query_warps * self.key_warps

    @property
    def query_stride(self) -> int:
        return 4 * (self.BM + 8)

    @property
    def key_stride(self) -> int:
        return 4 * (self.step_keys + 8)

    @property
    def value_stride(self) -> int:
        return 4 * (self.step_keys + 4)

    @property
    def keys_offset(self) -> int:
        return self.key_pad * self.query_stride

    @property
    def values_offset(self) -> int:
        return self.key_pad * self.key_stride

    @property
    def stage_bytes(self) -> int:
        return self.values_offset + self.value_pad * self.value_stride

    @property
    def merge_stride(self) -> int:
        return 4 * (self.BM + 4)

    @property
    def maxima_offset(self) -> int:
        return self.key_warps * self.value_pad * self.merge_stride

    @property
    def sums_offset(self) -> int:
        return self.maxima_offset + 4 * self.key_warps * self.BM

    @cached_property
    def shared_bytes(self) -> int:
        staging = self.keys_offset + self.stages * self.stage_bytes
        merge = self.sums_offset + 4 * self.key_warps * self.BM
        return staging if self.key_warps == 1 else max(staging, merge)

    @property
    def keeps_query(self) -> int:
        """Whether q stays in registers, both its parts; wide ones are read again for every block."""
        return self.key_pad <= 48

    @property
    def together(self) -> int:
        """Column tiles of V in flight at once: the most up to 4 that divide them, fewer where registers are short."""
        width = self.key_pad + self.value_pad
        most = 4 if width <= 112 else 2 if width <= 200 else 1
        return max(i for i in range(1, most + 1) if self.value_pad // 8 % i == 0)

    @property
    def fragment_shapes(self) -> tuple[tuple[int, ...], ...]:
        """One lane's q, k, p, s, v, part, acc and rows; of q, k, p and v there is a high and a low part."""
        return (
            (self.key_pad // 8 if self.keeps_query else 1, 4),
            (2, 4),
            (self.BN // 8, 4),
            (1, self.BN // 8, 4),
            (self.together, 2, 4),
            (self.together, 4),
            (1, self.value_pad // 8, 4),
            (1, 2),
        )

    def rules(self):
        return [
            (self.BN % 32 == 0 and self.BN > 0, "BN must be a multiple of 32: keys are permuted within 32"),
            (2 <= self.stages <= 4, "stages must be 2, 3 or 4: one is read while the others fill"),
            (0 < self.threads <= 1024, f"{self.threads} threads are not within the 1024 of a block"),
            (self.key_warps == 1 or not self.tokens_first, "keys can be split over warps only with channels first"),
        ]
