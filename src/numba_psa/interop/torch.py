"""PSA attention in PyTorch's autograd, for people who train.

    from numba_psa.interop.torch import attention_forward
    ultralytics.nn.modules.block.Attention.forward = attention_forward

from where on C2PSA trains through these kernels. `psa_attention` is the function itself.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch.autograd.function import once_differentiable

from numba_psa.errors import DTypeError
from numba_psa.implementations import implementation
from numba_psa.numerics import BFLOAT16

__all__ = ["PSAAttention", "attention_forward", "psa_attention"]


def psa_attention(
    qkv: torch.Tensor, num_heads: int, *, softmax_scale: float | None = None, impl: str | None = None
) -> torch.Tensor:
    """out = v · softmax_keys(softmax_scale · qᵀ k)ᵀ for each head, NCHW in and out, differentiable once.

    qkv `[B, num_heads*4*KEY_DIM, H, W]`. impl: which implementation runs; left out, "cuda" for a CUDA tensor and "cpu" for
    one on the CPU. "oracle" takes float64, which torch.autograd.gradcheck wants. No tensor is copied on the way.
    Raises ShapeError, DTypeError, ParameterError, BackendUnavailableError.
    """
    return PSAAttention.apply(qkv, num_heads, softmax_scale, impl)


class PSAAttention(torch.autograd.Function):
    """`PSAAttention.apply(qkv, num_heads, softmax_scale, impl)`: psa_attention, whose backward is psa_attention_backward."""

    @staticmethod
    def forward(
        ctx: Any, qkv: torch.Tensor, num_heads: int, softmax_scale: float | None = None, impl: str | None = None
    ) -> torch.Tensor:
        """out, keeping qkv, out and l."""
        if not isinstance(qkv, torch.Tensor):
            raise DTypeError(f"qkv must be a torch.Tensor, got {type(qkv).__name__}")
        impl = impl or ("cuda" if qkv.is_cuda else "cpu")
        namespace, given = implementation(impl), _array(qkv.detach(), impl)
        out, (_, l) = namespace.psa_attention(given, num_heads, softmax_scale=softmax_scale, save_for_backward=True)
        out, l = _tensor(out), _tensor(l)
        ctx.save_for_backward(qkv, out, l)
        ctx.num_heads, ctx.softmax_scale, ctx.impl = num_heads, softmax_scale, impl
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_out: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        """d_qkv."""
        qkv, out, l, d_out = (_array(x.detach().contiguous(), ctx.impl) for x in (*ctx.saved_tensors, d_out))
        d_qkv = implementation(ctx.impl).psa_attention_backward(
            qkv, d_out, ctx.num_heads, softmax_scale=ctx.softmax_scale, saved=(out, l)
        )
        return _tensor(d_qkv), None, None, None


def attention_forward(self: Any, x: torch.Tensor) -> torch.Tensor:
    """The forward of a module with the parts of Ultralytics' Attention: proj(attention(qkv(x)) + pe(v))."""
    qkv = self.qkv(x)
    batch, _, height, width = qkv.shape
    out = psa_attention(qkv, self.num_heads, softmax_scale=float(self.scale))
    heads = qkv.view(batch, self.num_heads, -1, height, width)
    v = heads[:, :, heads.shape[2] // 2 :].reshape(out.shape)
    return self.proj(out + self.pe(v))


def _array(tensor: torch.Tensor, impl: str) -> Any:
    """A tensor as `impl` takes it: itself, or NumPy's view of it."""
    if impl == "cuda":
        return tensor
    if tensor.is_cuda:
        raise DTypeError(f"impl={impl!r} takes tensors on the CPU, got one on {tensor.device}: impl='cuda' takes that")
    if tensor.dtype == torch.bfloat16:
        return tensor.view(torch.uint16).numpy().view(BFLOAT16)
    return tensor.numpy()


def _tensor(array: Any) -> torch.Tensor:
    if isinstance(array, torch.Tensor):
        return array
    if array.dtype == BFLOAT16:
        return torch.from_numpy(array.view(np.uint16)).view(torch.bfloat16)
    return torch.from_numpy(array)
