"""Fused tensor-core kernels in Numba CUDA: the oracle's functions, on compute capability 8.0 and later.

Importing this package touches no device. Where there is none, kernels still compile to PTX and run in Numba's simulator
(NUMBA_ENABLE_CUDASIM=1); a call raises BackendUnavailableError.
"""

from numba_psa.cuda.operations import (
    flash_attention2_forward,
    psa_attention,
    psa_extract_v_nchw,
    psa_merge_attn_nchw,
    psa_pack_qkv,
)
from numba_psa.cuda.operations_backward import (
    flash_attention2_backward_dkv,
    flash_attention2_backward_dq,
    psa_attention_backward,
    psa_extract_v_backward,
    psa_fa2_backward,
    psa_merge_attn_backward,
    psa_pack_qkv_backward,
)
from numba_psa.cuda.plans import AttentionPlan, plan_psa_attention
from numba_psa.cuda.plans_backward import AttentionBackwardPlan, plan_psa_attention_backward

__all__ = [
    "AttentionBackwardPlan",
    "AttentionPlan",
    "flash_attention2_backward_dkv",
    "flash_attention2_backward_dq",
    "flash_attention2_forward",
    "plan_psa_attention",
    "plan_psa_attention_backward",
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
