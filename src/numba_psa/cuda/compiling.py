"""From a kernel factory and its config to machine code: PTX by Numba, a cubin by nvJitLink, kept on disk.

A cubin's name says the config and the architecture, its directory everything else that it depends on: the sources of this
folder and the versions of the compilers. So nothing stale is ever loaded, and a directory can be deleted at any time.
"""

from __future__ import annotations

import os
import platform
import re
import tempfile
from collections.abc import Callable
from functools import cache
from hashlib import sha256
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from numba_psa._numba_cuda import compile_ptx
from numba_psa.cuda.device import REVISION
from numba_psa.devices import INSTALL
from numba_psa.errors import BackendUnavailableError

ARCHITECTURES = (80, 86, 89, 90, 100, 120)
"""What the kernels are checked to compile for."""


def compute_capability(arch: int) -> tuple[int, ...]:
    """(9, 0, "a") for 90: wgmma exists only in the target that has no successors."""
    return (arch // 10, arch % 10, "a") if arch == 90 else (arch // 10, arch % 10)


def target(arch: int) -> str:
    """ptxas' name of an architecture: sm_90a, sm_80 …"""
    return "sm_" + "".join(map(str, compute_capability(arch)))


def ptx_of(make: Callable[[Any], Callable], config: Any, signature: Any, arch: int) -> str:
    """PTX of `make(config)` for an architecture; needs no GPU."""
    bounds = (config.threads, config.blocks_per_sm)
    return compile_ptx(make(config), signature, compute_capability(arch), fastmath=True, launch_bounds=bounds)


def cubin_of(make: Callable[[Any], Callable], config: Any, signature: Any, arch: int) -> bytes:
    """Machine code of `make(config)`, from disk if it has been compiled before."""
    path = cache_directory() / f"{make.__name__.removeprefix('make_')}-{config.name}-{target(arch)}.cubin"
    try:
        return path.read_bytes()
    except OSError:
        pass
    cubin = assemble(ptx_of(make, config, signature, arch), arch)
    keep(path, cubin)
    return cubin


def assemble(ptx: str, arch: int) -> bytes:
    """PTX to a cubin by nvJitLink, or by the driver where there is no nvJitLink."""
    try:
        from cuda.core import Linker, LinkerOptions, ObjectCode
    except ImportError:  # cuda-core before 0.5 had them there
        try:
            from cuda.core.experimental import Linker, LinkerOptions, ObjectCode
        except ImportError as error:
            raise BackendUnavailableError(f"assembling PTX needs cuda-core ({error}): {INSTALL}") from error
    code = ObjectCode.from_ptx(ptx.encode())
    return bytes(Linker(code, options=LinkerOptions(arch=target(arch))).link("cubin").code)


def entry_of(cubin: bytes) -> bytes:
    """The name of the one kernel in a cubin: its code lies in an ELF section `.text.NAME`, beside ptxas' own helpers."""
    return re.search(rb"\0\.text\.([^\0]*_kernel[^\0]*)\0", cubin).group(1)


# ---- the cache --------------------------------------------------------------------------------------------------------
@cache
def cache_directory() -> Path:
    """Where cubins of these sources and versions are kept: below $NUMBA_PSA_CACHE_DIR, or the user's cache."""
    base = (
        os.environ.get("NUMBA_PSA_CACHE_DIR")
        or Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "numba-psa"
    )
    parts = [str(REVISION), platform.python_version(), *(f"{name} {_version(name)}" for name in _COMPILERS)]
    return Path(base) / sha256("\n".join(parts).encode()).hexdigest()[:16]


_COMPILERS = (
    "numba",
    "numba-cuda",
    "llvmlite",
    "cuda-core",
    "nvidia-nvvm",
    "nvidia-nvjitlink",
    "nvidia-nvjitlink-cu12",
    "nvidia-cuda-nvcc-cu12",
)


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "-"


def keep(path: Path, cubin: bytes) -> None:
    """Write all of the file or nothing; a directory that cannot be written to costs the next process a compilation."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=path.parent, delete=False) as file:
            file.write(cubin)
        os.replace(file.name, path)
    except OSError:
        pass
