"""Golden vectors: cases with their right results on disk, for ports in any language.

The same version gives the same bytes on every machine (see `exact` and `values`). Vectors change only with the minor version
of numba-psa, and then the notes of that version say which and why; the format on disk has a version of its own in every
manifest.
"""

from __future__ import annotations

import functools
import hashlib
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from numba_psa import __version__, oracle
from numba_psa.contract import OPERATIONS
from numba_psa.errors import ParameterError
from numba_psa.numerics import WORST_FACTOR, accumulator_dtype, float_dtype, judge, machine_epsilon
from numba_psa.shapes import V_LO, AttentionShape, K, PSAShape, Q
from numba_psa.testing import exact
from numba_psa.testing.case import Case
from numba_psa.testing.casefiles import (
    VERSION,
    StoredCase,
    Tolerance,
    VectorError,
    read_case,
    read_manifest,
    read_outputs,
    write_case,
    write_manifest,
)
from numba_psa.testing.check import factor_of, move, moved_arguments, upstream_norm
from numba_psa.testing.compare import Problem, Report, problem_of, within
from numba_psa.testing.stock import STOCK_MODELS, STOCK_SIDES
from numba_psa.testing.values import make_case, value_kinds

Outputs = dict[str, np.ndarray]
SUITES = ("smoke", "standard", "yolo")


# ---- right results, the same bits everywhere --------------------------------------------------------------------------
def results(case: Case, compute: type = np.float64, keep: Callable[[np.ndarray], np.ndarray] = lambda x: x) -> Outputs:
    """{output: result in `compute`, not rounded}; `keep` is what psa_attention_backward does to the o and l inside it."""
    operation = case.operation
    if operation.kind == "layout":
        return operation(oracle, case)
    if not isinstance(case.shape, PSAShape):
        given = [case[name] for name in operation.arrays] + [case.arguments.get("softmax_scale")]
        if operation.kind == "forward":
            return dict(zip("ol", exact.forward(*given, compute), strict=True))
        found = dict(zip(("dq", "dk", "dv"), exact.gradients(*given, compute), strict=True))
        for name in case.targets:
            if name in operation.adds:
                found[name] = found[name] + case[name].astype(compute)
        return {name: found[name] for name in operation.outputs}
    scale = case.arguments.get("softmax_scale")
    packed = oracle.psa_pack_qkv(case["qkv"], case["num_heads"])
    q, k, v = packed[Q], packed[K], np.concatenate(list(packed[V_LO:]), axis=2)
    o, l = exact.forward(q, k, v, scale, compute)
    place = {"num_heads": case["num_heads"], "height": case.shape.height, "width": case.shape.width}
    if operation.kind == "forward":
        return {"out": oracle.psa_merge_attn_nchw(*np.split(o, 2, axis=2), **place)}
    do = np.concatenate(oracle.psa_merge_attn_backward(case["d_out"], case["num_heads"]), axis=2)
    dq, dk, dv = exact.gradients(q, k, v, keep(o), do, keep(l), scale, compute)
    return {"d_qkv": oracle.psa_pack_qkv_backward(np.stack((dq, dk, *np.split(dv, 2, axis=2))), **place)}


def store(folder: Path, case: Case, id: str, storage: str = "bin") -> Path:
    """Writes `case` with its expected outputs and tolerances; returns `folder`."""
    write_vector(folder, case, id, storage)
    return folder


def write_vector(folder: Path, case: Case, id: str, storage: str = "bin") -> str:
    """Writes `case` with its expected outputs and tolerances; returns the sha256 of its manifest."""
    wide = results(case)
    with np.errstate(all="ignore"):
        expected = {name: x.astype(case.result_dtype(name)) for name, x in wide.items()}
    shapes = {name: x.shape for name, x in expected.items()}
    return write_case(
        folder, case, shapes, id=id, storage=storage, expected=expected, tolerances=_tolerances(case, wide, expected)
    )


