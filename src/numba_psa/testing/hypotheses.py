"""What a port would have given, had it made a known mistake: predictions for `diagnose` to hold against the data.

A prediction is `(cause, detail, {output: array})`, cause a key of `causes.CAUSES`. Layout mistakes are index maps of one
canonical array `[B, num_heads, sections, KEY_DIM, H, W]`, into which every layout operation decodes its input and from
which it encodes its output: correct is the identity. Mistakes in the arithmetic are in `hypotheses_attention`.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator

import numpy as np

from numba_psa.shapes import V_LO, PSAShape
from numba_psa.testing.case import Case

Outputs = dict[str, np.ndarray]
Prediction = tuple[str, str, Outputs]
IndexMap = Callable[[np.ndarray], np.ndarray]
TILES = (2, 4, 8, 16, 32, 64, 128)
SECTION_NAMES = ("Q", "K", "V_lo", "V_hi")


# ---- canonical form ---------------------------------------------------------------------------------------------------
def canonical(array: np.ndarray, shape: PSAShape, tokens_first: bool) -> np.ndarray:
    """`[B, h, S, KEY_DIM, H, W]` of NCHW channels, or of sections `[S, BH, N, KEY_DIM]`."""
    b, h, kd, height, width = shape.batch, shape.num_heads, shape.key_dim, shape.height, shape.width
    if not tokens_first:
        return array.reshape(b, h, array.shape[1] // (h * kd), kd, height, width)
    return array.reshape(array.shape[0], b, h, height, width, kd).transpose(1, 2, 0, 5, 3, 4)


def to_nchw(x: np.ndarray) -> np.ndarray:
    b, h, s, kd, height, width = x.shape
    return x.reshape(b, h * s * kd, height, width)


def to_sections(x: np.ndarray) -> np.ndarray:
    """`[S, BH, N, KEY_DIM]`."""
    b, h, s, kd, height, width = x.shape
    return x.transpose(2, 0, 1, 4, 5, 3).reshape(s, b * h, height * width, kd)


def decode(case: Case) -> np.ndarray:
    """The input of a layout operation, or the qkv of psa_attention and its backward, in canonical form."""
    arrays = [np.asarray(case[name], np.float64) for name in case.operation.arrays]
    if case.op == "psa_merge_attn_nchw":
        return canonical(np.stack(arrays), case.shape, tokens_first=True)
    return canonical(arrays[0], case.shape, tokens_first=case.op == "psa_pack_qkv_backward")


def encode(case: Case, x: np.ndarray) -> Outputs:
    """The outputs of a layout operation from its canonical array."""
    match case.op:
        case "psa_pack_qkv":
            return {"packed": to_sections(x)}
        case "psa_extract_v_nchw":
            return {"v": to_nchw(x[:, :, V_LO:])}
        case "psa_merge_attn_nchw":
            return {"out": to_nchw(x)}
        case "psa_merge_attn_backward":
            return dict(zip(("d_lo", "d_hi"), to_sections(x), strict=True))
        case "psa_extract_v_backward":
            x = np.concatenate((np.zeros_like(x), x), axis=2)
    return with_targets(case, {"d_qkv": to_nchw(x)})


def with_targets(case: Case, outputs: Outputs, added: tuple[str, ...] | None = None) -> Outputs:
    """`outputs` with the target of each added: of those the contract adds into, or of the names given."""
    names = case.operation.adds if added is None else added
    return {
        name: x + np.asarray(case[name], np.float64) if name in names and name in case else x for name, x in outputs.items()
    }


# ---- index maps -------------------------------------------------------------------------------------------------------
def _flat_tokens(x: np.ndarray) -> np.ndarray:
    return x.reshape(*x.shape[:-2], -1)


def _transposed_image(x: np.ndarray) -> np.ndarray:
    return x.swapaxes(-1, -2).reshape(x.shape)


def _untransposed_image(x: np.ndarray) -> np.ndarray:
    *lead, height, width = x.shape
    return x.reshape(*lead, width, height).swapaxes(-1, -2)


def _row_pitch(x: np.ndarray) -> np.ndarray:
    height, width = x.shape[-2:]
    y, col = np.divmod(np.arange(height * width), max(width, 1))
    return _flat_tokens(x)[..., (y * height + col) % max(height * width, 1)].reshape(x.shape)


def _as_sections_first(x: np.ndarray) -> np.ndarray:
    """Reads channels that are [head][section] as [section][head]."""
    b, h, s, *rest = x.shape
    return x.reshape(b, s, h, *rest).swapaxes(1, 2)


def _as_head_first(x: np.ndarray) -> np.ndarray:
    b, h, s, *rest = x.shape
    return x.swapaxes(1, 2).reshape(b, h, s, *rest)


def _heads_outermost(x: np.ndarray) -> np.ndarray:
    """(b, h) reads what lies at h*B + b."""
    b, h, *rest = x.shape
    return x.reshape(h, b, *rest).swapaxes(0, 1)


def _heads_innermost(x: np.ndarray) -> np.ndarray:
    b, h, *rest = x.shape
    return x.swapaxes(0, 1).reshape(b, h, *rest)


def _batch_then_sections(x: np.ndarray) -> np.ndarray:
    b, h, s, *rest = x.shape
    return np.moveaxis(x.reshape(s, b * h, *rest), 0, 1).reshape(x.shape)


def _tokens_by_width(x: np.ndarray) -> np.ndarray:
    """[N, KEY_DIM] memory filled in the order [KEY_DIM, N]."""
    *lead, kd, height, width = x.shape
    return x.reshape(*lead, height * width, kd).swapaxes(-1, -2).reshape(x.shape)


def _width_by_tokens(x: np.ndarray) -> np.ndarray:
    *lead, kd, height, width = x.shape
    return x.reshape(*lead, kd, height * width).swapaxes(-1, -2).reshape(x.shape)


def _tokens_by_head_width(x: np.ndarray) -> np.ndarray:
    """As `_tokens_by_width`, over all sections of a head at once: [BH, N, width] taken for [BH, width, N]."""
    b, h, s, kd, height, width = x.shape
    rows = x.reshape(b, h, s * kd, height * width).swapaxes(-1, -2)
    return rows.reshape(x.shape)


def _channels(formula: Callable[..., np.ndarray]) -> IndexMap:
    """Channel (h, section, d) is read from `formula(h, section, d, S, KEY_DIM, heads)`, not (h*S + section)*KEY_DIM + d."""

    def move(x: np.ndarray) -> np.ndarray:
        b, heads, s, kd, *image = x.shape
        h, section, d = np.ogrid[:heads, :s, :kd]
        index = np.broadcast_to(formula(h, section, d, s, kd, heads), (heads, s, kd)) % (heads * s * kd)
        return x.reshape(b, heads * s * kd, *image)[:, index]

    return move


def _permuted(order: tuple[int, ...]) -> IndexMap:
    return lambda x: x[:, :, list(order)] if x.shape[2] == len(order) else x


def _kept(axis: int) -> IndexMap:
    """Only index 0 of `axis` is written."""
    return lambda x: np.where((np.arange(x.shape[axis]) == 0).reshape([-1 if i == axis else 1 for i in range(x.ndim)]), x, 0)


def _same_half(source: int) -> IndexMap:
    def copy(x: np.ndarray) -> np.ndarray:
        x = x.copy()
        x[:, :, -2:] = x[:, :, source : source + 1 or None]
        return x

    return copy


def _tail(tile: int, axis: str, repeat: bool) -> IndexMap:
    """Tokens or channels beyond the last whole tile are 0, or repeat those one tile before."""

    def cut(x: np.ndarray) -> np.ndarray:
        flat = _flat_tokens(x) if axis == "n" else np.moveaxis(_flat_tokens(x), 3, -1)
        n, whole = flat.shape[-1], flat.shape[-1] // tile * tile
        if whole == n or (repeat and not whole):
            return x
        flat = flat.copy()
        flat[..., whole:] = flat[..., np.arange(whole, n) - tile] if repeat else 0
        return flat.reshape(x.shape) if axis == "n" else np.moveaxis(flat, -1, 3).reshape(x.shape)

    return cut


def _section_maps() -> Iterator[tuple[str, str, IndexMap]]:
    yield "lo-hi-swapped", "", _permuted((1, 0))
    yield "lo-hi-swapped", "", _permuted((0, 1, 3, 2))
    for order in itertools.permutations(range(4)):
        if order not in ((0, 1, 2, 3), (0, 1, 3, 2)):
            yield "section-order", "read as " + ", ".join(SECTION_NAMES[i] for i in order), _permuted(order)


INTERLEAVED = _channels(lambda h, s, d, S, kd, heads: h * S * kd + d * S + s)

INDEX_MAPS: tuple[tuple[str, str, IndexMap], ...] = (
    *_section_maps(),
    ("one-half-for-both", "V_lo", _same_half(-2)),
    ("one-half-for-both", "V_hi", _same_half(-1)),
    ("section-major", "channels", _as_sections_first),
    ("section-major", "channels", _as_head_first),
    ("section-major", "packed as [BH, 4, N, KEY_DIM]", _batch_then_sections),
    ("section-major", "packed as [BH, 4, N, KEY_DIM]", lambda x: _inverse(_batch_then_sections, x)),
    ("batch-head-swapped", "", _heads_outermost),
    ("batch-head-swapped", "", _heads_innermost),
    ("spatial-transpose", "", _transposed_image),
    ("spatial-transpose", "", _untransposed_image),
    ("row-pitch", "y*H + x", _row_pitch),
    ("token-width-transposed", "", _tokens_by_width),
    ("token-width-transposed", "", _width_by_tokens),
    ("token-width-transposed", "over the whole head", _tokens_by_head_width),
    ("token-width-transposed", "over the whole head", lambda x: _inverse(_tokens_by_head_width, x)),
    (
        "key-dim-stride",
        "channels of a head interleaved: d*sections + section",
        INTERLEAVED,
    ),
    ("key-dim-stride", "interleaved the other way", lambda x: _inverse(INTERLEAVED, x)),
    ("key-dim-stride", "sections 1 apart", _channels(lambda h, s, d, S, kd, heads: h * S * kd + s + d)),
    *(
        ("key-dim-stride", f"heads {n}*KEY_DIM apart", _channels(lambda h, s, d, S, kd, heads, n=n: (h * n + s) * kd + d))
        for n in (1, 2, 3)
    ),
    ("key-dim-stride", "heads 4*KEY_DIM apart", _channels(lambda h, s, d, S, kd, heads: (h * 4 + s) * kd + d)),
    ("key-dim-stride", "sections 2*KEY_DIM apart", _channels(lambda h, s, d, S, kd, heads: (h * S + 2 * s) * kd + d)),
    ("first-head-copied", "", lambda x: np.broadcast_to(x[:, :1], x.shape)),
    ("first-batch-copied", "", lambda x: np.broadcast_to(x[:1], x.shape) if len(x) else x),
    ("heads-missing", "", _kept(1)),
    ("batches-missing", "", _kept(0)),
    *(
        (cause, f"{what} in tiles of {tile}", _tail(tile, axis, cause == "tail-repeated"))
        for cause in ("tail-missing", "tail-repeated")
        for axis, what in (("n", "tokens"), ("d", "channels"))
        for tile in TILES
    ),
)


def _inverse(move: IndexMap, x: np.ndarray) -> np.ndarray:
    """The map that undoes `move`, a permutation."""
    index = move(np.arange(x.size).reshape(x.shape)).ravel()
    out = np.empty_like(x).ravel()
    out[index] = x.ravel()
    return out.reshape(x.shape)


def adjoint(move: IndexMap, x: np.ndarray) -> np.ndarray:
    """What scatters back through `move`: sums where it reads an element twice, 0 where it reads none."""
    index = move(np.arange(1, x.size + 1).reshape(x.shape)).ravel()  # 0: not read from anywhere
    return np.bincount(index.astype(int), weights=x.ravel(), minlength=x.size + 1)[1:].reshape(x.shape)


# ---- predictions ------------------------------------------------------------------------------------------------------
def layout_predictions(case: Case) -> Iterator[Prediction]:
    """For the six layout operations: a wrong index map between the input and the output, or a target misused."""
    x = decode(case)
    if case.op == "psa_extract_v_backward":
        yield "target-cleared", "Q and K", _cleared(case, x)
    for cause, detail, move in INDEX_MAPS:
        moved = move(x)
        yield cause, detail, encode(case, moved)
        if case.op in ("psa_pack_qkv_backward", "psa_extract_v_backward") and np.isfinite(x).all():
            yield cause, detail, encode(case, adjoint(move, x))
        if case.op == "psa_extract_v_backward":
            # The same mistake made over all four sections of qkv, Q and K among them.
            whole = np.concatenate((np.zeros_like(x), x), axis=2)
            yield cause, detail, with_targets(case, {"d_qkv": to_nchw(move(whole))})
            yield cause, detail, with_targets(case, {"d_qkv": to_nchw(adjoint(move, np.nan_to_num(whole)))})


def _cleared(case: Case, x: np.ndarray) -> Outputs:
    """psa_extract_v_backward that zeroes Q and K of its target."""
    d_qkv = encode(case, x)["d_qkv"]
    heads = d_qkv.reshape(case.shape.heads).copy()
    heads[:, :V_LO] = 0
    return {"d_qkv": heads.reshape(d_qkv.shape)}


def output_predictions(case: Case, truth: Outputs, actual: Outputs) -> Iterator[Prediction]:
    """Mistakes that show in the outputs alone, whatever the operation."""
    fresh = {
        name: x - np.asarray(case[name], np.float64) if name in case.operation.adds and name in case else x
        for name, x in truth.items()
    }
    for names in subsets(truth):
        part = ", ".join(names) if len(names) < len(truth) else ""
        yield (
            "not-written",
            part,
            truth | {n: np.asarray(case[n], np.float64) if n in case else np.zeros_like(truth[n]) for n in names},
        )
        if set(names) & set(case.targets):
            yield "not-written", part, truth | {n: np.zeros_like(truth[n]) for n in names}
        if set(names) <= set(case.operation.adds) & set(case.targets):
            yield "stored-instead-of-added", part, truth | {n: fresh[n] for n in names}
        if set(names) <= set(case.operation.stores) & set(case.targets):
            yield "added-instead-of-stored", part, truth | with_targets(case, {n: truth[n] for n in names}, tuple(names))
        yield "stale-values", part, truth | {n: truth[n] + fresh[n] for n in names}
        yield "negated", part, truth | {n: truth[n] - 2 * fresh[n] for n in names}
        factor = _factor({n: actual[n] - (truth[n] - fresh[n]) for n in names}, {n: fresh[n] for n in names})
        if factor is not None:
            yield (
                "constant-factor",
                f"{part + ' ' if part else ''}×{factor:.4g}",
                truth | {n: truth[n] + (factor - 1) * fresh[n] for n in names},
            )
    for a, b in itertools.combinations(truth, 2):
        if truth[a].shape == truth[b].shape:
            yield "outputs-swapped", f"{a} and {b}", truth | {a: truth[b], b: truth[a]}


def subsets(names: Outputs) -> list[tuple[str, ...]]:
    """All of the names together first, then each on its own, then the other pairs."""
    every = tuple(names)
    singles = [(name,) for name in every] if len(every) > 1 else []
    pairs = list(itertools.combinations(every, 2)) if len(every) > 2 else []
    return [every, *pairs, *singles]


def _factor(actual: Outputs, expected: Outputs) -> float | None:
    """The factor that fits best, or None if there is none to speak of."""
    a = np.concatenate([x.ravel() for x in actual.values()])
    e = np.concatenate([x.ravel() for x in expected.values()])
    finite = np.isfinite(a) & np.isfinite(e)
    e, a = e[finite], a[finite]
    largest = np.max(np.abs(e), initial=0.0)
    if largest == 0 or np.max(np.abs(a), initial=0.0) == 0 or e.size < 2:
        return None
    return float((a / largest) @ (e / largest) / ((e / largest) @ (e / largest)))
