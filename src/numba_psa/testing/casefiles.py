"""A case on disk: `manifest.json` (see `case.schema.json`) beside its arrays, for programs in any language.

    bin          one raw little-endian C-ordered file for each array: input.qkv.bin, target.d_qkv.bin, output.packed.bin
    npz          inputs.npz (targets under "target.<name>") and outputs.npz
    safetensors  the same two, .safetensors

bfloat16 is stored as uint16, and named in the manifest. The same case gives the same bytes everywhere.
"""

from __future__ import annotations

import functools
import hashlib
import io
import json
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib import resources
from pathlib import Path
from typing import Any

import numpy as np

from numba_psa import __version__
from numba_psa.contract import OPERATIONS
from numba_psa.errors import NumbaPSAError
from numba_psa.numerics import BFLOAT16
from numba_psa.testing.case import Case

FORMATS = ("bin", "npz", "safetensors")
MANIFEST = "manifest.json"
VERSION = 1
"""Of the format on disk: raised when a reader of the last one would misread the next."""


class VectorError(NumbaPSAError, ValueError):
    """A file of golden vectors is missing, damaged, or not one; the message names it."""


@dataclass(frozen=True)
class Tolerance:
    """How far an output may be off: see `tolerance` in the schema."""

    norm: float
    worst: float
    reference_norm: float
    reason: str


@dataclass(frozen=True)
class StoredCase:
    """A case read from disk, its expected outputs and their tolerances, where it has them."""

    id: str
    case: Case
    expected: Mapping[str, np.ndarray] = field(default_factory=dict)
    tolerances: Mapping[str, Tolerance] = field(default_factory=dict)


# ---- writing ----------------------------------------------------------------------------------------------------------
def write_case(
    folder: Path,
    case: Case,
    output_shapes: Mapping[str, tuple[int, ...]],
    *,
    id: str = "case",
    storage: str = "bin",
    expected: Mapping[str, np.ndarray] | None = None,
    tolerances: Mapping[str, Tolerance] | None = None,
) -> str:
    """Writes `case` into `folder`, with `expected` outputs or none, and returns the sha256 of its manifest.

    The manifest lists every output with its shape, dtype and file name in any case: what a program has to write, and where.
    """
    folder.mkdir(parents=True, exist_ok=True)
    inputs = {("input", name): case[name] for name in case.operation.arrays}
    inputs |= {("target", name): case[name] for name in case.targets}
    outputs = {("output", name): x for name, x in (expected or {}).items()}
    digests = _store(folder, storage, inputs, "inputs") | _store(folder, storage, outputs, "outputs")
    arrays = [_entry(case, role, name, x.shape, x.dtype, storage, digests) for (role, name), x in inputs.items()]
    for name in case.operation.outputs:
        entry = _entry(case, "output", name, output_shapes[name], case.result_dtype(name), storage, digests)
        if tolerances and name in tolerances:
            entry["tolerance"] = vars(tolerances[name])
        arrays.append(entry)
    parameters = {
        name: case[name] for name in (*case.operation.sizes, "softmax_scale") if case.arguments.get(name) is not None
    }
    manifest = {
        "format": "numba-psa case",
        "version": VERSION,
        "generator": f"numba-psa {__version__}",
        "id": id,
        "op": case.op,
        "parameters": parameters,
        "values": case.values,
        "flags": list(case.flags),
        "storage": storage,
        "arrays": arrays,
    }
    return write_manifest(folder, manifest)


def write_manifest(folder: Path, manifest: Mapping[str, Any]) -> str:
    """Validates and writes; returns the sha256 of the file."""
    _validator().validate(manifest)
    text = json.dumps(manifest, indent=1, ensure_ascii=False, allow_nan=False) + "\n"
    (folder / MANIFEST).write_bytes(text.encode())
    return hashlib.sha256(text.encode()).hexdigest()


def _entry(case, role, name, shape, dtype, storage, digests) -> dict[str, Any]:
    entry = {
        "name": name,
        "role": role,
        "shape": list(shape),
        "dtype": dtype.name,
        "stored_as": "uint16" if dtype == BFLOAT16 else dtype.name,
        "layout": case.layouts.get(name, "C") if role == "input" else "C",
        "file": _file_name(role, name, storage),
    }
    return entry | ({"sha256": digests[entry["file"]]} if entry["file"] in digests else {})


