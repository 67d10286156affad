"""Named arrays from `.safetensors`, `.npz` and `.onnx` files."""

from __future__ import annotations

import json
import shlex
import zipfile
from collections.abc import Callable
from os import PathLike
from pathlib import Path

import numpy as np

from numba_psa.errors import BackendUnavailableError, WeightsError
from numba_psa.numerics import BFLOAT16, FLOAT16, FLOAT32, FLOAT64

_FLOATS = {"F16": FLOAT16, "BF16": BFLOAT16, "F32": FLOAT32, "F64": FLOAT64}
Contents = tuple[dict[str, np.ndarray], dict[str, str]]
_INSTALL = "pip install 'numba-psa[models]'"


def read_state(path: str | PathLike[str]) -> dict[str, np.ndarray]:
    """{name: array} of a weight file; of an `.onnx` file its initializers. Raises as `read_file` does."""
    return read_file(path)[0]


def read_metadata(path: str | PathLike[str]) -> dict[str, str]:
    """{key: text} that a file says about itself: `metadata_props` of `.onnx`, `__metadata__` of `.safetensors`, else {}."""
    return read_file(path)[1]


def read_file(path: str | PathLike[str]) -> Contents:
    """`read_state` and `read_metadata` of a file.

    Raises WeightsError for what cannot be read, BackendUnavailableError where the package that reads it is missing, OSError.
    A `.pt` file is a pickle: loading it runs code of whoever wrote it, so it is refused with the command that converts it.
    """
    path = Path(path)
    suffix = path.suffix.lower()
    if suffix in (".pt", ".pth"):
        raise WeightsError(
            f"{path} is a pickle, which runs code when it is loaded; this writes its weights as .safetensors and runs none "
            f"of it: numba-psa convert {shlex.quote(str(path))}"
        )
    if suffix not in _READERS:
        raise WeightsError(f"{path}: weights are read from {', '.join(_READERS)} files")
    content = path.read_bytes()
    return _READERS[suffix](path, content)


def _read_safetensors(path: Path, content: bytes) -> Contents:
    try:
        import safetensors
    except ImportError as error:
        raise BackendUnavailableError(f"reading {path} needs safetensors: {_INSTALL}") from error
    try:
        entries = safetensors.deserialize(content)
    except safetensors.SafetensorError as error:
        raise WeightsError(f"{path} is no .safetensors file: {error}") from error
    arrays = {}
    for name, entry in entries:
        # Only floats are weights; of others (counters) a placeholder of the same shape says that they are there.
        dtype = _FLOATS.get(entry["dtype"])
        data = np.frombuffer(entry["data"], dtype) if dtype else np.zeros(int(np.prod(entry["shape"])), np.int64)
        arrays[name] = data.reshape(entry["shape"])
    header = json.loads(content[8 : 8 + int.from_bytes(content[:8], "little")])  # which deserialize has checked
    return arrays, dict(header.get("__metadata__") or {})


def _read_npz(path: Path, content: bytes) -> Contents:
    import io

    try:
        with np.load(io.BytesIO(content), allow_pickle=False) as file:
            return {name: file[name] for name in file.files}, {}
    except (ValueError, AttributeError, EOFError, zipfile.BadZipFile) as error:
        raise WeightsError(f"{path} is no .npz file of plain arrays: {error}") from error


def _read_onnx(path: Path, content: bytes) -> Contents:
    from numba_psa.nn import onnx_graph

    model = onnx_graph.parse(path, content)
    return onnx_graph.initializers(model, path), onnx_graph.metadata(model)


_READERS: dict[str, Callable[[Path, bytes], Contents]] = {
    ".safetensors": _read_safetensors,
    ".npz": _read_npz,
    ".onnx": _read_onnx,
}