def _tolerances(case: Case, wide: Mapping[str, np.ndarray], expected: Mapping[str, np.ndarray]) -> dict[str, Tolerance]:
    if case.operation.kind == "layout":
        return {name: Tolerance(0.0, 0.0, 0.0, "values are moved, or added and rounded once: exact") for name in expected}
    compute = accumulator_dtype(case.dtype)
    with np.errstate(all="ignore"):
        references = [{name: x.astype(case.result_dtype(name)) for name, x in results(case, compute.type).items()}]
    width = case.shape.key_dim if isinstance(case.shape, PSAShape) else case.shape.head_dim
    for pattern, moved in enumerate(moved_arguments(case.operation, case)):
        keep = functools.partial(move, pattern=pattern, name="saved", dtype=case.dtype, width=width)
        references.append(results(Case(case.op, moved), keep=keep))
    size, factor, found = upstream_norm(case.operation, case), factor_of(case.operation, case), {}
    for name, x in expected.items():
        verdict = judge(x, wide[name], [r[name] for r in references], factor=factor, reference_norm=size)
        half_eps = machine_epsilon(x.dtype) / 2
        reason = (
            f"{factor} x the error of the same formula in {compute.name}, or of the exact result of inputs that differ in "
            f"its last place, + 1.5 eps of {x.dtype.name}: one for the result, half for the rounding of expected"
        )
        norm, worst = verdict.budget + half_eps, verdict.worst_budget + WORST_FACTOR * half_eps
        found[name] = Tolerance(_rounded_up(norm), _rounded_up(worst), _rounded_up(size), reason)
    return found


def _rounded_up(x: float) -> float:
    """To two digits: norms depend on the machine in their last bits, which must not reach the file."""
    if x == 0 or not math.isfinite(x):
        return 0.0 if x == 0 else 1e300
    exponent = math.floor(math.log10(x)) - 1
    return float(f"{math.ceil(x * (1 - 1e-9) / 10.0**exponent)}e{exponent}")


# ---- suites -----------------------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Recipe:
    """How a case of a suite is made."""

    op: str
    shape: PSAShape | AttentionShape
    dtype: str = "float32"
    values: str | None = None
    softmax_scale: float | None = None
    targets: bool = False
    seed: int = 1

    def case(self) -> Case:
        return make_case(
            self.op,
            self.shape,
            float_dtype(self.dtype),
            values=self.values,
            seed=self.seed,
            softmax_scale=self.softmax_scale,
            targets=self.targets,
            forward=exact.saved,
        )

    @property
    def id(self) -> str:
        s = self.shape
        if isinstance(s, PSAShape):
            size = f"b{s.batch}h{s.num_heads}k{s.key_dim}-{s.height}x{s.width}"
        else:
            size = f"bh{s.bh}-q{s.n_ctx_q}k{s.n_ctx_k}-d{s.head_dim}v{s.value_dim}"
        parts = [self.op, size, self.dtype, self.values or value_kinds(self.op)[0]]
        parts += [f"scale{self.softmax_scale:g}"] if self.softmax_scale is not None else []
        return "-".join(parts + (["targets"] if self.targets else []))


def recipes(suite: str, ops: tuple[str, ...] = tuple(OPERATIONS)) -> Iterator[Recipe]:
    """smoke: one small ragged case an operation. standard: shapes, dtypes and every kind of values. yolo: stock models."""
    if suite not in SUITES:
        raise ParameterError(f"--suite must be one of {', '.join(SUITES)}, got {suite!r}")
    for op in ops:
        yield from {"smoke": _smoke, "standard": _standard, "yolo": _yolo}[suite](op)


def _of(op: str, psa: PSAShape) -> PSAShape | AttentionShape:
    return psa.attention if OPERATIONS[op].arrays[0] == "q" else psa


def _smoke(op: str) -> Iterator[Recipe]:
    values = "ramp" if OPERATIONS[op].kind == "layout" else "normal"
    yield Recipe(op, _of(op, PSAShape(2, 3, 4, 3, 5)), values=values, targets=bool(OPERATIONS[op].adds))


def _standard(op: str) -> Iterator[Recipe]:
    operation = OPERATIONS[op]
    whole, targets = operation.arrays[0] != "q", (False, True) if operation.adds else (False,)
    base = _of(op, PSAShape(2, 3, 4, 3, 5))
    shapes = [PSAShape(1, 1, 1, 1, 1), PSAShape(1, 2, 36, 1, 17), PSAShape(3, 2, 3, 4, 4), PSAShape(1, 1, 32, 7, 9)]
    shapes = [_of(op, shape) for shape in (*shapes, PSAShape(0, 2, 4, 3, 3), PSAShape(2, 1, 5, 0, 3))]
    if not whole and op != "psa_fa2_backward":
        shapes += [AttentionShape(2, 5, 33, 8, 8), AttentionShape(1, 17, 3, 7, 12), AttentionShape(2, 4, 0, 8, 8)]
    kinds = value_kinds(op)
    for kind in kinds:
        for target in targets:
            yield Recipe(op, base, values=kind, targets=target)
    plain = "ramp" if operation.kind == "layout" else "normal"
    for shape in shapes:
        yield Recipe(op, shape, values=plain, targets=targets[-1])
    for dtype in ("float16", "bfloat16", "float64"):
        for kind in dict.fromkeys((plain, "special" if operation.kind == "layout" else "overflow-half", kinds[-1])):
            yield Recipe(op, base, dtype, values=kind, targets=targets[-1])
    if operation.scaled:
        for scale in (1.0, 0.0, -0.5):
            yield Recipe(op, base, values="normal", softmax_scale=scale, targets=targets[-1])


