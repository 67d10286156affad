"""`numba-psa convert`: a PyTorch checkpoint to `.safetensors`, without PyTorch and without running what stands in it."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def convert(
    checkpoint: Annotated[Path, typer.Argument(help="A .pt file of an Ultralytics detector.")],
    output: Annotated[Path | None, typer.Option(help="The .safetensors file; default: beside the checkpoint.")] = None,
) -> None:
    """Write the weights of CHECKPOINT as .safetensors.

    A .pt file is a pickle, which is a program. Nothing of it is run: names become inert classes, and a call that is not the
    rebuilding of a tensor is refused by its name.
    """
    from numba_psa.errors import NumbaPSAError, ParameterError
    from numba_psa.nn.checkpoint import convert

    output = output or checkpoint.with_suffix(".safetensors")
    try:
        if output.suffix.lower() != ".safetensors":
            raise ParameterError(f"--output {output} must end in .safetensors")
        count, metadata = convert(checkpoint, output)
    except (NumbaPSAError, OSError) as error:
        typer.echo(f"numba-psa convert: {error}", err=True)
        raise typer.Exit(2) from error
    typer.echo(f"{output}: {count} arrays; {'; '.join(f'{key} {value}' for key, value in metadata.items())}")
