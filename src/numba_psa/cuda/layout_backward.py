"""The gradients of the layout operations: the transposes of layout.py the other way round, added or stored.

Every element of a target is read and written by one thread: the same bits on every run.
"""

from __future__ import annotations

from dataclasses import dataclass

from numba import types, uint32

from numba_psa._numba_cuda import MAX_GRID_Y, cuda
from numba_psa.cuda import transpose
from numba_psa.cuda.backward_sums import widened
from numba_psa.cuda.chunks import load_chunk, store_chunk
from numba_psa.cuda.device import bits_float, float_bits, shared_address, step
from numba_psa.cuda.fragments import pack
from numba_psa.cuda.layout import LayoutConfig, rows_to_tokens, tokens_to_rows


@dataclass(frozen=True)
class GradientLayoutConfig(LayoutConfig):
    """LayoutConfig, and whether a kernel adds into its target or stores."""

    adds: bool = False
    bf16: bool = False


@step
def add_words(words, more, item, bf16):
    """words += more, elements of 16 bytes; each sum is rounded once."""
    for i in range(4):
        if item == 4:
            words[i] = float_bits(bits_float(words[i]) + bits_float(more[i]))
        else:
            low = widened(bf16, words[i]) + widened(bf16, more[i])
            words[i] = pack(bf16, low, widened(bf16, words[i] >> 16) + widened(bf16, more[i] >> 16))


def make_psa_pack_qkv_backward(config):
    """d_qkv[b, (4h + section) KEY_DIM + d, n] = d_packed[section, bh, n, d], a block a tile of one (bh, section)."""
    tile, WORDS = config.constants(), config.words
    move = transpose.tokens_to_rows if config.matrices else tokens_to_rows

    def psa_pack_qkv_backward_kernel(d_packed, d_qkv, n_tokens, heads):
        """Addresses. Grid (ceil(N / tokens), 65535 matrices, the rest of them)."""
        shared = shared_address(cuda.shared.array(0, uint32))
        words = cuda.local.array(WORDS, uint32)
        matrix = cuda.blockIdx.z * MAX_GRID_Y + cuda.blockIdx.y  # bh * 4 + section
        if matrix < 4 * heads:
            matrix_bytes = tile.key_dim * n_tokens * tile.item
            source = d_packed + (matrix % 4 * heads + matrix // 4) * matrix_bytes
            target, first = d_qkv + matrix * matrix_bytes, cuda.blockIdx.x * tile.tokens
            move(tile, words, shared, source, target, n_tokens, first, cuda.threadIdx.x)

    return psa_pack_qkv_backward_kernel


def make_psa_merge_attn_backward(config):
    """d_lo[bh, n, d] = d_merged[b, 2h KEY_DIM + d, n], d_hi KEY_DIM channels further; a block a tile of one (bh, half)."""
    tile, WORDS = config.constants(), config.words
    move = transpose.rows_to_tokens if config.matrices else rows_to_tokens

    def psa_merge_attn_backward_kernel(d_merged, d_lo, d_hi, n_tokens, heads):
        """Addresses. Grid (ceil(N / tokens), 65535 matrices, the rest of them)."""
        shared = shared_address(cuda.shared.array(0, uint32))
        words = cuda.local.array(WORDS, uint32)
        matrix = cuda.blockIdx.z * MAX_GRID_Y + cuda.blockIdx.y  # bh * 2 + half
        if matrix < 2 * heads:
            matrix_bytes = tile.key_dim * n_tokens * tile.item
            target = (d_hi if matrix % 2 else d_lo) + matrix // 2 * matrix_bytes
            source, first = d_merged + matrix * matrix_bytes, cuda.blockIdx.x * tile.tokens
            move(tile, words, shared, source, target, n_tokens, first, cuda.threadIdx.x)

    return psa_merge_attn_backward_kernel


def make_psa_extract_v_backward(config):
    """The V half of each head's channels (+)= d_v; where nothing is added to, the other half = 0. Straight copies."""
    tile = config.constants()
    ADDS, BF16 = int(config.adds), int(config.bf16)

    def psa_extract_v_backward_kernel(d_v, d_qkv, n_tokens, heads):
        """Addresses. Grid (ceil(2 KEY_DIM N / (tokens KEY_DIM)), 65535 heads, the rest of them)."""
        words, before = cuda.local.array(4, uint32), cuda.local.array(4, uint32)
        head = cuda.blockIdx.z * MAX_GRID_Y + cuda.blockIdx.y
        if head < heads:
            count, size, a_block = 16 // tile.item, 2 * tile.key_dim * n_tokens, tile.tokens * tile.key_dim
            source, target = d_v + head * size * tile.item, d_qkv + (2 * head + 1) * size * tile.item
            first = cuda.blockIdx.x * a_block
            for i in range(first + cuda.threadIdx.x * count, min(first + a_block, size), tile.threads * count):
                load_chunk(words, tile.item, tile.rows_copy, source + i * tile.item, size - i)
                if ADDS:
                    load_chunk(before, tile.item, tile.rows_copy, target + i * tile.item, size - i)
                    add_words(words, before, tile.item, BF16)
                store_chunk(words, tile.item, tile.rows_copy, target + i * tile.item, size - i)
                if not ADDS:
                    for j in range(4):
                        words[j] = 0
                    store_chunk(words, tile.item, tile.rows_copy, target + (i - size) * tile.item, size - i)

    return psa_extract_v_backward_kernel


def make_add(config):
    """target += source, `tokens * KEY_DIM` elements a block."""
    tile = config.constants()
    BF16 = int(config.bf16)

    def add_kernel(source, target, size):
        """Addresses of `size` elements. Grid (ceil(size / (tokens KEY_DIM)))."""
        words, before = cuda.local.array(4, uint32), cuda.local.array(4, uint32)
        count, a_block = 16 // tile.item, tile.tokens * tile.key_dim
        first = cuda.blockIdx.x * a_block
        for i in range(first + cuda.threadIdx.x * count, min(first + a_block, size), tile.threads * count):
            load_chunk(words, tile.item, tile.rows_copy, source + i * tile.item, size - i)
            load_chunk(before, tile.item, tile.rows_copy, target + i * tile.item, size - i)
            add_words(words, before, tile.item, BF16)
            store_chunk(words, tile.item, tile.rows_copy, target + i * tile.item, size - i)

    return add_kernel


ADD_SIGNATURE = types.void(types.int64, types.int64, types.int64)
