"""Every size, layout and shape check of PSA attention and FlashAttention-2, once.

The alphabet: `B` batch, `num_heads`, `BH = B*num_heads` (bh = b*num_heads + h), `H`, `W` image rows and columns,
`N = H*W` tokens (n = y*W + x), `KEY_DIM` width of a query or key head, `head_dim = 2*KEY_DIM`,
`qkv_h = num_heads*4*KEY_DIM` and `c = num_heads*2*KEY_DIM` channels. FlashAttention-2 has `q [BH, n_ctx_q, D]`,
`k [BH, n_ctx_k, D]`, `v [BH, n_ctx_k, Dv]`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from numbers import Integral

from numba_psa.errors import DTypeError, ShapeError

Q, K, V_LO, V_HI = range(4)
"""The four sections of a head in `qkv` and of the packed layout, in this order."""
SECTIONS = 4

QKV_AXES = ("B", "qkv_h", "H", "W")
OUT_AXES = ("B", "c", "H", "W")
PACKED_AXES = ("4", "BH", "N", "KEY_DIM")
SECTION_AXES = ("BH", "N", "KEY_DIM")
Q_AXES = ("BH", "n_ctx_q", "D")
K_AXES = ("BH", "n_ctx_k", "D")
V_AXES = ("BH", "n_ctx_k", "Dv")
O_AXES = ("BH", "n_ctx_q", "Dv")
L_AXES = ("BH", "n_ctx_q")


def check_count(name: str, value: object, least: int) -> int:
    """`value` as an int, or the error that names it: DTypeError for a float or bool, ShapeError below `least`."""
    if type(value) is not int and (isinstance(value, bool) or not isinstance(value, Integral)):  # int first: it is fast
        raise DTypeError(f"{name} must be an int, got {type(value).__name__} {value!r}")
    if value < least:
        raise ShapeError(f"{name} must be at least {least}, got {value}")
    return int(value)


def check_rank(name: str, shape: Sequence[int], axes: Sequence[str]) -> None:
    """ShapeError unless `shape` has one size for each of `axes`."""
    if len(shape) != len(axes):
        raise ShapeError(f"{name} must have {len(axes)} dimensions [{', '.join(axes)}], got {len(shape)}: {tuple(shape)}")


def check_shape(name: str, shape: Sequence[int], expected: Sequence[int], axes: Sequence[str]) -> None:
    """ShapeError that names the first axis of `shape` that differs from `expected`."""
    check_rank(name, shape, axes)
    for axis, (label, got, want) in enumerate(zip(axes, shape, expected, strict=True)):
        if got != want:
            raise ShapeError(
                f"{name} has {label} = {got} on axis {axis}, expected {want}: "
                f"shape {tuple(shape)}, expected {tuple(expected)} [{', '.join(axes)}]"
            )


def _width_per_head(name: str, channels: int, num_heads: int, sections: int, symbol: str) -> int:
    """KEY_DIM out of `channels = num_heads * sections * KEY_DIM`, or the ShapeError that names what would fit."""
    unit = num_heads * sections
    key_dim, rest = divmod(channels, unit)
    if rest or key_dim == 0:
        fits = [unit * width for width in (key_dim, key_dim + 1) if width > 0]
        raise ShapeError(
            f"{name} has {channels} channels on axis 1, which is not {symbol} = num_heads*{sections}*KEY_DIM for "
            f"num_heads = {num_heads}: it must be a positive multiple of {unit}, such as {' or '.join(map(str, fits))} "
            f"(each head holds KEY_DIM queries, KEY_DIM keys and exactly 2*KEY_DIM values)"
        )
    return key_dim


@dataclass(frozen=True)
class PSAShape:
    """One PSA attention problem, `qkv [B, qkv_h, H, W] -> out [B, c, H, W]`.

    Channels of `qkv` are head-major: head h owns `[h*4*KEY_DIM, (h+1)*4*KEY_DIM)`, in it Q, K, V_lo, V_hi, each
    KEY_DIM wide. `B`, `H` and `W` may be 0; `num_heads` and `KEY_DIM` are at least 1.
    """

    batch: int
    num_heads: int
    key_dim: int
    height: int
    width: int

    def __post_init__(self) -> None:
        for name, least in (("batch", 0), ("num_heads", 1), ("key_dim", 1), ("height", 0), ("width", 0)):
            object.__setattr__(self, name, check_count(name, getattr(self, name), least))

    # ---- constructors, one for each layout that fixes the problem ----
    @classmethod
    def from_qkv(cls, shape: Sequence[int], num_heads: int) -> PSAShape:
        """From `qkv [B, qkv_h, H, W]`."""
        return cls._from_channels("qkv", shape, num_heads, SECTIONS, "qkv_h", QKV_AXES)

    @classmethod
    def from_out(cls, shape: Sequence[int], num_heads: int, name: str = "out") -> PSAShape:
        """From an attention output, extracted V, or gradient of one, `[B, c, H, W]`; `name` is for the message."""
        return cls._from_channels(name, shape, num_heads, 2, "c", OUT_AXES)

    @classmethod
    def from_section(cls, shape: Sequence[int], num_heads: int, height: int, width: int, name: str = "section") -> PSAShape:
        """From one packed section `[BH, N, KEY_DIM]`; `name` is for the message."""
        check_rank(name, shape, SECTION_AXES)
        num_heads = check_count("num_heads", num_heads, 1)
        height, width = check_count("height", height, 0), check_count("width", width, 0)
        bh, n, key_dim = shape
        if bh % num_heads:
            raise ShapeError(f"{name} has BH = {bh} on its axis, which num_heads = {num_heads} does not divide")
        if n != height * width:
            raise ShapeError(
                f"{name} has N = {n} tokens, but height*width = {height}*{width} = {height * width}: they must be equal"
            )
        return cls(bh // num_heads, num_heads, check_count(f"KEY_DIM of {name}", key_dim, 1), height, width)

    @classmethod
    def from_packed(cls, shape: Sequence[int], num_heads: int, height: int, width: int, name: str = "packed") -> PSAShape:
        """From the packed buffer `[4, BH, N, KEY_DIM]`."""
        check_rank(name, shape, PACKED_AXES)
        if shape[0] != SECTIONS:
            raise ShapeError(f"{name} has {shape[0]} sections on axis 0, expected 4: Q, K, V_lo, V_hi")
        return cls.from_section(shape[1:], num_heads, height, width, name)

    @classmethod
    def _from_channels(cls, name, shape, num_heads, sections, symbol, axes) -> PSAShape:
        check_rank(name, shape, axes)
        num_heads = check_count("num_heads", num_heads, 1)
        batch, channels, height, width = shape
        return cls(batch, num_heads, _width_per_head(name, channels, num_heads, sections, symbol), height, width)

    # ---- sizes ----
    @property
    def bh(self) -> int:
        """BH = B*num_heads, the number of independent attentions."""
        return self.batch * self.num_heads

    @property
    def n(self) -> int:
        """N = H*W tokens."""
        return self.height * self.width

    @property
    def head_dim(self) -> int:
        """Width of a value head, 2*KEY_DIM."""
        return 2 * self.key_dim

    @property
    def qkv_h(self) -> int:
        """Channels of qkv, num_heads*4*KEY_DIM."""
        return self.num_heads * SECTIONS * self.key_dim

    @property
    def c(self) -> int:
        """Channels of the output, num_heads*2*KEY_DIM."""
        return self.num_heads * self.head_dim

    @property
    def softmax_scale(self) -> float:
        """The default scale of the scores, 1/sqrt(KEY_DIM)."""
        return self.key_dim**-0.5

    # ---- layouts ----
    @property
    def qkv(self) -> tuple[int, int, int, int]:
        """`[B, qkv_h, H, W]`."""
        return self.batch, self.qkv_h, self.height, self.width

    @property
    def heads(self) -> tuple[int, int, int, int]:
        """qkv seen by section: `[BH, 4, KEY_DIM, N]`, the same bytes as `qkv`."""
        return self.bh, SECTIONS, self.key_dim, self.n

    @property
    def out(self) -> tuple[int, int, int, int]:
        """`[B, c, H, W]`: attention output, extracted V, and their gradients."""
        return self.batch, self.c, self.height, self.width

    @property
    def out_heads(self) -> tuple[int, int, int, int]:
        """out seen by half: `[BH, 2, KEY_DIM, N]`, the same bytes as `out`."""
        return self.bh, 2, self.key_dim, self.n

    @property
    def section(self) -> tuple[int, int, int]:
        """One of Q, K, V_lo, V_hi: `[BH, N, KEY_DIM]`."""
        return self.bh, self.n, self.key_dim

    @property
    def packed(self) -> tuple[int, int, int, int]:
        """`[4, BH, N, KEY_DIM]`, sections first."""
        return SECTIONS, *self.section

    @property
    def l(self) -> tuple[int, int]:
        """Log-sum-exp: `[BH, N]`."""
        return self.bh, self.n

    @property
    def attention(self) -> AttentionShape:
        """The FlashAttention-2 problem of one half of V."""
        return AttentionShape(self.bh, self.n, self.n, self.key_dim, self.key_dim)


@dataclass(frozen=True)
class AttentionShape:
    """One FlashAttention-2 problem: `q [BH, n_ctx_q, D]`, `k [BH, n_ctx_k, D]`, `v [BH, n_ctx_k, Dv]`.

    `BH`, `n_ctx_q` and `n_ctx_k` may be 0; the widths are at least 1.
    """

    bh: int
    n_ctx_q: int
    n_ctx_k: int
    head_dim: int
    value_dim: int

    def __post_init__(self) -> None:
        for name, least in (("bh", 0), ("n_ctx_q", 0), ("n_ctx_k", 0), ("head_dim", 1), ("value_dim", 1)):
            object.__setattr__(self, name, check_count(name, getattr(self, name), least))

    @classmethod
    def from_qkv(cls, q: Sequence[int], k: Sequence[int], v: Sequence[int]) -> AttentionShape:
        """From the shapes of q, k and v."""
        check_rank("q", q, Q_AXES)
        check_rank("k", k, K_AXES)
        check_rank("v", v, V_AXES)
        shape = cls(q[0], q[1], k[1], q[2], v[2])
        check_shape("k", k, shape.k, K_AXES)
        check_shape("v", v, shape.v, V_AXES)
        return shape

    def check_saved(self, o: Sequence[int], do: Sequence[int], l: Sequence[int]) -> None:
        """ShapeError unless o, do and l are what a forward of this problem gives."""
        check_shape("o", o, self.o, O_AXES)
        check_shape("do", do, self.o, O_AXES)
        check_shape("l", l, self.l, L_AXES)

    def check_self_attention(self) -> None:
        """ShapeError unless queries and keys are the same tokens, as psa_fa2_backward needs."""
        if self.n_ctx_q != self.n_ctx_k:
            raise ShapeError(
                f"psa_fa2_backward needs n_ctx_q == n_ctx_k, got {self.n_ctx_q} and {self.n_ctx_k}: "
                "use flash_attention2_backward_dq and flash_attention2_backward_dkv"
            )

    @property
    def softmax_scale(self) -> float:
        """The default scale of the scores, 1/sqrt(D)."""
        return self.head_dim**-0.5

    @property
    def q(self) -> tuple[int, int, int]:
        """`[BH, n_ctx_q, D]`: q and dq."""
        return self.bh, self.n_ctx_q, self.head_dim

    @property
    def k(self) -> tuple[int, int, int]:
        """`[BH, n_ctx_k, D]`: k and dk."""
        return self.bh, self.n_ctx_k, self.head_dim

    @property
    def v(self) -> tuple[int, int, int]:
        """`[BH, n_ctx_k, Dv]`: v and dv."""
        return self.bh, self.n_ctx_k, self.value_dim

    @property
    def o(self) -> tuple[int, int, int]:
        """`[BH, n_ctx_q, Dv]`: o and do."""
        return self.bh, self.n_ctx_q, self.value_dim

    @property
    def l(self) -> tuple[int, int]:
        """`[BH, n_ctx_q]`."""
        return self.bh, self.n_ctx_q
