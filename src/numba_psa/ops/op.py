"""What every graph operation answers: shapes, launch geometry, kernel arguments, source, PTX, and running it.

Source: the traits CustomOp and RuntimeOp as vision-rs 0.1.1 implements them (`psa.rs`). A shape is a tuple whose unknown
sizes, the batch above all, are None and stay None. Arguments are packed as the original's runtime takes them: pointers,
32-bit integers, 32-bit floats. (Numba's own entry points take arrays as descriptors and integers as 64-bit; `run` goes
through the implementations, which know that.)
"""

from __future__ import annotations

import inspect
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any, Literal, NamedTuple

import numpy as np

from numba_psa.errors import ParameterError, ShapeError
from numba_psa.implementations import default_implementation, implementation
from numba_psa.numerics import accumulator_dtype, float_dtype
from numba_psa.shapes import check_count, check_rank

Shape = tuple[int | None, ...]
Grid = tuple[int, int, int]


class Tensor(NamedTuple):
    """A buffer as a runtime sees it: an address and a known shape."""

    pointer: int
    shape: tuple[int, ...]


class Argument(NamedTuple):
    """One kernel argument: its name in the kernel, how it is passed, its value."""

    name: str
    kind: Literal["ptr", "i32", "f32"]
    value: int | float


class Lowered(NamedTuple):
    """What a graph compiler gets: kernel name, source, name of the entry point, and the op that packs its arguments."""

    name: str
    source: str
    entry_point: str
    op: Op


def pointer(name: str, address: int) -> Argument:
    return Argument(name, "ptr", int(address))


def integers(**values: int) -> list[Argument]:
    """32-bit integer arguments, or the ShapeError that names the one that does not fit."""
    for name, value in values.items():
        if not -(2**31) <= value < 2**31:
            raise ShapeError(f"{name} = {value} does not fit the 32-bit integer the original's kernels take")
    return [Argument(name, "i32", int(value)) for name, value in values.items()]


def scalar(name: str, value: float) -> Argument:
    return Argument(name, "f32", float(np.float32(value)))


