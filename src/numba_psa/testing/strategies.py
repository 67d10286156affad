"""Hypothesis strategies over shapes, dtypes, memory layouts, values and whole cases of the twelve operations.

    @given(cases("psa_pack_qkv"))
    def test_my_port(case):
        compare(my_psa_pack_qkv(*case.args, **case.kwargs), case=case).check()

Every choice shrinks towards the plainest: B = num_heads = KEY_DIM = H = W = 1, C order, no target, readable values.
Numbers come from a drawn seed, not one by one: a case of a million elements costs as many choices as one of four.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from hypothesis import strategies as st

from numba_psa.contract import OPERATIONS
from numba_psa.numerics import FLOAT32, FLOATS, float_dtype
from numba_psa.shapes import AttentionShape, PSAShape
from numba_psa.testing.case import LAYOUTS, Case
from numba_psa.testing.stock import STOCK_MODELS, STOCK_SIDES
from numba_psa.testing.values import POSITIVE_SCALE_ONLY, make_case, value_kinds

COUNTS = (1, 2, 3, 4, 5, 6)
"""Batches and heads: unequal ones come up often."""
WIDTHS = (1, 2, 3, 4, 5, 7, 8, 12, 16, 31, 32, 33, 36, 64, 72)
"""KEY_DIM and D: powers of two, their neighbours, 32 (YOLO11, YOLO26) and 36 (YOLOv10m)."""
TILES = (8, 16, 32, 64, 128)
TOKENS = tuple(sorted({1, 2, 3, 4, 5, 6, 10, 11, 13, 20, 23, 37, 49, 97} | {t + e for t in TILES for e in (-1, 0, 1)}))
"""Rows, columns and token counts: 1, primes, and each tile with its neighbours."""
SCALES = (1.0, 0.25, 0.0, -0.5)
SEEDS = 8
"""Of the numbers in a case. Few: a new case must then differ in its shape or kind of values, not in its seed alone."""
MAX_TOKENS = 400
"""Default for the most tokens in a case: a 640 px image at stride 32 is 20×20."""
MAX_ELEMENTS = 1 << 13
"""The most elements per section of qkv in a case that is not a stock model's: keeps a case in the milliseconds."""


def dtypes(names: Sequence[str] | None = None) -> st.SearchStrategy[np.dtype]:
    """float32, float16, bfloat16 and float64, or those named."""
    order = (FLOAT32, *(d for d in FLOATS if d != FLOAT32))
    return st.sampled_from([float_dtype(name) for name in names] if names else order)


def layouts() -> st.SearchStrategy[str]:
    """Names of memory layouts (`testing.case.LAYOUTS`)."""
    return st.sampled_from(LAYOUTS)


@st.composite
def psa_shapes(draw, max_tokens: int = MAX_TOKENS, *, empty: bool = True, stock: bool = True) -> PSAShape:
    """PSA problems of at most `max_tokens` tokens: ragged, square or not, at times a stock model's or an empty one."""
    corner = draw(_corner("stock", "stock", "empty"))
    models = [(m, side) for m in STOCK_MODELS for side in STOCK_SIDES.values() if side**2 <= max_tokens]
    if stock and corner == "stock" and models:
        model, side = draw(st.sampled_from(sorted(models, key=lambda x: (x[1], x[0].num_heads, x[0].key_dim))))
        return PSAShape(1, model.num_heads, model.key_dim, side, side)
    batch, heads = draw(_at_most(COUNTS, 4)), draw(st.sampled_from(COUNTS))
    key_dim = draw(_at_most(WIDTHS, max(1, MAX_ELEMENTS // (batch * heads))))
    tokens = max(1, min(max_tokens, MAX_ELEMENTS // (batch * heads * key_dim)))
    height = draw(_at_most(TOKENS, min(tokens, 33)))
    width = draw(_at_most(TOKENS, tokens // height))
    if empty and corner == "empty":
        batch, height = draw(st.sampled_from(((0, height), (batch, 0))))
    return PSAShape(batch, heads, key_dim, height, width)


@st.composite
def attention_shapes(draw, max_tokens: int = MAX_TOKENS, *, square: bool = False, empty: bool = True) -> AttentionShape:
    """FlashAttention-2 problems; `square` makes n_ctx_q = n_ctx_k. Dv differs from D at times, n_ctx_k is 0 at times."""
    corner = draw(_corner("wide", "wide", "empty"))
    bh = draw(_at_most(COUNTS, 6))
    d = draw(st.sampled_from(WIDTHS))
    tokens = max(1, min(max_tokens, MAX_ELEMENTS // (bh * d)))
    n_q = draw(_at_most(TOKENS, tokens))
    n_k = n_q if square or draw(st.booleans()) else draw(_at_most(TOKENS, tokens))
    dv = draw(_at_most(WIDTHS, 72)) if corner == "wide" else d
    if empty and corner == "empty":
        bh, n_q, n_k = draw(st.sampled_from(((0, n_q, n_k), (bh, 0, 0 if square else n_k), (bh, 0 if square else n_q, 0))))
    return AttentionShape(bh, n_q, n_k, d, dv)


@st.composite
def cases(
    draw,
    op: str,
    *,
    dtype: str | np.dtype | None = "float32",
    max_tokens: int = MAX_TOKENS,
    contiguous: bool = False,
    empty: bool = True,
    stock: bool = True,
) -> Case:
    """Complete arguments of `op` (a name in `contract.OPERATIONS`).

    dtype None draws it too; `contiguous` keeps every array C-ordered; `empty=False` leaves out arrays without elements,
    `stock=False` the shapes of stock models.
    """
    operation = OPERATIONS[op]
    whole = operation.arrays[0] != "q"
    square = op == "psa_fa2_backward"
    shape = draw(
        psa_shapes(max_tokens, empty=empty, stock=stock)
        if whole
        else attention_shapes(max_tokens, square=square, empty=empty)
    )
    chosen = draw(dtypes()) if dtype is None else float_dtype(dtype)
    values = draw(st.sampled_from(value_kinds(op)))
    scale = draw(st.sampled_from(SCALES)) if operation.scaled and draw(st.booleans()) else None
    if values in POSITIVE_SCALE_ONLY and scale is not None and scale <= 0:
        scale = None
    targets = bool(operation.adds) and draw(st.booleans())
    arranged = {}
    if not contiguous and draw(st.booleans()):
        arranged = {name: draw(layouts()) for name in operation.arrays}
    return make_case(
        op,
        shape,
        chosen,
        values=values,
        seed=draw(st.integers(0, SEEDS - 1)),
        softmax_scale=scale,
        targets=targets,
        layouts={name: layout for name, layout in arranged.items() if layout != "C"},
    )


def _at_most(choices: Sequence[int], limit: int) -> st.SearchStrategy[int]:
    return st.sampled_from([x for x in choices if x <= limit])


@st.composite
def _corner(draw, *names: str) -> str:
    """ "" mostly, one of `names` for one case in ten.

    Hypothesis tells cases apart by what was drawn: a number of which most values mean the same would let it take repeats for
    new cases. So the rare choice is drawn in two steps.
    """
    return draw(st.sampled_from(names)) if draw(st.integers(0, 9)) == 9 else ""
