"""The simulator checks of the layers' convolutions must catch bugs planted in their steps, each in its own process."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

SIM = Path(__file__).parents[1] / "sim"

PLANTED = {
    "the sum of one warp is taken for all": """
import numba_psa.cuda.convolution as kernel
original = kernel.publish_sums
def publish(tile, acc, sums, lane):
    for i in range(acc.shape[1]):
        acc[:, i] *= sums == 0
    original(tile, acc, sums, lane)
kernel.publish_sums = publish
checks.test_convolution(*checks.CASES[0])
""",
    "the other piece is read at its own channels": """
import numba_psa.cuda.convolution_steps as steps
steps.channel_address = lambda tile, source, channel: source.x0 + channel * source.row_bytes
checks.test_convolution(*checks.CASES[2])
""",
    "columns wrap around the edge of the picture": """
import numba_psa.cuda.convolution_steps as steps
steps.neighbour_exists = lambda tap, i, columns: True
checks.test_convolution(*checks.CASES[9])
""",
    "16-bit pairs are exchanged": """
import numba_psa.cuda.convolution_tiles as tiles
original = checks.packed
def packed(weight, item):
    found = original(weight, item)
    return found.reshape(-1, 2)[:, ::-1].reshape(-1).copy() if item == 2 else found
checks.packed = packed
checks.test_convolution(*checks.CASES[4])
""",
    "channels beyond the last are numbers": """
import numba_psa.cuda.convolution_steps as steps
original = steps.load_row
def load_row(tile, edge, row, address, token, tokens, there):
    original(tile, edge, row, address, token, tokens, True)
steps.load_row = load_row
checks.test_nan_stays_in_its_token()
""",
    "the depthwise kernel is turned around": """
import numba_psa.cuda.convolution as kernel
original = kernel.ld_global_f32
kernel.ld_global_f32 = lambda address: original(address) if address % 36 else original(address + 32)
checks.test_depthwise_on_the_values_of_qkv_added_in_place({}, 2, 3, 4, 8)
""",
    "the residual is forgotten": """
original = planned_cuda.CudaPlan.conv
planned_cuda.CudaPlan.conv = lambda self, conv, x, add=None: original(self, conv, x)
layer_checks.test_layers_agree_with_the_oracle(layer_checks.nn.PSABlock, "cuda", layer_checks.FLOAT16, {})
""",
    "buffers that are in use share a place": """
planned_cuda.places = lambda buffers, item: ([0] * len(buffers), max(item * buffer.elements for buffer in buffers))
layer_checks.test_layers_agree_with_the_oracle(layer_checks.nn.PSABlock, "cuda", layer_checks.FLOAT16, {})
""",
    "addresses are those of the first call": """
original = planned_cuda.CudaPlan._point
planned_cuda.CudaPlan._point = lambda self, x, y: None if self._pointed else original(self, x, y)
layer_checks.test_out_and_addresses_that_change()
""",
}
RUN = """
import sys
sys.path.insert(0, {host!r}); sys.path.insert(0, {sim!r}); sys.setswitchinterval(5e-5)
import warnings; warnings.simplefilter("ignore")
import test_cuda_convolution as checks
import test_nn as layer_checks
from numba_psa.nn import planned_cuda
planned_cuda.multiprocessors = lambda device: 0  # the fewest threads
{planted}
"""


def run(planted: str) -> subprocess.CompletedProcess:
    code = RUN.format(sim=str(SIM), host=str(SIM.parent / "host"), planted=planted)
    environment = os.environ | {"NUMBA_ENABLE_CUDASIM": "1"}
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment, timeout=240)


@pytest.mark.parametrize("bug", PLANTED)
def test_planted_bugs_are_caught(bug):
    answer = run(PLANTED[bug])
    assert answer.returncode == 1, answer.stderr
    assert "\nAssertionError" in answer.stderr, answer.stderr[-2000:]


def test_and_without_a_planted_bug_the_same_checks_pass():
    lines = dict.fromkeys(line for bug in PLANTED.values() for line in bug.splitlines() if "checks.test_" in line)
    answer = run("\n".join(lines))
    assert answer.returncode == 0, answer.stderr
