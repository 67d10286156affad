"""Golden vectors: the same bytes, right values, every format, and clear errors for what is damaged, foreign or missing."""

from __future__ import annotations

import hashlib
import json
import math
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from numba_psa import OPERATIONS, oracle
from numba_psa.errors import ParameterError
from numba_psa.numerics import FLOAT64
from numba_psa.shapes import AttentionShape, PSAShape
from numba_psa.testing import exact, vectors
from numba_psa.testing.casefiles import FORMATS, VectorError, read_case, read_manifest
from numba_psa.testing.check import truth
from numba_psa.testing.compare import compare
from numba_psa.testing.mutants_attention import MUTANTS
from numba_psa.testing.values import make_case
from numba_psa.testing.variants import VARIANTS


def tree(folder: Path) -> dict[str, str]:
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    return {str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


def answer(folder: Path, answers: Path, namespace=oracle, ids=None) -> None:
    """What a port would write for each case."""
    for entry in read_manifest(folder, "vectors")["cases"]:
        if ids is None or entry["id"] in ids:
            case = read_case(folder / entry["id"]).case
            for name, x in case.operation(namespace, case).items():
                path = answers / entry["id"] / f"output.{name}.bin"
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_bytes(np.ascontiguousarray(x).tobytes())


def run_vectors(*options: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", "from numba_psa.cli import app; app()", "vectors", *options]
    return subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)


@pytest.fixture(scope="module")
def smoke(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("vectors") / "smoke"
    assert vectors.write(folder, "smoke") == 12
    return folder


@pytest.fixture(scope="module")
def standard(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("vectors") / "standard"
    vectors.write(folder, "standard")
    return folder


# ---- the arithmetic ---------------------------------------------------------------------------------------------------
def test_exp_and_log_are_accurate():
    rng = np.random.default_rng(0)
    x = np.concatenate((rng.uniform(-700, 700, 5000), rng.uniform(-1, 1, 5000)))
    assert np.max(np.abs(exact.exp(x) / np.array([math.exp(v) for v in x]) - 1)) < 1e-15
    y = np.concatenate((np.exp(rng.uniform(-300, 300, 5000)), rng.uniform(0.5, 2, 5000)))
    want = np.array([math.log(v) for v in y])
    assert np.max(np.abs(exact.log(y) - want) / np.maximum(np.abs(want), 1e-3)) < 1e-12
    assert np.array_equal(
        exact.exp(np.array([-np.inf, 0, np.inf, np.nan, 710])), [0, 1, np.inf, np.nan, np.inf], equal_nan=True
    )
    assert np.array_equal(exact.log(np.array([0, 1, np.inf, np.nan])), [-np.inf, 0, np.inf, np.nan], equal_nan=True)


@pytest.mark.parametrize("op", OPERATIONS)
def test_results_are_those_of_the_oracle(op):
    shape = PSAShape(2, 2, 4, 3, 5)
    for values in ("masked-rows", "nan", "wide30", "normal") if OPERATIONS[op].scaled else ("special", "ramp"):
        inner = shape.attention if OPERATIONS[op].arrays[0] == "q" else shape
        case = make_case(op, inner, FLOAT64, values=values, targets=bool(OPERATIONS[op].adds))
        for name, x in vectors.results(case).items():
            want = truth(OPERATIONS[op], case)[name]
            assert np.allclose(
                x, want, rtol=1e-9, atol=1e-9 * np.nanmax(np.abs(want[np.isfinite(want)]), initial=1), equal_nan=True
            )


# ---- the files --------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("storage", FORMATS)
def test_every_format_gives_the_same_bytes_twice_and_the_same_arrays(tmp_path, smoke, storage):
    vectors.write(tmp_path / "a", "smoke", storage=storage)
    vectors.write(tmp_path / "b", "smoke", storage=storage)
    assert tree(tmp_path / "a") == tree(tmp_path / "b")
    for entry in read_manifest(smoke, "vectors")["cases"]:
        one, other = read_case(smoke / entry["id"]), read_case(tmp_path / "a" / entry["id"])
        assert one.case.arguments.keys() == other.case.arguments.keys()
        for a, b in zip(one.case.args, other.case.args, strict=True):
            assert np.array_equal(a, b)
        assert all(np.array_equal(x, other.expected[name]) for name, x in one.expected.items())
    outcomes = list(vectors.check(tmp_path / "a", tmp_path / "b"))
    assert [o.status for o in outcomes] == ["passed"] * 12


def test_vectors_of_this_version_are_these_bytes(smoke):
    """The version policy: if this digest changes, so does the minor version, and its notes say why."""
    digest = hashlib.sha256(json.dumps(tree(smoke)).encode()).hexdigest()
    assert digest == "6fb24fc29f0375b215ce8ec0c728632fee83ad3a44ae5716c7710d613b59bf95"


def test_bytes_do_not_depend_on_blas_threads_or_simd(smoke, tmp_path):
    script = f"from numba_psa.testing import vectors; from pathlib import Path; vectors.write(Path({str(tmp_path / 'v')!r}))"
    environment = {
        "OPENBLAS_NUM_THREADS": "1",
        "OPENBLAS_CORETYPE": "Prescott",
        "NPY_DISABLE_CPU_FEATURES": "AVX2 FMA3 AVX512F",
    }
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", script],
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert tree(tmp_path / "v") == tree(smoke)


def test_bfloat16_is_stored_as_uint16_and_named(tmp_path):
    case = make_case("psa_pack_qkv", PSAShape(1, 1, 2, 1, 3), "bfloat16", values="special")
    for storage in FORMATS:
        vectors.store(tmp_path / storage, case, "case", storage)
        entry = read_manifest(tmp_path / storage, "case")["arrays"][0]
        assert (entry["dtype"], entry["stored_as"]) == ("bfloat16", "uint16")
        stored = read_case(tmp_path / storage)
        assert stored.case["qkv"].dtype == case.dtype
        assert stored.case["qkv"].tobytes() == case["qkv"].tobytes()
        assert compare(stored.expected["packed"], case=case).passed


def test_layouts_are_kept_for_a_replay(tmp_path):
    case = make_case("psa_pack_qkv", PSAShape(1, 1, 2, 2, 3), np.float32, layouts={"qkv": "reversed"})
    vectors.store(tmp_path / "c", case, "case")
    assert read_case(tmp_path / "c").case.layouts == {"qkv": "reversed"}


# ---- checking ---------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("variant", VARIANTS[:8], ids=lambda v: v.name)
def test_correct_variants_pass_the_standard_vectors(standard, tmp_path, variant):
    answer(standard, tmp_path, variant)
    failed = [(o.id, str(o.report)) for o in vectors.check(standard, tmp_path) if o.status != "passed"]
    assert failed == []


def test_planted_bugs_fail_the_standard_vectors(standard, tmp_path):
    """All but those that need a shape or a layout in memory that no vector has."""
    survivors = []
    entries = read_manifest(standard, "vectors")["cases"]
    stored = {entry["id"]: read_case(standard / entry["id"]) for entry in entries}
    for mutant in MUTANTS:
        cases = [s for s in stored.values() if s.case.op == mutant.op]
        for s in cases:
            with np.errstate(all="ignore"):
                returned, _ = s.case.call(mutant.function)
            if not vectors.judge_stored(s, dict(zip(s.case.operation.outputs, returned, strict=True))).passed:
                break
        else:
            survivors.append(mutant.name)
    assert survivors == ["psa_pack_qkv/ignores-strides"]


def test_partial_answers_wrong_ones_and_damaged_ones(smoke, tmp_path):
    ids = [entry["id"] for entry in read_manifest(smoke, "vectors")["cases"]]
    answers = tmp_path / "answers"
    answer(smoke, answers, ids=ids[:4])
    done = run_vectors("check", str(smoke), "--actual", str(answers))
    assert (done.returncode, done.stdout) == (0, "4 passed, 0 failed, 8 missing\n")
    packed = next(answers.glob("psa_pack_qkv-*/output.packed.bin"))
    values = np.frombuffer(packed.read_bytes(), np.float32).reshape(4, -1)
    packed.write_bytes(values[[0, 1, 3, 2]].tobytes())
    next(answers.glob("*/output.l.bin")).write_bytes(b"abc")
    done = run_vectors("check", str(smoke), "--actual", str(answers), "--json", str(tmp_path / "out.json"))
    assert done.returncode == 1
    assert "1. lo-hi-swapped" in done.stdout
    assert "output.l.bin: 3 bytes, expected" in done.stdout
    assert done.stdout.endswith("2 passed, 2 failed, 8 missing\n")
    assert json.loads((tmp_path / "out.json").read_text())["counts"] == {"passed": 2, "failed": 2, "missing": 8}
    (tmp_path / "nothing").mkdir()
    done = run_vectors("check", str(smoke), "--actual", str(tmp_path / "nothing"))
    assert (done.returncode, done.stdout) == (1, "0 passed, 0 failed, 12 missing\n")


def damage_array(case: Path) -> None:
    path = next(case.glob("input.*.bin"))
    path.write_bytes(path.read_bytes()[:-1] + b"\x55")


def damage_text(case: Path) -> None:
    (case / "manifest.json").write_text("{ not json")


def foreign(case: Path) -> None:
    (case / "manifest.json").write_text('{"format": "something else"}')


def newer(case: Path) -> None:
    edit(case, version=99)


def escape(case: Path) -> None:
    manifest = json.loads((case / "manifest.json").read_text())
    manifest["arrays"][0]["file"] = "../../secret"
    (case / "manifest.json").write_text(json.dumps(manifest))


def unknown_op(case: Path) -> None:
    edit(case, op="attention")


def no_heads(case: Path) -> None:
    edit(case, parameters={})


def wrong_heads(case: Path) -> None:
    edit(case, parameters={"num_heads": 5})


def edit(case: Path, **changes) -> None:
    manifest = json.loads((case / "manifest.json").read_text())
    (case / "manifest.json").write_text(json.dumps(manifest | changes))


@pytest.mark.parametrize(
    ("harm", "message"),
    [
        (damage_array, "damaged"),
        (damage_text, "not a manifest"),
        (foreign, "expected a manifest with format"),
        (newer, "format version 99"),
        (escape, "does not match"),
        (unknown_op, "is not one of"),
        (no_heads, "needs num_heads"),
        (wrong_heads, "48 channels"),
        (shutil.rmtree, "there is no manifest"),
    ],
    ids=lambda x: x.__name__ if callable(x) else "",
)
def test_a_damaged_or_foreign_case_is_a_clear_error(smoke, tmp_path, harm, message):
    shutil.copytree(smoke, tmp_path / "v")
    case = next((tmp_path / "v").glob("psa_pack_qkv-*"))
    harm(case)
    with pytest.raises(VectorError, match=message):
        read_case(case)
    done = run_vectors("show", str(case))
    assert done.returncode == 2
    assert message in done.stderr
    assert "Traceback" not in done.stderr
    with pytest.raises(VectorError):
        list(vectors.check(tmp_path / "v", smoke))


@pytest.mark.parametrize("storage", ["npz", "safetensors"])
def test_a_broken_archive_is_a_clear_error(tmp_path, storage):
    vectors.write(tmp_path / "v", "smoke", ("psa_pack_qkv",), storage)
    case = next((tmp_path / "v").glob("psa_pack_qkv-*"))
    (tmp_path / "a" / case.name).mkdir(parents=True)
    for content in (b"", b"not an archive", (case / f"outputs.{storage}").read_bytes()[:100]):
        (tmp_path / "a" / case.name / f"outputs.{storage}").write_bytes(content)
        (outcome,) = vectors.check(tmp_path / "v", tmp_path / "a")
        assert outcome.status == "failed"
        assert f"not a .{storage} file" in outcome.problem


def test_writing_refuses_what_is_not_vectors(tmp_path, smoke):
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(VectorError, match="holds no vectors"):
        vectors.write(tmp_path, "smoke")
    with pytest.raises(VectorError, match="holds no vectors"):
        vectors.write(tmp_path / "notes.txt", "smoke")
    with pytest.raises(ParameterError, match="--suite"):
        vectors.write(tmp_path / "x", "huge")
    assert run_vectors("write", str(tmp_path / "x"), "--op", "nothing").returncode == 2
    assert run_vectors("write", str(tmp_path / "x"), "--format", "csv").returncode == 2


def test_show_prints_sizes_flags_and_tolerance(smoke):
    done = run_vectors("show", str(next(smoke.glob("psa_attention-*"))))
    assert done.returncode == 0
    for text in (
        "B=2 num_heads=3 KEY_DIM=4 H=3 W=5",
        "num_heads = 3",
        "NonSquare: H differs from W",
        "input.qkv.bin",
        "tolerance: norm",
    ):
        assert text in done.stdout


def test_suites_cover_what_they_say():
    for suite in vectors.SUITES:
        ids = [recipe.id for recipe in vectors.recipes(suite)]
        assert len(ids) == len(set(ids))
    flags = set()
    for recipe in vectors.recipes("standard"):
        flags.update(recipe.case().flags)
    assert {
        "NonSquare",
        "NonPow2",
        "Tail",
        "LargeLogit",
        "MaskedRow",
        "MaskedKey",
        "Empty",
        "Accumulates",
        "HasNaN",
        "Half",
    } <= flags
    shapes = {recipe.shape for recipe in vectors.recipes("yolo")}
    assert PSAShape(1, 4, 36, 20, 20) in shapes
    assert AttentionShape(2, 400, 400, 32, 32) in shapes


# ---- a program in another language --------------------------------------------------------------------------------------
@pytest.fixture(scope="module")
def compiled(tmp_path_factory):
    """compile(flag) -> the program; skips where there is no C compiler."""
    compiler = shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
    if compiler is None:
        pytest.skip("no C compiler (cc, gcc or clang) on this machine")
    source, folder = Path(__file__).parents[1] / "c" / "psa_pack_qkv.c", tmp_path_factory.mktemp("c")
    assert len(source.read_text().splitlines()) < 80

    def build(*flags: str) -> Path:
        program = folder / ("psa_pack_qkv" + "".join(flags))
        subprocess.run(
            [compiler, "-O2", "-Wall", "-Werror", *flags, "-o", str(program), str(source)], check=True, timeout=60
        )
        return program

    return build


@pytest.mark.parametrize(
    ("flags", "cause"), [((), None), (("-DSWAP_LO_HI",), "lo-hi-swapped"), (("-DSECTION_MAJOR",), "section-major")]
)
def test_a_c_program_on_vectors_and_under_the_fuzzer(compiled, standard, tmp_path, flags, cause):
    program = compiled(*flags)
    for entry in read_manifest(standard, "vectors")["cases"]:
        if entry["op"] == "psa_pack_qkv":
            (tmp_path / entry["id"]).mkdir()
            subprocess.run([program, standard / entry["id"], tmp_path / entry["id"]], check=True, timeout=20)
    outcomes = list(vectors.check(standard, tmp_path, ("psa_pack_qkv",)))
    assert {o.status for o in outcomes} <= {"passed", "failed"}
    if cause is None:
        assert all(o.status == "passed" for o in outcomes)
    else:
        assert cause in {d.cause for o in outcomes if o.status == "failed" for d in o.report.diagnosis[:1]}

    command = [sys.executable, "-c", "from numba_psa.cli import app; app()", "fuzz", "--op", "psa_pack_qkv"]
    command += ["--exec", f"{program} {{in}} {{out}}", "--dtype", "any", "--max-examples", "50"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == (0 if cause is None else 1), done.stderr
    assert cause is None or f"1. {cause}" in done.stdout
