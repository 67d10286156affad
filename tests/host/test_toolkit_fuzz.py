"""`numba-psa fuzz`: every finding by its name, limits, replay, sharing between machines, exit codes."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import fuzz_ports
import numpy as np
import pytest

from numba_psa import PSAShape
from numba_psa.errors import ParameterError
from numba_psa.testing.casefiles import read_case
from numba_psa.testing.fuzz import FINDINGS, FuzzResult, fuzz, open_database, read_expectations
from numba_psa.testing.targets import CallableTarget, ExecTarget, TargetFailure, WorkerTarget
from numba_psa.testing.values import make_case

HERE = Path(__file__).parent
ONE_PIXEL = make_case("psa_pack_qkv", PSAShape(1, 1, 1, 1, 1), np.float32)


def run_fuzz(folder: Path, *options: str) -> subprocess.CompletedProcess[str]:
    """The command line, in `folder`, where the ports lie."""
    (folder / "fuzz_ports.py").write_text((HERE / "fuzz_ports.py").read_text())
    command = [sys.executable, "-c", "from numba_psa.cli import app; app()", "fuzz", *options]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=300, check=False)


# ---- the command line -------------------------------------------------------------------------------------------------
def test_a_right_port_passes(tmp_path):
    done = run_fuzz(
        tmp_path, "--op", "psa_pack_qkv", "--target", "fuzz_ports:right", "--max-examples", "40", "--dtype", "any"
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == "psa_pack_qkv: no counterexample in 40 cases, seed 0\n"


def test_a_wrong_port_is_diagnosed_saved_and_replayed(tmp_path):
    done = run_fuzz(tmp_path, "--op", "psa_pack_qkv", "--target", "fuzz_ports:wrong", "--json", "found.json")
    assert done.returncode == 1, done.stderr
    assert "B=1 num_heads=1 KEY_DIM=1 H=1 W=1" in done.stdout
    assert "1. lo-hi-swapped" in done.stdout
    finding = json.loads((tmp_path / "found.json").read_text())["results"][0]["finding"]
    assert finding["diagnosis"][0]["cause"] == "lo-hi-swapped"
    stored = read_case(tmp_path / finding["saved"])
    assert set(stored.expected) == {"packed"}
    assert finding["replay"] in done.stdout
    words = finding["replay"].split()[2:]
    again = run_fuzz(tmp_path, *words)
    assert again.returncode == 1
    assert "lo-hi-swapped" in again.stdout
    fixed = run_fuzz(tmp_path, *[word.replace(":wrong", ":right") for word in words])
    assert fixed.returncode == 0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--op", "psa_pack", "--target", "a:b"), "--op must be all or one of"),
        (("--op", "psa_pack_qkv"), "give one of --target"),
        (("--op", "psa_pack_qkv", "--target", "fuzz_ports"), "package.module:function"),
        (("--op", "psa_pack_qkv", "--target", "no_such_module:f"), "cannot import no_such_module"),
        (("--op", "psa_pack_qkv", "--target", "fuzz_ports:no_such"), "has no no_such"),
        (("--op", "psa_pack_qkv", "--exec", "./program {in}"), "{out} is missing, the folder of outputs"),
        (("--op", "psa_pack_qkv", "--exec", "./no-such-program {in} {out}"), "cannot run ./no-such-program"),
        (("--op", "psa_pack_qkv", "--target", "fuzz_ports:right", "--dtype", "int8"), "dtype must be"),
        (("--op", "psa_pack_qkv", "--exec", "p {in} {out}", "--format", "csv"), "--format must be one of bin"),
        (("--op", "psa_pack_qkv", "--target", "fuzz_ports:right", "--replay", "nowhere"), "there is no manifest"),
        (("--op", "psa_pack_qkv", "--target", "fuzz_ports:right", "--xfails", "nowhere"), "No such file"),
        (
            ("--op", "psa_pack_qkv", "--target", "fuzz_ports:right", "--database", "redis://localhost:1"),
            "redis://localhost:1",
        ),
    ],
)
def test_usage_errors_exit_with_2_and_say_what_is_wrong(tmp_path, options, message):
    done = run_fuzz(tmp_path, *options)
    assert done.returncode == 2, done.stdout
    assert message in done.stderr
    assert "Traceback" not in done.stderr


def test_xfails_skip_and_expect_and_say_what_can_go(tmp_path):
    options = ("--op", "psa_pack_qkv", "--target", "fuzz_ports:right_or_no_odd_key_dim", "--max-examples", "60")
    (tmp_path / "known.txt").write_text("xfail psa_pack_qkv raises\nxfail * Half,wrong-values\n")
    done = run_fuzz(tmp_path, *options, "--xfails", "known.txt", "--dtype", "any")
    assert done.returncode == 0, done.stdout
    assert "failed as expected" in done.stdout
    assert "never failed, the line can go: xfail * Half,wrong-values" in done.stdout
    (tmp_path / "known.txt").write_text("skip *\n")
    done = run_fuzz(tmp_path, *options, "--xfails", "known.txt")
    assert done.returncode == 2
    assert "no case was run" in done.stderr


def test_op_all_runs_every_function_of_a_module(tmp_path):
    (tmp_path / "whole.py").write_text("from numba_psa.oracle import *\n")
    done = run_fuzz(tmp_path, "--op", "all", "--target", "whole", "--max-examples", "5")
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("no counterexample in 5 cases") == 12


def test_xfails_lines_are_checked(tmp_path):
    for line in ("maybe psa_pack_qkv", "skip nothing", "xfail * NoSuchFlag", "skip * raises", "xfail * Half raises"):
        (tmp_path / "x").write_text(f"# fine\n{line}\n")
        with pytest.raises(ParameterError, match="line 2"):
            read_expectations(tmp_path / "x")


# ---- findings ---------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("port", "kind", "text"),
    [
        ("raises", "raises", "KeyError: 'nothing here'"),
        ("hangs", "hangs", "no result after 0.5 s"),
        ("crashes", "crashes", "last words"),
        ("wrong_count", "wrong-count", ""),
        ("returns_none", "wrong-count", "NoneType"),
        ("wrong_shape", "wrong-shape", ""),
        ("wrong_dtype", "wrong-dtype", ""),
        ("modifies_inputs", "modifies-inputs", "qkv"),
        ("wrong", "wrong-values", ""),
    ],
)
def test_every_finding_has_its_name(monkeypatch, port, kind, text):
    monkeypatch.chdir(HERE)
    target = WorkerTarget(f"fuzz_ports:{port}", timeout=0.5)
    try:
        finding = fuzz("psa_pack_qkv", target, max_examples=10, evidence=False).finding
    finally:
        target.close()
    assert kind in FINDINGS
    assert finding.kind == kind
    assert text in finding.text
    if kind != "hangs":
        assert finding.case.shape == PSAShape(1, 1, 1, 1, 1)


def test_nondeterminism_is_found_unless_allowed():
    target = CallableTarget(fuzz_ports.rounds_at_random)
    finding = fuzz("flash_attention2_forward", target, max_examples=30).finding
    assert finding.kind == "nondeterministic"
    assert finding.diagnosis == []
    assert fuzz("flash_attention2_forward", target, max_examples=30, nondeterminism=True).finding is None


def test_a_buffer_that_is_not_zeroed_is_named():
    finding = fuzz("psa_extract_v_backward", CallableTarget(fuzz_ports.stale), max_examples=30).finding
    assert finding.kind == "nondeterministic"
    assert finding.diagnosis[0].cause == "stale-values"


def test_a_worker_lives_on_after_a_crash(monkeypatch):
    monkeypatch.chdir(HERE)
    target = WorkerTarget("fuzz_ports:crashes", timeout=5)
    try:
        for _ in range(2):
            with pytest.raises(TargetFailure, match="SIGABRT"):
                target.run(ONE_PIXEL)
    finally:
        target.close()


def test_same_seed_same_cases_other_seed_other_cases():
    def cases_of(seed_):
        seen = []

        def watch(qkv, num_heads):
            seen.append((qkv.shape, float(np.nan_to_num(qkv.astype(float)).sum())))
            return fuzz_ports.oracle.psa_pack_qkv(qkv, num_heads)

        fuzz("psa_pack_qkv", CallableTarget(watch), max_examples=20, seed_=seed_)
        return seen

    assert cases_of(3) == cases_of(3) != cases_of(4)


def test_counterexamples_are_shared_through_a_directory(tmp_path):
    """A second machine tries first what the first one found; a bug that 20 random cases miss is found at once."""

    def rare(qkv, num_heads):
        packed = fuzz_ports.oracle.psa_pack_qkv(qkv, num_heads)
        return packed + (1 if min(qkv.shape[2:]) >= 5 and max(qkv.shape[2:]) == 7 else 0)

    database = open_database(str(tmp_path))
    first = fuzz("psa_pack_qkv", CallableTarget(rare), max_examples=1000, database=database, evidence=False)
    assert first.finding.case.shape == PSAShape(1, 1, 1, 7, 5), "not that of a stock model at 224 px, 7×7"
    assert fuzz("psa_pack_qkv", CallableTarget(rare), max_examples=20).finding is None
    second = fuzz("psa_pack_qkv", CallableTarget(rare), max_examples=20, database=database, shrink=False, evidence=False)
    assert second.finding is not None
    assert second.examples <= 5


def test_progress_is_reported():
    seen = []
    fuzz("psa_pack_qkv", CallableTarget(fuzz_ports.right), max_examples=5, progress=lambda r: seen.append(r.examples))
    assert seen == [1, 2, 3, 4, 5]
    assert isinstance(FuzzResult("psa_pack_qkv", 0).finding, type(None))


# ---- programs ---------------------------------------------------------------------------------------------------------
PROGRAM = """
import json, sys, pathlib
source, target, what = pathlib.Path(sys.argv[1]), pathlib.Path(sys.argv[2]), sys.argv[3]
manifest = json.loads((source / "manifest.json").read_text())
if what == "fails": sys.exit("cannot do it")
if what == "silent": sys.exit(0)
qkv = (source / "input.qkv.bin").read_bytes()
(target / "output.packed.bin").write_bytes(qkv if what == "copies" else qkv[:-1])
"""


@pytest.mark.parametrize(
    ("what", "kind", "text"),
    [
        ("fails", "crashes", "exit code 1\ncannot do it"),
        ("silent", "wrong-count", "no output packed: the program wrote nothing"),
        ("short", "wrong-shape", "output.packed.bin: 15 bytes, expected 16"),
    ],
)
def test_what_a_program_can_do_wrong(tmp_path, what, kind, text):
    (tmp_path / "p.py").write_text(PROGRAM)
    target = ExecTarget(f"{sys.executable} {tmp_path / 'p.py'} {{in}} {{out}} {what}", timeout=20)
    with pytest.raises(TargetFailure) as caught:
        target.run(ONE_PIXEL)
    assert caught.value.kind == kind
    assert text in caught.value.text


def test_a_program_that_hangs_is_killed():
    target = ExecTarget(f"{sys.executable} -c 'import time; time.sleep(600)' {{in}} {{out}}", timeout=0.3)
    with pytest.raises(TargetFailure, match="hangs"):
        target.run(ONE_PIXEL)


def test_a_program_that_is_right_on_one_pixel(tmp_path):
    (tmp_path / "p.py").write_text(PROGRAM)
    target = ExecTarget(f"{sys.executable} {tmp_path / 'p.py'} {{in}} {{out}} copies", timeout=20)
    assert np.array_equal(target.run(ONE_PIXEL)[0].ravel(), ONE_PIXEL["qkv"].ravel())