def _yolo(op: str) -> Iterator[Recipe]:
    values = "ramp" if OPERATIONS[op].kind == "layout" else "normal"
    for heads, key_dim in sorted({(m.num_heads, m.key_dim) for m in STOCK_MODELS}):
        for side in STOCK_SIDES.values():
            yield Recipe(
                op, _of(op, PSAShape(1, heads, key_dim, side, side)), values=values, targets=bool(OPERATIONS[op].adds)
            )


def write(
    folder: Path, suite: str = "smoke", ops: tuple[str, ...] = tuple(OPERATIONS), storage: str = "bin", progress=None
) -> int:
    """Writes the vectors of `suite` below `folder`, one folder a case and an index; returns their number."""
    if (folder / "manifest.json").exists():
        read_manifest(folder, "vectors")  # a folder of something else is not written over
    elif folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise VectorError(f"{folder}: exists and holds no vectors: choose another, or an empty one")
    folder.mkdir(parents=True, exist_ok=True)
    index = []
    chosen = list(recipes(suite, ops))
    for number, recipe in enumerate(chosen, 1):
        case = recipe.case()
        digest = write_vector(folder / recipe.id, case, recipe.id, storage)
        index.append({"id": recipe.id, "op": recipe.op, "flags": list(case.flags), "sha256": digest})
        if progress:
            progress(number, len(chosen))
    head = {"format": "numba-psa vectors", "version": VERSION, "generator": f"numba-psa {__version__}", "suite": suite}
    write_manifest(folder, head | {"cases": index})
    return len(index)


# ---- checking ---------------------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Checked:
    """One case of a check: "passed", "failed" or "missing"."""

    id: str
    flags: tuple[str, ...]
    status: str
    report: Report | None = None
    problem: str = ""


def check(folder: Path, actual: Path, ops: tuple[str, ...] = tuple(OPERATIONS)) -> Iterator[Checked]:
    """Each case below `folder` against the outputs in `actual/<id>`; a case without outputs there is missing.

    Raises VectorError for damaged vectors; a damaged output fails its case.
    """
    if not actual.is_dir():
        raise VectorError(f"{actual}: there is no such folder")
    for entry in read_manifest(folder, "vectors")["cases"]:
        if entry["op"] in ops:
            yield _check_one(folder / entry["id"], actual / entry["id"], entry)


def _check_one(folder: Path, actual: Path, entry: Mapping) -> Checked:
    manifest = folder / "manifest.json"
    if not manifest.exists():
        raise VectorError(f"{manifest}: there is no manifest")
    if hashlib.sha256(manifest.read_bytes()).hexdigest() != entry["sha256"]:
        raise VectorError(f"{manifest}: damaged: its sha256 is not the one in the index")
    stored = read_case(folder)
    flags = tuple(entry["flags"])
    if not stored.expected:
        raise VectorError(f"{folder}: holds no expected outputs")
    shapes = {name: x.shape for name, x in stored.expected.items()}
    try:
        found = read_outputs(actual, stored.case, shapes)
    except VectorError as error:
        return Checked(entry["id"], flags, "failed", problem=str(error))
    if not found:
        return Checked(entry["id"], flags, "missing")
    report = judge_stored(stored, found)
    return Checked(entry["id"], flags, "passed" if report.passed else "failed", report)


def judge_stored(stored: StoredCase, found: Mapping[str, np.ndarray]) -> Report:
    """Outputs of a port against the expected ones on disk, within the tolerances on disk."""
    case, problem = stored.case, problem_of(found, stored.expected, stored.case)
    if problem is None and set(stored.tolerances) != set(stored.expected):
        problem = Problem("wrong-count", "the manifest has no tolerance for some output")
    if problem is not None:
        return Report(case.op, case, found, stored.expected, {}, problem)
    limits = {name: (t.norm, t.worst, t.reference_norm) for name, t in stored.tolerances.items()}
    verdicts = {name: within(found[name], x, *limits[name]) for name, x in stored.expected.items()}
    return Report(case.op, case, found, stored.expected, verdicts)
