"""Which implementation runs: an explicit choice, a documented default, never a silent fallback."""

from __future__ import annotations

import importlib
import importlib.util
from functools import cache
from types import ModuleType
from typing import Any

from numba_psa.errors import BackendUnavailableError, ParameterError

IMPLEMENTATIONS = ("oracle", "mirror", "cpu", "cuda")


@cache
def implementation(name: str) -> ModuleType:
    """The namespace `numba_psa.<name>`: one of oracle, mirror, cpu, cuda, each with the operations of the contract.

    Raises ParameterError for another name and BackendUnavailableError where it cannot run; both say what to do.
    """
    if name not in IMPLEMENTATIONS:
        raise ParameterError(f"impl must be one of {', '.join(IMPLEMENTATIONS)}, got {name!r}")
    if importlib.util.find_spec(f"numba_psa.{name}") is None:
        raise BackendUnavailableError(f"impl={name!r} is not part of this version of numba-psa")
    return importlib.import_module(f"numba_psa.{name}")


def default_implementation(array: Any) -> str:
    """What `impl=None` means for `array`: "mirror" for a device array, "cpu" for NumPy arrays and what becomes one."""
    return "mirror" if hasattr(array, "__cuda_array_interface__") else "cpu"


def attention(qkv: Any, num_heads: int, *, impl: str | None = None, **keywords: Any) -> Any:
    """`psa_attention` of the implementation `impl`; left out, of the default for the kind of `qkv`."""
    return implementation(impl or default_implementation(qkv)).psa_attention(qkv, num_heads, **keywords)


def attention_backward(qkv: Any, d_out: Any, num_heads: int, *, impl: str | None = None, **keywords: Any) -> Any:
    """`psa_attention_backward` of the implementation `impl`; left out, of the default for the kind of `qkv`."""
    return implementation(impl or default_implementation(qkv)).psa_attention_backward(qkv, d_out, num_heads, **keywords)
