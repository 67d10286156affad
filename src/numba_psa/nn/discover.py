"""Which attention layers a weight file holds, by the names of its arrays."""

from __future__ import annotations

import re
from collections.abc import Iterable

from numba_psa.errors import WeightsError
from numba_psa.nn.layers import C2PSA, PSA, Attention, C3k2, Layer, PSABlock
from numba_psa.nn.weights import natural

_QKV = "qkv.conv.weight"
_SIGNATURES: tuple[tuple[type[Layer], str, str], ...] = (
    (C3k2, "cv1.conv.weight", r"m\.\d+\.1\.attn\."),
    (C2PSA, "cv1.conv.weight", r"m\.\d+\.attn\."),
    (PSA, "cv1.conv.weight", r"attn\."),
    (PSABlock, "ffn.0.conv.weight", r"attn\."),
    (Attention, _QKV, r""),
)
"""By what a layer is known, below its prefix: an array, and what precedes `qkv.conv.weight`. The first that fits."""


def layer_class(names: Iterable[str], prefix: str) -> type[Layer]:
    """The class of the layer at `prefix`; WeightsError, which names the layers there are, where there is none."""
    names = set(names)
    found = _class_at(names, prefix.strip("."))
    if found is None:
        there = ", ".join(f"{at or '(no prefix)'} ({layer.__name__})" for at, layer in attention_layers(names).items())
        raise WeightsError(f"no attention layer has the prefix {prefix!r}; there is {there or 'none at all'}")
    return found


def attention_layers(names: Iterable[str]) -> dict[str, type[Layer]]:
    """{prefix: class} of every attention layer that is not part of another one, in the order of the network."""
    known, layers = set(names), {}
    for name in sorted(known, key=natural):
        if name == _QKV or name.endswith(f".{_QKV}"):
            parts = name.split(".")
            prefixes = (".".join(parts[:count]) for count in range(len(parts) - 2))
            prefix, layer = next((at, found) for at in prefixes if (found := _class_of(known, at, name)))
            layers[prefix] = layer
    return layers


def _class_at(names: set[str], prefix: str) -> type[Layer] | None:
    start = f"{prefix}." if prefix else ""
    inside = sorted(name for name in names if name.startswith(start) and name.endswith(_QKV))
    return next((found for name in inside if (found := _class_of(names, prefix, name))), None)


def _class_of(names: set[str], prefix: str, qkv: str) -> type[Layer] | None:
    """The class of the layer at `prefix` that the attention with the weight `qkv` belongs to."""
    start = f"{prefix}." if prefix else ""
    for layer, mark, attention in _SIGNATURES:
        if start + mark in names and re.fullmatch(attention + re.escape(_QKV), qkv[len(start) :]):
            return layer
    return None
