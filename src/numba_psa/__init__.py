"""PSA attention and FlashAttention-2, defined once in NumPy and computed by several implementations.

    import numba_psa
    out = numba_psa.attention(qkv, num_heads)  # [B, num_heads*4*KEY_DIM, H, W] -> [B, num_heads*2*KEY_DIM, H, W]

`numba_psa.oracle` is the definition; `numba_psa.mirror` the original's kernels one by one in Numba CUDA; `numba_psa.cpu`
the fused CPU path, which NumPy arrays take. Importing this package touches no device and loads neither Numba nor Hypothesis.
"""

from numba_psa import oracle
from numba_psa.contract import OPERATIONS, Operation
from numba_psa.errors import BackendUnavailableError, DTypeError, NumbaPSAError, ParameterError, ShapeError, WeightsError
from numba_psa.implementations import IMPLEMENTATIONS, attention, attention_backward, implementation
from numba_psa.shapes import AttentionShape, PSAShape

__version__ = "0.1.0"

__all__ = [
    "IMPLEMENTATIONS",
    "OPERATIONS",
    "AttentionShape",
    "BackendUnavailableError",
    "DTypeError",
    "NumbaPSAError",
    "Operation",
    "PSAShape",
    "ParameterError",
    "ShapeError",
    "WeightsError",
    "attention",
    "attention_backward",
    "implementation",
    "oracle",
]
