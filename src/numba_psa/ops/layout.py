"""The three layout operations as graph nodes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from numba_psa.ops.op import Grid, Op, Shape, Tensor, integers, labelled, pointer
from numba_psa.shapes import OUT_AXES, QKV_AXES, SECTIONS, PSAShape, check_count

LABEL_AXES = ("B", "sections", "num_heads", "N", "KEY_DIM")
"""How the graph labels the packed buffer. Its memory is sections-first, `[4, BH, N, KEY_DIM]`: the label moves nothing."""
HALF_AXES = ("B", "num_heads", "N", "KEY_DIM")


@dataclass(frozen=True)
class _LayoutOp(Op):
    num_heads: int

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "num_heads", check_count("num_heads", self.num_heads, 1))

    @property
    def qkv_h(self) -> int:
        return self.num_heads * SECTIONS * self.key_dim

    @property
    def c(self) -> int:
        return self.num_heads * 2 * self.key_dim

    def _qkv(self, input_shapes: Sequence[Shape]) -> Shape:
        self._check_count(input_shapes)
        return labelled("qkv", input_shapes[0], QKV_AXES, qkv_h=self.qkv_h)

    def _token_grid(self, output_shape: Sequence[int]) -> Grid:
        """(BH·N, 1, 1) from an output `[B, c, H, W]`."""
        batch, _, height, width = labelled("output", output_shape, OUT_AXES, c=self.c)
        return batch * self.num_heads * height * width, 1, 1


def _product(*sizes: int | None) -> int | None:
    result = 1
    for size in sizes:
        if size is None:
            return None
        result *= size
    return result


@dataclass(frozen=True)
class PsaPackQkv(_LayoutOp):
    """`[B, qkv_h, H, W]` → the packed buffer, labelled `[B, 4, num_heads, N, KEY_DIM]`, laid out `[4, BH, N, KEY_DIM]`."""

    name = "psa_pack_qkv"

    def infer_output_shape(self, input_shapes: Sequence[Shape]) -> Shape:
        batch, _, height, width = self._qkv(input_shapes)
        return batch, SECTIONS, self.num_heads, _product(height, width), self.key_dim

    def grid(self, output_shape: Sequence[int]) -> Grid:
        batch, sections, heads, n, _ = labelled("output", output_shape, LABEL_AXES, num_heads=self.num_heads)
        return batch * sections * heads * n, 1, 1

    def pack_args(self, inputs, params, output, output_shape):
        return [pointer("qkv_ptr", inputs[0].pointer), pointer("out_ptr", output), *self._sizes(inputs[0])]

    def pack_backward_args(self, inputs, params, output, output_shape, grad_output, grad_inputs):
        pointers = [pointer("d_packed_ptr", grad_output), pointer("d_qkv_ptr", grad_inputs[0])]
        return [*pointers, *self._sizes(inputs[0])]

    def _sizes(self, qkv: Tensor):
        batch, qkv_h, height, width = self._qkv([qkv.shape])
        return integers(qkv_h=qkv_h, H=height, W=width, B=batch, num_heads=self.num_heads)

    def factories(self):
        from numba_psa.mirror import psa_kernels

        return psa_kernels.psa_pack_qkv_kernel, psa_kernels.psa_pack_qkv_backward_kernel

    def run(self, inputs: Sequence[Any], *, impl: str | None = None):
        packed = self._namespace(inputs, impl).psa_pack_qkv(inputs[0], self.num_heads)
        return packed.reshape(self.infer_output_shape([inputs[0].shape])), ()

    def run_backward(self, inputs, output, params, grad_output, *, grad_inputs=None, impl=None):
        """d_qkv += d_packed, in place where grad_inputs holds a d_qkv."""
        shape = PSAShape.from_qkv(inputs[0].shape, self.num_heads)
        d_packed = grad_output.reshape(shape.packed)
        d_qkv = grad_inputs[0] if grad_inputs else None
        backward = self._namespace(inputs, impl).psa_pack_qkv_backward
        return (backward(d_packed, self.num_heads, shape.height, shape.width, d_qkv=d_qkv),)


@dataclass(frozen=True)
class PsaExtractV(_LayoutOp):
    """`[B, qkv_h, H, W]` → v `[B, c, H, W]`."""

    name = "psa_extract_v_nchw"

    def infer_output_shape(self, input_shapes: Sequence[Shape]) -> Shape:
        batch, _, height, width = self._qkv(input_shapes)
        return batch, self.c, height, width

    def grid(self, output_shape: Sequence[int]) -> Grid:
        return self._token_grid(output_shape)

    def pack_args(self, inputs, params, output, output_shape):
        return [pointer("qkv_ptr", inputs[0].pointer), pointer("v_ptr", output), *self._sizes(inputs[0])]

    def pack_backward_args(self, inputs, params, output, output_shape, grad_output, grad_inputs):
        return [pointer("d_v_ptr", grad_output), pointer("d_qkv_ptr", grad_inputs[0]), *self._sizes(inputs[0])]

    def _sizes(self, qkv: Tensor):
        _, qkv_h, height, width = self._qkv([qkv.shape])
        return integers(qkv_h=qkv_h, c=self.c, H=height, W=width, num_heads=self.num_heads)

    def factories(self):
        from numba_psa.mirror import psa_kernels

        return psa_kernels.psa_extract_v_nchw_kernel, psa_kernels.psa_extract_v_backward_kernel

    def run(self, inputs: Sequence[Any], *, impl: str | None = None):
        return self._namespace(inputs, impl).psa_extract_v_nchw(inputs[0], self.num_heads), ()

    def run_backward(self, inputs, output, params, grad_output, *, grad_inputs=None, impl=None):
        """d_qkv's value channels += d_v, in place where grad_inputs holds a d_qkv."""
        d_qkv = grad_inputs[0] if grad_inputs else None
        return (self._namespace(inputs, impl).psa_extract_v_backward(grad_output, self.num_heads, d_qkv=d_qkv),)


