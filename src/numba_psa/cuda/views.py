"""Arrays of any library as addresses, and results as arrays of that library, with no import and no copy on the way.

Device arrays come by torch's own attributes, by `__cuda_array_interface__` or by DLPack (the only one that knows
bfloat16); NumPy arrays are copied over and back. Strided arrays are made contiguous by the library they come from.
"""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from math import prod
from typing import Any

import numpy as np

from numba_psa._numba_cuda import (
    SIMULATED,
    cuda,
    flat_copy,
    is_device_array,
    require_device,
    to_device,
    to_host,
    to_numba_array,
    write_back,
)
from numba_psa.cuda.dlpack import DEVICE, DTYPES, DLTensor, Lent
from numba_psa.errors import DTypeError, ParameterError
from numba_psa.numerics import FLOAT64, check_dtypes, float_dtype
from numba_psa.shapes import check_shape


class View:
    """A contiguous array in the memory that kernels see."""

    __slots__ = ("dtype", "owner", "pointer", "shape")

    def __init__(self, pointer: int, shape: tuple[int, ...], dtype: np.dtype, owner: Any):
        self.pointer, self.shape, self.dtype, self.owner = pointer, shape, dtype, owner

    @property
    def nbytes(self) -> int:
        return prod(self.shape) * self.dtype.itemsize


@cache
def _common_dtype(dtypes: tuple[tuple[str, np.dtype], ...]) -> np.dtype:
    """The one dtype of these (name, dtype) pairs, which kernels take."""
    dtype = check_dtypes(**dict(dtypes))
    if dtype == FLOAT64:
        raise DTypeError(
            "impl='cuda' takes float16, bfloat16 and float32, not float64: impl='mirror', 'cpu' and 'oracle' do"
        )
    return dtype


