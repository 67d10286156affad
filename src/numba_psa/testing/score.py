"""How good the fuzzer is: planted bugs killed and named, correct implementations not complained about.

python -m numba_psa.testing.score                 # everything: about seven minutes on two cores
python -m numba_psa.testing.score --quick         # default seed, few examples
"""

from __future__ import annotations

import argparse
import os
import time
from collections import Counter
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context

from hypothesis import HealthCheck, Phase, given, seed, settings

from numba_psa import __version__
from numba_psa.contract import OPERATIONS
from numba_psa.testing.check import standard
from numba_psa.testing.compare import problem_of
from numba_psa.testing.fuzz import MAX_EXAMPLES, SEED, fuzz
from numba_psa.testing.mutants_attention import MUTANTS
from numba_psa.testing.strategies import cases
from numba_psa.testing.targets import CallableTarget
from numba_psa.testing.variants import VARIANTS


@dataclass(frozen=True)
class Kill:
    """What became of a mutant."""

    name: str
    cause: str | None
    killed: bool
    examples: int
    named: str | None


def kill(number: int, seed_: int = SEED, max_examples: int = MAX_EXAMPLES, name: bool = True, shrink: bool = True) -> Kill:
    """Fuzzes mutant `number`; with `name`, diagnoses it too."""
    mutant = MUTANTS[number]
    result = fuzz(
        mutant.op,
        CallableTarget(mutant.function),
        seed_=seed_,
        max_examples=max_examples,
        shrink=shrink and name,
        evidence=name,
    )
    diagnosis = result.finding.diagnosis if result.finding and name else []
    return Kill(
        mutant.name, mutant.cause, result.finding is not None, result.examples, diagnosis[0].cause if diagnosis else None
    )


def false_alarms(op: str, seed_: int, examples: int) -> tuple[int, Counter]:
    """(cases, {variant: alarms}) of every correct variant on cases of all dtypes."""
    alarms: Counter = Counter({variant.name: 0 for variant in VARIANTS})
    count = 0

    @seed(seed_)
    @settings(
        max_examples=examples, deadline=None, database=None, phases=[Phase.generate], suppress_health_check=list(HealthCheck)
    )
    @given(cases(op, dtype=None))
    def run(case) -> None:
        nonlocal count
        count += 1
        measured = standard(case.operation, case)
        for variant in VARIANTS:
            returned, changed = case.call(getattr(variant, op))
            results = dict(zip(case.operation.outputs, returned, strict=True))
            right = not changed and problem_of(results, measured.expected, case) is None
            if not (right and all(verdict.passed for verdict in measured.judge(results).values())):
                alarms[variant.name] += 1
                print(f"false alarm: {variant.name} on {case!r}", flush=True)

    run()
    return count, alarms


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="default seed only, 200 examples a variant and operation")
    parser.add_argument("--seeds", type=int, default=20, help="other seeds, at 500 examples each")
    parser.add_argument("--alarms", action="store_true", help="false alarms only")
    parser.add_argument("--examples", type=int, default=500, help="for each variant and operation")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    options = parser.parse_args()
    seeds, examples = (0, 200) if options.quick else (options.seeds, options.examples)
    start = time.time()
    print(f"numba-psa {__version__}, seed {SEED}, {len(MUTANTS)} mutants, {len(VARIANTS)} correct variants")
    numbers = range(0 if options.alarms else len(MUTANTS))
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # one process a core: read when a child imports NumPy
    with ProcessPoolExecutor(options.jobs, mp_context=get_context("spawn")) as pool:
        if kills := list(pool.map(kill, numbers)):
            _print_kills(kills)
        others = [(number, SEED + 1 + i) for number in numbers for i in range(seeds)]
        if others:
            later = list(pool.map(_kill_only, others, chunksize=10))
            alive = [f"{k.name} at seed {s}" for k, (_, s) in zip(later, others, strict=True) if not k.killed]
            print(f"other seeds: {len(later) - len(alive)} of {len(later)} runs killed within 500 examples ({seeds} seeds)")
            for line in alive:
                print(f"  alive: {line}")
        alarms: Counter = Counter()
        total = 0
        parts = 8
        jobs = [(op, SEED + 100 + part, -(-examples // parts)) for op in OPERATIONS for part in range(parts)]
        for count, found in pool.map(_alarms, jobs):
            alarms.update(found)
            total += count
    print(f"correct variants: {sum(alarms.values())} false alarms on {total} cases each of all operations and dtypes")
    for name, count in alarms.items():
        print(f"  {name}: {count}")
    print(f"{time.time() - start:.0f} s on {options.jobs} processes")


def _kill_only(job: tuple[int, int]) -> Kill:
    return kill(job[0], job[1], 500, name=False)


def _alarms(job: tuple[str, int, int]) -> tuple[int, Counter]:
    return false_alarms(*job)


def _print_kills(kills: list[Kill]) -> None:
    dead = [k for k in kills if k.killed]
    nameable = [k for k in kills if k.cause is not None]
    right = [k for k in nameable if k.named == k.cause]
    share = 100 * len(right) / len(nameable)
    print(f"killed within {MAX_EXAMPLES} examples at seed {SEED}: {len(dead)} of {len(kills)}")
    print(f"top diagnosis right: {len(right)} of {len(nameable)} with a nameable cause ({share:.0f} %)")
    for k in kills:
        if not k.killed:
            print(f"  alive: {k.name}")
        elif k.cause is not None and k.named != k.cause:
            print(f"  {k.name}: {k.cause}, named {k.named}")


if __name__ == "__main__":
    main()
