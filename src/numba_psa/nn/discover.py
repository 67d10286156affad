"""Which attention layers a weight file holds, by the names of its arrays."""

from __future__ import annotations

from collections.abc import Iterable

from numba_psa.errors import WeightsError
from numba_psa.nn.layers import C2PSA, PSA, Attention, C3k2, Layer, PSABlock

_QKV = "qkv.conv.weight"
_SIGNATURES: tuple[tuple[type[Layer], tuple[str, ...]], ...] = (
    (C3k2, ("cv1.conv.weight", f"m.0.1.attn.{_QKV}")),
    (C2PSA, ("cv1.conv.weight", f"m.0.attn.{_QKV}")),
    (PSA, ("cv1.conv.weight", f"attn.{_QKV}")),
    (PSABlock, ("ffn.0.conv.weight", f"attn.{_QKV}")),
    (Attention, (_QKV,)),
)
"""The arrays by which a layer is known, below its prefix; the first that fits."""


def layer_class(names: Iterable[str], prefix: str) -> type[Layer]:
    """The class of the layer at `prefix`; WeightsError, which names the layers there are, where there is none."""
    names = set(names)
    found = _class_at(names, prefix.strip("."))
    if found is None:
        there = ", ".join(f"{at or '(no prefix)'} ({layer.__name__})" for at, layer in attention_layers(names).items())
        raise WeightsError(f"no attention layer has the prefix {prefix!r}; there is {there or 'none at all'}")
    return found


def attention_layers(names: Iterable[str]) -> dict[str, type[Layer]]:
    """{prefix: class} of every attention layer that is not part of another one, in the order of the names."""
    names = list(names)
    known, layers = set(names), {}
    for name in names:
        if name == _QKV or name.endswith(f".{_QKV}"):
            parts = name.split(".")
            prefixes = (".".join(parts[:count]) for count in range(len(parts) - 2))
            prefix, layer = next((at, found) for at in prefixes if (found := _class_at(known, at)))
            layers[prefix] = layer
    return layers


def _class_at(names: set[str], prefix: str) -> type[Layer] | None:
    start = f"{prefix}." if prefix else ""
    return next((layer for layer, marks in _SIGNATURES if all(start + mark in names for mark in marks)), None)
