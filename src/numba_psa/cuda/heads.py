"""Where a head's arrays begin."""

from __future__ import annotations

from typing import NamedTuple

from numba_psa.cuda.device import step


class Head(NamedTuple):
    """Addresses of one head's arrays."""

    q: int
    k: int
    v: int
    out: int
    l: int


@step
def heads_of(tile, head, q, k, v, out, l, n_queries, n_keys):
    """The addresses of head number `head` from those of the first.

    Channels first: q, k and v lie in qkv `[BH][KEY_DIM q, KEY_DIM k, 2*KEY_DIM v][N]`, out is `[BH][2*KEY_DIM][N]`.
    Tokens first: q `[BH][n_ctx_q][D]`, k `[BH][n_ctx_k][D]`, v `[BH][n_ctx_k][Dv]`, out `[BH][n_ctx_q][Dv]`.
    l is `[BH][n_ctx_q]`, float32. Packed: k and v are not in qkv but `[BH][KEY_DIM k, 2*KEY_DIM v][pitch]` (align.py).
    """
    if tile.tokens_first:
        q += head * n_queries * (tile.item * tile.key_dim)
        k += head * n_keys * (tile.item * tile.key_dim)
        v += head * n_keys * (tile.item * tile.value_dim)
    else:
        slab = head * n_keys * (tile.item * (2 * tile.key_dim + tile.value_dim))
        q += slab
        if tile.packed:
            slab = head * ((n_keys + 7) // 8 * 8) * (tile.item * (tile.key_dim + tile.value_dim))
        k += slab
        v += slab
    out += head * n_queries * (tile.item * tile.value_dim)
    l += head * n_queries * 4
    return Head(q, k, v, out, l)
