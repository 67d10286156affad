"""The layout operations as coalesced transposes: [KEY_DIM][N] to [N][KEY_DIM] and back, through shared memory.

A block moves all channels of TOKENS tokens of one matrix. Both sides are touched 16 bytes at a time where addresses allow.
16-bit matrices whose channels come in eights go through ldmatrix (transpose.py), others an element at a time: then rows of
shared memory are an odd number of words long, so that neither side meets its own banks.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import NamedTuple

from numba import types, uint32

from numba_psa._numba_cuda import MAX_GRID_Y, cuda
from numba_psa.cuda import transpose
from numba_psa.cuda.chunks import element_of, load_chunk, put_element, store_chunk
from numba_psa.cuda.device import (
    REVISION,
    barrier,
    ld_shared_u16,
    ld_shared_u32,
    shared_address,
    st_shared_u16,
    st_shared_u32,
    step,
)
from numba_psa.errors import ParameterError


class Layout(NamedTuple):
    """The integers that device code needs. Strides in bytes."""

    key_dim: int
    item: int
    rows_copy: int  # bytes of an access to channel rows
    tokens_copy: int  # bytes of an access to token rows
    tokens: int
    threads: int
    stride: int
    revision: int


@dataclass(frozen=True)
class LayoutConfig:
    """Tiles of the layout kernels, for elements of `item` bytes."""

    key_dim: int
    item: int = 2
    rows_copy: int = 16
    tokens_copy: int = 16
    tokens: int = 128
    revision = REVISION

    def __post_init__(self) -> None:
        rules = [
            (self.key_dim >= 1, f"key_dim must be at least 1, got {self.key_dim}"),
            (self.item in (2, 4), f"item must be 2 or 4 bytes, got {self.item}"),
            (self.tokens > 0 and self.tokens % 8 == 0, f"tokens must be a positive multiple of 8, got {self.tokens}"),
            (self.rows_copy in (2, 4, 8, 16) and self.tokens_copy in (2, 4, 8, 16), "copies must be of 2, 4, 8 or 16 bytes"),
            (self.shared_bytes <= 48 * 1024, f"{self.shared_bytes} bytes of shared memory exceed {48 * 1024}"),
        ]
        for holds, reason in rules:
            if not holds:
                raise ParameterError(f"{self}: {reason}")

    @property
    def matrices(self) -> bool:
        """Whether the tile is transposed by ldmatrix, else an element at a time."""
        return self.item == 2 and self.key_dim % 8 == 0 and self.tokens_copy == 16 and self.tokens >= 32

    @property
    def threads(self) -> int:
        return 128 if self.matrices and self.key_dim <= 64 else 256

    @property
    def blocks_per_sm(self) -> int:
        return 8 if self.matrices and self.key_dim <= 64 else 4

    @property
    def words(self) -> tuple[int, ...]:
        """Shape of a thread's registers: chunks of 16 bytes that it loads at once."""
        return (-(-self.key_dim * self.tokens // 8 // self.threads), 4) if self.matrices else (4,)

    @property
    def stride(self) -> int:
        words = self.tokens * self.item // 4
        return 4 * (words + 1 - words % 2)

    @property
    def shared_bytes(self) -> int:
        if self.matrices:
            return max(transpose.tile_bytes(*size) for size in ((self.key_dim, self.tokens), (self.tokens, self.key_dim)))
        return self.key_dim * self.stride

    @property
    def name(self) -> str:
        return f"Layout_{'_'.join(f'{field.name}{getattr(self, field.name)}' for field in fields(self))}"

    def constants(self) -> Layout:
        """The config as device code sees it."""
        return Layout(*(int(getattr(self, field)) for field in Layout._fields))


# ---- through rows of shared memory, an element at a time across --------------------------------------------------------
@step
def chunk_to_row(tile, words, shared):
    """16 bytes along a channel's row; rows are not aligned to more than 4."""
    for i in range(4):
        st_shared_u32(shared + 4 * i, words[i])


@step
def chunk_from_row(tile, words, shared):
    for i in range(4):
        words[i] = ld_shared_u32(shared + 4 * i)


@step
def chunk_to_columns(tile, words, shared, first):
    """Consecutive elements of [token][channel], from element `first` on, into [channel][token]."""
    for i in range(16 // tile.item):
        at = shared + (first + i) % tile.key_dim * tile.stride + (first + i) // tile.key_dim * tile.item
        if tile.item == 4:
            st_shared_u32(at, words[i])
        else:
            st_shared_u16(at, element_of(words, 2, i))


@step
def chunk_from_columns(tile, words, shared, first):
    for i in range(16 // tile.item):
        at = shared + (first + i) % tile.key_dim * tile.stride + (first + i) // tile.key_dim * tile.item
        put_element(words, tile.item, i, ld_shared_u32(at) if tile.item == 4 else ld_shared_u16(at))


# ---- the two directions -----------------------------------------------------------------------------------------------
@step
def rows_to_tokens(tile, words, shared, rows, tokens, n_tokens, first, tid):
    """tokens[n][c] = rows[c][n] for `tile.tokens` tokens from `first` on; rows and tokens are addresses of matrices."""
    count = 16 // tile.item
    a_row = tile.tokens // count
    for i in range(tid, tile.key_dim * a_row, tile.threads):
        channel, token = i // a_row, i % a_row * count
        valid = n_tokens - first - token
        if valid > 0:
            source = rows + (channel * n_tokens + first + token) * tile.item
            load_chunk(words, tile.item, tile.rows_copy, source, valid)
            chunk_to_row(tile, words, shared + channel * tile.stride + token * tile.item)
    barrier()
    elements = min(tile.tokens, n_tokens - first) * tile.key_dim
    for i in range(tid * count, elements, tile.threads * count):
        chunk_from_columns(tile, words, shared, i)
        store_chunk(words, tile.item, tile.tokens_copy, tokens + (first * tile.key_dim + i) * tile.item, elements - i)


@step
def tokens_to_rows(tile, words, shared, tokens, rows, n_tokens, first, tid):
    """rows[c][n] = tokens[n][c], as rows_to_tokens."""
    count = 16 // tile.item
    elements = min(tile.tokens, n_tokens - first) * tile.key_dim
    for i in range(tid * count, elements, tile.threads * count):
        load_chunk(words, tile.item, tile.tokens_copy, tokens + (first * tile.key_dim + i) * tile.item, elements - i)
        chunk_to_columns(tile, words, shared, i)
    barrier()
    a_row = tile.tokens // count
    for i in range(tid, tile.key_dim * a_row, tile.threads):
        channel, token = i // a_row, i % a_row * count
        valid = n_tokens - first - token
        if valid > 0:
            chunk_from_row(tile, words, shared + channel * tile.stride + token * tile.item)
            store_chunk(words, tile.item, tile.rows_copy, rows + (channel * n_tokens + first + token) * tile.item, valid)


def make_psa_pack_qkv(config):
    """packed[section, bh, n, d] = qkv[b, (4h + section) KEY_DIM + d, n], a block a tile of one (bh, section)."""
    tile, WORDS = config.constants(), config.words
    move = transpose.rows_to_tokens if config.matrices else rows_to_tokens

    def psa_pack_qkv_kernel(qkv, packed, n_tokens, heads):
        """Addresses. Grid (ceil(N / tokens), 65535 matrices, the rest of them)."""
        shared = shared_address(cuda.shared.array(0, uint32))
        words = cuda.local.array(WORDS, uint32)
        matrix = cuda.blockIdx.z * MAX_GRID_Y + cuda.blockIdx.y  # bh * 4 + section
        if matrix < 4 * heads:
            matrix_bytes = tile.key_dim * n_tokens * tile.item
            target = packed + (matrix % 4 * heads + matrix // 4) * matrix_bytes
            move(
                tile,
                words,
                shared,
                qkv + matrix * matrix_bytes,
                target,
                n_tokens,
                cuda.blockIdx.x * tile.tokens,
                cuda.threadIdx.x,
            )

    return psa_pack_qkv_kernel


def make_psa_merge_attn_nchw(config):
    """out[b, 2h KEY_DIM + d, n] = lo[bh, n, d], and hi KEY_DIM channels further, a block a tile of one (bh, half)."""
    tile, WORDS = config.constants(), config.words
    move = transpose.tokens_to_rows if config.matrices else tokens_to_rows

    def psa_merge_attn_nchw_kernel(lo, hi, out, n_tokens, heads):
        """Addresses. Grid (ceil(N / tokens), 65535 matrices, the rest of them)."""
        shared = shared_address(cuda.shared.array(0, uint32))
        words = cuda.local.array(WORDS, uint32)
        matrix = cuda.blockIdx.z * MAX_GRID_Y + cuda.blockIdx.y  # bh * 2 + half
        if matrix < 2 * heads:
            matrix_bytes = tile.key_dim * n_tokens * tile.item
            source = (hi if matrix % 2 else lo) + matrix // 2 * matrix_bytes
            move(
                tile,
                words,
                shared,
                source,
                out + matrix * matrix_bytes,
                n_tokens,
                cuda.blockIdx.x * tile.tokens,
                cuda.threadIdx.x,
            )

    return psa_merge_attn_nchw_kernel


def make_psa_extract_v_nchw(config):
    """v of a head = the second half of the head's channels: straight copies, `tokens * KEY_DIM` elements a block."""
    tile = config.constants()

    def psa_extract_v_nchw_kernel(qkv, v, n_tokens, heads):
        """Addresses. Grid (ceil(2 KEY_DIM N / (tokens KEY_DIM)), 65535 heads, the rest of them)."""
        words = cuda.local.array(4, uint32)
        head = cuda.blockIdx.z * MAX_GRID_Y + cuda.blockIdx.y
        if head < heads:
            count, size, a_block = 16 // tile.item, 2 * tile.key_dim * n_tokens, tile.tokens * tile.key_dim
            source, target = qkv + (2 * head + 1) * size * tile.item, v + head * size * tile.item
            first = cuda.blockIdx.x * a_block
            for i in range(first + cuda.threadIdx.x * count, min(first + a_block, size), tile.threads * count):
                load_chunk(words, tile.item, tile.rows_copy, source + i * tile.item, size - i)
                store_chunk(words, tile.item, tile.rows_copy, target + i * tile.item, size - i)

    return psa_extract_v_nchw_kernel


PACK_SIGNATURE = types.void(types.int64, types.int64, types.int32, types.int32)
MERGE_SIGNATURE = types.void(types.int64, types.int64, types.int64, types.int32, types.int32)
