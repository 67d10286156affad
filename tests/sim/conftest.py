"""Kernels in Numba's simulator: the same source as on a GPU, in Python threads."""

import os
import sys

import pytest

if "numba" in sys.modules and os.environ.get("NUMBA_ENABLE_CUDASIM") != "1":
    raise pytest.UsageError("run these with NUMBA_ENABLE_CUDASIM=1, in a process of their own: see scripts/test.sh")
os.environ["NUMBA_ENABLE_CUDASIM"] = "1"
sys.setswitchinterval(5e-5)  # its threads wait for each other all the time: four times as fast


def pytest_collection_modifyitems(items):
    for item in items:
        # NaN and overflow are values under test, and each simulated thread computes them with NumPy scalars
        item.add_marker(pytest.mark.filterwarnings("ignore::RuntimeWarning"))
