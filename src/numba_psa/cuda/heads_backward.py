"""Where a head's arrays begin, for the passes of the backward."""

from __future__ import annotations

from typing import NamedTuple

from numba_psa.cuda.device import step
from numba_psa.cuda.tiles_backward import SUMS_PAD


class Pass(NamedTuple):
    """Addresses of one head in one pass: a block's own rows, the columns that they meet, the gradients of the rows.

    wide: the partner that is value_dim wide. In the pass for dq rows are q and do, columns k and v, and d_wide is unused;
    in the pass for dk and dv rows are k and v, columns q and do.
    """

    rows: int
    rows_wide: int
    columns: int
    columns_wide: int
    d_rows: int
    d_wide: int
    sums: int
    n_rows: int
    n_columns: int
    softmax_scale: float
    scale: float  # softmax_scale as exponents want it
    norms: int


@step
def pass_of(tile, of_keys, head, q, k, v, do, dq, dk, dv, sums, n_queries, n_keys, *scalars):
    """The addresses of head number `head` from those of the first, in the pass for dk and dv if of_keys, else for dq.

    Layouts of q, k, v and out, here do, are those of `heads.heads_of`; dq, dk and dv lie as q, k and v do. sums is
    `[BH][2][n_ctx_q up to a multiple of 64]`: l, then delta. scalars: the last three of Pass.
    """
    queries, keys = head * n_queries, head * n_keys
    if tile.tokens_first:
        q_at, k_at, v_at = queries * tile.key_dim, keys * tile.key_dim, keys * tile.value_dim
    else:
        q_at = k_at = v_at = keys * (2 * tile.key_dim + tile.value_dim)
    q, dq = q + tile.item * q_at, dq + tile.item * q_at
    k, dk = k + tile.item * k_at, dk + tile.item * k_at
    v, dv = v + tile.item * v_at, dv + tile.item * v_at
    do += tile.item * tile.value_dim * queries
    sums += 8 * head * ((n_queries + SUMS_PAD - 1) // SUMS_PAD * SUMS_PAD)
    if of_keys:
        return Pass(k, v, q, do, dk, dv, sums, n_keys, n_queries, *scalars)
    return Pass(q, do, k, v, dq, dq, sums, n_queries, n_keys, *scalars)
