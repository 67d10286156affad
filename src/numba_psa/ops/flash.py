"""Attention as graph nodes: over one V half of the packed buffer, and the plain FlashAttention-2."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from numba_psa.errors import ParameterError
from numba_psa.ops.layout import HALF_AXES, LABEL_AXES
from numba_psa.ops.op import Grid, Op, Shape, Tensor, integers, labelled, pointer, scalar
from numba_psa.shapes import K_AXES, Q_AXES, SECTIONS, V_HI, V_LO, AttentionShape, K, Q


@dataclass(frozen=True)
class FlashAttn2Psa(Op):
    """Attention over V_lo or V_hi: packed, labelled `[B, 4, num_heads, N, KEY_DIM]` → `[B, num_heads, N, KEY_DIM]`.

    One param: l `[BH·N]`. The packed buffer must be in C order; its memory is `[4, BH, N, KEY_DIM]`, so that Q, K and V are
    found by pointer arithmetic. The backward adds into sections Q and K of d_packed and stores into its own V section.
    """

    v_section: int = field(kw_only=True)

    name = "flash_attention2_forward"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.v_section not in (V_LO, V_HI):
            raise ParameterError(f"v_section must be {V_LO} (V_lo) or {V_HI} (V_hi), got {self.v_section}")

    @classmethod
    def lo(cls, key_dim: int, dtype: Any = "float32") -> FlashAttn2Psa:
        """Attention over V_lo."""
        return cls(key_dim, dtype=dtype, v_section=V_LO)

    @classmethod
    def hi(cls, key_dim: int, dtype: Any = "float32") -> FlashAttn2Psa:
        """Attention over V_hi."""
        return cls(key_dim, dtype=dtype, v_section=V_HI)

    def infer_output_shape(self, input_shapes: Sequence[Shape]) -> Shape:
        self._check_count(input_shapes)
        batch, _, heads, n, key_dim = self._packed(input_shapes[0])
        return batch, heads, n, key_dim

    def param_shapes(self, input_shapes: Sequence[tuple[int, ...]]) -> list[tuple[int, ...]]:
        batch, _, heads, n, _ = self._packed(input_shapes[0])
        return [(batch * heads * n,)]

    def grid(self, output_shape: Sequence[int]) -> Grid:
        batch, heads, n, _ = labelled("output", output_shape, HALF_AXES, KEY_DIM=self.key_dim)
        return n, batch * heads, 1

    def pack_args(self, inputs, params, output, output_shape):
        n = self._packed(inputs[0].shape)[3]
        return [
            *self._sections(inputs[0].pointer, inputs[0], ("q_ptr", "k_ptr", "v_ptr")),
            pointer("o_ptr", output),
            pointer("l_ptr", params[0]),
            *integers(n_ctx_q=n, n_ctx_k=n),
            scalar("softmax_scale", self.key_dim**-0.5),
            scalar("neg_inf", -math.inf),
        ]

    def pack_backward_args(self, inputs, params, output, output_shape, grad_output, grad_inputs):
        return [
            *self._sections(inputs[0].pointer, inputs[0], ("q_ptr", "k_ptr", "v_ptr")),
            pointer("o_ptr", output),
            pointer("do_ptr", grad_output),
            pointer("l_ptr", params[0]),
            *self._sections(grad_inputs[0], inputs[0], ("dq_ptr", "dk_ptr", "dv_ptr")),
            *integers(N=self._packed(inputs[0].shape)[3]),
            scalar("softmax_scale", self.key_dim**-0.5),
        ]

    def _packed(self, shape: Shape) -> Shape:
        return labelled("packed", shape, LABEL_AXES, sections=SECTIONS, KEY_DIM=self.key_dim)

    def _sections(self, base: int, packed: Tensor, names: Sequence[str]):
        """Pointers to sections Q, K and this op's V in a buffer laid out like `packed` that starts at `base`."""
        batch, _, heads, n, key_dim = self._packed(packed.shape)
        section_bytes = batch * heads * n * key_dim * self.dtype.itemsize
        return [
            pointer(name, base + section * section_bytes)
            for name, section in zip(names, (Q, K, self.v_section), strict=True)
        ]

    @property
    def constants(self) -> tuple[int, ...]:
        return self.key_dim, self.key_dim

    def factories(self):
        from numba_psa.mirror import flash_attn2_kernels as kernels

        return kernels.flash_attention2_forward_kernel, kernels.psa_fa2_backward_kernel

    def run(self, inputs: Sequence[Any], *, impl: str | None = None):
        """(o `[B, num_heads, N, KEY_DIM]`, (l `[BH·N]`,))."""
        q, k, v = self._views(inputs[0])
        o, l = self._namespace(inputs, impl).flash_attention2_forward(q, k, v)
        return o.reshape(self.infer_output_shape([inputs[0].shape])), (l.reshape(l.size),)

    def run_backward(self, inputs, output, params, grad_output, *, grad_inputs=None, impl=None):
        """d_packed with Q and K added into, this op's V section stored; zeros, but for these, if none is given."""
        namespace = self._namespace(inputs, impl)
        packed = inputs[0]
        q, k, v = self._views(packed)
        d_packed = grad_inputs[0] if grad_inputs else _zeros_like(packed)
        dq, dk, dv = self._views(d_packed)
        o, do = (x.reshape(q.shape) for x in (output, grad_output))
        l = params[0].reshape(q.shape[:2])
        namespace.psa_fa2_backward(q, k, v, o, do, l, dq=dq, dk=dk, dv=dv)
        return (d_packed,)

    def _views(self, packed: Any) -> list[Any]:
        """Sections Q, K and this op's V `[BH, N, KEY_DIM]` of a packed buffer, sharing its memory."""
        batch, _, heads, n, key_dim = self._packed(packed.shape)
        contiguous = packed.flags.c_contiguous if hasattr(packed, "flags") else packed.is_c_contiguous()
        if not contiguous:
            raise ParameterError("packed must be in C order: its label does not say where its sections lie")
        sections = packed.reshape((SECTIONS, batch * heads, n, key_dim))
        return [sections[section] for section in (Q, K, self.v_section)]


