"""Whether a CUDA GPU can be used, asked of the driver itself: loads no Numba, creates no context."""

from __future__ import annotations

import ctypes
import sys
from functools import cache

INSTALL = "pip install 'numba-psa[cu13]' (driver 580 or later) or 'numba-psa[cu12]'"


@cache
def gpu_problem() -> str | None:
    """Why no CUDA GPU can be used here, in words; None where one can."""
    if sys.platform == "darwin":
        return "CUDA does not exist on macOS"
    name = "nvcuda.dll" if sys.platform == "win32" else "libcuda.so.1"
    try:
        driver = ctypes.CDLL(name)
    except OSError:
        return f"no NVIDIA driver: {name} cannot be loaded"
    count = ctypes.c_int(0)
    for call, arguments in (("cuInit", (0,)), ("cuDeviceGetCount", (ctypes.byref(count),))):
        status = getattr(driver, call)(*arguments)
        if status:
            return f"the NVIDIA driver answers {call} with error {status}"
    return None if count.value else "the NVIDIA driver finds no GPU"
