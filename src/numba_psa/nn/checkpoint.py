"""PyTorch checkpoints of Ultralytics detectors, read without PyTorch and without running what stands in them.

A `.pt` file is a zip of raw storages (`…/data/0`, …) and one pickle, `…/data.pkl`, that says which module holds which view
of which storage. A pickle is a program: it names things to import and calls them. Here nothing is imported. Every name
becomes an inert class, whose objects hold the attributes that the pickle gives them; the only calls that do anything are the
rebuilding of tensors (as NumPy arrays) and of plain containers, and any other call is an error that names it.
"""

from __future__ import annotations

import io
import math
import pickle
import pickletools
import zipfile
from collections.abc import Callable, Iterator, Mapping
from os import PathLike
from pathlib import Path
from reprlib import repr  # a pickle can nest tuples so that the whole of one is longer than any memory
from typing import Any

import numpy as np

from numba_psa.errors import BackendUnavailableError, WeightsError
from numba_psa.nn.conv import BATCH_NORM_EPS
from numba_psa.nn.written import written
from numba_psa.numerics import BFLOAT16

DEEPEST = 64
"""Modules inside modules; a detector has 9."""
MOST_MODULES = 100_000
MOST_COPIES = 4
"""How often arrays may share a storage, on average: written out, each is a copy."""

_STORAGES = {
    "torch.DoubleStorage": np.dtype("<f8"),
    "torch.FloatStorage": np.dtype("<f4"),
    "torch.HalfStorage": np.dtype("<f2"),
    "torch.BFloat16Storage": BFLOAT16,
    "torch.LongStorage": np.dtype("<i8"),
    "torch.IntStorage": np.dtype("<i4"),
    "torch.ShortStorage": np.dtype("<i2"),
    "torch.CharStorage": np.dtype("i1"),
    "torch.ByteStorage": np.dtype("u1"),
    "torch.BoolStorage": np.dtype("?"),
}
_VALUES = {
    *("torch.device", "numpy.dtype", "numpy.core.multiarray.scalar", "numpy._core.multiarray.scalar", "_codecs.encode"),
    *(f"pathlib.{pure}{system}Path" for pure in ("", "Pure") for system in ("Posix", "Windows")),
}
"""Calls that stand for a value which no weight depends on: not made, an inert object stands for it."""


class _Global(type):
    """The type of the inert classes: one for each name in the pickle; calling one is what a pickle's call comes to."""

    name: str

    def __call__(cls, *arguments: Any) -> Any:
        if cls.name in _CALLS:
            return _CALLS[cls.name](*arguments)
        if cls.name in _VALUES:
            return cls.__new__(cls)
        raise WeightsError(f"it calls {cls.name}, which is not the rebuilding of a tensor: it is refused, and was not run")


class _Inert(metaclass=_Global):
    """An object of an unknown class: holds what the pickle says it holds."""

    __slots__ = ("state",)
    name = "object"

    def __new__(cls, *_: Any, **__: Any) -> _Inert:
        self = object.__new__(cls)
        self.state = {}
        return self

    def __setstate__(self, state: Any) -> None:
        self.state = state if isinstance(state, dict) else {}


class _Dict(dict):
    """An OrderedDict; its own attributes (`_metadata` of a state dict) are left out."""

    def __setstate__(self, _: Any) -> None:
        pass


def _tensor(storage: Any, first: Any, shape: Any, strides: Any, *_: Any) -> np.ndarray:
    """The view of a storage, read-only, every element of which lies inside it."""
    shape, strides = tuple(shape), tuple(strides)
    counts = (first, *shape, *strides)
    if (
        not isinstance(storage, np.ndarray)
        or len(shape) != len(strides)
        or not all(type(n) is int and n >= 0 for n in counts)
    ):
        raise WeightsError(
            f"a tensor has offset {repr(first)}, shape {repr(shape)} and strides {repr(strides)}, which make no sense"
        )
    size = math.prod(shape)
    last = first + sum((count - 1) * stride for count, stride in zip(shape, strides, strict=True)) if size else first
    if size > storage.size or last >= storage.size + (size == 0):
        raise WeightsError(
            f"a tensor of shape {shape} with strides {strides} from element {first} on does not lie in a storage of "
            f"{storage.size} elements"
        )
    if len(shape) > 32:
        raise WeightsError(f"a tensor has {len(shape)} dimensions")
    steps = [stride * storage.itemsize for stride in strides]
    return np.lib.stride_tricks.as_strided(storage[first:], shape, steps, writeable=False)


_CALLS: dict[str, Callable[..., Any]] = {
    "torch._utils._rebuild_tensor": _tensor,
    "torch._utils._rebuild_tensor_v2": _tensor,
    "torch._utils._rebuild_parameter": lambda data, *_: data,
    "torch.Size": lambda sizes=(): tuple(sizes),
    "collections.OrderedDict": _Dict,
    "builtins.set": lambda items=(): list(items),
    "__builtin__.set": lambda items=(): list(items),
}