def _zeros_like(array: Any) -> Any:
    import numpy as np

    zeros = np.zeros(array.shape, array.dtype)
    if isinstance(array, np.ndarray):
        return zeros
    from numba_psa._numba_cuda import to_device

    return to_device(zeros)


@dataclass(frozen=True)
class FlashAttention2(Op):
    """FlashAttention-2 of head width `key_dim`: q `[BH, n_ctx_q, D]`, k and v `[BH, n_ctx_k, D]` → o `[BH, n_ctx_q, D]`.

    One param: l `[BH·n_ctx_q]`. In the original a mere bundle of three kernels; here an op, whose backward is two launches:
    what concerns it comes as a pair (dq, dkv). Gradients are stored, not added.
    """

    name = "flash_attention2"
    n_activation_inputs = 3

    def infer_output_shape(self, input_shapes: Sequence[Shape]) -> Shape:
        q = self._checked(input_shapes)[0]
        return q[0], q[1], self.key_dim

    def param_shapes(self, input_shapes: Sequence[tuple[int, ...]]) -> list[tuple[int, ...]]:
        bh, n_ctx_q, _ = self._checked(input_shapes)[0]
        return [(bh * n_ctx_q,)]

    def grid(self, output_shape: Sequence[int]) -> Grid:
        bh, n_ctx_q, _ = labelled("output", output_shape, Q_AXES, D=self.key_dim)
        return n_ctx_q, bh, 1

    @property
    def backward_block(self) -> tuple[Grid, Grid]:
        return self.block, self.block

    def backward_grid(self, input_shapes, output_shape) -> tuple[Grid, Grid]:
        """(grid of dq, grid of dkv): one block a query row, one block a key row."""
        bh, n_ctx_k, _ = self._checked(input_shapes)[1]
        return self.grid(output_shape), (n_ctx_k, bh, 1)

    def pack_args(self, inputs, params, output, output_shape):
        pointers = [pointer(f"{name}_ptr", x.pointer) for name, x in zip("qkv", inputs, strict=True)]
        pointers += [pointer("o_ptr", output), pointer("l_ptr", params[0])]
        return [*pointers, *self._sizes(inputs), scalar("neg_inf", -math.inf)]

    def pack_backward_args(self, inputs, params, output, output_shape, grad_output, grad_inputs):
        """(arguments of dq, arguments of dkv); grad_inputs are the addresses of dq, dk and dv."""
        common = [pointer(f"{name}_ptr", x.pointer) for name, x in zip("qkv", inputs, strict=True)]
        common += [pointer("o_ptr", output), pointer("do_ptr", grad_output), pointer("l_ptr", params[0])]
        dq, dk, dv = (pointer(f"d{name}_ptr", x) for name, x in zip("qkv", grad_inputs, strict=True))
        return [*common, dq, *self._sizes(inputs)], [*common, dk, dv, *self._sizes(inputs)]

    def _sizes(self, inputs: Sequence[Tensor]):
        q, k, _ = self._checked([x.shape for x in inputs])
        return [*integers(n_ctx_q=q[1], n_ctx_k=k[1]), scalar("softmax_scale", self.key_dim**-0.5)]

    def _checked(self, input_shapes: Sequence[Shape]) -> tuple[Shape, Shape, Shape]:
        self._check_count(input_shapes)
        q, k, v = input_shapes
        q = labelled("q", q, Q_AXES, D=self.key_dim)
        k = labelled("k", k, K_AXES, D=self.key_dim, BH=q[0])
        v = labelled("v", v, K_AXES, D=self.key_dim, BH=q[0], n_ctx_k=k[1])
        return q, k, v

    @property
    def constants(self) -> tuple[int, ...]:
        return self.key_dim, self.key_dim

    def factories(self):
        from numba_psa.mirror import flash_attn2_kernels as kernels

        return (
            kernels.flash_attention2_forward_kernel,
            kernels.flash_attention2_backward_dq_kernel,
            kernels.flash_attention2_backward_dkv_kernel,
        )

    def run(self, inputs: Sequence[Any], *, impl: str | None = None):
        """(o, (l `[BH·n_ctx_q]`,))."""
        namespace = self._namespace(inputs, impl)
        self._checked([x.shape for x in inputs])
        o, l = namespace.flash_attention2_forward(*inputs)
        return o, (l.reshape(l.size),)

    def run_backward(self, inputs, output, params, grad_output, *, grad_inputs=None, impl=None):
        """(dq, dk, dv), stored: given grad_inputs are overwritten."""
        namespace = self._namespace(inputs, impl)
        shape = AttentionShape.from_qkv(*(x.shape for x in inputs))
        saved = (*inputs, output, grad_output, params[0].reshape(shape.l))
        gradients = (namespace.flash_attention2_backward_dq(*saved), *namespace.flash_attention2_backward_dkv(*saved))
        if grad_inputs is None:
            return gradients
        for target, gradient in zip(grad_inputs, gradients, strict=True):
            target[...] = gradient
        return tuple(grad_inputs)
