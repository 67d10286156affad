"""Keys and values whose rows begin at odd places, copied to rows that begin at multiples of 16 bytes.

A product on Hopper's warpgroups wants its operands aligned, and every block of queries needs them: so they are moved once,
by a kernel of its own, `[BH][KEY_DIM + 2 KEY_DIM][N]` to rows of N up to a multiple of 8, filled up with zeros.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

from numba import int32, int64, types, uint32

from numba_psa._numba_cuda import cuda
from numba_psa.cuda.device import (
    REVISION,
    funnel_shift,
    ld_global_v4_u32,
    let_next_kernel_start,
    st_global_v4_u32,
    step,
)


@dataclass(frozen=True)
class AlignConfig:
    """KEY_DIM of 16-bit qkv; a thread moves `chunks` times 16 bytes."""

    key_dim: int
    chunks: int = 2
    threads: int = 256
    blocks_per_sm: int = 4
    shared_bytes = 0
    revision = REVISION

    @property
    def rows(self) -> int:
        """Of keys and values of a head."""
        return 3 * self.key_dim

    def blocks(self, n: int) -> int:
        """That a head of n tokens takes."""
        return -(-self.rows * pitch_of(n) // (8 * self.chunks * self.threads))

    def bytes(self, n: int) -> int:
        """That the aligned rows of a head take."""
        return 2 * self.rows * pitch_of(n)

    @property
    def name(self) -> str:
        return "Align_" + "_".join(f"{field.name}{getattr(self, field.name)}" for field in fields(self))


def pitch_of(n: int) -> int:
    """Tokens from an aligned row to the next."""
    return (n + 7) // 8 * 8


@step
def load_eight(words, i, address, end):
    """words[i] = the 32 bytes from the aligned 16 on that hold `address`; none beyond `end`."""
    first = address & -16
    a, b, c, d = ld_global_v4_u32(first)
    words[i, 0], words[i, 1], words[i, 2], words[i, 3] = a, b, c, d
    if first + 16 < end:
        a, b, c, d = ld_global_v4_u32(first + 16)
        words[i, 4], words[i, 5], words[i, 6], words[i, 7] = a, b, c, d


@step
def shift_down(words, i, misplaced):
    """words[i, :4] = the 16 bytes that begin `misplaced` bytes within words[i]."""
    if misplaced & 8:
        for w in range(6):
            words[i, w] = words[i, w + 2]
    if misplaced & 4:
        for w in range(5):
            words[i, w] = words[i, w + 1]
    for w in range(4):
        words[i, w] = funnel_shift(words[i, w], words[i, w + 1], 8 * (misplaced & 2))


@step
def keep_first(words, i, valid):
    """Zeros for all but the first `valid` elements of words[i, :4]."""
    for w in range(4):
        if valid <= 2 * w:
            words[i, w] = 0
        elif valid == 2 * w + 1:
            words[i, w] &= 0xFFFF


def make_align_rows(config):
    """The kernel for one AlignConfig."""
    ROWS, THREADS, SHAPE, CHUNKS = config.rows, config.threads, (config.chunks, 8), config.chunks

    def align_rows_kernel(k, target, n_tokens, heads):
        """k: address of the first head's keys in qkv; heads are [4 KEY_DIM][n_tokens]. Grid (AlignConfig.blocks, heads)."""
        let_next_kernel_start()
        words = cuda.local.array(SHAPE, uint32)
        chunks = (n_tokens + 7) // 8
        head = cuda.blockIdx.y
        source, row_bytes = k + head * (ROWS // 3 * 4) * (2 * n_tokens), 2 * n_tokens
        end = k + (heads - 1) * (ROWS // 3 * 4) * row_bytes + ROWS * row_bytes  # of the last head's values
        target += head * ROWS * (16 * chunks)
        first = cuda.blockIdx.x * (CHUNKS * THREADS) + cuda.threadIdx.x
        for i in range(CHUNKS):
            at = first + i * THREADS
            row = int64(int32(at) // int32(chunks))  # a division of 64 bits would be slow
            chunk = at - row * chunks
            if row < ROWS:
                load_eight(words, i, source + row * row_bytes + 16 * chunk, end)
        for i in range(CHUNKS):
            at = first + i * THREADS
            row = int64(int32(at) // int32(chunks))  # a division of 64 bits would be slow
            chunk = at - row * chunks
            if row < ROWS:
                shift_down(words, i, source + row * row_bytes & 15)
                if n_tokens - 8 * chunk < 8:
                    keep_first(words, i, n_tokens - 8 * chunk)
                st_global_v4_u32(target + 16 * at, words[i, 0], words[i, 1], words[i, 2], words[i, 3])

    return align_rows_kernel


ALIGN_SIGNATURE = types.void(types.int64, types.int64, types.int32, types.int32)