class Call:
    """The arrays of one call: all NumPy, or all of one device. Results are of the kind of the first."""

    def __init__(self, stream: Any = None, **arrays: Any):
        self._like = next(iter(arrays.values()))
        self.kind = kind_of(self._like)
        if len(arrays) > 1 and len({kind_of(x) == "numpy" for x in arrays.values()}) > 1:
            raise DTypeError(f"some arrays lie on the device and some do not ({', '.join(arrays)}): move one or the other")
        self.stream = stream_handle(stream, self.kind, self._like)
        self._views = {name: self._view(x) for name, x in arrays.items()}
        self.dtype = _common_dtype(tuple((name, view.dtype) for name, view in self._views.items()))
        require_device("cuda")

    def __getitem__(self, name: str) -> View:
        return self._views[name]

    def empty(self, shape: Sequence[int], dtype: np.dtype | None = None) -> View:
        """Uninitialised memory for a result."""
        shape, dtype = tuple(shape), dtype or self.dtype
        if self.kind == "torch":
            options = {} if dtype == self.dtype else {"dtype": getattr(sys.modules["torch"], dtype.name)}
            array = self._like.new_empty(shape, **options)
            return View(array.data_ptr(), shape, dtype, array)
        if self.kind == "cupy":
            array = sys.modules["cupy"].empty(shape, dtype)
            return View(array.data.ptr, shape, dtype, array)
        if self.kind == "numpy" and SIMULATED:
            array = np.empty(shape, dtype)
            return View(array.ctypes.data, shape, dtype, array)
        array = cuda.device_array(shape, dtype)
        return View(address_of(array), shape, dtype, array)

    def scratch(self, count: int) -> View | None:
        """`count` bytes until the call returns, if the arrays' library lends them in the order of the call's stream."""
        if self.kind == "torch" and self.stream == _torch_stream(self._like.get_device()):
            array = self._like.new_empty(count, dtype=sys.modules["torch"].uint8)
            return View(array.data_ptr(), (count,), np.dtype(np.uint8), array)
        return None

    def on_stream(self) -> AbstractContextManager:
        """In this context memory is taken from what belongs to the call's stream.

        A library hands freed memory to the next allocation of the same stream: temporaries may then go when the call
        returns, though kernels still run.
        """
        if self.kind == "torch":
            streams, device = sys.modules["torch"].cuda, self._like.get_device()
            if self.stream == _torch_stream(device):
                return nullcontext()
            own = streams.ExternalStream(self.stream, device=device) if self.stream else streams.default_stream(device)
            return streams.stream(own)
        if self.kind == "cupy":
            streams = sys.modules["cupy"].cuda
            if self.stream == streams.get_current_stream().ptr:
                return nullcontext()
            return streams.ExternalStream(self.stream) if self.stream else streams.Stream.null
        return nullcontext()

    def result(self, view: View) -> Any:
        """A result as the caller's kind of array."""
        if self.kind == "dlpack" and hasattr(self._like, "__array_namespace__"):
            lent = Lent(view.pointer, view.shape, view.dtype, view.owner, self._like.__dlpack_device__()[1], self.stream)
            return self._like.__array_namespace__().from_dlpack(lent)
        if self.kind != "numpy" or SIMULATED:
            return view.owner
        return to_host(view.owner) if prod(view.shape) else np.empty(view.shape, view.dtype)

    def target(self, name: str, given: Any, shape: Sequence[int], axes: Sequence[str]) -> View:
        """Where a result goes: the caller's array, checked, or a new one. `finish` hands it back."""
        if given is None:
            return self.empty(shape)
        if self.kind == "dlpack":
            raise ParameterError(f"{name}: {type(given).__name__} comes by DLPack only, which is for reading")
        if kind_of(given) != self.kind or not hasattr(given, "shape"):
            kind = "a numpy.ndarray" if self.kind == "numpy" else "the same kind of array as the inputs"
            raise DTypeError(f"{name} must be {kind}, got {type(given).__name__}")
        check_shape(name, tuple(given.shape), tuple(shape), axes)
        found = dtype_of(given)
        if found != self.dtype:
            raise DTypeError(f"{name} has dtype {found}, expected {self.dtype}")
        if self.kind == "numpy" and not given.flags.writeable:
            raise ParameterError(f"{name} is read-only, but the result is written into it")
        if not (_is_contiguous(given) and (self.kind != "numpy" or SIMULATED)):
            return self.empty(shape)
        view = self._view(given)
        for other, x in self._views.items():
            if view.pointer < x.pointer + x.nbytes and x.pointer < view.pointer + view.nbytes:
                raise ParameterError(f"{name} overlaps {other}: the result would overwrite what is still being read")
        return view

    def added_target(self, name: str, given: Any, shape: Sequence[int], axes: Sequence[str]) -> View:
        """The caller's array to add into, checked: its memory, or a contiguous copy of what it holds."""
        view = self.target(name, given, shape, axes)
        return view if view.owner is given else self._view(given)

    def finish(self, given: Any, view: View) -> Any:
        """The caller's own target, now holding the result, or the new array."""
        if given is None:
            return self.result(view)
        if view.owner is not given:
            if self.kind == "numpy":
                np.copyto(given, self.result(view))
            elif self.kind == "torch":
                given.copy_(view.owner)
            elif self.kind == "cupy":
                given[...] = view.owner
            else:
                write_back(view.owner.reshape(prod(view.shape)), to_numba_array(given), _numba_stream(self.stream))
        return given

    def _view(self, array: Any) -> View:
        if self.kind == "torch":
            array = array if array.is_contiguous() else array.contiguous()
            return View(array.data_ptr(), tuple(array.shape), dtype_of(array), array)
        if self.kind == "numpy":
            host = np.ascontiguousarray(array)
            if SIMULATED:
                return View(host.ctypes.data, host.shape, host.dtype, host if host is not array else array)
            require_device("cuda")
            device = to_device(host) if host.size else None
            return View(address_of(device) if host.size else 0, host.shape, host.dtype, device)
        if self.kind == "cupy":
            array = array if array.flags.c_contiguous else sys.modules["cupy"].ascontiguousarray(array)
            return View(array.data.ptr, array.shape, dtype_of(array), array)
        if self.kind == "dlpack":
            return view_of_dlpack(array, self.stream)
        device, shape, dtype = to_numba_array(array), tuple(array.shape), dtype_of(array)
        if not device.is_c_contiguous():
            device = flat_copy(device, _numba_stream(self.stream))
        return View(address_of(device), shape, dtype, array if _is_contiguous(array) else device)


_libraries: dict[type, str] = {}


def _library(kind: type) -> str:
    """The package that a class comes from, remembered: subclasses of torch.Tensor are torch's."""
    names = [base.__module__.partition(".")[0] for base in kind.__mro__]
    found = next((name for name in ("torch", "cupy", "jaxlib", "jax") if name in names), names[0])
    return _libraries.setdefault(kind, found)


def kind_of(array: Any) -> str:
    """Which way an array is looked at: torch, cupy, numba (any __cuda_array_interface__), dlpack (jax too) or numpy."""
    library = _libraries.get(type(array)) or _library(type(array))
    if library == "torch" and not array.is_cuda:
        raise DTypeError(f"a torch tensor on {array.device} is no CUDA array: call .cuda(), or .numpy() for impl='cpu'")
    if library in ("torch", "cupy"):
        return library
    if isinstance(array, np.ndarray | list | tuple | np.generic):
        return "numpy"
    try:
        if library not in ("jax", "jaxlib") and is_device_array(array):  # jax's results must be jax's
            return "numba"
    except Exception:
        pass
    if hasattr(array, "__dlpack__"):
        return "dlpack"
    raise DTypeError(
        f"impl='cuda' takes NumPy arrays and CUDA arrays (__cuda_array_interface__ or DLPack), got {type(array).__name__}"
    )


