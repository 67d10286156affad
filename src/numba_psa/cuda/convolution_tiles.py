"""How the convolutions of a layer are cut: frozen configs, and weights laid out as tensor cores take them."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import NamedTuple

import numpy as np

from numba_psa.cuda.device import REVISION
from numba_psa.cuda.tiles import SHARED_LIMIT, padded
from numba_psa.errors import ParameterError

MOST_PIECES = 4
"""Tensors that a convolution can read as if they were concatenated along channels."""


class ConvolutionTile(NamedTuple):
    """The integers that device code needs. A quad is four tokens of a channel that lie together."""

    item: int  # bytes of an element
    bf16: int
    exact: int  # float32 as three TF32 products
    taps: int  # 1 or 3: the kernel is taps x taps
    edge: int  # tokens to the left and to the right of a quad that it needs
    row: int  # tokens that a quad needs of a row
    pieces: int
    whole: int  # every quad lies in the tensor or not at all, and its address is a multiple of its size
    copy: int  # bytes of a store: a quad or an element
    k_step: int  # channels that one product sums over
    steps: int  # products that are loaded together
    channel_tiles: int  # of 16 channels, of a warp
    token_groups: int  # of 32 tokens, of a warp
    k_warps: int  # warps that share the sum over the channels
    channel_warps: int
    threads: int
    block_channels: int
    block_tokens: int
    quads: int  # that a thread finishes
    prefetches: int  # bias and residual, while the sum is under way
    sum_stride: int  # bytes from a channel to the next, in shared memory
    overlaps: int  # with the end of the kernel before
    revision: int


@dataclass(frozen=True)
class ConvolutionConfig:
    """Tiles of a convolution: a warp has 16·channel_tiles channels by 32·token_groups tokens in registers.

    k_warps warps sum over a part of the input channels each and add up in shared memory, in a fixed order; channel_warps
    such sets have different output channels of the same tokens. One that cannot run raises ParameterError.
    """

    item: int = 4
    bf16: bool = False
    taps: int = 1
    pieces: int = 1
    whole: bool = True
    channel_tiles: int = 2
    token_groups: int = 1
    k_warps: int = 4
    channel_warps: int = 1
    steps: int = 4
    blocks_per_sm: int = 1
    arch: int = 80

    exact = True
    revision = REVISION

    def __post_init__(self) -> None:
        limit = 1024 * SHARED_LIMIT.get(self.arch, 99)
        rules = [
            (self.arch >= 80, f"this kernel needs sm_80, not sm_{self.arch}"),
            (self.item in (2, 4) and (self.item == 2 or not self.bf16), f"item must be 2 or 4 bytes, got {self.item}"),
            (self.taps in (1, 3), f"kernels are 1×1 or 3×3, got {self.taps}×{self.taps}"),
            (1 <= self.pieces <= MOST_PIECES, f"pieces must be 1 to {MOST_PIECES}, got {self.pieces}"),
            (0 < self.threads <= 1024, f"{self.threads} threads are not within the 1024 of a block"),
            (16 * self.channel_tiles * self.token_groups <= 128, "more than 128 sums a thread would spill"),
            (self.shared_bytes <= limit, f"{self.shared_bytes} bytes of shared memory exceed {limit}"),
        ]
        reason = next((reason for holds, reason in rules if not holds), None)
        if reason:
            raise ParameterError(f"{self}: {reason}")

    @property
    def edge(self) -> int:
        return self.taps // 2

    @property
    def row(self) -> int:
        return 4 + 2 * self.edge

    @property
    def copy(self) -> int:
        return 4 * self.item if self.whole else self.item

    @property
    def k_step(self) -> int:
        return 32 // self.item

    @property
    def threads(self) -> int:
        return 32 * self.k_warps * self.channel_warps

    @property
    def block_channels(self) -> int:
        return 16 * self.channel_tiles * self.channel_warps

    @property
    def block_tokens(self) -> int:
        return 32 * self.token_groups

    @property
    def quads(self) -> int:
        return -(-self.block_channels * self.block_tokens // 4 // self.threads)

    @property
    def prefetches(self) -> bool:
        return self.quads <= 2

    @property
    def sum_stride(self) -> int:
        return 4 * (self.block_tokens + 4)  # 16 bytes more keep the rows of a warp in different banks

    @property
    def shared_bytes(self) -> int:
        return self.k_warps * self.block_channels * self.sum_stride

    @property
    def overlaps(self) -> bool:
        return self.arch >= 90

    @property
    def fragment_shapes(self) -> tuple[tuple[int, ...], ...]:
        """One lane's weights, inputs and sums."""
        weights = self.steps, self.channel_tiles, self.taps, 4
        inputs = self.steps, self.token_groups, 2, self.row
        return weights, inputs, (self.channel_tiles, 4 * self.token_groups, 4)

    @property
    def name(self) -> str:
        """Every field, short: names the kernel's file in the cache, and the config in benchmarks."""
        return f"Convolution_{'_'.join(f'{field.name}{int(getattr(self, field.name))}' for field in fields(self))}"

    def constants(self) -> ConvolutionTile:
        """The config as device code sees it."""
        return ConvolutionTile(*(int(getattr(self, field)) for field in ConvolutionTile._fields))


