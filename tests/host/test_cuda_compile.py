"""The CUDA kernels on a machine without a GPU: PTX and ptxas for every architecture, configs, the choice table, errors."""

import importlib.util
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from numba_psa import OPERATIONS, BackendUnavailableError, DTypeError, ParameterError, PSAShape, ShapeError
from numba_psa.cuda import choice, compiling, layout, plans, tiles, tiles_wgmma
from numba_psa.cuda.choice import Problem, choose
from numba_psa.cuda.forward import SIGNATURE, make_forward
from numba_psa.devices import gpu_problem
from numba_psa.numerics import BFLOAT16, FLOAT16, FLOAT32

SCRIPT = Path(__file__).parents[2] / "scripts" / "compile_all.py"
specification = importlib.util.spec_from_file_location("compile_all", SCRIPT)
compile_all = importlib.util.module_from_spec(specification)
sys.modules["compile_all"] = compile_all
specification.loader.exec_module(compile_all)

PTXAS = compile_all.find_ptxas()
needs_ptxas = pytest.mark.skipif(PTXAS is None, reason="ptxas is not installed: pip install 'numba-psa[cu13]'")


# ---- compiling --------------------------------------------------------------------------------------------------------
@needs_ptxas
@pytest.mark.parametrize(
    ("arch", "problem"),
    [
        (80, Problem(2, 400, 400, 32, 64, FLOAT16)),
        (86, Problem(128, 399, 399, 36, 72, BFLOAT16)),
        (89, Problem(128, 400, 400, 32, 64, FLOAT32)),
        (90, Problem(128, 400, 400, 32, 64, FLOAT16)),
        (90, Problem(4, 1599, 1599, 32, 64, BFLOAT16, saves_l=True)),
        (90, Problem(4, 1600, 1600, 32, 64, FLOAT32)),
        (100, Problem(8, 70, 133, 64, 64, FLOAT16, tokens_first=True, saves_l=True)),
        (120, Problem(2, 400, 400, 64, 128, FLOAT32)),
    ],
    ids=str,
)
def test_kernels_compile_without_spills_or_float64(arch, problem):
    found = choose(problem, arch, 132)
    report = compile_all.assess(PTXAS, found.make, found.config, SIGNATURE, arch)
    assert report.problem is None, report


@needs_ptxas
@pytest.mark.parametrize(
    "config", [layout.LayoutConfig(36, 2, 2, 2), layout.LayoutConfig(36, 4, 4, 4), layout.LayoutConfig(32)]
)
def test_layout_kernels_compile(config):
    for make, signature in (
        (layout.make_psa_pack_qkv, layout.PACK_SIGNATURE),
        (layout.make_psa_merge_attn_nchw, layout.MERGE_SIGNATURE),
    ):
        assert compile_all.assess(PTXAS, make, config, signature, 80).problem is None


def test_cubins_are_cached_by_source_version_and_architecture(tmp_path, monkeypatch):
    monkeypatch.setenv("NUMBA_PSA_CACHE_DIR", str(tmp_path))
    compiling.cache_directory.cache_clear()
    config = tiles.MmaTileConfig(query_warps=1, BN=16, key_dim=8, value_dim=16)
    cubin = compiling.cubin_of(make_forward, config, SIGNATURE, 80)
    assert cubin[:4] == b"\x7fELF"
    assert b"attention_forward_kernel" in compiling.entry_of(cubin)
    (path,) = tmp_path.rglob("*.cubin")
    path.write_bytes(b"from disk")
    assert compiling.cubin_of(make_forward, config, SIGNATURE, 80) == b"from disk"
    before = compiling.cache_directory()
    monkeypatch.setattr(compiling, "REVISION", compiling.REVISION + 1)
    compiling.cache_directory.cache_clear()
    assert compiling.cache_directory() != before
    compiling.cache_directory.cache_clear()


# ---- configs and the table --------------------------------------------------------------------------------------------
BAD_CONFIGS = [
    (tiles.MmaTileConfig, {"BN": 24}, "multiple of 16"),
    (tiles.MmaTileConfig, {"stages": 1}, "stages"),
    (tiles.MmaTileConfig, {"query_warps": 40}, "1024"),
    (tiles.MmaTileConfig, {"query_tiles": 4, "BN": 128}, "spill"),
    (tiles.MmaTileConfig, {"stages": 4, "key_warps": 4}, "shared memory exceed"),
    (tiles.MmaTileConfig, {"key_warps": 2, "tokens_first": True}, "channels first"),
    (tiles.MmaTileConfig, {"copy": 3}, "copy must be"),
    (tiles.MmaTileConfig, {"key_dim": 129}, "1 to 128"),
    (tiles.MmaTileConfig, {"realigned": True}, "odd places"),
    (tiles.MmaTileConfig, {"arch": 75}, "needs sm_80"),
    (tiles.Tf32TileConfig, {"BN": 16}, "multiple of 32"),
    (tiles.Tf32TileConfig, {"copy": 2}, "copy must be"),
    (tiles_wgmma.WarpgroupTileConfig, {"arch": 80, "stages": 3}, "needs sm_90"),
    (tiles_wgmma.WarpgroupTileConfig, {"arch": 90, "stages": 3, "BN": 96}, "64, 128 or 192"),
    (tiles_wgmma.WarpgroupTileConfig, {"arch": 90, "stages": 3, "tail": 8}, "multiple of 16"),
    (tiles_wgmma.WarpgroupTileConfig, {"arch": 90, "stages": 3, "tail": 16, "key_groups": 2}, "no tail"),
    (tiles_wgmma.WarpgroupTileConfig, {"arch": 90, "stages": 3, "warpgroups": 4}, "do not fit into the tile"),
    (tiles_wgmma.Tf32WarpgroupTileConfig, {"arch": 90, "key_dim": 36}, "at most 32"),
    (tiles_wgmma.Tf32WarpgroupTileConfig, {"arch": 90, "key_groups": 4}, "1 to 3"),
    (layout.LayoutConfig, {"key_dim": 4, "item": 8}, "2 or 4 bytes"),
    (layout.LayoutConfig, {"key_dim": 4, "tokens": 12}, "multiple of 8"),
]


