"""DLPack, by which array libraries hand memory to each other: the struct, and results handed out.

https://dmlc.github.io/dlpack/latest/python_spec.html
"""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np

from numba_psa._numba_cuda import SIMULATED
from numba_psa.numerics import BFLOAT16, FLOAT64


class DLTensor(ctypes.Structure):
    """A tensor in memory that somebody else owns."""

    _fields_ = (
        ("data", ctypes.c_void_p),
        ("device_type", ctypes.c_int32),
        ("device_id", ctypes.c_int32),
        ("ndim", ctypes.c_int32),
        ("code", ctypes.c_uint8),
        ("bits", ctypes.c_uint8),
        ("lanes", ctypes.c_uint16),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
    )


class _DLManagedTensor(ctypes.Structure):
    _fields_ = (("tensor", DLTensor), ("context", ctypes.c_void_p), ("deleter", ctypes.c_void_p))


DEVICE = 1 if SIMULATED else 2
"""The simulator's device memory is the host's."""
DTYPES = {(2, 16): np.dtype(np.float16), (4, 16): BFLOAT16, (2, 32): np.dtype(np.float32), (2, 64): FLOAT64}
_CODES = {dtype: code for code, dtype in DTYPES.items()}

_lent: dict[int, tuple] = {}
"""What each capsule in use keeps alive, by the address of its struct."""


def lent() -> int:
    """How many results are in use by other libraries."""
    return len(_lent)


@ctypes.CFUNCTYPE(None, ctypes.c_void_p)
def _give_back(address: int) -> None:
    _lent.pop(address, None)


_is_valid = ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_char_p)(("PyCapsule_IsValid", ctypes.pythonapi))
_pointer = ctypes.PYFUNCTYPE(ctypes.c_void_p, ctypes.c_void_p, ctypes.c_char_p)(("PyCapsule_GetPointer", ctypes.pythonapi))


@ctypes.PYFUNCTYPE(None, ctypes.c_void_p)
def _drop(capsule: int) -> None:
    """A capsule that dies without having been taken over."""
    if _is_valid(capsule, b"dltensor"):
        _give_back(_pointer(capsule, b"dltensor"))


_new_capsule = ctypes.PYFUNCTYPE(ctypes.py_object, ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p)(
    ("PyCapsule_New", ctypes.pythonapi)
)


class Lent:
    """Memory of a result, for another library's from_dlpack."""

    def __init__(self, pointer: int, shape: tuple[int, ...], dtype: np.dtype, owner: Any, device: int, stream: int):
        self._tensor = pointer, shape, dtype
        self._owner, self._device, self._stream = owner, device, stream

    def __dlpack_device__(self) -> tuple[int, int]:
        return DEVICE, self._device

    def __dlpack__(self, *, stream: Any = None, **_: Any) -> Any:
        if not SIMULATED and stream != -1:
            self._order(0 if stream in (None, 1) else int(stream))
        pointer, shape, dtype = self._tensor
        sizes = (ctypes.c_int64 * len(shape))(*shape)
        tensor = DLTensor(pointer or None, DEVICE, self._device, len(shape), *_CODES[dtype], 1, sizes, None, 0)
        managed = _DLManagedTensor(tensor, None, ctypes.cast(_give_back, ctypes.c_void_p))
        address = ctypes.addressof(managed)
        _lent[address] = managed, sizes, self._owner
        return _new_capsule(address, b"dltensor", ctypes.cast(_drop, ctypes.c_void_p))

    def _order(self, stream: int) -> None:
        """Work on the consumer's stream waits for the result; the host does not."""
        if stream == self._stream:
            return
        from cuda.bindings import driver

        from numba_psa.cuda.launching import checked

        event = checked(driver.cuEventCreate(driver.CUevent_flags.CU_EVENT_DISABLE_TIMING), "cuEventCreate")
        checked(driver.cuEventRecord(event, self._stream), "cuEventRecord")
        checked(driver.cuStreamWaitEvent(stream, event, 0), "cuStreamWaitEvent")
        checked(driver.cuEventDestroy(event), "cuEventDestroy")
