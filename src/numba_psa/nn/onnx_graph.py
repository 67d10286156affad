"""What an ONNX file says about a layer: its weights, and the tensor that enters it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from numba_psa.errors import BackendUnavailableError, WeightsError


def parse(path: Path, content: bytes) -> Any:
    """The `onnx.ModelProto` in `content`; large models keep their arrays in files beside `path`, which are not read here."""
    try:
        import onnx
        from google.protobuf.message import DecodeError
    except ImportError as error:
        raise BackendUnavailableError(f"reading {path} needs onnx: pip install 'numba-psa[models]'") from error
    try:
        model = onnx.load_model_from_string(content)
    except DecodeError as error:
        raise WeightsError(f"{path} is no .onnx file: {error}") from error
    if not model.graph.node:
        raise WeightsError(f"{path} is no .onnx file: it has no graph")
    return model


def initializers(model: Any, path: Path) -> dict[str, np.ndarray]:
    """{name: array} of the initializers, those in external files included."""
    from onnx import numpy_helper

    try:
        return {tensor.name: numpy_helper.to_array(tensor, str(path.parent)) for tensor in model.graph.initializer}
    except (ValueError, TypeError, OSError) as error:
        raise WeightsError(f"{path}: an initializer cannot be read: {error}") from error


def input_of(model: Any, weight: str) -> str:
    """The name of the tensor that the convolution with this weight reads."""
    for node in model.graph.node:
        if node.op_type == "Conv" and len(node.input) > 1 and node.input[1] == weight:
            return node.input[0]
    raise WeightsError(f"no convolution of the graph has the weight {weight}")
