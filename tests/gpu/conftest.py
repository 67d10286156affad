"""On a real GPU; skipped, with the reason, where there is none. The same kernels run in tests/sim everywhere."""

import os

import pytest

from numba_psa.devices import gpu_problem


def pytest_collection_modifyitems(items):
    problem = gpu_problem()
    if os.environ.get("NUMBA_ENABLE_CUDASIM", "0") not in ("", "0"):
        problem = "NUMBA_ENABLE_CUDASIM is set"
    if problem:
        for item in items:
            item.add_marker(pytest.mark.skip(reason=problem))
