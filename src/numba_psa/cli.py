"""`numba-psa`: the command line. Each command lives in `numba_psa.commands` and imports what it needs when it runs."""

from __future__ import annotations

import typer

from numba_psa.commands.doctor import doctor
from numba_psa.commands.verify import verify

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
