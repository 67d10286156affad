"""From named arrays to the convolutions of a layer: sizes inferred, batch norm folded, everything wrong listed at once."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from numba_psa.errors import WeightsError
from numba_psa.nn.conv import BATCH_NORM, Conv, fold
from numba_psa.numerics import FLOATS

Width = tuple[int, str]
"""A number of channels: a factor times a size of the layer that the weights decide, such as (2, "c")."""


@dataclass(frozen=True)
class Wanted:
    """A convolution that a layer needs: `<name>.conv.weight [c_out, c_in, k, k]` and a bias or a batch norm.

    A plain one has `<name>.weight` and `<name>.bias` and never a batch norm.
    """

    name: str
    c_out: Width
    c_in: Width
    kernel_size: int = 1
    silu: bool = False
    depthwise: bool = False
    stride: int = 1
    plain: bool = False

    @property
    def path(self) -> str:
        """What the names of its weight and its bias begin with."""
        return self.name if self.plain else f"{self.name}.conv"

    @property
    def weight_axes(self) -> tuple[Width, ...]:
        return self.c_out, (1, "") if self.depthwise else self.c_in, (self.kernel_size, ""), (self.kernel_size, "")


def under(prefix: str, convs: Iterable[Wanted]) -> tuple[Wanted, ...]:
    """The same convolutions with their names below `prefix`."""
    return tuple(replace(conv, name=f"{prefix}.{conv.name}") for conv in convs)


def select(state: Mapping[str, np.ndarray], prefix: str) -> dict[str, np.ndarray]:
    """The arrays below `prefix`, without it; WeightsError where there are none."""
    start = f"{prefix.strip('.')}." if prefix.strip(".") else ""
    found = {name[len(start) :]: np.asarray(array) for name, array in state.items() if name.startswith(start)}
    if not found:
        roots = sorted({match[0] for name in state if (match := re.match(r"model\.\d+", name))}, key=natural)
        there = f"; there are {', '.join(roots)}" if roots else f"; there are {', '.join(list(state)[:8]) or 'no arrays'}"
        raise WeightsError(f"no array has a name below {start[:-1]!r}{there}")
    return found


def count_units(state: Mapping[str, np.ndarray], pattern: str) -> int:
    """How many numbered units there are: one more than the largest number that `pattern` captures, at least one."""
    numbers = [int(match[1]) for name in state if (match := re.match(pattern, name))]
    return max(numbers, default=0) + 1


def build(
    state: Mapping[str, np.ndarray], wanted: Sequence[Wanted], layer: str, known: Mapping[str, int] | None = None
) -> dict[str, Conv]:
    """{name: Conv} for all of `wanted`, out of the arrays of one layer.

    Raises one WeightsError with every name that is missing, unexpected, or has a wrong shape, dtype or value. A size is
    what most weights say it is, so that one wrong array is not taken for many; or what `known` says.
    """
    sizes = _sizes(state, wanted) | dict(known or {})
    problems: list[str] = []
    used: set[str] = set()
    convs = {conv.name: _conv(state, conv, sizes, problems, used) for conv in wanted}
    ignored = {name for name in state if name.endswith(".bn.num_batches_tracked")}
    problems += [f"{name}: unexpected" for name in sorted(set(state) - used - ignored, key=natural)]
    if problems:
        raise WeightsError(f"these are no weights of a {layer}:\n  " + "\n  ".join(problems))
    return convs


def _sizes(state: Mapping[str, np.ndarray], wanted: Sequence[Wanted]) -> dict[str, int]:
    votes: dict[str, Counter] = defaultdict(Counter)
    for conv in wanted:
        parts = [f"{conv.path}.bias", *(f"{conv.name}.bn.{part}" for part in BATCH_NORM)]
        candidates = [(f"{conv.path}.weight", conv.weight_axes), *((part, [conv.c_out]) for part in parts)]
        for name, axes in candidates:
            shape = np.shape(state.get(name, ()))
            if len(shape) == len(axes):
                for (factor, symbol), size in zip(axes, shape, strict=True):
                    if symbol and size and size % factor == 0:
                        votes[symbol][size // factor] += 1
    return {"": 1, **{symbol: count.most_common(1)[0][0] for symbol, count in votes.items()}}


def _conv(state, conv: Wanted, sizes: Mapping[str, int], problems: list[str], used: set[str]) -> Conv | None:
    def take(name: str, axes: Sequence[Width], alternative: str = "") -> np.ndarray | None:
        used.add(name)
        expected = tuple(factor * sizes[symbol] if symbol in sizes else None for factor, symbol in axes)
        array, shown = state.get(name), f"[{', '.join('any' if size is None else str(size) for size in expected)}]"
        if array is None:
            problems.append(f"{name}{alternative} {shown}: missing")
        elif array.dtype not in FLOATS:
            problems.append(f"{name}: has dtype {array.dtype}, must be float16, bfloat16, float32 or float64")
        elif len(array.shape) != len(expected) or any(
            size not in (None, got) for size, got in zip(expected, array.shape, strict=True)
        ):
            problems.append(f"{name}: has shape {list(array.shape)}, must be {shown}")
        elif not np.isfinite(array.astype(np.float64)).all():
            problems.append(f"{name}: holds NaN or inf")
        elif name.endswith(".bn.running_var") and (array < 0).any():
            problems.append(f"{name}: holds negative variances")
        else:
            return array.astype(np.float64 if array.dtype == np.float64 else np.float32)  # exact
        return None

    before = len(problems)
    weight = take(f"{conv.path}.weight", conv.weight_axes)
    normed = not conv.plain and any(f"{conv.name}.bn.{part}" in state for part in BATCH_NORM)
    if normed:
        parts = {part: take(f"{conv.name}.bn.{part}", [conv.c_out]) for part in BATCH_NORM}
    else:
        bias = take(f"{conv.path}.bias", [conv.c_out], "" if conv.plain else f" (or {conv.name}.bn.*)")
    if len(problems) > before:
        return None
    if normed:
        weight, bias = fold(weight, parts)
    return Conv(weight, bias, conv.silu, len(weight) if conv.depthwise else 1, conv.stride)


def natural(name: str) -> list:
    """Sorts model.9 before model.10."""
    return [int(part) if part.isdigit() else part for part in re.split(r"(\d+)", name)]
