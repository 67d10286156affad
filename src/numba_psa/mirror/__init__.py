"""The ten kernels of vision-rs 0.1.1 one by one in Numba CUDA, and the oracle's functions on top of them.

A reference, not a fast path: one block owns one query or key row, as in the original. Runs on a GPU, and unchanged in
Numba's simulator (NUMBA_ENABLE_CUDASIM=1). Arrays are all NumPy or all device arrays; results are of the same kind.
"""

from numba_psa.mirror.attention import psa_attention, psa_attention_backward
from numba_psa.mirror.flash_attn2 import (
    flash_attention2_backward_dkv,
    flash_attention2_backward_dq,
    flash_attention2_forward,
    psa_fa2_backward,
)
from numba_psa.mirror.psa import (
    psa_extract_v_backward,
    psa_extract_v_nchw,
    psa_merge_attn_backward,
    psa_merge_attn_nchw,
    psa_pack_qkv,
    psa_pack_qkv_backward,
)

__all__ = [
    "flash_attention2_backward_dkv",
    "flash_attention2_backward_dq",
    "flash_attention2_forward",
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