def _file_name(role: str, name: str, storage: str) -> str:
    return f"{role}.{name}.bin" if storage == "bin" else f"{'outputs' if role == 'output' else 'inputs'}.{storage}"


def _key(role: str, name: str) -> str:
    return f"target.{name}" if role == "target" else name


def _store(folder: Path, storage: str, arrays: Mapping[tuple[str, str], np.ndarray], stem: str) -> dict[str, str]:
    """Writes the arrays; {file name: sha256}."""
    raw = {key: _little_endian(x) for key, x in arrays.items()}
    if storage == "bin":
        files = {_file_name(role, name, storage): x.tobytes() for (role, name), x in raw.items()}
    elif not raw:
        files = {}
    elif storage == "npz":
        files = {f"{stem}.npz": _npz_bytes({_key(*key): x for key, x in raw.items()})}
    else:
        from safetensors.numpy import save

        files = {f"{stem}.safetensors": save({_key(*key): x for key, x in raw.items()})}
    for name, data in files.items():
        (folder / name).write_bytes(data)
    return {name: hashlib.sha256(data).hexdigest() for name, data in files.items()}


def _little_endian(x: np.ndarray) -> np.ndarray:
    x = np.ascontiguousarray(x)
    if x.dtype == BFLOAT16:
        x = x.view(np.uint16)
    return x.astype(x.dtype.newbyteorder("<"), copy=False)


