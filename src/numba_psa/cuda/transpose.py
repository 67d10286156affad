"""Transposes of 16-bit matrices whose channels come in eights, through ldmatrix.

All loads of a thread are under way before the first is stored. A row in shared memory is an odd number of 16-byte units
long, and two units more after every eight rows: so neither the stores nor the eight rows of a matrix meet in a bank.
"""

from __future__ import annotations

from numba_psa.cuda.chunks import load_chunk, store_chunk
from numba_psa.cuda.device import barrier, ldmatrix_x4_trans, st_shared_v4_u32, step


def tile_bytes(rows: int, columns: int) -> int:
    """Shared memory of a tile."""
    return rows * 16 * (columns // 8 | 1) + rows // 8 * 32


@step
def unit_address(shared, stride, row, unit):
    return shared + row * stride + (row >> 3) * 32 + 16 * unit


@step
def transpose_tile(
    threads, words, shared, stride, source, source_row, source_copy, target, target_row, target_copy, size, valid, tid
):
    """target[c][r] = source[r][c] of `size` = (rows, columns) elements, `valid` of which exist.

    source_row, target_row: bytes from a row to the next. A lane of ldmatrix.trans gets two elements of a column: row 2q + e
    of matrix b is row 2b + e of the q-th eight rows, so that the lane's four words are eight neighbours of a column.
    """
    chunks, units, eights = size[0] * size[1] // 8, size[1] // 8, size[0] // 8
    for i in range(words.shape[0]):
        at = tid + i * threads
        row, unit = at // units, at % units
        left = valid[1] - 8 * unit if row < valid[0] else 0
        load_chunk(words[i], 2, source_copy, source + row * source_row + 16 * unit, left)
    for i in range(words.shape[0]):
        at = tid + i * threads
        if at < chunks:
            chunk = words[i]
            st_shared_v4_u32(unit_address(shared, stride, at // units, at % units), chunk[0], chunk[1], chunk[2], chunk[3])
    barrier()
    lane, matrix, named = tid & 31, tid >> 3 & 3, tid & 7
    chunk = words[0]
    for i in range(words.shape[0]):  # a warp makes 32 chunks of the result, in fours of (unit of the source, eight rows)
        first = tid - lane + i * threads
        if first < chunks:
            four = first // 8 + (named >> 1)
            row = 8 * (four % eights) + 2 * matrix + (named & 1)
            found = ldmatrix_x4_trans(unit_address(shared, stride, row, four // eights))
            chunk[0], chunk[1], chunk[2], chunk[3] = found
            four = first // 8 + (lane & 3)
            column, row = four // eights * 8 + (lane >> 2), four % eights * 8
            if column < valid[1]:
                store_chunk(chunk, 2, target_copy, target + column * target_row + 2 * row, valid[0] - row)


@step
def rows_to_tokens(tile, words, shared, rows, tokens, n_tokens, first, tid):
    """tokens[n][c] = rows[c][n] for `tile.tokens` tokens from `first` on; rows and tokens are addresses of matrices."""
    valid = tile.key_dim, min(tile.tokens, n_tokens - first)
    stride = 16 * (tile.tokens // 8 | 1)
    source, target, row = rows + 2 * first, tokens + first * (2 * tile.key_dim), 2 * n_tokens
    size = tile.key_dim, tile.tokens
    transpose_tile(
        tile.threads, words, shared, stride, source, row, tile.rows_copy, target, 2 * tile.key_dim, 16, size, valid, tid
    )


@step
def tokens_to_rows(tile, words, shared, tokens, rows, n_tokens, first, tid):
    """rows[c][n] = tokens[n][c], as rows_to_tokens."""
    valid = min(tile.tokens, n_tokens - first), tile.key_dim
    stride = 16 * (tile.key_dim // 8 | 1)
    source, target, row = tokens + first * (2 * tile.key_dim), rows + 2 * first, 2 * n_tokens
    size = tile.tokens, tile.key_dim
    transpose_tile(
        tile.threads, words, shared, stride, source, 2 * tile.key_dim, 16, target, row, tile.rows_copy, size, valid, tid
    )
