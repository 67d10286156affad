"""`numba-psa detect`: the boxes that a detector finds in pictures."""

from __future__ import annotations

import json
import re
import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Annotated, Any, BinaryIO

import typer
from typer.core import TyperCommand

ADDRESS = re.compile(r"auto|local|(ray://)?[\w.-]+:\d+|ray://\S+")


class Detect(TyperCommand):
    """Lets --ray stand without an address, which then is "auto": the cluster that this machine belongs to."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        args = list(args)
        for place, argument in enumerate(args):
            if argument == "--ray" and not (args[place + 1 :] and ADDRESS.fullmatch(args[place + 1])):
                args[place] = "--ray=auto"
        return super().parse_args(ctx, args)


def detect(
    images: Annotated[list[str], typer.Argument(metavar="IMAGE…", help="Picture files.", show_default=False)],
    weights: Annotated[Path, typer.Option(help="A YOLO11 or YOLO26 detector: .onnx, .safetensors or .npz.")],
    imgsz: Annotated[int, typer.Option(help="The longer side of a picture is resized to this multiple of 32.")] = 640,
    conf: Annotated[float, typer.Option(help="The score that a box must exceed.")] = 0.25,
    out: Annotated[
        Path | None, typer.Option(help="Annotated picture; with more than one IMAGE a folder, made if need be.")
    ] = None,
    json: Annotated[Path | None, typer.Option(help="Write the boxes here, in pixels of the upright pictures.")] = None,
    profile: Annotated[
        bool, typer.Option("--profile", help="Time each layer on the first picture that can be read.")
    ] = False,
    ray: Annotated[
        str | None,
        typer.Option(metavar="[ADDRESS]", help="Spread the pictures over this Ray cluster; alone: the one at hand."),
    ] = None,
) -> None:
    """Find objects in every IMAGE.

    A picture that cannot be read is one line on stderr, the others go on, and the exit code is 1; it is 2 where nothing can
    be done. Files appear whole or not at all.
    """
    from numba_psa.errors import NumbaPSAError
    from numba_psa.nn.batch import printable

    try:
        failed = _detect(images, weights, imgsz, conf, out, json, profile, ray)
    except (NumbaPSAError, OSError) as error:
        lines = map(printable, str(error).splitlines())  # a list of wrong weights has many
        typer.echo("numba-psa detect: " + "\n".join(lines), err=True)
        raise typer.Exit(2) from error
    raise typer.Exit(1 if failed else 0)


def _detect(images, weights, imgsz, conf, out, json_file, profile, address) -> int:
    """Do it, and give the number of pictures that failed."""
    from numba_psa.errors import ParameterError
    from numba_psa.nn import batch, cluster, yolo
    from numba_psa.nn.written import written
    from numba_psa.nn.yolo_pictures import check_options

    if profile and address is not None:
        raise ParameterError("--profile times this machine, and --ray is for others: give one of them")
    if out and json_file and out.resolve() == json_file.resolve():
        raise ParameterError(f"--out and --json are both {out}: they need a file each")
    model = yolo.load(weights)
    check_options(model.stride, imgsz, conf)
    _check_targets([path for path in (out, json_file) if path], [*images, weights])
    folder = out is not None and (len(images) > 1 or out.is_dir())
    request = batch.Request(imgsz, conf, _format(out, folder))
    with ExitStack() as files:
        # Before the work, so that what cannot be written does not come out after it.
        json_target = files.enter_context(written(json_file)) if json_file else None
        targets = _targets(images, out) if folder else [out]
        if folder:
            out.mkdir(exist_ok=True)
            _check_targets(targets, images)
        if address is None:
            found = batch.outcomes(model, images, request)
        else:
            found = cluster.outcomes(weights, images, request, address)
        results: list[batch.Outcome] = [batch.Outcome(image) for image in images]
        for index, result in _with_progress(_drawn(found, targets), len(images)):
            results[index] = result
        for result in results:
            if not result.error:
                typer.echo(result)
        if json_target:
            _write_json(json_target, weights, request, results)
    if profile:
        _profile(model, weights, images, imgsz)
    return sum(bool(result.error) for result in results)


def _check_targets(targets: Iterable[Path], sources: Sequence[str | Path]) -> None:
    """ParameterError where a file that is to be written is one that is read."""
    from numba_psa.errors import ParameterError

    sources = {Path(source).resolve() for source in sources}
    for target in targets:
        if target.resolve() in sources:
            raise ParameterError(f"{target} would overwrite what it is made from")


def _format(out: Path | None, folder: bool) -> str | None:
    """The Pillow format of annotated pictures; ParameterError where it writes none with such a suffix."""
    from numba_psa.errors import ParameterError
    from numba_psa.nn.picture import pillow

    if out is None or folder:
        return out and "PNG"
    pil = pillow()
    kind = pil.Image.registered_extensions().get(out.suffix.lower())
    if kind not in pil.Image.SAVE:
        raise ParameterError(f"--out {out}: pictures are written as .png, .jpg, .webp and others, not as {out.suffix!r}")
    return kind


def _targets(images: Sequence[str], folder: Path) -> list[Path]:
    """A file in the folder for each picture: its name as .png, with a number where others before have the same."""
    names: set[str] = set()
    targets = []
    for image in images:
        stem = Path(image).stem
        name, number = f"{stem}.png", 1
        while name.casefold() in names:
            number += 1
            name = f"{stem}-{number}.png"
        names.add(name.casefold())
        targets.append(folder / name)
    return targets


def _drawn(found: Iterable[tuple[int, Any]], targets: Sequence[Path]) -> Iterable[tuple[int, Any]]:
    """The same outcomes, once their drawings are written, and without them."""
    from dataclasses import replace

    from numba_psa.nn.batch import printable
    from numba_psa.nn.written import written

    for index, result in found:
        error = result.error
        if result.drawing is not None:
            try:
                with written(targets[index]) as file:
                    file.write(result.drawing)
            except OSError as fault:
                error = printable(f"{targets[index]}: {fault}")
        yield index, replace(result, drawing=None, error=error)


def _with_progress(found: Iterable[tuple[int, Any]], total: int) -> Iterable[tuple[int, Any]]:
    """The same outcomes, with a bar on a terminal, and a line for each that failed, as they come."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    console = Console(stderr=True)
    columns = TextColumn("pictures"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn()
    with Progress(*columns, console=console, transient=True, disable=total < 2 or not console.is_terminal) as progress:
        task = progress.add_task("", total=total)
        for index, result in found:
            if result.error:
                progress.console.print(f"numba-psa detect: {result.error}", markup=False, highlight=False, soft_wrap=True)
            progress.advance(task)
            yield index, result


def _write_json(file: BinaryIO, weights: Path, request: Any, results: Sequence[Any]) -> None:
    head = json.dumps({"weights": str(weights), "imgsz": request.imgsz, "conf": request.conf})
    lines = ",\n".join(json.dumps(result.as_json()) for result in results)  # one for each picture
    file.write(f'{head[:-1]}, "images": [\n{lines}\n]}}\n'.encode())


def _profile(model: Any, weights: Path, images: Sequence[str], imgsz: int) -> None:
    """Print each layer's time on the first picture that can be read, and onnxruntime's time for the whole."""
    from rich.console import Console
    from rich.table import Table

    from numba_psa.errors import NumbaPSAError
    from numba_psa.nn import picture

    for image in images:
        try:
            content = picture.read(image)
        except (NumbaPSAError, OSError):
            continue
        x = picture.network_input(picture.framed(content, imgsz))
        break
    else:
        return
    rows = model.profile(x)
    whole, work = sum(row.ms for row in rows), sum(row.gflop for row in rows)
    table = Table(title=f"{model.family}{model.scale} on {x.shape[3]}×{x.shape[2]} pixels", title_justify="left")
    for column in ("layer", "kind", "gives", "ms", "share", "GFLOP", "GFLOP/s"):
        table.add_column(column, justify="left" if column in ("layer", "kind", "gives") else "right")
    for row in rows:
        shape = "×".join(map(str, row.shape)) if row.shape else ""
        speed = f"{row.gflop / row.ms * 1e3:.0f}" if row.ms and row.gflop else ""
        table.add_row(row.layer, row.kind, shape, f"{row.ms:.2f}", f"{row.share:.1%}", f"{row.gflop:.3f}", speed)
    table.add_row("all", "", "", f"{whole:.2f}", "100.0%", f"{work:.3f}", f"{work / whole * 1e3:.0f}" if whole else "")
    console = Console()
    if not console.is_terminal:
        console = Console(width=100)
    console.print(table)
    typer.echo(_against_onnxruntime(model, weights, x))


def _against_onnxruntime(model: Any, weights: Path, x: Any) -> str:
    """One line: how long onnxruntime takes for what the model does, or why that is not known."""
    import numba

    from numba_psa.errors import BackendUnavailableError, WeightsError
    from numba_psa.nn import onnx_graph

    if weights.suffix.lower() != ".onnx":
        return f"onnxruntime: not compared, for {weights} is no .onnx file"
    threads = numba.get_num_threads()
    try:
        peer = onnx_graph.runner(onnx_graph.parse(weights, weights.read_bytes()), weights, threads)
        theirs = _milliseconds(peer, x)
    except (BackendUnavailableError, WeightsError) as error:
        return f"onnxruntime: not compared, {error}"
    ours = _milliseconds(model.predict, x)
    return f"the whole: {ours:.1f} ms; onnxruntime: {theirs:.1f} ms, {theirs / ours:.2f} times ours ({threads} threads each)"


def _milliseconds(call: Callable[[Any], Any], x: Any, calls: int = 20) -> float:
    """Median of a call after two that warm up."""
    times = []
    for _ in range(calls + 2):
        start = time.perf_counter()
        call(x)
        times.append(time.perf_counter() - start)
    return 1e3 * statistics.median(times[2:])