def _npz_bytes(arrays: Mapping[str, np.ndarray]) -> bytes:
    """What np.savez writes, without the clock and the platform in it."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_STORED) as archive:
        for name, x in arrays.items():
            member = zipfile.ZipInfo(f"{name}.npy", (1980, 1, 1, 0, 0, 0))
            member.create_system, member.external_attr = 3, 0o644 << 16
            content = io.BytesIO()
            np.lib.format.write_array(content, x, version=(1, 0), allow_pickle=False)
            archive.writestr(member, content.getvalue())
    return buffer.getvalue()


# ---- reading ----------------------------------------------------------------------------------------------------------
@functools.cache
def _validator():
    from jsonschema import Draft202012Validator

    schema = json.loads(resources.files("numba_psa.testing").joinpath("case.schema.json").read_text())
    return Draft202012Validator(schema)


def read_manifest(folder: Path, kind: str) -> dict[str, Any]:
    """The validated manifest of `folder`, which must be a "case" or "vectors"; VectorError otherwise."""
    path = folder / MANIFEST
    try:
        manifest = json.loads(path.read_bytes())
    except FileNotFoundError:
        raise VectorError(f"{path}: there is no manifest") from None
    except (OSError, ValueError, RecursionError) as error:
        raise VectorError(f"{path}: not a manifest: {error}") from None
    found = manifest.get("format") if isinstance(manifest, dict) else None
    if found != f"numba-psa {kind}":
        raise VectorError(f"{path}: expected a manifest with format 'numba-psa {kind}', found {found!r}")
    if manifest.get("version") != VERSION:
        raise VectorError(f"{path}: format version {manifest.get('version')!r}, but this numba-psa reads version {VERSION}")
    validator = _validator()
    wanted = "case" if kind == "case" else "index"
    for error in validator.evolve(
        schema={**validator.schema["$defs"][wanted], "$defs": validator.schema["$defs"]}
    ).iter_errors(manifest):
        raise VectorError(f"{path}: {error.json_path}: {error.message}")
    return manifest


def read_case(folder: Path) -> StoredCase:
    """The case in `folder`; VectorError names what is missing or damaged."""
    folder = Path(folder)
    manifest = read_manifest(folder, "case")
    op = manifest["op"]
    if op not in OPERATIONS:
        raise VectorError(f"{folder / MANIFEST}: op {op!r} is not one of {', '.join(OPERATIONS)}")
    arguments: dict[str, Any] = {}
    layouts, expected, tolerances = {}, {}, {}
    for entry in manifest["arrays"]:
        name = entry["name"]
        if entry["role"] == "output":
            if "sha256" in entry:
                expected[name] = _read_array(folder, entry)
            if "tolerance" in entry:
                tolerances[name] = Tolerance(**entry["tolerance"])
            continue
        arguments[name] = _read_array(folder, entry)
        if entry["layout"] != "C":
            layouts[name] = entry["layout"]
    arguments |= manifest["parameters"]
    case = Case(op, arguments, layouts, manifest["values"])
    operation = case.operation
    if missing := [name for name in operation.arrays + operation.sizes if name not in arguments]:
        raise VectorError(f"{folder / MANIFEST}: {op} needs {', '.join(missing)}")
    if expected and set(expected) != set(operation.outputs):
        raise VectorError(
            f"{folder / MANIFEST}: {op} has outputs {', '.join(operation.outputs)}, found {', '.join(expected)}"
        )
    try:
        _ = case.shape
    except NumbaPSAError as error:
        raise VectorError(f"{folder / MANIFEST}: {error}") from None
    return StoredCase(manifest["id"], case, expected, tolerances)


def _read_array(folder: Path, entry: Mapping[str, Any]) -> np.ndarray:
    path = folder / entry["file"]
    data = _bytes(path)
    if "sha256" in entry and hashlib.sha256(data).hexdigest() != entry["sha256"]:
        raise VectorError(f"{path}: damaged: its sha256 is not the one in the manifest")
    raw = _parse(path, data, _key(entry["role"], entry["name"]), np.dtype(entry["stored_as"]), tuple(entry["shape"]))
    return raw.view(BFLOAT16) if entry["dtype"] == "bfloat16" else raw


def _bytes(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise VectorError(f"{path}: cannot be read: {error.strerror}") from None


def _parse(path: Path, data: bytes, key: str, dtype: np.dtype, shape: tuple[int, ...]) -> np.ndarray:
    """The array `key` of a file in any of the formats, or VectorError if it has another dtype or shape."""
    if path.suffix == ".bin":
        size = int(np.prod(shape, dtype=object)) * dtype.itemsize
        if len(data) != size:
            raise VectorError(f"{path}: {len(data)} bytes, expected {size} for {dtype.name} {list(shape)}")
        return np.frombuffer(data, dtype.newbyteorder("<")).astype(dtype).reshape(shape)
    arrays = _parse_archive(path, data)
    if key not in arrays:
        raise VectorError(f"{path}: holds no array {key!r}, only {', '.join(arrays) or 'none'}")
    found = arrays[key]
    if found.dtype != dtype or found.shape != shape:
        raise VectorError(f"{path}: {key} is {found.dtype.name} {list(found.shape)}, expected {dtype.name} {list(shape)}")
    return found


def _parse_archive(path: Path, data: bytes) -> dict[str, np.ndarray]:
    try:
        if path.suffix == ".npz":
            with np.load(io.BytesIO(data), allow_pickle=False) as archive:
                return {name: archive[name] for name in archive.files}
        from safetensors import deserialize

        return {name: _from_tensor(**tensor) for name, tensor in deserialize(data)}
    except (ValueError, OSError, KeyError, EOFError, zipfile.BadZipFile) as error:
        raise VectorError(f"{path}: not a {path.suffix} file: {error}") from None
    except Exception as error:  # safetensors raises a type of its own, not exported in every version
        if type(error).__module__.startswith("safetensors"):
            raise VectorError(f"{path}: not a {path.suffix} file: {error}") from None
        raise


_TENSOR_TYPES = {"F16": "float16", "F32": "float32", "F64": "float64", "U16": "uint16", "BF16": "uint16"}


def _from_tensor(dtype: str, shape: list[int], data: bytes) -> np.ndarray:
    if dtype not in _TENSOR_TYPES:
        raise ValueError(f"dtype {dtype} is none of {', '.join(_TENSOR_TYPES)}")
    return (
        np.frombuffer(bytes(data), np.dtype(_TENSOR_TYPES[dtype]).newbyteorder("<"))
        .astype(_TENSOR_TYPES[dtype])
        .reshape(shape)
    )


def read_outputs(folder: Path, case: Case, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, np.ndarray]:
    """What a program wrote for `case`: its outputs, in any of the formats, each array as it was found there.

    A `.bin` says nothing of its shape and dtype: its length must fit. Missing outputs are missing from the result.
    """
    found: dict[str, np.ndarray] = {}
    for name in case.operation.outputs:
        dtype = case.result_dtype(name)
        stored = np.dtype(np.uint16) if dtype == BFLOAT16 else dtype
        for storage in FORMATS:
            path = folder / _file_name("output", name, storage)
            if not path.exists():
                continue
            if storage == "bin":
                raw = _parse(path, _bytes(path), name, stored, tuple(shapes[name]))
            else:
                raw = _parse_archive(path, _bytes(path)).get(name)
            if raw is not None:
                found[name] = raw.view(BFLOAT16) if dtype == BFLOAT16 and raw.dtype == np.uint16 else raw
                break
    return found