@dataclass(frozen=True)
class DepthwiseConfig:
    """Of the depthwise 3×3: a thread has one quad. The fields that steps ask for are as in ConvolutionTile."""

    item: int = 4
    bf16: bool = False
    whole: bool = True
    threads: int = 128
    blocks_per_sm: int = 4
    arch: int = 80

    taps, edge, row, shared_bytes = 3, 1, 6, 0
    exact = True
    pieces = k_step = steps = channel_tiles = token_groups = k_warps = channel_warps = 0
    block_channels = block_tokens = quads = prefetches = sum_stride = 0
    revision = REVISION
    copy = ConvolutionConfig.copy
    overlaps = ConvolutionConfig.overlaps
    constants = ConvolutionConfig.constants

    @property
    def name(self) -> str:
        return f"Depthwise_{'_'.join(f'{field.name}{int(getattr(self, field.name))}' for field in fields(self))}"


def packed(weight: np.ndarray, item: int) -> np.ndarray:
    """weight `[c_out, c_in, k, k]` as operands A of the tensor cores: `[tile of 16 channels][k step][tap][lane][16 bytes]`.

    A k step is a row dy of the kernel for 8 (float32) or 16 input channels, dy fastest; its k taps follow. Lane i has the
    channels i//4 and i//4 + 8 of the tile, and of the inputs i%4 and i%4 + 4; in 16 bits 2(i%4), +1, +8 and +9. Missing
    channels are zeros. The dtype stays.
    """
    c_out, c_in, k, _ = weight.shape
    k_step, pair = 32 // item, 4 // item
    full = np.zeros((padded(c_out, 16), padded(c_in, k_step), k, k), weight.dtype)
    full[:c_out, :c_in] = weight
    # [tile][half][i//4] [chunk][h][i%4][of a pair] [dy][dx] -> [tile] [chunk][dy] [dx] [i//4][i%4] [h][half] [of a pair]
    split = full.reshape(len(full) // 16, 2, 8, -1, 2, 4, pair, k, k)
    return np.ascontiguousarray(split.transpose(0, 3, 7, 8, 2, 5, 4, 1, 6)).reshape(-1)


def choose_convolution(
    c_in: int, c_out: int, batch: int, tokens: int, multiprocessors: int, *, taps: int, item: int, **fields
) -> ConvolutionConfig:
    """The tiles for a convolution: the fewer there are, the more warps share a sum, for every multiprocessor to be busy.

    By measurement on one H200: whole layers at B = 1, 20×20, and chains of equal launches up to B = 8, 40×40.
    """

    def blocks(channels: int) -> int:
        return batch * -(-tokens // 32) * -(-c_out // channels)

    if blocks(32) <= 1.5 * multiprocessors:
        sizes = _few(blocks(32) < 0.6 * multiprocessors, c_in > 128, taps, item)
    elif blocks(32) <= 8 * multiprocessors or c_out <= 32:
        sizes = {"channel_tiles": 2, "k_warps": 4, "steps": 1 if taps > 1 else 2}
    else:
        sizes = {"channel_tiles": 2, "k_warps": 2, "channel_warps": 2, "steps": 1 if taps > 1 else 2}
    if not fields.get("whole", True):
        sizes["steps"] = min(sizes["steps"], 2)  # single elements take more registers on their way
    return ConvolutionConfig(taps=taps, item=item, **sizes, **fields)


def _few(very: bool, long: bool, taps: int, item: int) -> dict[str, int]:
    """Tiles for at most one block a multiprocessor; `very`: for half of them."""
    channel_tiles = 1 if very else 2
    if taps > 1:
        k_warps, steps = 12, 1
    elif item == 4:
        k_warps, steps = 8, 4 if very or long else 2
    elif very:
        k_warps, steps = 4, 4 if long else 2
    else:
        k_warps, steps = 8, 2 if long else 4
    return {"channel_tiles": channel_tiles, "k_warps": k_warps, "steps": steps}
