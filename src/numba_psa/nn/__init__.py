"""Vision layers around PSA attention, for inference from trained weights, without PyTorch.

    from numba_psa.nn import C2PSA
    layer = C2PSA.from_file("yolo26n.onnx", prefix="model.10")
    y = layer(x)                       # x [B, 256, H, W], NumPy; impl="oracle" for float64 inside
    y = layer(x, impl="cuda")          # on a GPU, where a CuPy, torch or Numba array goes without asking

`Attention`, `PSABlock`, `C2PSA`, `C3k2` (with YOLO26's attention, or without) and `PSA` (YOLO10). Whole detectors are in
`numba_psa.nn.yolo`. Importing this loads no Numba.
"""

from numba_psa.nn.files import read_state
from numba_psa.nn.layers import C2PSA, PSA, Attention, C3k2, Layer, PSABlock

__all__ = ["C2PSA", "PSA", "Attention", "C3k2", "Layer", "PSABlock", "read_state"]
