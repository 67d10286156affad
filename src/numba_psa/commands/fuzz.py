"""`numba-psa fuzz`: looks for a case on which a port is wrong, and says how it is wrong."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import Annotated

import typer


def fuzz(
    op: Annotated[str, typer.Option(help="An operation of the contract, or all.")],
    target: Annotated[
        str | None,
        typer.Option(help="package.module:function; with --op all a module, whose functions have the operations' names."),
    ] = None,
    exec_: Annotated[
        str | None, typer.Option("--exec", help="A command; {in} becomes a folder with a case, {out} one for its outputs.")
    ] = None,
    max_examples: Annotated[int, typer.Option(min=1, help="Cases to try.")] = 200,
    seed: Annotated[int, typer.Option(min=0, help="Same seed, same cases.")] = 0,
    dtype: Annotated[str, typer.Option(help="float32, float16, bfloat16, float64, or any to draw it.")] = "float32",
    timeout: Annotated[float, typer.Option(min=0.01, help="Seconds a call may take before it is killed.")] = 10.0,
    max_tokens: Annotated[int, typer.Option(min=1, help="The most tokens, H*W or n_ctx, in a case.")] = 400,
    contiguous: Annotated[bool, typer.Option("--contiguous", help="C-ordered arrays only.")] = False,
    allow_nondeterminism: Annotated[
        bool,
        typer.Option("--allow-nondeterminism", help="Accept results that differ between two runs, as atomics make them."),
    ] = False,
    xfails: Annotated[
        Path | None, typer.Option(help="Lines `skip|xfail OP FLAG,FINDING`: what the port is known not to do.")
    ] = None,
    database: Annotated[
        str | None, typer.Option(help="Directory or redis:// of Hypothesis' examples: counterexamples are tried first.")
    ] = None,
    format: Annotated[str, typer.Option(help="How --exec gets its arrays: bin, npz or safetensors.")] = "bin",
    replay: Annotated[Path | None, typer.Option(help="Run this one saved case only.")] = None,
    save: Annotated[Path, typer.Option(help="Where counterexamples are saved.")] = Path("counterexamples"),
    json_file: Annotated[Path | None, typer.Option("--json", help="Write what was found here.")] = None,
) -> None:
    """Look for a counterexample; exit code 0: none found, 1: found, 2: usage.

    The target gets NumPy arrays: the oracle's positional arguments, softmax_scale= when it is not the default, and targets
    to add or store into under the name of their output, when the case has them. It returns its results. It runs in a
    process of its own, with the current directory importable.
    """
    from rich.console import Console

    from numba_psa.commands.extras import need
    from numba_psa.errors import NumbaPSAError

    console = Console(soft_wrap=True, highlight=False)
    try:
        need("fuzz", "hypothesis", "jsonschema", *(("redis",) if (database or "").startswith("redis") else ()))
        need("fuzz", *(("safetensors",) if format == "safetensors" else ()))
        run = _Run(op, target, exec_, dtype, timeout, format, max_tokens, contiguous, allow_nondeterminism, xfails, database)
        results = run.replay(replay) if replay else run.search(console, max_examples, seed)
        reports = [_show(console, result, run, save) for result in results]
        if json_file:
            json_file.write_text(json.dumps({"about": run.about(seed, max_examples), "results": reports}, indent=1) + "\n")
    except (NumbaPSAError, OSError) as error:
        typer.echo(f"numba-psa fuzz: {error}", err=True)
        raise typer.Exit(2) from error
    if not any(result.examples for result in results):
        typer.echo("numba-psa fuzz: no case was run: every one is skipped", err=True)
        raise typer.Exit(2)
    raise typer.Exit(1 if any(result.finding for result in results) else 0)


class _Run:
    """Options, checked, and what they start."""

    def __init__(
        self, op, target, command, dtype, timeout, storage, max_tokens, contiguous, nondeterminism, xfails, database
    ):
        from numba_psa.contract import OPERATIONS
        from numba_psa.errors import ParameterError
        from numba_psa.numerics import float_dtype
        from numba_psa.testing.casefiles import FORMATS

        if op not in ("all", *OPERATIONS):
            raise ParameterError(f"--op must be all or one of {', '.join(OPERATIONS)}, got {op!r}")
        if (target is None) == (command is None):
            raise ParameterError("give one of --target package.module:function and --exec 'COMMAND {in} {out}'")
        if storage not in FORMATS:
            raise ParameterError(f"--format must be one of {', '.join(FORMATS)}, got {storage!r}")
        if target is not None and (":" in target) == (op == "all"):
            wanted = "a module" if op == "all" else "package.module:function"
            raise ParameterError(f"--target must be {wanted} with --op {op}, got {target!r}")
        self.ops = tuple(OPERATIONS) if op == "all" else (op,)
        self.op, self.port, self.command = op, target, command
        self.dtype = None if dtype == "any" else float_dtype(dtype).name
        self.timeout, self.storage = timeout, storage
        self.max_tokens, self.contiguous, self.nondeterminism = max_tokens, contiguous, nondeterminism
        self.xfails, self.database = xfails, database

    def target(self, op: str):
        from numba_psa.testing.targets import ExecTarget, WorkerTarget

        if self.command is not None:
            return ExecTarget(self.command, self.timeout, self.storage)
        return WorkerTarget(self.port if ":" in self.port else f"{self.port}:{op}", self.timeout)

    def search(self, console, max_examples: int, seed: int):
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

        from numba_psa.testing.fuzz import fuzz, open_database, read_expectations

        expectations = read_expectations(self.xfails) if self.xfails else []
        database = open_database(self.database)
        columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()
        results = []
        with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
            for op in self.ops:
                task = progress.add_task(op, total=max_examples)
                target = self.target(op)
                try:
                    result = fuzz(
                        op,
                        target,
                        max_examples=max_examples,
                        seed_=seed,
                        dtype=self.dtype,
                        max_tokens=self.max_tokens,
                        contiguous=self.contiguous,
                        nondeterminism=self.nondeterminism,
                        expectations=expectations,
                        database=database,
                        progress=lambda r, task=task: progress.update(task, completed=min(r.examples, max_examples)),
                    )
                finally:
                    target.close()
                    progress.remove_task(task)
                results.append(result)
        return results

    def replay(self, folder: Path):
        from numba_psa.errors import ParameterError
        from numba_psa.testing.casefiles import read_case
        from numba_psa.testing.fuzz import FuzzResult, examine_case

        case = read_case(folder).case
        if self.op not in ("all", case.op):
            raise ParameterError(f"--replay {folder} is a case of {case.op}, not of {self.op}")
        target = self.target(case.op)
        try:
            finding = examine_case(case, target, nondeterminism=self.nondeterminism)
        finally:
            target.close()
        return [FuzzResult(case.op, 0, examples=1, finding=finding)]

    def replay_command(self, op: str, folder: Path) -> str:
        words = ["numba-psa", "fuzz", "--op", op]
        if self.command is not None:
            words += ["--exec", self.command] + (["--format", self.storage] if self.storage != "bin" else [])
        else:
            words += ["--target", self.port if ":" in self.port else f"{self.port}:{op}"]
        if self.timeout != 10.0:
            words += ["--timeout", f"{self.timeout:g}"]
        if self.nondeterminism:
            words.append("--allow-nondeterminism")
        return shlex.join([*words, "--replay", str(folder)])

    def about(self, seed: int, max_examples: int) -> dict[str, object]:
        import platform

        import numpy

        from numba_psa import __version__

        options = {"op": self.op, "target": self.port, "exec": self.command, "dtype": self.dtype or "any", "seed": seed}
        versions = {"numba_psa": __version__, "numpy": numpy.__version__, "python": platform.python_version()}
        return options | {"max_examples": max_examples, "max_tokens": self.max_tokens} | versions


def _show(console, result, run: _Run, save: Path) -> dict[str, object]:
    """Prints a result and saves its counterexample; returns it for --json."""
    from rich.text import Text

    counts = f"{result.examples} cases, seed {result.seed}"
    if result.skipped:
        counts += f", {result.skipped} skipped"
    if result.xfailed:
        counts += f", {result.xfailed} failed as expected"
    entry = {"op": result.op, "seed": result.seed, "examples": result.examples, "skipped": result.skipped}
    entry |= {"xfailed": result.xfailed, "unexpectedly_passing": result.unexpectedly_passing, "finding": None}
    finding = result.finding
    if finding is None:
        console.print(Text(f"{result.op}: no counterexample in {counts}", style="green"))
    else:
        folder = _save(finding, save)
        replay = run.replay_command(result.op, folder)
        console.print(Text(f"{result.op}: {finding.kind} ({counts})", style="bold red"))
        for line in _describe(finding, folder, replay):
            console.print(Text(line))
        entry["finding"] = {
            "kind": finding.kind,
            "case": repr(finding.case),
            "flags": finding.case.flags,
            "text": finding.text,
            "report": str(finding.report) if finding.report is not None else None,
            "diagnosis": [{"cause": d.cause, "detail": d.detail, "explained": d.explained} for d in finding.diagnosis],
            "saved": str(folder),
            "replay": replay,
        }
    for line in result.unexpectedly_passing:
        console.print(Text(f"{result.op}: never failed, the line can go: {line}", style="yellow"))
    return entry


def _describe(finding, folder: Path, replay: str) -> list[str]:
    import numpy as np

    case = finding.case
    lines = [f"  case: {case.sizes} {case.dtype} ({', '.join(case.flags) or 'no flags'})"]
    arrays = {name: x for name, x in case.arguments.items() if isinstance(x, np.ndarray)}
    small = sum(x.size for x in arrays.values()) <= 32
    for name, x in arrays.items():
        layout = f" in memory: {case.layouts[name]}" if name in case.layouts else ""
        values = f" = {np.array2string(x, threshold=32, separator=', ', max_line_width=10_000)}" if small else ""
        lines.append(f"    {name} {list(x.shape)}{layout}{values}".replace("\n", ""))
    if "softmax_scale" in case.arguments:
        lines.append(f"    softmax_scale = {case['softmax_scale']}")
    lines += [f"  {line}" for line in finding.text.splitlines()]
    if finding.report is not None:
        lines += str(finding.report).splitlines()[1:]
    return [*lines, f"  saved: {folder}", f"  replay: {replay}"]


def _save(finding, save: Path) -> Path:
    """The case as a golden vector: inputs, what is expected, and how far off a result may be."""
    from numba_psa.testing.vectors import store

    name = f"{finding.case.op}-{finding.kind}"
    return store(save / name, finding.case, name)
