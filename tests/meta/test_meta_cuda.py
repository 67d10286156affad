"""The simulator checks of the CUDA kernels must catch bugs planted in their steps. Each runs in a process of its own."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

SIM = Path(__file__).parents[1] / "sim"

PLANTED = {
    "keys past the last token are not masked": """
import numba_psa.cuda.forward as kernel
kernel.mask_tail = lambda s, keys_left, lane: None
checks.test_mma_forward_on_channels_first({"query_warps": 1, "BN": 16, "copy": 8}, 1, 20, {})
""",
    "the accumulator is not rescaled": """
import numba_psa.cuda.fragments as steps
steps.rescale = lambda acc, alpha: None
checks.test_mma_forward_on_channels_first({"query_warps": 1, "BN": 16}, 1, 40, {"amplitude": 4.0})
""",
    "a split low part is lost": """
import numba_psa.cuda.fragments_tf32 as steps
original = steps.split
def split(exact, x, high, low, i):
    original(exact, x, high, low, i)
    low[i] = 0
steps.split = split
checks.test_float32_is_float32({"query_warps": 1, "key_dim": 8, "value_dim": 8}, 16, {})
""",
    "masked rows keep what 0 times inf left": """
import numba_psa.cuda.staging as steps
steps.weighted = lambda value, weight, attending: value * weight
checks.test_special_values_stay_where_they_belong(*checks.SPECIAL[0])
""",
    "rows at odd places are not shifted": """
import numba_psa.cuda.realign as steps
steps.funnel_shift = lambda low, high, n: low
checks.test_mma_forward_on_channels_first({"query_warps": 1, "BN": 16, "copy": 2, "realigned": True}, 1, 19, {})
""",
    "aligned keys are not shifted": """
import numba_psa.cuda.align as steps
steps.shift_down = lambda words, i, misplaced: None
checks.test_wgmma_forward({"key_groups": 2, "copy": 2, "realigned": True}, 67, {})
""",
    "key warps do not agree on a maximum": """
import numba_psa.cuda.merge as steps
steps.agree_on_maximum = lambda *arguments: None
checks.test_mma_forward_on_channels_first({"query_warps": 1, "key_warps": 2, "BN": 16}, 1, 40, {"amplitude": 4.0})
""",
    "values are read from the wrong channels": """
import numba_psa.cuda.forward_wgmma as kernel
original = kernel.values_descriptor
kernel.values_descriptor = lambda shared: original(shared + 1024)
checks.test_wgmma_forward({"tail": 16}, 72, {})
""",
}
RUN = """
import sys
sys.path.insert(0, {host!r}); sys.path.insert(0, {sim!r}); sys.setswitchinterval(5e-5)
import warnings; warnings.simplefilter("ignore")
import test_cuda_forward as checks
{planted}
"""


@pytest.mark.parametrize("bug", PLANTED)
def test_planted_bugs_are_caught(bug):
    code = RUN.format(sim=str(SIM), host=str(SIM.parent / "host"), planted=PLANTED[bug])
    environment = os.environ | {"NUMBA_ENABLE_CUDASIM": "1"}
    answer = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment, timeout=120)
    assert answer.returncode == 1, answer.stderr
    assert answer.stderr.rstrip().splitlines()[-1].startswith(("AssertionError", "E ", "assert")), answer.stderr[-2000:]


def test_and_without_a_planted_bug_the_same_checks_pass():
    calls = "\n".join(line for planted in PLANTED.values() for line in planted.splitlines() if line.startswith("checks."))
    code = RUN.format(sim=str(SIM), host=str(SIM.parent / "host"), planted=calls)
    environment = os.environ | {"NUMBA_ENABLE_CUDASIM": "1"}
    subprocess.run([sys.executable, "-c", code], check=True, env=environment, timeout=240)
