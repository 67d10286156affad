"""`numba-psa`: the command line. Each command lives in `numba_psa.commands` and imports what it needs when it runs."""

from __future__ import annotations

import typer

from numba_psa.commands import vectors
from numba_psa.commands.convert import convert
from numba_psa.commands.detect import Detect, detect
from numba_psa.commands.doctor import doctor
from numba_psa.commands.fuzz import fuzz
from numba_psa.commands.infer import infer
from numba_psa.commands.verify import verify
from numba_psa.commands.weights import weights

app = typer.Typer(
    name="numba-psa",
    help="PSA attention and FlashAttention-2: verify kernels, fuzz ports, write golden vectors.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    add_completion=False,
)


@app.callback()
def main() -> None:
    """PSA attention and FlashAttention-2 without PyTorch."""


app.command()(verify)
app.command()(doctor)
app.command()(fuzz)
app.add_typer(vectors.app, name="vectors")
app.command()(infer)
app.command()(weights)
app.command()(convert)
app.command(cls=Detect)(detect)
