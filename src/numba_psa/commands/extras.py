"""What a command needs beyond the package's own dependencies."""

from __future__ import annotations

import importlib.util

from numba_psa.errors import BackendUnavailableError


def need(extra: str, *modules: str) -> None:
    """BackendUnavailableError that names what is missing of `modules`, and the command that installs it."""
    missing = [module for module in modules if importlib.util.find_spec(module) is None]
    if missing:
        raise BackendUnavailableError(f"{', '.join(missing)} is not installed: pip install 'numba-psa[{extra}]'")
