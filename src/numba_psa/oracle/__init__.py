"""The definition: every operation in plain NumPy, computed in float64 and rounded once to the dtype of its inputs.

Start here to know what a kernel must give. Each function also takes `dtype`, the dtype of the result
(`dtype=np.float64`: the unrounded truth), and, where it does arithmetic beyond one addition, `compute_dtype`, the dtype of
that arithmetic (the tolerance rule of `numba_psa.numerics` asks for the kernel's own).
"""

from numba_psa.oracle.attention import psa_attention, psa_attention_backward
from numba_psa.oracle.flash_attn2 import (
    flash_attention2_backward_dkv,
    flash_attention2_backward_dq,
    flash_attention2_forward,
    flash_attention2_forward_online,
)
from numba_psa.oracle.psa import (
    psa_extract_v_backward,
    psa_extract_v_nchw,
    psa_fa2_backward,
    psa_merge_attn_backward,
    psa_merge_attn_nchw,
    psa_pack_qkv,
    psa_pack_qkv_backward,
)

__all__ = [
    "flash_attention2_backward_dkv",
    "flash_attention2_backward_dq",
    "flash_attention2_forward",
    "flash_attention2_forward_online",
    "psa_attention",
    "psa_attention_backward",
    "psa_extract_v_backward",
    "psa_extract_v_nchw",
    "psa_fa2_backward",
    "psa_merge_attn_backward",
    "psa_merge_attn_nchw",
    "psa_pack_qkv",
    "psa_pack_qkv_backward",
]
