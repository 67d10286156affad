"""`numba-psa vectors`: golden vectors for ports in any language: write them, check a port's outputs, look at a case."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

app = typer.Typer(
    help="Golden vectors on disk: write them, check a port's outputs against them, show a case.", no_args_is_help=True
)

Op = Annotated[list[str] | None, typer.Option("--op", help="Only this operation; may be repeated.")]


def _ops(names: list[str] | None, storage: str = "bin") -> tuple[str, ...]:
    """The operations asked for, once it is clear that the files can be read and written."""
    from numba_psa.commands.extras import need
    from numba_psa.contract import OPERATIONS
    from numba_psa.errors import ParameterError

    need("fuzz", "jsonschema", *(("safetensors",) if storage == "safetensors" else ()))
    for name in names or ():
        if name not in OPERATIONS:
            raise ParameterError(f"--op must be one of {', '.join(OPERATIONS)}, got {name!r}")
    return tuple(names or OPERATIONS)


def _usage(error: Exception) -> typer.Exit:
    typer.echo(f"numba-psa vectors: {error}", err=True)
    return typer.Exit(2)


@app.command()
def write(
    folder: Annotated[Path, typer.Argument(help="Where to: a new or empty folder, or one of vectors.")],
    op: Op = None,
    suite: Annotated[str, typer.Option(help="smoke, standard or yolo.")] = "smoke",
    format: Annotated[str, typer.Option(help="bin, npz or safetensors.")] = "bin",
) -> None:
    """Write cases with their right results: a folder a case, its manifest.json, and an index above them."""
    from rich.console import Console
    from rich.progress import Progress

    from numba_psa.errors import NumbaPSAError, ParameterError
    from numba_psa.testing import vectors
    from numba_psa.testing.casefiles import FORMATS

    try:
        if format not in FORMATS:
            raise ParameterError(f"--format must be one of {', '.join(FORMATS)}, got {format!r}")
        with Progress(console=Console(stderr=True), transient=True) as progress:
            task = progress.add_task("writing", total=None)
            count = vectors.write(
                folder, suite, _ops(op, format), format, lambda done, of: progress.update(task, completed=done, total=of)
            )
    except (NumbaPSAError, OSError) as error:
        raise _usage(error) from error
    typer.echo(f"{count} cases of suite {suite} in {folder}")


@app.command()
def check(
    folder: Annotated[Path, typer.Argument(help="Vectors.")],
    actual: Annotated[
        Path, typer.Option(help="A port's outputs: <case id>/output.<name>.bin, outputs.npz or outputs.safetensors.")
    ],
    op: Op = None,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write the outcome of every case here.")] = None,
) -> None:
    """Compare a port's outputs case by case; exit code 0: none failed, 1: some failed or nothing was there, 2: usage.

    A port need not have them all: cases without outputs are counted as missing.
    """
    from numba_psa.errors import NumbaPSAError
    from numba_psa.testing import vectors

    outcomes = []
    try:
        for found in vectors.check(folder, actual, _ops(op)):
            outcomes.append(found)
            if found.status == "failed":
                typer.echo(f"failed {found.id} [{', '.join(found.flags)}]")
                for line in (str(found.report) if found.report else found.problem).splitlines()[1 if found.report else 0 :]:
                    typer.echo(line if found.report else f"  {line}")
    except NumbaPSAError as error:
        raise _usage(error) from error
    counts = {status: sum(o.status == status for o in outcomes) for status in ("passed", "failed", "missing")}
    typer.echo(", ".join(f"{n} {status}" for status, n in counts.items()))
    if json_file:
        rows = [
            {
                "id": o.id,
                "status": o.status,
                "flags": o.flags,
                "problem": o.problem or (str(o.report) if o.status == "failed" else ""),
                "causes": [d.cause for d in o.report.diagnosis] if o.report else [],
            }
            for o in outcomes
        ]
        json_file.write_text(json.dumps({"counts": counts, "cases": rows}, indent=1) + "\n")
    raise typer.Exit(1 if counts["failed"] or not counts["passed"] else 0)


@app.command()
def show(case: Annotated[Path, typer.Argument(help="The folder of one case.")]) -> None:
    """Print a case: parameters, flags with their meaning, arrays and tolerances."""
    import numpy as np

    from numba_psa.errors import NumbaPSAError
    from numba_psa.testing.case import FLAGS
    from numba_psa.testing.casefiles import read_case, read_manifest

    try:
        _ops(None)
        stored, manifest = read_case(case), read_manifest(case, "case")
    except NumbaPSAError as error:
        raise _usage(error) from error
    typer.echo(f"{stored.id}: {stored.case.op}, {manifest['generator']}")
    typer.echo(f"  {stored.case.sizes}, {stored.case.dtype}, values: {stored.case.values}")
    for name, value in manifest["parameters"].items():
        typer.echo(f"  {name} = {value}")
    for flag in manifest["flags"]:
        typer.echo(f"  {flag}: {FLAGS[flag][0] if flag in FLAGS else 'unknown to this version'}")
    for entry in manifest["arrays"]:
        memory = f", {entry['layout']} in memory" if entry["layout"] != "C" else ""
        typer.echo(f"  {entry['role']} {entry['name']} {entry['shape']} {entry['dtype']} in {entry['file']}{memory}")
        array = stored.expected.get(entry["name"]) if entry["role"] == "output" else stored.case.arguments[entry["name"]]
        if array is not None:
            first = ", ".join(f"{x:.9g}" for x in np.ravel(array)[:8].tolist())
            typer.echo(f"    {first}{', …' if array.size > 8 else ''}")
        if "tolerance" in entry:
            t = entry["tolerance"]
            typer.echo(f"    tolerance: norm {t['norm']:g}, worst element {t['worst']:g}: {t['reason']}")
