"""PSA attention as the original's graph: nodes, shapes, forward, and a backward that accumulates as the original does."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

from numba_psa.ops.flash import FlashAttn2Psa
from numba_psa.ops.layout import PsaExtractV, PsaMergeAttn, PsaPackQkv
from numba_psa.ops.op import Op, Shape
from numba_psa.shapes import PSAShape, check_shape


class Tape(NamedTuple):
    """What a forward leaves for the backward."""

    qkv: Any
    packed: Any
    lo: Any
    hi: Any
    l_lo: Any
    l_hi: Any


@dataclass(frozen=True)
class PsaAttentionGraph:
    """qkv `[B, qkv_h, H, W]` → (attention `[B, c, H, W]`, v `[B, c, H, W]`).

    qkv ─ pack ─┬─ attention over V_lo ─┬─ merge ─ attention
        │       └─ attention over V_hi ─┘
        └─ extract_v ─ v                  (a layer adds its positional term to the attention: pe(v))
    """

    num_heads: int
    key_dim: int
    height: int
    width: int
    dtype: Any = "float32"

    def __post_init__(self) -> None:
        PSAShape(0, self.num_heads, self.key_dim, self.height, self.width)

    @property
    def pack(self) -> PsaPackQkv:
        return PsaPackQkv(self.key_dim, self.num_heads, dtype=self.dtype)

    @property
    def attention_lo(self) -> FlashAttn2Psa:
        return FlashAttn2Psa.lo(self.key_dim, self.dtype)

    @property
    def attention_hi(self) -> FlashAttn2Psa:
        return FlashAttn2Psa.hi(self.key_dim, self.dtype)

    @property
    def merge(self) -> PsaMergeAttn:
        return PsaMergeAttn(self.key_dim, self.num_heads, self.height, self.width, dtype=self.dtype)

    @property
    def extract_v(self) -> PsaExtractV:
        return PsaExtractV(self.key_dim, self.num_heads, dtype=self.dtype)

    @property
    def nodes(self) -> list[tuple[str, Op, tuple[str, ...]]]:
        """(name, op, names of its inputs), in an order in which they can run; the graph's own input is "qkv"."""
        return [
            ("packed", self.pack, ("qkv",)),
            ("lo", self.attention_lo, ("packed",)),
            ("hi", self.attention_hi, ("packed",)),
            ("attention", self.merge, ("lo", "hi")),
            ("v", self.extract_v, ("qkv",)),
        ]

    def infer_shapes(self, batch: int | None = None) -> dict[str, Shape]:
        """{name: shape} of the input and of every node, with the batch unknown unless it is given."""
        shapes: dict[str, Shape] = {"qkv": (batch, self.pack.qkv_h, self.height, self.width)}
        for name, op, inputs in self.nodes:
            shapes[name] = op.infer_output_shape([shapes[x] for x in inputs])
        return shapes

    def forward(self, qkv: Any, *, impl: str | None = None) -> tuple[Any, Any, Tape]:
        """(attention, v, tape for the backward)."""
        self._check_input(qkv)
        packed, _ = self.pack.run([qkv], impl=impl)
        lo, (l_lo,) = self.attention_lo.run([packed], impl=impl)
        hi, (l_hi,) = self.attention_hi.run([packed], impl=impl)
        attention, _ = self.merge.run([lo, hi], impl=impl)
        v, _ = self.extract_v.run([qkv], impl=impl)
        return attention, v, Tape(qkv, packed, lo, hi, l_lo, l_hi)

    def backward(self, tape: Tape, d_attention: Any, d_v: Any, *, impl: str | None = None) -> Any:
        """d_qkv from the gradients of both outputs.

        Both halves add into sections Q and K of one d_packed; pack and extract_v add into one d_qkv.
        """
        d_lo, d_hi = self.merge.run_backward([tape.lo, tape.hi], None, (), d_attention, impl=impl)
        d_packed = self.attention_lo.run_backward([tape.packed], tape.lo, (tape.l_lo,), d_lo, impl=impl)
        d_packed = self.attention_hi.run_backward(
            [tape.packed], tape.hi, (tape.l_hi,), d_hi, grad_inputs=d_packed, impl=impl
        )
        d_qkv = self.pack.run_backward([tape.qkv], None, (), d_packed[0], impl=impl)
        return self.extract_v.run_backward([tape.qkv], None, (), d_v, grad_inputs=d_qkv, impl=impl)[0]

    def _check_input(self, qkv: Any) -> None:
        shape = PSAShape(qkv.shape[0], self.num_heads, self.key_dim, self.height, self.width)
        check_shape("qkv", qkv.shape, shape.qkv, ("B", "qkv_h", "H", "W"))
