"""Whether a CUDA GPU can be used, asked of the driver itself: loads no Numba, creates no context."""

from __future__ import annotations

import ctypes
import sys
from functools import cache

INSTALL = "pip install 'numba-psa[cu13]' (driver 580 or later) or 'numba-psa[cu12]'"


@cache
def _driver() -> ctypes.CDLL | None:
    if sys.platform == "darwin":
        return None
    try:
        return ctypes.CDLL("nvcuda.dll" if sys.platform == "win32" else "libcuda.so.1")
    except OSError:
        return None


@cache
def gpu_problem() -> str | None:
    """Why no CUDA GPU can be used here, in words; None where one can."""
    if sys.platform == "darwin":
        return "CUDA does not exist on macOS"
    driver = _driver()
    if driver is None:
        return "no NVIDIA driver is installed"
    count = ctypes.c_int(0)
    for call, arguments in (("cuInit", (0,)), ("cuDeviceGetCount", (ctypes.byref(count),))):
        status = getattr(driver, call)(*arguments)
        if status:
            return f"the NVIDIA driver answers {call} with error {status}"
    return None if count.value else "the NVIDIA driver finds no GPU"


def driver_version() -> str | None:
    """The newest CUDA version that the driver can run, such as "13.0"; None without a driver."""
    driver, number = _driver(), ctypes.c_int(0)
    if driver is None or driver.cuDriverGetVersion(ctypes.byref(number)):
        return None
    return f"{number.value // 1000}.{number.value % 1000 // 10}"
