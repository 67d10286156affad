"""The kernels of the gradients on a machine without a GPU: PTX and ptxas, configs, the choice table, errors."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from test_cuda_compile import PTXAS, compile_all, needs_ptxas

from numba_psa import BackendUnavailableError, DTypeError, ParameterError, PSAShape, ShapeError, cuda
from numba_psa.cuda import compiling, tiles_backward_wgmma
from numba_psa.cuda import tiles_backward as tiles
from numba_psa.cuda.backward import BACKWARD_SIGNATURE
from numba_psa.cuda.backward_sums import SUMS_SIGNATURE, make_backward_sums
from numba_psa.cuda.choice import Problem
from numba_psa.cuda.choice_backward import choose_backward
from numba_psa.cuda.layout_backward import ADD_SIGNATURE, GradientLayoutConfig, make_add
from numba_psa.cuda.plans_backward import exponent_scale
from numba_psa.devices import gpu_problem
from numba_psa.numerics import BFLOAT16, FLOAT16, FLOAT32


@needs_ptxas
@pytest.mark.parametrize(
    ("arch", "problem"),
    [
        (80, Problem(2, 400, 400, 32, 64, FLOAT16)),
        (89, Problem(128, 400, 400, 32, 64, FLOAT32)),
        (90, Problem(128, 400, 400, 32, 64, FLOAT16)),
        (90, Problem(128, 399, 399, 32, 64, BFLOAT16)),
        (90, Problem(32, 1600, 1600, 32, 64, FLOAT32)),
        (120, Problem(8, 70, 133, 64, 64, FLOAT16, tokens_first=True)),
    ],
    ids=str,
)
def test_kernels_compile_without_spills_or_float64(arch, problem):
    found = choose_backward(problem, tiles.DQ | tiles.DKV, arch, 132)
    report = compile_all.assess(PTXAS, found.make, found.config, BACKWARD_SIGNATURE, arch)
    assert report.problem is None, report


@needs_ptxas
def test_small_kernels_compile():
    for item, copy in ((2, 16), (2, 2), (4, 4)):
        config = tiles.SumsConfig(36, 72, item, copy=copy, arch=90)
        assert compile_all.assess(PTXAS, make_backward_sums, config, SUMS_SIGNATURE, 90).problem is None
    assert compile_all.assess(PTXAS, make_add, GradientLayoutConfig(8, adds=True), ADD_SIGNATURE, 80).problem is None


BAD_CONFIGS = [
    (tiles.MmaBackwardConfig, {"BN": 24}, "multiple of 16"),
    (tiles.MmaBackwardConfig, {"passes": 4}, "passes must be"),
    (tiles.MmaBackwardConfig, {"stages": 5}, "stages"),
    (tiles.MmaBackwardConfig, {"row_warps": 33}, "1024"),
    (tiles.MmaBackwardConfig, {"tokens_first": True, "row_warps": 1, "copy": 2}, "fewer than a row has chunks"),
    (tiles.MmaBackwardConfig, {"key_dim": 129}, "1 to 128"),
    (tiles.MmaBackwardConfig, {"saves_l": True}, "for the forward"),
    (tiles.Tf32BackwardConfig, {"BN": 16}, "multiple of 32"),
    (tiles.Tf32BackwardConfig, {"key_dim": 128, "value_dim": 128, "row_warps": 4, "arch": 120}, "shared memory exceed"),
    (tiles_backward_wgmma.WarpgroupBackwardConfig, {"arch": 80}, "needs sm_90"),
    (tiles_backward_wgmma.WarpgroupBackwardConfig, {"arch": 90, "key_step": 48}, "32 or 64"),
    (tiles_backward_wgmma.WarpgroupBackwardConfig, {"arch": 90, "BN": 32}, "BN must be 64"),
    (tiles_backward_wgmma.WarpgroupBackwardConfig, {"arch": 90, "row_warps": 2}, "4 or 8"),
    (
        tiles_backward_wgmma.WarpgroupBackwardConfig,
        {"arch": 90, "key_dim": 64, "value_dim": 128},
        "more than registers hold",
    ),
    (tiles_backward_wgmma.WarpgroupBackwardConfig, {"arch": 90, "tokens_first": True}, "channels first"),
    (tiles_backward_wgmma.Tf32WarpgroupBackwardConfig, {"arch": 90, "key_dim": 36}, "at most 32"),
    (tiles_backward_wgmma.Tf32WarpgroupBackwardConfig, {"arch": 90, "stages": 2}, "stages 3"),
]


@pytest.mark.parametrize(("config", "fields", "message"), BAD_CONFIGS)
def test_configs_refuse_what_cannot_run(config, fields, message):
    with pytest.raises(ParameterError, match=message):
        config(**fields)


widths = st.integers(1, 128)


@given(
    problem=st.builds(
        Problem,
        heads=st.integers(1, 999),
        n_queries=st.integers(0, 9999),
        n_keys=st.integers(0, 9999),
        key_dim=widths,
        value_dim=widths,
        dtype=st.sampled_from((FLOAT16, BFLOAT16, FLOAT32)),
        tokens_first=st.just(True),
        alignment=st.sampled_from((4, 8, 16)),
    ),
    arch=st.sampled_from(compiling.ARCHITECTURES),
    passes=st.sampled_from((1, 2, 3)),
)
def test_the_table_has_a_kernel_for_every_problem(problem, arch, passes):
    """Of either layout, and its copies are as narrow as rows and addresses ask for."""
    found = [choose_backward(problem, passes, arch, 132).config]
    n, key_dim = problem.n_keys, min(problem.key_dim, 64)
    psa = Problem(problem.heads, n, n, key_dim, 2 * key_dim, problem.dtype, alignment=problem.alignment)
    found.append(choose_backward(psa, passes, arch, 132).config)
    for wanted, config in zip((problem, psa), found, strict=True):
        assert config.copy == wanted.copy
        assert config.passes == passes
        assert (config.key_dim, config.value_dim) == (wanted.key_dim, wanted.value_dim)


def test_widths_types_and_scales():
    with pytest.raises(ShapeError, match="KEY_DIM up to 64, got 65: impl='cpu'"):
        choose_backward(Problem(1, 9, 9, 65, 130, FLOAT16), 3, 90, 132)
    with pytest.raises(DTypeError, match="float64"):
        cuda.plan_psa_attention_backward(PSAShape(1, 1, 4, 2, 2), np.float64)
    assert exponent_scale(0.5, FLOAT32) == 0.5
    assert exponent_scale(0.5, FLOAT16) == pytest.approx(0.5 / np.log(2))
    assert exponent_scale(0.0, FLOAT32) > 0


@pytest.mark.skipif(gpu_problem() is None, reason="there is a GPU")
def test_a_call_without_a_gpu_says_what_is_missing():
    qkv, d_out = np.zeros((1, 8, 2, 2), np.float32), np.zeros((1, 4, 2, 2), np.float32)
    with pytest.raises(BackendUnavailableError, match=r"impl='cuda' needs a CUDA GPU.*impl='cpu'"):
        cuda.psa_attention_backward(qkv, d_out, 1)
