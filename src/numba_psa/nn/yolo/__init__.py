"""YOLO11 and YOLO26 detectors, n to x, from trained weights on the CPU, without PyTorch.

    from numba_psa.nn import yolo
    model = yolo.load("best.onnx")             # or .safetensors; family, scale and classes are what the weights say
    y = model(x)                               # x [B, 3, H, W], NumPy, RGB 0…1; impl="oracle" for float64 by the formulas
    y, layers = model(x, taps=["10", "22"])    # the tensors of layers 10 and 22 too
    boxes = model("street.jpg")                # a picture

The network is `model.layers`, a list; `model.layers[10]` is the C2PSA. Importing this loads no Numba.
"""

from numba_psa.nn.yolo.detector import Detector, Timing, load

__all__ = ["Detector", "Timing", "load"]
