"""The one place that knows what runs the kernels of this folder: the `step` decorator, and PTX or its simulator twins."""

from __future__ import annotations

from pathlib import Path
from zlib import crc32

from numba_psa._numba_cuda import SIMULATED, cuda

REVISION = crc32(b"".join(path.read_bytes() for path in sorted(Path(__file__).parent.glob("*.py"))))
"""Of all sources of this folder. Part of every compiled kernel's key: an edit of any step compiles anew."""

if SIMULATED:
    from numba_psa.cuda.ptx_sim import *  # noqa: F403
    from numba_psa.cuda.wgmma_sim import *  # noqa: F403

    def step(function):
        """In the simulator a step is a plain function."""
        return function
else:
    from numba_psa.cuda.ptx import *  # noqa: F403
    from numba_psa.cuda.wgmma import *  # noqa: F403

    def step(function):
        """A device function that always dissolves into its caller, so that its array arguments stay registers."""
        return cuda.jit(device=True, forceinline=True, fastmath=True)(function)
