"""The simulator checks of the CUDA gradients must catch bugs planted in their steps. Each runs in a process of its own."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

SIM = Path(__file__).parents[1] / "sim"

MMA = 'checks.MmaBackwardConfig, {"row_warps": 1, "BN": 16, "copy": 4, "key_dim": 4, "value_dim": 8}, 18'
PLANTED = {
    "delta is forgotten": (
        """
def without_delta(tile, dp, s, delta, factor):
    dp *= s * factor
kernel.score_gradients_by_rows = without_delta
""",
        f"checks.test_gradients_on_channels_first({MMA}, {{}})",
    ),
    "l belongs to another query": (
        """
two_columns = steps.two_columns
steps.two_columns = lambda order, address, n: two_columns(order, address, n)[::-1]
""",
        f"checks.test_gradients_on_channels_first({MMA}, {{}})",
    ),
    "the power of two of float16 stays in the result": (
        "kernel.unscaled = lambda tile, factor, exponent: factor",
        f"checks.test_gradients_on_channels_first({MMA}, {{}})",
    ),
    "a small gradient is not scaled up": (
        "kernel.gradient_exponent = lambda *arguments: 0",
        f"checks.test_gradients_on_channels_first({MMA}, {{'amplitude': 0.05, 'd_amplitude': 1e-3, 'scale': 100.0}})",
    ),
    "queries without any key are not left out": (
        "kernel.again_if_not_finite = lambda *arguments: None",
        "checks.test_special_values_stay_where_they_belong(checks.SPECIAL[0])",
    ),
    "a split low part is lost": (
        """
split = fragments_tf32.split
def without_low(exact, x, high, low, i):
    split(exact, x, high, low, i)
    low[i] = 0
fragments_tf32.split = without_low
""",
        """
fields = {"row_warps": 1, "key_dim": 4, "value_dim": 8}
checks.test_gradients_on_channels_first(checks.Tf32BackwardConfig, fields, 16, {})
""",
    ),
    "columns are taken from the wrong operand": (
        """
values_descriptor = wgmma.values_descriptor
wgmma.values_descriptor = lambda shared: values_descriptor(shared + 1024)
""",
        """
fields = {"passes": checks.DQ, "key_dim": 8, "value_dim": 16}
checks.test_gradients_on_warpgroup_products(checks.WarpgroupBackwardConfig, fields, 16, {})
""",
    ),
}
RUN = """
import sys
sys.path.insert(0, {host!r}); sys.path.insert(0, {sim!r}); sys.setswitchinterval(5e-5)
import warnings; warnings.simplefilter("ignore")
import test_cuda_backward as checks
import numba_psa.cuda.backward as kernel, numba_psa.cuda.backward_steps as steps
import numba_psa.cuda.backward_wgmma as wgmma, numba_psa.cuda.fragments_tf32 as fragments_tf32
{code}
"""


def run(code, timeout):
    source = RUN.format(sim=str(SIM), host=str(SIM.parent / "host"), code=code)
    environment = os.environ | {"NUMBA_ENABLE_CUDASIM": "1"}
    return subprocess.run([sys.executable, "-c", source], capture_output=True, text=True, env=environment, timeout=timeout)


@pytest.mark.parametrize("bug", PLANTED)
def test_planted_bugs_are_caught(bug):
    answer = run("\n".join(PLANTED[bug]), 120)
    assert answer.returncode == 1, answer.stderr
    assert answer.stderr.rstrip().splitlines()[-1].startswith("AssertionError"), answer.stderr[-2000:]


def test_and_without_a_planted_bug_the_same_checks_pass():
    answer = run("\n".join({check: None for _, check in PLANTED.values()}), 240)
    assert answer.returncode == 0, answer.stderr[-2000:]
