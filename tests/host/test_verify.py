"""`numba-psa verify` and `doctor`, as a user runs them."""

import json

import numpy as np
import pytest
from typer.testing import CliRunner

from numba_psa import ShapeError, cpu
from numba_psa.cli import app
from numba_psa.contract import OPERATIONS
from numba_psa.shapes import PSAShape
from numba_psa.testing import verify as module


def run(*arguments):
    return CliRunner().invoke(app, [str(x) for x in arguments])


def test_the_cpu_path_passes_at_full_size(tmp_path):
    result = run("verify", "--impl", "cpu", "--json", tmp_path / "table.json")
    assert result.exit_code == 0, result.output
    table = json.loads((tmp_path / "table.json").read_text())
    assert {row["operation"] for row in table["rows"]} == set(OPERATIONS)
    assert any(row["shape"] == "1,2,32,20,20" and row["problem"] == "yolo26n_astronaut" for row in table["rows"])
    assert all(row["passed"] for row in table["rows"])
    assert table["about"]["versions"]["numpy"] == np.__version__


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float64"])
def test_other_dtypes(dtype):
    result = run("verify", "--impl", "cpu", "--dtype", dtype, "--shape", "1,2,5,3,4", "--seed", 3)
    assert result.exit_code == 0, result.output
    assert "12 checked, 12 ok" in result.output


def test_own_tensors(tmp_path):
    rng = np.random.default_rng(0)
    np.savez(tmp_path / "psa.npz", qkv=rng.standard_normal((1, 24, 2, 3)).astype(np.float32), num_heads=2)
    assert "12 checked, 12 ok" in run("verify", "--impl", "cpu", "--input", tmp_path / "psa.npz").output
    q, k, v = (rng.standard_normal((2, n, 4)).astype(np.float32) for n in (3, 5, 5))
    np.savez(tmp_path / "flash.npz", q=q, k=k, v=v)
    assert "3 checked, 3 ok" in run("verify", "--impl", "cpu", "--input", tmp_path / "flash.npz").output


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--op", "psa_pack"), "--op must be one of"),
        (("--impl", "gpu"), "--impl must be one of"),
        (("--dtype", "int8"), "dtype must be"),
        (("--shape", "1,2,3"), "five sizes"),
        (("--shape", "1,0,3,4,5"), "num_heads must be at least 1"),
        (("--input", "nothing.npz"), "nothing.npz"),
    ],
)
def test_wrong_usage_is_one_line_and_exit_code_2(arguments, message):
    result = run("verify", *arguments)
    assert result.exit_code == 2
    assert message in result.output
    assert len(result.output.strip().splitlines()) == 1


def test_a_foreign_file_is_refused(tmp_path):
    (tmp_path / "x.npz").write_bytes(b"not a zip file")
    assert run("verify", "--input", tmp_path / "x.npz").exit_code == 2
    np.savez(tmp_path / "y.npz", other=np.zeros(3))
    result = run("verify", "--input", tmp_path / "y.npz")
    assert result.exit_code == 2
    assert "it holds other" in result.output


def test_a_wrong_kernel_fails(monkeypatch):
    right = cpu.psa_merge_attn_nchw
    monkeypatch.setattr(cpu, "psa_merge_attn_nchw", lambda lo, hi, *size: right(hi, lo, *size))
    result = run("verify", "--impl", "cpu", "--op", "psa_merge_attn_nchw", "--shape", "1,2,5,3,4")
    assert result.exit_code == 1
    assert "FAIL" in result.output


def test_a_kernel_that_raises_is_a_finding_not_a_crash():
    class Broken:
        @staticmethod
        def psa_pack_qkv(qkv, num_heads):
            raise RuntimeError("illegal memory access")

    problem = module.synthetic(np.dtype(np.float32), 0, [PSAShape(1, 1, 1, 1, 1)])
    (row,) = module.verify("mine", Broken, ["psa_pack_qkv"], problem)
    assert not row.passed
    assert "illegal memory access" in row.reason


def test_what_an_implementation_refuses_is_no_failure():
    class Narrow:
        @staticmethod
        def psa_pack_qkv(qkv, num_heads):
            raise ShapeError("KEY_DIM = 5 is more than 4")

    problem = module.synthetic(np.dtype(np.float32), 0, [PSAShape(1, 1, 5, 1, 1)])
    (row,) = module.verify("mine", Narrow, ["psa_pack_qkv"], problem)
    assert row.refused
    assert not row.passed
    result = run("verify", "--impl", "cuda", "--op", "psa_attention", "--shape", "1,1,5,1,1")
    assert result.exit_code in (0, 2)  # 2: no GPU, said in one line


def test_doctor_reports():
    result = run("doctor")
    assert result.exit_code == 0
    for word in ("numba-cuda", "simulator", "CPU threads", "numba-psa[" if "missing" in result.output else "numba"):
        assert word in result.output