@dataclass(frozen=True)
class PsaMergeAttn(_LayoutOp):
    """lo, hi `[B, num_heads, N, KEY_DIM]` → `[B, c, H, W]`. H and W cannot be told from N: they are the op's own."""

    height: int
    width: int

    name = "psa_merge_attn_nchw"
    n_activation_inputs = 2

    def __post_init__(self) -> None:
        super().__post_init__()
        for size in ("height", "width"):
            object.__setattr__(self, size, check_count(size, getattr(self, size), 0))

    def infer_output_shape(self, input_shapes: Sequence[Shape]) -> Shape:
        self._check_count(input_shapes)
        expected = {"num_heads": self.num_heads, "N": self.height * self.width, "KEY_DIM": self.key_dim}
        lo, hi = (labelled(name, x, HALF_AXES, **expected) for name, x in zip(("lo", "hi"), input_shapes, strict=True))
        batch = lo[0] if lo[0] is not None else hi[0]
        labelled("hi", hi, HALF_AXES, B=batch)
        return batch, self.c, self.height, self.width

    def grid(self, output_shape: Sequence[int]) -> Grid:
        return self._token_grid(output_shape)

    def pack_args(self, inputs, params, output, output_shape):
        lo, hi = inputs
        pointers = [pointer("lo_ptr", lo.pointer), pointer("hi_ptr", hi.pointer), pointer("out_ptr", output)]
        return [*pointers, *self._sizes(output_shape)]

    def pack_backward_args(self, inputs, params, output, output_shape, grad_output, grad_inputs):
        d_lo, d_hi = grad_inputs
        pointers = [pointer("d_merged_ptr", grad_output), pointer("d_lo_ptr", d_lo), pointer("d_hi_ptr", d_hi)]
        return [*pointers, *self._sizes(output_shape)]

    def _sizes(self, output_shape: Sequence[int]):
        _, c, height, width = labelled("output", output_shape, OUT_AXES, c=self.c, H=self.height, W=self.width)
        return integers(c=c, H=height, W=width, num_heads=self.num_heads)

    def factories(self):
        from numba_psa.mirror import psa_kernels

        return psa_kernels.psa_merge_attn_nchw_kernel, psa_kernels.psa_merge_attn_backward_kernel

    def run(self, inputs: Sequence[Any], *, impl: str | None = None):
        batch = self.infer_output_shape([x.shape for x in inputs])[0]
        section = PSAShape(batch, self.num_heads, self.key_dim, self.height, self.width).section
        lo, hi = (x.reshape(section) for x in inputs)
        merge = self._namespace(inputs, impl).psa_merge_attn_nchw
        return merge(lo, hi, self.num_heads, self.height, self.width), ()

    def run_backward(self, inputs, output, params, grad_output, *, grad_inputs=None, impl=None):
        """d_lo and d_hi, stored: given grad_inputs are overwritten."""
        halves = self._namespace(inputs, impl).psa_merge_attn_backward(grad_output, self.num_heads)
        halves = tuple(half.reshape(x.shape) for half, x in zip(halves, inputs, strict=True))
        if grad_inputs is None:
            return halves
        for target, half in zip(grad_inputs, halves, strict=True):
            target[...] = half
        return tuple(grad_inputs)
