"""`numba-psa weights`: the attention layers in a weight file."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def weights(
    file: Annotated[Path, typer.Argument(help="A .safetensors, .npz or .onnx file.")],
    imgsz: Annotated[int, typer.Option(help="Side of the square picture that tokens are counted for.")] = 640,
) -> None:
    """List the attention layers of FILE: class, channels, heads, widths, and tokens at stride 32."""
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    from numba_psa.errors import NumbaPSAError, WeightsError
    from numba_psa.nn.discover import attention_layers
    from numba_psa.nn.files import read_state
    from numba_psa.nn.picture import STRIDE
    from numba_psa.shapes import check_count

    try:
        side = -(-check_count("imgsz", imgsz, 1) // STRIDE)
        state = read_state(file)
        found = attention_layers(state)
        if not found:
            raise WeightsError(f"{file} holds no attention layer: none of its {len(state)} arrays is a qkv.conv.weight")
    except (NumbaPSAError, OSError) as error:
        typer.echo(f"numba-psa weights: {error}", err=True)
        raise typer.Exit(2) from error

    console = Console()
    if not console.is_terminal:
        console = Console(width=150)
    table = Table(title=escape(f"attention layers of {file}"), title_justify="left")
    for column in (
        "prefix",
        "class",
        "channels",
        "attentions",
        "heads",
        "key_dim",
        "head_dim",
        f"tokens at {imgsz}×{imgsz}",
    ):
        table.add_column(column, overflow="fold")
    problems = []
    for prefix, layer_class in found.items():
        try:
            layer = layer_class.from_state_dict(state, prefix)
        except NumbaPSAError as error:
            problems.append(f"{prefix}: {error}")
            continue
        attention = layer.attentions[0]
        sizes = (len(layer.attentions), attention.num_heads, attention.key_dim, attention.head_dim)
        channels, tokens = f"{layer.c_in} -> {layer.c_out}", f"{side}×{side} = {side * side}"
        table.add_row(escape(prefix), layer_class.__name__, channels, *map(str, sizes), tokens)
    console.print(table)
    console.print(f"heads: max(c // 64, 1), which the weights do not say; tokens: at stride {STRIDE}", highlight=False)
    for problem in problems:
        typer.echo(f"numba-psa weights: {problem}", err=True)
    raise typer.Exit(1 if problems else 0)
