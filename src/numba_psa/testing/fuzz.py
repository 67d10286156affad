"""Looking for a case on which a port is wrong: generation, shrinking and the example database are Hypothesis'.

result = fuzz("psa_pack_qkv", CallableTarget(my_pack))
if result.finding: print(result.finding)
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
from hypothesis import HealthCheck, Phase, Verbosity, given, seed, settings
from hypothesis.database import DirectoryBasedExampleDatabase, ExampleDatabase
from hypothesis.errors import FlakyFailure

from numba_psa.contract import OPERATIONS
from numba_psa.errors import ParameterError
from numba_psa.testing.case import FLAGS, Case
from numba_psa.testing.compare import Report, compare
from numba_psa.testing.stock import is_stock
from numba_psa.testing.strategies import MAX_TOKENS, cases
from numba_psa.testing.targets import Target, TargetFailure

MAX_EXAMPLES = 200
SEED = 0
FINDINGS = (
    "wrong-values",
    "wrong-shape",
    "wrong-dtype",
    "wrong-count",
    "raises",
    "crashes",
    "hangs",
    "modifies-inputs",
    "nondeterministic",
)
"""Names of what can be found."""
EVIDENCE_EXAMPLES = 100
"""Cases tried after a finding, to tell apart causes that look alike on the smallest one."""
EVIDENCE_TOKENS = 160
"""The most tokens in those: a tail of every tile up to 128 shows, and trying every cause stays quick."""
EVIDENCE = 8
"""Further failures that a diagnosis takes into account."""


@dataclass(frozen=True)
class Finding:
    """A case on which the port is wrong, as small as Hypothesis could make it."""

    kind: str
    case: Case
    text: str
    report: Report | None = None

    @property
    def diagnosis(self):
        """Possible causes, best first; [] unless values are wrong."""
        return self.report.diagnosis if self.report is not None else []

    @property
    def elements(self) -> int:
        return sum(x.size for x in self.case.arguments.values() if isinstance(x, np.ndarray))

    @property
    def tokens(self) -> int:
        return max(self.case.tokens)


@dataclass(frozen=True)
class Expectation:
    """One line of an xfails file: cases that are not run (skip), or that may fail (xfail)."""

    mode: str
    op: str
    names: frozenset[str]
    line: str

    def covers(self, case: Case) -> bool:
        """Whether `case` has the op and every flag that the line names."""
        return self.op in ("*", case.op) and (self.names - set(FINDINGS)) <= set(case.flags) | {case.dtype.name}

    def allows(self, finding: Finding) -> bool:
        kinds = self.names & set(FINDINGS)
        return self.mode == "xfail" and self.covers(finding.case) and (not kinds or finding.kind in kinds)


@dataclass
class FuzzResult:
    """What a run did. `examples` counts the cases that were compared; `xfailed` those that failed as expected."""

    op: str
    seed: int
    examples: int = 0
    skipped: int = 0
    xfailed: int = 0
    finding: Finding | None = None
    failed_as_expected: set[str] = field(default_factory=set)
    unexpectedly_passing: list[str] = field(default_factory=list)
    """Lines of the xfails file that cases matched, but none failed: they can go."""


class _Found(Exception):
    """One type for each kind of finding, so that shrinking keeps to the kind it began with."""


_FOUND = {kind: type(f"Found_{kind.replace('-', '_')}", (_Found,), {}) for kind in FINDINGS}


class _Stop(BaseException):
    """Ends the search at once: Hypothesis shrinks only what is an Exception."""


def fuzz(
    op: str,
    target: Target,
    *,
    max_examples: int = MAX_EXAMPLES,
    seed_: int = SEED,
    dtype: str | None = "float32",
    max_tokens: int = MAX_TOKENS,
    contiguous: bool = False,
    nondeterminism: bool = False,
    expectations: Sequence[Expectation] = (),
    database: ExampleDatabase | None = None,
    shrink: bool = True,
    evidence: bool = True,
    progress: Callable[[FuzzResult], None] = lambda result: None,
) -> FuzzResult:
    """Runs `target` on up to `max_examples` cases of `op` and stops at the first finding, shrunk.

    dtype None draws the dtype; `nondeterminism` accepts results that differ between two runs (each must be right).
    A finding that hangs is not shrunk: every attempt would take the timeout. Same arguments, same cases.
    """
    if op not in OPERATIONS:
        raise ParameterError(f"op must be one of {', '.join(OPERATIONS)}, got {op!r}")
    result = FuzzResult(op, seed_)
    smallest: dict[str, Finding] = {}
    covered: set[str] = set()

    def examine(case: Case) -> Finding | None:
        if any(e.mode == "skip" and e.covers(case) for e in expectations):
            result.skipped += 1
            return None
        result.examples += 1
        finding = examine_case(case, target, nondeterminism=nondeterminism)
        for e in expectations:
            if e.mode == "xfail" and e.covers(case):
                covered.add(e.line)
        if finding is not None and (allowing := [e for e in expectations if e.allows(finding)]):
            result.xfailed += 1
            result.failed_as_expected.update(e.line for e in allowing)
            return None
        return finding

    def search(case: Case) -> None:
        finding = examine(case)
        progress(result)
        if finding is None:
            return
        known = smallest.get(finding.kind)
        if known is None or finding.elements <= known.elements:
            smallest[finding.kind] = finding
        raise _Stop if finding.kind == "hangs" else _FOUND[finding.kind](finding)

    def attempt(stock: bool) -> Finding | None:
        strategy = cases(op, dtype=dtype, max_tokens=max_tokens, contiguous=contiguous, stock=stock)
        phases = [Phase.reuse, Phase.generate] + ([Phase.shrink] if shrink else [])
        try:
            _run(search, strategy, op, max_examples, seed_, phases, database)
        except _Stop:
            return smallest["hangs"]
        except _Found as found:
            # Hypothesis ends on the smallest case; take what it saw there, not an earlier one of the same size.
            return found.args[0]
        except FlakyFailure:
            # The port fails on a case and passes on the same case later: its smallest failure is the evidence there is.
            kind, finding = min(smallest.items(), key=lambda item: item[1].elements)
            note = "It does not fail on this case every time."
            return replace(finding, text=f"{note}\n{finding.text}") if kind != "nondeterministic" else finding
        return None

    found = attempt(stock=True)
    if found is not None and shrink and found.kind != "hangs" and is_stock(found.case.shape):
        # Shrinking does not lead from a stock model to the shapes around it: the smallest is looked for among those.
        other = attempt(stock=False)
        found = other if other is not None and other.kind == found.kind and other.elements < found.elements else found
    if found is not None and found.kind == "wrong-values" and evidence:
        strategy = cases(op, dtype=dtype, max_tokens=min(max_tokens, EVIDENCE_TOKENS), contiguous=contiguous, empty=False)
        others = _evidence(strategy, found, target, op, seed_)
        found = replace(found, report=replace(found.report, others=others))
    result.finding = found
    result.unexpectedly_passing = [e.line for e in expectations if e.line in covered - result.failed_as_expected]
    return result


def _run(test, strategy, op, max_examples, seed_, phases, database) -> None:
    @settings(
        max_examples=max_examples,
        deadline=None,
        database=database,
        phases=phases,
        report_multiple_bugs=False,
        verbosity=Verbosity.quiet,
        suppress_health_check=list(HealthCheck),
    )
    @seed(seed_)  # below settings: above them it would take the database away
    @given(strategy)
    def run(case: Case) -> None:
        test(case)

    # Machines share counterexamples by this key: it must not depend on where or how this function is written.
    run._hypothesis_internal_database_key = f"numba-psa fuzz {op}".encode()
    run()


def examine_case(case: Case, target: Target, *, nondeterminism: bool = False) -> Finding | None:
    """What is wrong with `target` on `case`, or None. It is called twice, to see whether it gives the same results."""
    first: list[np.ndarray] | None = None
    for _ in range(2):
        try:
            results = target.run(case)
        except TargetFailure as failure:
            return Finding(failure.kind, case, failure.text)
        if first is not None and _same(first, results):
            return None
        report = compare(results, case=case)
        if first is not None and not nondeterminism:
            text = f"a second run on the same input differs in {_difference(first, results)}"
            return Finding("nondeterministic", case, text, None if report.passed else report)
        if not report.passed:
            return Finding(report.kind, case, "", report)
        first = results
    return None


def _same(a: Sequence[np.ndarray], b: Sequence[np.ndarray]) -> bool:
    return len(a) == len(b) and all(
        x.shape == y.shape and x.dtype == y.dtype and bool(((x == y) | ((x != x) & (y != y))).all())
        for x, y in zip(a, b, strict=True)
    )


def _difference(a: Sequence[np.ndarray], b: Sequence[np.ndarray]) -> str:
    if [(x.shape, x.dtype) for x in a] != [(x.shape, x.dtype) for x in b]:
        return "shape, dtype or count"
    count = sum(int(np.count_nonzero(~((x == y) | ((x != x) & (y != y))))) for x, y in zip(a, b, strict=True))
    return f"{count} of {sum(x.size for x in a)} elements"


def _evidence(
    strategy, finding: Finding, target: Target, op: str, seed_: int
) -> list[tuple[Case, Mapping[str, np.ndarray]]]:
    """Other cases on which the port gives wrong values: with plain ones if it does there, and of all sizes."""
    failures: dict[str, Finding] = {}

    def collect(case: Case) -> None:
        try:
            report = compare(target.run(case), case=case)
        except TargetFailure as failure:
            if failure.kind == "hangs":
                raise _Stop from None
            return
        if report.kind == "wrong-values":
            failures.setdefault(repr(case), Finding(report.kind, case, "", report))

    with contextlib.suppress(_Stop):
        _run(collect, strategy, op, EVIDENCE_EXAMPLES, seed_ + 1, [Phase.generate], None)
    plain = [f for f in failures.values() if f.case.values in ("ramp", "normal", "eighths")]
    chosen = sorted(plain if len(plain) >= EVIDENCE else failures.values(), key=lambda f: (f.tokens, f.elements))
    places = sorted({round(i * (len(chosen) - 1) / (EVIDENCE - 1)) for i in range(EVIDENCE)}) if chosen else []
    return [(chosen[i].case, chosen[i].report.actual) for i in places]


# ---- what the command line gives --------------------------------------------------------------------------------------
def read_expectations(path: Path) -> list[Expectation]:
    """The lines of an xfails file: `skip|xfail OP|* FLAG,FINDING,…`; # begins a comment. ParameterError names a bad line."""
    found = []
    try:
        lines = path.read_text().splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ParameterError(f"--xfails {path}: {error}") from None
    dtypes = ("float16", "bfloat16", "float32", "float64")
    for number, line in enumerate(lines, 1):
        words = line.split("#")[0].split()
        if not words:
            continue
        names = frozenset(words[2].split(",")) if len(words) == 3 else frozenset()
        known = {*FLAGS, *FINDINGS, *dtypes}
        if (
            len(words) not in (2, 3)
            or words[0] not in ("skip", "xfail")
            or words[1] not in ("*", *OPERATIONS)
            or names - known
        ):
            wanted = "skip|xfail, an operation or *, then flags, dtypes or findings joined by commas"
            raise ParameterError(
                f"--xfails {path}, line {number}: {line.strip()!r}: expected {wanted}; known: {', '.join(sorted(known))}"
            )
        if words[0] == "skip" and names & set(FINDINGS):
            raise ParameterError(
                f"--xfails {path}, line {number}: {line.strip()!r}: a finding can be expected, not skipped: use xfail"
            )
        found.append(Expectation(words[0], words[1], names, " ".join(words)))
    return found


def open_database(where: str | None) -> ExampleDatabase | None:
    """Hypothesis' example database in a directory or at a redis:// address; None for None."""
    if where is None:
        return None
    if not where.startswith(("redis://", "rediss://")):
        return DirectoryBasedExampleDatabase(where)
    from hypothesis.extra.redis import RedisExampleDatabase
    from redis import Redis
    from redis.exceptions import RedisError

    try:
        server = Redis.from_url(where)
        server.ping()
    except (RedisError, ValueError) as error:
        raise ParameterError(f"--database {where}: {error}") from None
    return RedisExampleDatabase(server, key_prefix=b"numba-psa:")