class _Unpickler(pickle.Unpickler):
    """The pickle of one checkpoint; `storage(key)` gives the bytes of one."""

    def __init__(self, content: bytes, storage: Callable[[str], bytes]):
        super().__init__(io.BytesIO(content))
        self._content_of, self._storages, self._globals = storage, {}, {}

    def find_class(self, module: str, name: str) -> type:
        full = f"{module}.{name}"
        if full not in self._globals:
            self._globals[full] = _Global("Inert", (_Inert,), {"__slots__": (), "name": full})
        return self._globals[full]

    def persistent_load(self, pid: Any) -> np.ndarray:
        try:
            kind, storage, key, _, count = pid
            dtype = _STORAGES[storage.name]
        except (TypeError, ValueError, AttributeError, KeyError):
            kind = dtype = None
        if kind != "storage" or not isinstance(key, str) or type(count) is not int:
            name = getattr(pid[1], "name", pid[1]) if isinstance(pid, tuple) and len(pid) > 1 else pid
            raise WeightsError(f"it refers to {repr(name)}, which is none of {', '.join(_STORAGES)}")
        if (key, dtype, count) not in self._storages:
            self._storages[key, dtype, count] = self._storage(key, dtype, count)
        return self._storages[key, dtype, count]

    def _storage(self, key: str, dtype: np.dtype, count: int) -> np.ndarray:
        content = self._content_of(key)
        if count < 0 or len(content) < count * dtype.itemsize:
            raise WeightsError(f"storage {key} holds {len(content)} bytes, too few for {count} elements of {dtype}")
        return np.frombuffer(content, dtype, count)


def read_checkpoint(path: str | PathLike[str]) -> tuple[dict[str, np.ndarray], dict[str, str]]:
    """({name: array}, metadata) of a `.pt` file as PyTorch 1.6 and later write it; nothing in it is run.

    The names are those of PyTorch's `state_dict()`. A checkpoint holds a model, its moving average (`ema`, which is
    preferred), or the arrays themselves. The metadata is text, and for a model says what its arrays do not: `names` and
    `stride` as an ONNX export has them, and `sppf_silu`, whether the first convolution of the SPPF has an activation.

    The arrays are read-only. Raises WeightsError: for what is no such file, for a call that is not the rebuilding of a
    tensor (by its name), for a model that the layers of this package would compute wrongly. OSError.
    """
    path = Path(path)
    try:
        state, metadata = _state(_load(path))
        if sum(array.nbytes for array in state.values()) > MOST_COPIES * path.stat().st_size:
            raise WeightsError(f"its arrays share storages more than {MOST_COPIES} times")
        return state, metadata
    except WeightsError as error:
        raise WeightsError(f"{path}: {error}") from error
    except (TypeError, ValueError, AttributeError, OverflowError) as error:  # lists for dicts, inf for a stride
        raise WeightsError(f"{path}: its model is damaged: {type(error).__name__}: {error}") from error


def convert(source: str | PathLike[str], target: str | PathLike[str]) -> tuple[int, dict[str, str]]:
    """Write what `read_checkpoint` reads of `source` to the `.safetensors` file `target`: (number of arrays, metadata)."""
    try:
        from safetensors.numpy import save
    except ImportError as error:
        raise BackendUnavailableError("writing .safetensors needs safetensors: pip install 'numba-psa[models]'") from error
    state, metadata = read_checkpoint(source)
    with written(target) as file:
        file.write(save({name: np.asarray(array, order="C") for name, array in state.items()}, metadata))
    return len(state), metadata


# ---- the file ---------------------------------------------------------------------------------------------------------
def _load(path: Path) -> Any:
    try:
        with zipfile.ZipFile(path) as archive:
            return _unpickled(archive, path.stat().st_size)
    except zipfile.BadZipFile as error:
        raise WeightsError(f"it is no checkpoint of PyTorch 1.6 or later, which is a zip: {error}") from error


def _unpickled(archive: zipfile.ZipFile, size: int) -> Any:
    programs = [name for name in archive.namelist() if name.endswith("/data.pkl")]
    if len(programs) != 1 or f"{programs[0][:-8]}constants.pkl" in archive.namelist():
        raise WeightsError("it is no checkpoint of torch.save: such a zip has one data.pkl, and no constants.pkl")
    root = programs[0][:-8]

    def content(name: str) -> bytes:
        try:
            entry = archive.getinfo(root + name)
        except KeyError:
            raise WeightsError(f"it has no {root + name}") from None
        if entry.compress_type != zipfile.ZIP_STORED or entry.file_size > size:
            raise WeightsError(f"{entry.filename} is compressed, which torch.save never does")
        try:
            return archive.read(entry)
        except (zipfile.BadZipFile, EOFError, RuntimeError, NotImplementedError) as error:  # cut off, or encrypted
            raise WeightsError(f"{entry.filename} cannot be read: {error}") from error

    if f"{root}byteorder" in archive.namelist() and content("byteorder") != b"little":
        raise WeightsError("it was written on a big-endian machine")
    program = content("data.pkl")
    try:
        # A number that says where to keep a value makes the unpickler reserve that many places.
        if any(op.name == "LONG_BINPUT" and place > len(program) for op, place, _ in pickletools.genops(program)):
            raise WeightsError("its pickle is damaged: it keeps values in places that it does not have")
        return _Unpickler(program, lambda key: content(f"data/{key}")).load()
    except WeightsError:
        raise
    except Exception as error:  # a damaged pickle can fail in any way: on a tuple that is not there, an int that is a list
        raise WeightsError(f"its pickle is damaged: {type(error).__name__}: {error}") from error