@pytest.mark.parametrize(("config", "fields", "message"), BAD_CONFIGS)
def test_configs_refuse_what_cannot_run(config, fields, message):
    with pytest.raises(ParameterError, match=message):
        config(**fields)


problems = st.builds(
    Problem,
    heads=st.integers(1, 4096),
    n_queries=st.integers(1, 10_000),
    n_keys=st.integers(1, 10_000),
    key_dim=st.integers(1, 64),
    value_dim=st.just(0),
    dtype=st.sampled_from((FLOAT16, BFLOAT16, FLOAT32)),
    saves_l=st.booleans(),
    exact=st.booleans(),
    alignment=st.sampled_from((4, 8, 16)),
)


@given(problem=problems, arch=st.sampled_from(compiling.ARCHITECTURES))
def test_the_table_has_a_kernel_for_every_problem(problem, arch):
    """And its copies are as narrow as the rows of that problem ask for."""
    n = problem.n_keys
    psa = Problem(
        problem.heads,
        n,
        n,
        problem.key_dim,
        2 * problem.key_dim,
        problem.dtype,
        False,
        problem.saves_l,
        problem.exact,
        problem.alignment,
    )
    found = choose(psa, arch, 132).config
    assert (n * psa.dtype.itemsize) % found.copy == 0
    assert problem.alignment % found.copy == 0 or found.copy == found.item
    assert found.saves_l == problem.saves_l
    assert (found.key_dim, found.value_dim) == (psa.key_dim, psa.value_dim)
    if hasattr(found, "tail") and found.BN in (64, 128) and found.key_warps == 1 and arch == 90 and found.tail:
        assert n % found.BN <= found.tail


@given(
    problem=st.builds(
        Problem,
        heads=st.integers(1, 999),
        n_queries=st.integers(1, 999),
        n_keys=st.integers(0, 999),
        key_dim=st.integers(1, 128),
        value_dim=st.integers(1, 128),
        dtype=st.sampled_from((FLOAT16, BFLOAT16, FLOAT32)),
        tokens_first=st.just(True),
        saves_l=st.just(True),
    ),
    arch=st.sampled_from(compiling.ARCHITECTURES),
)
def test_the_table_has_a_kernel_for_every_flash_problem(problem, arch):
    assert choose(problem, arch, 132).config.tokens_first


def test_widths_beyond_the_kernels_are_refused_with_a_way_out():
    with pytest.raises(ShapeError, match="KEY_DIM up to 64, got 65: impl='cpu'"):
        choose(Problem(1, 9, 9, 65, 130, FLOAT16), 90, 132)
    with pytest.raises(ShapeError, match="Dv up to 128, got 129"):
        choose(Problem(1, 9, 9, 8, 129, FLOAT16, tokens_first=True), 90, 132)


def test_scale_and_precision():
    assert plans.device_scale(0.0) > 0
    assert plans.device_scale(-2.0) == pytest.approx(-2 / np.log(2))
    assert plans.exactness(None, FLOAT16)
    assert not plans.exactness("tf32", FLOAT32)
    with pytest.raises(ParameterError, match="'half'"):
        plans.exactness("half", FLOAT32)
    with pytest.raises(DTypeError, match="float64"):
        plans.AttentionPlan(PSAShape(1, 1, 4, 2, 2), np.float64)


def test_the_name_of_a_config_tells_it_from_every_other():
    configs = [
        tiles.MmaTileConfig(),
        tiles.MmaTileConfig(bf16=True),
        tiles.MmaTileConfig(saves_l=True),
        tiles.Tf32TileConfig(),
        tiles.Tf32TileConfig(exact=False),
        tiles_wgmma.WarpgroupTileConfig(arch=90, stages=3),
    ]
    assert len({config.name for config in configs}) == len(configs)
    assert len({config.constants() for config in configs}) == len(configs)


# ---- without a device -------------------------------------------------------------------------------------------------
def test_importing_the_package_does_not_load_numba():
    code = "import sys, numba_psa; assert not any(name.startswith('numba.') or name == 'numba' for name in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.skipif(gpu_problem() is None, reason="there is a GPU")
@pytest.mark.parametrize("name", ["psa_attention", "psa_pack_qkv", "psa_extract_v_nchw"])
def test_a_call_without_a_gpu_says_what_is_missing(name):
    from numba_psa import cuda

    with pytest.raises(BackendUnavailableError, match=r"impl='cuda' needs a CUDA GPU.*impl='cpu'"):
        getattr(cuda, name)(np.zeros((1, 8, 2, 2), np.float32), 1)


def test_all_twelve_operations_are_there():
    from numba_psa import cuda

    assert all(callable(getattr(cuda, name)) and name in cuda.__all__ for name in OPERATIONS)
    assert choice.__doc__
