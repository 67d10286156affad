"""The twelve operations on a CPU: fused, vectorised for the host, on all of `numba.get_num_threads()` threads.

Same functions as `numba_psa.oracle`, NumPy arrays in and out. float32 and float64 are computed in themselves, float16 and
bfloat16 in float32. The first call for an element type compiles for a few seconds, and once for all shapes; Numba keeps
the result on disk. The same input gives the same bits on any number of threads.
"""

from numba_psa.cpu.attention import psa_attention, psa_attention_backward
from numba_psa.cpu.compiling import threading_layer
from numba_psa.cpu.flash_attn2 import (
    flash_attention2_backward_dkv,
    flash_attention2_backward_dq,
    flash_attention2_forward,
)
from numba_psa.cpu.psa import (
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
    "psa_attention",
    "psa_attention_backward",
    "psa_extract_v_backward",
    "psa_extract_v_nchw",
    "psa_fa2_backward",
    "psa_merge_attn_backward",
    "psa_merge_attn_nchw",
    "psa_pack_qkv",
    "psa_pack_qkv_backward",
    "threading_layer",
]