# ---- the model --------------------------------------------------------------------------------------------------------
def _state(loaded: Any) -> tuple[dict[str, np.ndarray], dict[str, str]]:
    found = loaded
    if isinstance(loaded, dict):
        found = next((loaded[key] for key in ("ema", "model", "state_dict") if loaded.get(key) is not None), loaded)
    if isinstance(found, dict) and found and all(_is_array(*item) for item in found.items()):
        return dict(found), {}
    if not isinstance(found, _Inert) or not isinstance(found.state.get("_modules"), dict):
        raise WeightsError(f"it holds no model, and no arrays by their names, but {_shown(found)}")
    modules = dict(_modules(found))
    state = {}
    for prefix, module in modules.items():
        state |= {prefix + name: array for name, array in _arrays(module, prefix)}
    if not state:
        raise WeightsError(f"its {_shown(found)} has no arrays")
    _check_modules(modules)
    return state, _metadata(loaded if isinstance(loaded, dict) else {}, found, modules)


def _is_array(name: Any, array: Any) -> bool:
    return isinstance(name, str) and isinstance(array, np.ndarray)


def _shown(found: Any) -> str:
    if isinstance(found, _Inert):
        return f"a {type(found).name}"
    return f"a dict of {', '.join(map(repr, list(found)[:8]))}" if isinstance(found, dict) else f"a {type(found).__name__}"


def _modules(root: _Inert) -> Iterator[tuple[str, _Inert]]:
    """(prefix of its arrays, module) of every module, a parent before its children, as `state_dict` goes through them."""
    waiting, count = [("", root)], 0
    while waiting:
        prefix, module = waiting.pop()
        count += 1
        if count > MOST_MODULES or prefix.count(".") > DEEPEST:
            raise WeightsError(f"it has more than {MOST_MODULES} modules, or more than {DEEPEST} inside each other")
        yield prefix, module
        children = module.state.get("_modules") or {}
        if not isinstance(children, dict) or not all(isinstance(child, _Inert | None) for child in children.values()):
            raise WeightsError(f"{prefix}_modules holds what is no module")
        below = [(f"{prefix}{name}.", child) for name, child in children.items() if child is not None]
        waiting += reversed(below)


def _arrays(module: _Inert, prefix: str) -> Iterator[tuple[str, np.ndarray]]:
    transient = module.state.get("_non_persistent_buffers_set") or ()
    for kind in ("_parameters", "_buffers"):
        for name, array in (module.state.get(kind) or {}).items():
            if array is None or name in transient:
                continue
            if not _is_array(name, array):
                raise WeightsError(f"{prefix}{name} is no tensor, but {_shown(array)}")
            yield name, array


def _check_modules(modules: Mapping[str, _Inert]) -> None:
    """WeightsError for what a state dict does not show and this package's layers take for granted."""
    for prefix, module in modules.items():
        name = type(module).name
        eps = module.state.get("eps")
        if name.endswith(".BatchNorm2d") and eps != BATCH_NORM_EPS:
            raise WeightsError(f"{prefix[:-1]} has eps = {repr(eps)}, but the networks here have {BATCH_NORM_EPS}")
        if prefix.endswith(".act.") and name.rsplit(".", 1)[-1] not in ("SiLU", "Identity"):
            raise WeightsError(f"{prefix[:-1]} is a {name}, but the networks here have SiLU")


def _metadata(loaded: Mapping[str, Any], model: _Inert, modules: Mapping[str, _Inert]) -> dict[str, str]:
    metadata = {key: loaded[key] for key in ("date", "version", "license") if isinstance(loaded.get(key), str)}
    names, stride, options = (model.state.get(key) for key in ("names", "stride", "args"))
    if isinstance(names, list | tuple):
        names = dict(enumerate(names))
    if isinstance(names, dict) and all(type(key) is int and isinstance(name, str) for key, name in names.items()):
        metadata["names"] = str(names)
    if isinstance(stride, np.ndarray) and stride.size:
        metadata["stride"] = str(int(stride.max()))
    options = options.state if isinstance(options, _Inert) else options
    for key, kind in (("task", str), ("imgsz", int)):
        if isinstance(options, dict) and isinstance(options.get(key), kind):
            metadata[key] = str(options[key])
    if "model.9.cv1.act." in modules:
        metadata["sppf_silu"] = str(type(modules["model.9.cv1.act."]).name.endswith(".SiLU")).lower()
    return metadata