@dataclass(frozen=True)
class Op(ABC):
    """One node of a graph. `dtype` is the element type of its buffers; `key_dim` the compile-time KEY_DIM or HEAD_DIM."""

    key_dim: int
    dtype: Any = field(default="float32", kw_only=True)

    name = ""
    n_activation_inputs = 1
    has_backward = True

    def __post_init__(self) -> None:
        object.__setattr__(self, "key_dim", check_count("key_dim", self.key_dim, 1))
        object.__setattr__(self, "dtype", float_dtype(self.dtype))

    # ---- shapes and geometry ----
    @abstractmethod
    def infer_output_shape(self, input_shapes: Sequence[Shape]) -> Shape:
        """Shape of the output; sizes that an input leaves unknown stay unknown."""

    def param_shapes(self, input_shapes: Sequence[tuple[int, ...]]) -> list[tuple[int, ...]]:
        """Shapes of the scratch buffers that the forward fills and the backward reads."""
        return []

    @property
    def block(self) -> Grid:
        """Threads of a block of our mirror kernel: a lane a column. (The original asks for 128, or 1 for attention.)"""
        return self.key_dim, 1, 1

    @abstractmethod
    def grid(self, output_shape: Sequence[int]) -> Grid:
        """Blocks of the forward kernel for a known output shape."""

    @property
    def backward_block(self) -> Any:
        return self.block

    def backward_grid(self, input_shapes: Sequence[tuple[int, ...]], output_shape: Sequence[int]) -> Any:
        """Blocks of the backward kernel: those of the forward."""
        return self.grid(output_shape)

    # ---- kernel arguments ----
    @abstractmethod
    def pack_args(
        self, inputs: Sequence[Tensor], params: Sequence[int], output: int, output_shape: Sequence[int]
    ) -> list[Argument]:
        """Arguments of the forward kernel in its order; params and output are addresses."""

    @abstractmethod
    def pack_backward_args(
        self,
        inputs: Sequence[Tensor],
        params: Sequence[int],
        output: int,
        output_shape: Sequence[int],
        grad_output: int,
        grad_inputs: Sequence[int],
    ) -> Any:
        """Arguments of the backward kernel in its order."""

    # ---- source and PTX of the mirror kernels ----
    @abstractmethod
    def factories(self) -> tuple[Callable, ...]:
        """Factories of the mirror kernels: the forward, then the backward ones."""

    @property
    def constants(self) -> tuple[int, ...]:
        """Compile-time constants of the kernels."""
        return (self.key_dim,)

    def forward_source(self) -> str:
        """Source text of the forward mirror kernel's factory."""
        return inspect.getsource(self.factories()[0])

    def backward_source(self) -> Any:
        """Source text of the backward mirror kernel's factory; a tuple where there are several."""
        sources = tuple(inspect.getsource(factory) for factory in self.factories()[1:])
        return sources[0] if len(sources) == 1 else sources

    def ptx(self, cc: tuple[int, int], *, backward: bool = False) -> Any:
        """PTX of the mirror kernel for compute capability `cc`, compiled with no device; a tuple where there are several."""
        from numba_psa._numba_cuda import compile_ptx
        from numba_psa.mirror.elements import ELEMENTS

        element = ELEMENTS[self.dtype]
        factories = self.factories()[1:] if backward else self.factories()[:1]
        kernels = [factory(*self.constants, element) for factory in factories]
        texts = tuple(compile_ptx(kernel, self._signature(kernel, element), cc) for kernel in kernels)
        return texts[0] if len(texts) == 1 else texts

    def _signature(self, kernel: Callable, element: Any) -> tuple:
        from numba import from_dtype, int64

        stored, real = from_dtype(element.storage), from_dtype(np.dtype(element.real))

        def typed(name: str) -> Any:
            if name == "l_ptr":
                return from_dtype(accumulator_dtype(self.dtype))[::1]
            if name.endswith("_ptr"):
                return stored[::1]
            return real if name in ("softmax_scale", "neg_inf") else int64

        return tuple(typed(name) for name in inspect.signature(kernel).parameters)

    def lower(self) -> Lowered:
        """Everything a graph compiler needs to launch the forward kernel."""
        return Lowered(self.name, self.forward_source(), "kernel", self)

    # ---- running ----
    @abstractmethod
    def run(self, inputs: Sequence[Any], *, impl: str | None = None) -> tuple[Any, tuple]:
        """(output, params) of the forward on arrays, by the implementation `impl` or the default for their kind."""

    @abstractmethod
    def run_backward(
        self,
        inputs: Sequence[Any],
        output: Any,
        params: Sequence[Any],
        grad_output: Any,
        *,
        grad_inputs: Sequence[Any] | None = None,
        impl: str | None = None,
    ) -> tuple:
        """Gradients of the inputs. Given `grad_inputs` are added into or stored to, as the kernel does, and returned."""

    def _check_count(self, inputs: Sequence[Any]) -> None:
        if len(inputs) != self.n_activation_inputs:
            raise ParameterError(f"{self.name} takes {self.n_activation_inputs} inputs, got {len(inputs)}")

    def _namespace(self, inputs: Sequence[Any], impl: str | None) -> ModuleType:
        self._check_count(inputs)
        return implementation(impl or default_implementation(inputs[0]))


def labelled(name: str, shape: Sequence[int | None], axes: Sequence[str], **expected: int | None) -> Shape:
    """`shape` after checking its rank and every size in `expected` (by axis label) that both sides know."""
    check_rank(name, shape, axes)
    for axis, (label, size) in enumerate(zip(axes, shape, strict=True)):
        wanted = expected.get(label)
        if wanted is not None and size is not None and size != wanted:
            raise ShapeError(f"{name} has {label} = {size} on axis {axis}, expected {wanted}: shape {tuple(shape)}")
    return tuple(shape)
