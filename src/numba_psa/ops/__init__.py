"""The graph level of the original: what each operation is to a graph compiler, and the PSA attention graph made of them."""

from numba_psa.ops.flash import FlashAttention2, FlashAttn2Psa
from numba_psa.ops.graph import PsaAttentionGraph, Tape
from numba_psa.ops.layout import PsaExtractV, PsaMergeAttn, PsaPackQkv
from numba_psa.ops.op import Argument, Lowered, Op, Tensor

__all__ = [
    "Argument",
    "FlashAttention2",
    "FlashAttn2Psa",
    "Lowered",
    "Op",
    "PsaAttentionGraph",
    "PsaExtractV",
    "PsaMergeAttn",
    "PsaPackQkv",
    "Tape",
    "Tensor",
]
