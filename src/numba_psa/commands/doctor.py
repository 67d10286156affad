"""`numba-psa doctor`: what can run here, and the command that installs what is missing."""

from __future__ import annotations

import os
import platform
from importlib.metadata import PackageNotFoundError, version

EXTRAS = {
    "cu13": ("nvidia-cuda-nvcc", "nvidia-nvvm", "nvidia-nvjitlink"),
    "fuzz": ("hypothesis", "jsonschema", "redis"),
    "models": ("safetensors", "onnx", "pillow"),
    "bench": ("matplotlib", "onnxruntime"),
    "cluster": ("ray",),
}


def doctor() -> None:
    """Print versions, CPU, GPU, driver and simulator; say what is missing and which command installs it."""
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    table = Table("what", "found", "to get it", title="numba-psa doctor", title_justify="left")
    missing = 0
    for what, found, command in (*_core(), *_gpu(), *_extras()):
        missing += bool(command)
        table.add_row(*map(escape, (what, found, command)))
    console = Console()
    if not console.is_terminal:
        console = Console(width=150)
    console.print(table)
    if missing:
        console.print("what could be added stands in the last column")


def _found(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _core():
    yield "Python", f"{platform.python_version()} on {platform.platform()}", ""
    for package in ("numba-psa", "numpy", "numba", "ml_dtypes"):
        yield package, _found(package) or "missing", "" if _found(package) else "pip install numba-psa"
    from numba import get_num_threads

    from numba_psa import cpu

    layer = cpu.threading_layer()
    slow = "apt install libgomp1, or pip install tbb: a parallel region costs 80 µs on workqueue, 2 µs on these"
    yield "CPU threads", f"{get_num_threads()} on the {layer} layer", slow if layer == "workqueue" else ""


def _gpu():
    from numba_psa.devices import INSTALL, driver_version, gpu_problem

    numba_cuda = _found("numba-cuda")
    yield "numba-cuda", numba_cuda or "missing", "" if numba_cuda else "pip install numba-psa (not on macOS)"
    problem = gpu_problem()
    if problem is None and numba_cuda:
        from numba_psa._numba_cuda import SIMULATED, cuda

        if SIMULATED:
            yield "GPU", "hidden by NUMBA_ENABLE_CUDASIM", "unset NUMBA_ENABLE_CUDASIM"
        else:
            device = cuda.get_current_device()
            name = device.name.decode() if isinstance(device.name, bytes) else device.name
            yield "GPU", f"{name}, compute capability {'.'.join(map(str, device.compute_capability))}", ""
        yield "driver", f"CUDA {driver_version()}", ""
    else:
        yield "GPU", problem or "present", "" if problem is None else f"a machine with one, and {INSTALL}"
    simulated = os.environ.get("NUMBA_ENABLE_CUDASIM", "0") not in ("", "0")
    yield "simulator", "on (NUMBA_ENABLE_CUDASIM)" if simulated else "off (NUMBA_ENABLE_CUDASIM=1 turns it on)", ""


def _extras():
    for extra, packages in EXTRAS.items():
        absent = [package for package in packages if not _found(package)]
        present = ", ".join(f"{package} {_found(package)}" for package in packages if package not in absent)
        found = "; ".join(filter(None, (present, f"missing {', '.join(absent)}" if absent else "")))
        yield f"extra {extra}", found, f"pip install 'numba-psa[{extra}]'" if absent else ""
