"""`numba-psa infer`: one attention layer on a tensor or on a picture, and where one token looks."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated

import typer


def infer(
    weights: Annotated[Path, typer.Option(help="A .safetensors, .npz or .onnx file.")],
    input: Annotated[Path, typer.Option(help="x [B, c_in, H, W] as .npy; or a picture, with a whole network's weights.")],
    output: Annotated[Path | None, typer.Option(help="Write y here, as .npy.")] = None,
    prefix: Annotated[str, typer.Option(help="Where the layer stands among the weights.")] = "model.10",
    impl: Annotated[str, typer.Option(help="cpu, oracle, cuda or mirror.")] = "cpu",
    num_heads: Annotated[int | None, typer.Option(help="Default: max(c // 64, 1).")] = None,
    imgsz: Annotated[
        int, typer.Option(min=32, max=16384, help="The longer side of a picture is resized to this, if the network lets it.")
    ] = 640,
    heatmap: Annotated[Path | None, typer.Option(help="Draw where the query token looks into this picture.")] = None,
    query: Annotated[str | None, typer.Option(help="y,x of the query token; default: the one in the middle.")] = None,
    head: Annotated[int, typer.Option(help="The head whose attention is drawn.")] = 0,
    block: Annotated[int, typer.Option(help="The attention that is drawn, where a layer has several.")] = 0,
) -> None:
    """Run the layer at --prefix on --input.

    A picture (RGB, resized with its proportions kept, grey around it, divided by 255) is put through the network before the
    layer: through that of `numba_psa.nn.yolo` where the weights are a YOLO11's or YOLO26's, else, of an .onnx file, by
    onnxruntime. The heatmap is computed by the float64 oracle.
    """
    from numba_psa.errors import NumbaPSAError, ParameterError

    try:
        if output is None and heatmap is None:
            raise ParameterError("nothing to write: give --output, --heatmap or both")
        _infer(weights, input, output, prefix, impl, num_heads, imgsz, heatmap, query, head, block)
    except (NumbaPSAError, OSError) as error:
        typer.echo(f"numba-psa infer: {error}", err=True)
        raise typer.Exit(2) from error


def _infer(weights, input, output, prefix, impl, num_heads, imgsz, heatmap, query, head, block) -> None:
    import numpy as np

    from numba_psa.errors import ParameterError
    from numba_psa.nn import picture
    from numba_psa.nn.discover import layer_class
    from numba_psa.nn.files import read_file

    state, metadata = read_file(weights)
    options = {} if num_heads is None else {"num_heads": num_heads}
    layer = layer_class(state, prefix).from_state_dict(state, prefix, **options)
    image = None
    if input.suffix.lower() == ".npy":
        x = _array(input)
    else:
        x, image, network = _features(weights, state, metadata, prefix, picture.read(input), imgsz)
        typer.echo(f"{input}: {image.width}×{image.height}, put through {network}")
    y = layer(x, impl)
    typer.echo(f"{prefix} ({type(layer).__name__}): {x.dtype} {list(x.shape)} -> {list(y.shape)}, impl {impl}")
    if output is not None:
        with output.open("wb") as file:  # not by name: np.save would append .npy to another suffix
            np.save(file, y)
        typer.echo(f"{output}: y")
    if heatmap is not None:
        token = _token(query, x.shape[2:])
        weights_of_token = layer.attention_map(x[:1], token, head, block)[0]
        if not np.isfinite(weights_of_token).all():
            raise ParameterError(f"there is no heatmap: {input} makes the attention NaN")
        try:
            picture.heatmap(weights_of_token, token, image).save(heatmap)
        except ValueError as error:  # Pillow does not know the suffix
            raise ParameterError(f"--heatmap {heatmap}: {error}") from error
        peak = np.unravel_index(weights_of_token.argmax(), weights_of_token.shape)
        looks = f"most at {peak[0]},{peak[1]} ({weights_of_token.max():.3f})"
        typer.echo(f"{heatmap}: where token {token[0]},{token[1]} looks in head {head}, {looks}")


def _array(path: Path):
    import numpy as np

    from numba_psa.errors import ParameterError

    try:
        return np.load(path, allow_pickle=False)
    except (ValueError, EOFError) as error:
        raise ParameterError(f"{path} is no .npy file of numbers: {error}") from error


def _features(weights: Path, state, metadata, prefix: str, image, imgsz: int):
    """(x that enters the layer at `prefix` when the network sees the picture, the picture in its frame, what network)."""
    from numba_psa.errors import ParameterError, WeightsError
    from numba_psa.nn import onnx_graph, picture
    from numba_psa.nn.yolo.detector import Detector

    layer = re.fullmatch(r"model\.(\d+)", prefix.strip("."))
    try:
        detector = layer and Detector.from_state_dict(state, metadata=metadata)
    except WeightsError as error:
        detector, reason = None, str(error)
    else:
        reason = f"of a detector only whole layers model.N are reached, not {prefix}"
    if detector:
        image, before = picture.framed(image, imgsz), str(int(layer[1]) - 1)  # every attention layer reads the one before
        x = detector(picture.network_input(image), taps=before)[1][before]
        return x, image, f"{detector.family}{detector.scale} up to model.{before}"
    if weights.suffix.lower() != ".onnx":
        raise ParameterError(
            f"a picture must pass the network before {prefix}, which cannot be built from {weights} ({reason}): "
            "give the network as .onnx, or the layer's input as .npy"
        )
    model = onnx_graph.parse(weights, weights.read_bytes())
    image = picture.framed(image, imgsz, onnx_graph.image_size(model))
    first = onnx_graph.first_conv(model, prefix)
    return onnx_graph.tensors(model, weights, [first], picture.network_input(image))[0], image, f"{weights} by onnxruntime"


def _token(query: str | None, size: tuple[int, int]) -> tuple[int, int]:
    from numba_psa.errors import ParameterError

    if query is None:
        return size[0] // 2, size[1] // 2
    try:
        y, x = (int(number) for number in query.split(","))
    except ValueError as error:
        raise ParameterError(f"--query must be two numbers y,x, got {query!r}") from error
    return y, x
