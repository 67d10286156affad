"""`numba-psa verify`: every kernel of every implementation present, against the oracle."""

from __future__ import annotations

import json
import os
import platform
from dataclasses import asdict
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Annotated

import typer

COMPARED = ("mirror", "cpu", "cuda")


def verify(
    op: Annotated[list[str] | None, typer.Option(help="Only this operation; may be repeated.")] = None,
    impl: Annotated[list[str] | None, typer.Option(help="Only mirror, cpu or cuda; may be repeated.")] = None,
    shape: Annotated[
        str | None, typer.Option(help="B,heads,key_dim,H,W of an N(0, 1) input, instead of all others.")
    ] = None,
    dtype: Annotated[str, typer.Option(help="float32, float16, bfloat16 or float64.")] = "float32",
    seed: Annotated[int, typer.Option(help="Of synthetic inputs, upstream gradients and targets.")] = 0,
    input: Annotated[Path | None, typer.Option(help="An .npz with qkv (and num_heads), or with q, k and v.")] = None,
    num_heads: Annotated[int | None, typer.Option(help="Heads of --input, where the file does not say.")] = None,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write the table and its circumstances here.")] = None,
) -> None:
    """Run every kernel of every implementation against the float64 oracle; exit code 1 if one fails.

    Without options: float32, on the attention input of a trained YOLO26n (N = 400) and on small ragged shapes. Where there
    is no GPU the mirror kernels run in Numba's simulator, on crops.
    """
    from numba_psa.contract import OPERATIONS
    from numba_psa.devices import gpu_problem
    from numba_psa.errors import BackendUnavailableError, NumbaPSAError

    no_gpu = gpu_problem()
    if no_gpu:
        os.environ.setdefault("NUMBA_ENABLE_CUDASIM", "1")  # read when numba is first imported, which is below
    simulated = os.environ.get("NUMBA_ENABLE_CUDASIM", "0") not in ("", "0")
    try:
        operations = [_one_of("--op", name, OPERATIONS) for name in op or OPERATIONS]
        wanted = [_one_of("--impl", name, COMPARED) for name in impl or COMPARED]
        given, given_small = _problems(dtype, seed, shape, input, num_heads)
    except (NumbaPSAError, OSError) as error:
        typer.echo(f"numba-psa verify: {error}", err=True)
        raise typer.Exit(2) from error

    rows, notes = [], []
    for name in wanted:
        if name == "cuda" and simulated and not impl:
            notes.append(f"cuda: not run, {no_gpu or 'NUMBA_ENABLE_CUDASIM is set'}")
            continue
        try:
            rows += _run(name, operations, given_small if name != "cpu" and simulated else given, seed, simulated)
        except BackendUnavailableError as error:
            if impl:
                typer.echo(f"numba-psa verify: {error}", err=True)
                raise typer.Exit(2) from error
            notes.append(f"{name}: {error}")
    if simulated and any(row.implementation == "mirror" for row in rows):
        notes.append(f"mirror ran in Numba's simulator, on crops ({no_gpu or 'NUMBA_ENABLE_CUDASIM is set'})")
    _print(rows, notes)
    if json_file:
        json_file.write_text(json.dumps({"about": _about(no_gpu), "rows": [asdict(row) for row in rows]}, indent=1))
    if all(row.refused for row in rows):
        typer.echo("numba-psa verify: nothing was run", err=True)
        raise typer.Exit(2)
    raise typer.Exit(0 if all(row.passed or row.refused for row in rows) else 1)


def _one_of(option: str, name: str, allowed) -> str:
    from numba_psa.errors import ParameterError

    if name not in allowed:
        raise ParameterError(f"{option} must be one of {', '.join(allowed)}, got {name!r}")
    return name


def _problems(dtype, seed, shape, input, num_heads):
    """(problems at full size, the same cut down for a simulator)."""
    from numba_psa.errors import ParameterError
    from numba_psa.numerics import float_dtype
    from numba_psa.shapes import PSAShape
    from numba_psa.testing import verify as cases

    dtype = float_dtype(dtype)
    if input:
        problem = _read(input, num_heads)
        return [problem], [problem.cropped()]
    if shape:
        try:
            sizes = [int(size) for size in shape.split(",")]
            asked = PSAShape(*sizes)
        except (ValueError, TypeError) as error:
            raise ParameterError(f"--shape must be five sizes B,heads,key_dim,H,W, got {shape!r}: {error}") from error
        problems = cases.synthetic(dtype, seed, [asked])
        return problems, problems
    full = cases.problems(dtype, seed, cases.RAGGED)
    small = cases.problems(dtype, seed, cases.RAGGED_SMALL)
    return full, [small[0].cropped(), *small[1:]]


