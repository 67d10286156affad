"""The twelve operations that every implementation has: their names, parameters and results, as data.

`oracle`, `mirror`, `cpu` and `cuda` are namespaces with these functions; a test, a fuzzer or a table is written once over
`OPERATIONS` and run over namespaces.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import ModuleType
from typing import Any, Literal

import numpy as np

from numba_psa.numerics import FORWARD_FACTOR, GRADIENT_FACTOR


@dataclass(frozen=True)
class Operation:
    """One function of the contract. Parameters are positional in the order `arrays`, `sizes`; the rest are keywords."""

    name: str
    kind: Literal["layout", "forward", "gradient"]
    arrays: tuple[str, ...]
    outputs: tuple[str, ...]
    sizes: tuple[str, ...] = ()
    adds: tuple[str, ...] = ()
    """Outputs that are added into a target of the same name, when it is given as a keyword."""
    stores: tuple[str, ...] = ()
    """Outputs that are stored into a target of the same name, when it is given as a keyword."""

    @property
    def scaled(self) -> bool:
        """Whether it takes softmax_scale: positional in the flash functions, a keyword in psa_attention and its backward."""
        return self.kind != "layout"

    @property
    def factor(self) -> float:
        """k of the tolerance rule."""
        return GRADIENT_FACTOR if self.kind == "gradient" else FORWARD_FACTOR

    @property
    def upstream(self) -> str:
        """The array whose norm stands in where the oracle's result is 0: the upstream gradient or an input."""
        return next((name for name in ("do", "d_out") if name in self.arrays), self.arrays[-1])

    def __call__(self, namespace: ModuleType | Any, arguments: Mapping[str, Any], **keywords: Any) -> dict[str, Any]:
        """{output name: array} of this function of `namespace`. Targets among the arguments are copied, not changed.

        `arguments` holds every name of `arrays` and `sizes`, and optionally softmax_scale and targets.
        """
        positional = [arguments[name] for name in self.arrays + self.sizes]
        keywords |= {name: np.copy(arguments[name]) for name in self.adds + self.stores if name in arguments}
        if arguments.get("softmax_scale") is not None:
            keywords["softmax_scale"] = arguments["softmax_scale"]
        results = getattr(namespace, self.name)(*positional, **keywords)
        return dict(zip(self.outputs, results if isinstance(results, tuple) else (results,), strict=True))


_SAVED = ("q", "k", "v", "o", "do", "l")
_GRID = ("num_heads", "height", "width")

OPERATIONS: dict[str, Operation] = {
    operation.name: operation
    for operation in (
        Operation("flash_attention2_forward", "forward", ("q", "k", "v"), ("o", "l")),
        Operation("flash_attention2_backward_dq", "gradient", _SAVED, ("dq",)),
        Operation("flash_attention2_backward_dkv", "gradient", _SAVED, ("dk", "dv")),
        Operation("psa_pack_qkv", "layout", ("qkv",), ("packed",), ("num_heads",)),
        Operation("psa_extract_v_nchw", "layout", ("qkv",), ("v",), ("num_heads",)),
        Operation("psa_merge_attn_nchw", "layout", ("lo", "hi"), ("out",), _GRID),
        Operation("psa_pack_qkv_backward", "layout", ("d_packed",), ("d_qkv",), _GRID, adds=("d_qkv",)),
        Operation("psa_extract_v_backward", "layout", ("d_v",), ("d_qkv",), ("num_heads",), adds=("d_qkv",)),
        Operation("psa_merge_attn_backward", "layout", ("d_merged",), ("d_lo", "d_hi"), ("num_heads",)),
        Operation("psa_fa2_backward", "gradient", _SAVED, ("dq", "dk", "dv"), adds=("dq", "dk"), stores=("dv",)),
        Operation("psa_attention", "forward", ("qkv",), ("out",), ("num_heads",)),
        Operation("psa_attention_backward", "gradient", ("qkv", "d_out"), ("d_qkv",), ("num_heads",)),
    )
}