def dtype_of(array: Any) -> np.dtype:
    """The element type; torch's by its name, for it is no NumPy dtype."""
    dtype = array.dtype if hasattr(array, "dtype") else np.dtype(array.__cuda_array_interface__["typestr"])
    return dtype if isinstance(dtype, np.dtype) else _torch_dtype(dtype)


_torch_dtypes: dict[Any, np.dtype] = {}


def _torch_dtype(dtype: Any) -> np.dtype:
    if dtype not in _torch_dtypes:
        _torch_dtypes[dtype] = float_dtype(str(dtype).removeprefix("torch."))
    return _torch_dtypes[dtype]


def _is_contiguous(array: Any) -> bool:
    if hasattr(array, "is_contiguous"):
        return array.is_contiguous()
    if isinstance(array, np.ndarray):
        return array.flags.c_contiguous
    if hasattr(array, "is_c_contiguous"):
        return array.is_c_contiguous()
    return to_numba_array(array).is_c_contiguous()


def address_of(array: Any) -> int:
    """Where a Numba device array begins; 0 for an empty one."""
    if SIMULATED:
        return array._ary.ctypes.data
    return array.__cuda_array_interface__["data"][0] or 0


# ---- streams ----------------------------------------------------------------------------------------------------------
def stream_handle(stream: Any, kind: str = "numpy", array: Any = None) -> int:
    """The CUstream of a stream of any library, as an int; None: the one that the array's library is working on."""
    if stream is None:
        if kind == "torch":
            return _torch_stream(array.get_device())
        if kind == "cupy":
            return sys.modules["cupy"].cuda.get_current_stream().ptr
        if kind == "numba" and not SIMULATED:
            return array.__cuda_array_interface__.get("stream") or 0
        return 0
    if isinstance(stream, int):
        return stream
    if hasattr(stream, "__cuda_stream__"):
        return int(stream.__cuda_stream__()[1])
    for attribute in ("cuda_stream", "ptr", "handle"):
        handle = getattr(stream, attribute, None)
        if handle is not None:
            return int(getattr(handle, "value", handle) or 0)
    raise DTypeError(f"stream must be a CUDA stream or its handle as an int, got {type(stream).__name__}")


def _torch_stream(device: int) -> int:
    """torch's current stream; its C function is ten times as fast as torch.cuda.current_stream."""
    torch = sys.modules["torch"]
    raw = getattr(torch._C, "_cuda_getCurrentRawStream", None)
    return raw(device) if raw else torch.cuda.current_stream(device).cuda_stream


def _numba_stream(handle: int) -> Any:
    return cuda.external_stream(handle) if handle and not SIMULATED else 0


# ---- DLPack -----------------------------------------------------------------------------------------------------------
def view_of_dlpack(array: Any, stream: int) -> View:
    """A view of a DLPack array; the capsule stays with it, and gives the memory back when it dies."""
    if array.__dlpack_device__()[0] != DEVICE:
        raise DTypeError(f"{type(array).__name__} does not lie on a CUDA device")
    capsule = array.__dlpack__(stream=stream or 1)  # 1: the legacy default stream
    pointer = ctypes.pythonapi.PyCapsule_GetPointer
    pointer.restype, pointer.argtypes = ctypes.c_void_p, (ctypes.py_object, ctypes.c_char_p)
    tensor = DLTensor.from_address(pointer(capsule, b"dltensor"))
    shape = tuple(tensor.shape[: tensor.ndim])
    dense = [prod(shape[i + 1 :]) for i in range(tensor.ndim)]
    if (
        tensor.strides
        and prod(shape)
        and any(s != d for n, s, d in zip(shape, tensor.strides[: tensor.ndim], dense, strict=True) if n > 1)
    ):
        raise ParameterError(f"a strided DLPack array of {type(array).__name__}: make it contiguous first")
    dtype = DTYPES.get((tensor.code, tensor.bits))
    if dtype is None or tensor.lanes != 1:
        raise DTypeError(f"DLPack type code {tensor.code}, {tensor.bits} bits is not float16, bfloat16 or float32")
    return View((tensor.data or 0) + tensor.byte_offset, shape, dtype, (array, capsule))