def _read(path: Path, num_heads: int | None):
    import zipfile

    import numpy as np

    from numba_psa.errors import ParameterError
    from numba_psa.numerics import check_dtypes
    from numba_psa.shapes import AttentionShape, PSAShape
    from numba_psa.testing.verify import Problem

    try:
        with np.load(path) as file:
            arrays = dict(file)
    except (ValueError, zipfile.BadZipFile, EOFError) as error:
        raise ParameterError(f"{path} is no .npz file: {error}") from error
    if "qkv" in arrays:
        heads = num_heads if num_heads is not None else arrays.get("num_heads")
        if heads is None:
            raise ParameterError(f"{path} has no num_heads: give --num-heads")
        check_dtypes(qkv=arrays["qkv"].dtype)
        PSAShape.from_qkv(arrays["qkv"].shape, int(heads))
        return Problem(path.name, arrays["qkv"], int(heads))
    if {"q", "k", "v"} <= set(arrays):
        q, k, v = (arrays[name] for name in "qkv")
        check_dtypes(q=q.dtype, k=k.dtype, v=v.dtype)
        AttentionShape.from_qkv(q.shape, k.shape, v.shape)
        return Problem(path.name, flash=(q, k, v))
    raise ParameterError(f"{path} must hold qkv, or q, k and v; it holds {', '.join(sorted(arrays)) or 'nothing'}")


def _run(name: str, operations, given, seed: int, simulated: bool):
    import sys
    import warnings

    from numba_psa.implementations import implementation
    from numba_psa.testing.verify import verify as rows_of

    namespace = implementation(name)
    in_simulator = simulated and name != "cpu"
    interval = sys.getswitchinterval()
    if in_simulator:
        sys.setswitchinterval(5e-5)  # its threads wait for each other all the time: four times as fast
    elif name != "cpu":
        from numba_psa._numba_cuda import require_device

        require_device(name)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", RuntimeWarning)
            plain = "online" if name == "mirror" else "two-pass"
            return list(rows_of(name, namespace, operations, given, seed=seed, warm=not in_simulator, plain=plain))
    finally:
        sys.setswitchinterval(interval)


def _print(rows, notes) -> None:
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    console = Console()
    if not console.is_terminal:
        console = Console(width=150)
    table = Table(title="numba-psa verify: error against the float64 oracle", title_justify="left")
    for column in ("operation", "implementation", "input", "shape", "dtype"):
        table.add_column(column, overflow="fold")
    for column in ("error", "budget", "time"):
        table.add_column(column, justify="right", no_wrap=True)
    table.add_column("verdict", no_wrap=True)
    for row in rows:
        if row.refused:
            verdict = "refused"
            notes = [*notes, f"{row.implementation} refused {row.operation}: {row.reason}"]
        else:
            verdict = "[green]ok[/]" if row.passed else f"[bold red]FAIL[/] {row.output} {escape(row.reason)}"
        figures = (f"{row.error:.1e}", f"{row.budget:.1e}" if row.budget else "exact", f"{1e3 * row.seconds:.2f} ms")
        if row.refused:
            figures = ("–", "–", "–")
        table.add_row(row.operation, row.implementation, row.problem, row.shape, row.dtype, *figures, verdict)
    console.print(table)
    for note in dict.fromkeys(notes):
        console.print(f"note: {note}", highlight=False, markup=False)
    refused, passed = sum(row.refused for row in rows), sum(row.passed for row in rows)
    counts = f"{len(rows) - refused} checked, {passed} ok, {len(rows) - refused - passed} failed"
    console.print(counts + f", {refused} refused" * bool(refused), highlight=False)


def _about(no_gpu: str | None) -> dict:
    def found(package):
        try:
            return version(package)
        except PackageNotFoundError:
            return None

    packages = ("numba-psa", "numpy", "numba", "numba-cuda", "ml_dtypes")
    return {
        "machine": platform.machine(),
        "system": platform.platform(),
        "python": platform.python_version(),
        "versions": {package: found(package) for package in packages},
        "gpu": no_gpu or "present",
    }
