"""What an ONNX file says about a layer: its weights, and the tensor that enters it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
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


def metadata(model: Any) -> dict[str, str]:
    """{key: text} of its `metadata_props`, and whether SPPF's first convolution has SiLU ("sppf_silu": "true" or "false").

    The graph shows what initializers do not: whether a Sigmoid reads the convolution's result.
    """
    found = {prop.key: prop.value for prop in model.metadata_props}
    results = [node.output[0] for node in model.graph.node if "model.9.cv1.conv.weight" in node.input]
    if results:
        activated = any(node.op_type == "Sigmoid" and node.input[0] in results for node in model.graph.node)
        found["sppf_silu"] = str(activated).lower()
    return found


def first_conv(model: Any, prefix: str) -> str:
    """The name of the tensor that enters the layer at `prefix`: what its first convolution reads."""
    return _conv(model, prefix, first=True).input[0]


def last_conv(model: Any, prefix: str) -> str:
    """The name of what the last convolution below `prefix` gives, before an activation."""
    return _conv(model, prefix, first=False).output[0]


def _conv(model: Any, prefix: str, *, first: bool) -> Any:
    start = f"{prefix.strip('.')}."
    found = [
        node
        for node in model.graph.node  # in an order in which they can be computed
        if node.op_type == "Conv" and len(node.input) > 1 and node.input[1].startswith(start)
    ]
    if not found:
        raise WeightsError(f"no convolution of the graph has weights below {prefix!r}")
    return found[0 if first else -1]


def tensors(model: Any, path: Path, names: Sequence[str], image: np.ndarray) -> list[np.ndarray]:
    """The named tensors of the network on `image` `[1, 3, H, W]`, computed by onnxruntime on the CPU."""
    from onnx import helper

    present = {output.name for output in model.graph.output}
    model.graph.output.extend(helper.make_empty_tensor_value_info(name) for name in names if name not in present)
    return runner(model, path)(image, list(names))


def runner(model: Any, path: Path, threads: int = 0) -> Callable[..., list[np.ndarray]]:
    """call(image, names=None): the network's outputs, or those named, by onnxruntime on the CPU; threads 0: its own choice.

    Raises BackendUnavailableError where onnxruntime is missing, WeightsError, also later, where it cannot run the network.
    """
    try:
        import onnxruntime
    except ImportError as error:
        raise BackendUnavailableError(f"running {path} needs onnxruntime: pip install 'numba-psa[bench]'") from error

    def typed(step: Callable[[], Any]) -> Any:
        try:
            return step()
        except Exception as error:  # onnxruntime's own types have no common base but this
            raise WeightsError(f"onnxruntime cannot run {path}: {error}") from error

    options = onnxruntime.SessionOptions()
    options.log_severity_level, options.intra_op_num_threads = 3, threads
    content = model.SerializeToString()
    session = typed(lambda: onnxruntime.InferenceSession(content, options, providers=["CPUExecutionProvider"]))
    source = session.get_inputs()[0].name
    return lambda image, names=None: typed(lambda: session.run(names, {source: image}))


def image_size(model: Any) -> tuple[int, int] | None:
    """(H, W) that the network is fixed to, None where it takes any."""
    dims = model.graph.input[0].type.tensor_type.shape.dim
    sizes = [dim.dim_value for dim in dims[2:4]]
    return tuple(sizes) if len(sizes) == 2 and all(sizes) else None
