"""Calls that every implementation must refuse, with the error and a word its message must hold."""

import numpy as np

from numba_psa import DTypeError, ParameterError, ShapeError

QKV = np.zeros((2, 48, 3, 2), np.float32)
SECTION = np.zeros((4, 6, 6), np.float32)
OUT = np.zeros((2, 24, 3, 2), np.float32)
Q, K, V = np.zeros((2, 3, 4), np.float32), np.zeros((2, 5, 4), np.float32), np.zeros((2, 5, 6), np.float32)
O, L = np.zeros((2, 3, 6), np.float32), np.zeros((2, 3), np.float32)
SAVED = (Q, K, V, O, O, L)
FROZEN = np.zeros((2, 48, 3, 2), np.float32)
FROZEN.flags.writeable = False

BAD_CALLS = {
    "rank": ("psa_pack_qkv", (QKV[0], 2), {}, ShapeError, "4 dimensions"),
    "channels not divisible": ("psa_pack_qkv", (QKV, 5), {}, ShapeError, "multiple of 20"),
    "no channels": ("psa_pack_qkv", (QKV[:, :0], 2), {}, ShapeError, "0 channels"),
    "V is not 2 KEY_DIM": ("psa_attention", (np.zeros((1, 516, 2, 2), np.float32), 4), {}, ShapeError, "512 or 528"),
    "no heads": ("psa_attention", (QKV, 0), {}, ShapeError, "num_heads must be at least 1"),
    "negative heads": ("psa_extract_v_nchw", (QKV, -2), {}, ShapeError, "got -2"),
    "float heads": ("psa_attention", (QKV, 2.0), {}, DTypeError, "num_heads must be an int"),
    "bool heads": ("psa_attention", (QKV, True), {}, DTypeError, "num_heads must be an int"),
    "integer dtype": ("psa_attention", (QKV.astype(int), 2), {}, DTypeError, "int64"),
    "complex dtype": ("psa_pack_qkv", (QKV.astype(complex), 2), {}, DTypeError, "complex128"),
    "H W is not N": ("psa_merge_attn_nchw", (SECTION, SECTION, 2, 3, 3), {}, ShapeError, "3\\*3 = 9"),
    "negative height": ("psa_merge_attn_nchw", (SECTION, SECTION, 2, -3, -2), {}, ShapeError, "height"),
    "heads do not divide BH": ("psa_merge_attn_nchw", (SECTION, SECTION, 3, 3, 2), {}, ShapeError, "BH = 4"),
    "lo and hi differ": ("psa_merge_attn_nchw", (SECTION, SECTION[:, :, :5], 2, 3, 2), {}, ShapeError, "KEY_DIM = 5"),
    "dtypes differ": ("psa_merge_attn_nchw", (SECTION, SECTION.astype(float), 2, 3, 2), {}, DTypeError, "hi has dtype"),
    "three sections": ("psa_pack_qkv_backward", (np.zeros((3, 4, 6, 6), np.float32), 2, 3, 2), {}, ShapeError, "sections"),
    "odd channels of d_v": ("psa_extract_v_backward", (OUT[:, :23], 2), {}, ShapeError, "d_v has 23 channels"),
    "target shape": ("psa_extract_v_backward", (OUT, 2), {"d_qkv": QKV[:1]}, ShapeError, "d_qkv has B = 1"),
    "target dtype": ("psa_extract_v_backward", (OUT, 2), {"d_qkv": QKV.astype(float)}, DTypeError, "d_qkv has dtype"),
    "target kind": ("psa_extract_v_backward", (OUT, 2), {"d_qkv": QKV.tolist()}, DTypeError, "numpy.ndarray"),
    "target read-only": ("psa_extract_v_backward", (OUT, 2), {"d_qkv": FROZEN}, ParameterError, "read-only"),
    "k width": ("flash_attention2_forward", (Q, K[..., :3], V), {}, ShapeError, "k has D = 3"),
    "v length": ("flash_attention2_forward", (Q, K, V[:, :4]), {}, ShapeError, "v has n_ctx_k = 4"),
    "no width": ("flash_attention2_forward", (Q[..., :0], K[..., :0], V), {}, ShapeError, "head_dim"),
    "v dtype": ("flash_attention2_forward", (Q, K, V.astype(np.float16)), {}, DTypeError, "v has dtype float16"),
    "scale NaN": ("flash_attention2_forward", (Q, K, V, float("nan")), {}, ParameterError, "finite"),
    "scale text": ("flash_attention2_forward", (Q, K, V, "1"), {}, DTypeError, "softmax_scale"),
    "scale bool": ("psa_attention", (QKV, 2), {"softmax_scale": True}, DTypeError, "softmax_scale"),
    "o shape": ("flash_attention2_backward_dq", (Q, K, V, O[..., :5], O, L), {}, ShapeError, "o has Dv = 5"),
    "l shape": ("flash_attention2_backward_dkv", (Q, K, V, O, O, L[:, :2]), {}, ShapeError, "l has n_ctx_q = 2"),
    "l dtype": ("flash_attention2_backward_dq", (Q, K, V, O, O, L.astype(float)), {}, DTypeError, "l has dtype float64"),
    "queries and keys differ": ("psa_fa2_backward", SAVED, {}, ShapeError, "n_ctx_q == n_ctx_k, got 3 and 5"),
    "d_out shape": ("psa_attention_backward", (QKV, OUT[..., :1], 2), {}, ShapeError, "d_out has W = 1"),
    "d_out dtype": ("psa_attention_backward", (QKV, OUT.astype(float), 2), {}, DTypeError, "float64"),
    "saved l": ("psa_attention_backward", (QKV, OUT, 2), {"saved": (OUT, L)}, ShapeError, "l has BH = 2"),
}
