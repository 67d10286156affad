"""From a problem to launches: a plan chooses, compiles and loads once, and then only launches.

A plan belongs to the device that was current when it was made. It holds no memory and no state that a call changes, so
threads may share one; calls on different streams run side by side.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import cache
from math import copysign, gcd
from typing import Any

import numpy as np

from numba_psa._numba_cuda import MAX_GRID_Y, SIMULATED, cuda
from numba_psa.cuda.align import ALIGN_SIGNATURE, AlignConfig, make_align_rows, pitch_of
from numba_psa.cuda.choice import Choice, Problem, choose
from numba_psa.cuda.forward import SIGNATURE
from numba_psa.cuda.launching import architecture, borrowed, current_device, head_runs, kernel, memory_pool
from numba_psa.cuda.views import dtype_of, kind_of, stream_handle
from numba_psa.errors import DTypeError, ParameterError
from numba_psa.numerics import FLOAT32, FLOAT64, LOG2E, check_scale, float_dtype
from numba_psa.shapes import OUT_AXES, QKV_AXES, PSAShape, check_shape

SMALLEST_SCALE = 1e-30
"""Scores that are multiplied by less than this all give the same probability, as they do with this."""


@cache
def multiprocessors(device: int) -> int:
    """How many a device has; the simulator plays an H200."""
    return 132 if SIMULATED else cuda.get_current_device().MULTIPROCESSOR_COUNT


def exactness(precision: str | None, dtype: np.dtype) -> bool:
    """Whether float32 means float32 (None) or TF32; ParameterError for another precision."""
    if precision is None:
        return True
    if precision != "tf32":
        raise ParameterError(f"precision must be None (the dtype's own) or 'tf32', got {precision!r}")
    if dtype != FLOAT32:
        raise ParameterError(f"precision='tf32' is a choice for float32, the arrays are {dtype}")
    return False


class AttentionPlan:
    """`plan(qkv, out, stream=None)` is psa_attention for one shape and dtype, at the price of a launch.

    qkv, out: contiguous device arrays of that shape and dtype, or their addresses as ints; out is written. stream: as in
    psa_attention. Nothing is waited for: it can be captured into a CUDA graph. Nothing is allocated, but for 16-bit qkv
    whose N is no multiple of 8: there the stream may lend 3/4 of its size, at most 256 MiB or a head, until the call ends.
    """

    def __init__(
        self,
        shape: PSAShape,
        dtype: Any,
        *,
        softmax_scale: float | None = None,
        precision: str | None = None,
        saves_l: bool = False,
    ):
        if not isinstance(shape, PSAShape):
            given = type(shape).__name__
            raise DTypeError(f"shape must be a PSAShape, such as PSAShape.from_qkv(qkv.shape, num_heads), got {given}")
        self.shape, self.dtype = shape, float_dtype(dtype)
        if self.dtype == FLOAT64:
            raise DTypeError("impl='cuda' takes float16, bfloat16 and float32, not float64")
        exact = exactness(precision, self.dtype)
        self._scale = device_scale(check_scale(softmax_scale, shape.softmax_scale))
        self._problem = Problem(
            shape.bh, shape.n, shape.n, shape.key_dim, shape.head_dim, self.dtype, saves_l=saves_l, exact=exact
        )
        self._launchers: dict[int, Launcher] = {}
        self._known: set[tuple] = set()
        self._n, self._part = shape.n, shape.key_dim * shape.n * self.dtype.itemsize  # bytes from q to k and from k to v
        self._problem.check_widths()
        self._aligned = self._launcher(16) if shape.bh and shape.n else None
        self._simple = self._aligned.simple if self._aligned else None
        self._seen: dict[str, tuple[Any, Any]] = {"qkv": (None, None), "out": (None, None)}

    @property
    def choice(self) -> Choice:
        """The kernel and config that run where addresses are multiples of 16."""
        return self._launcher(16).choice

    def __call__(self, qkv: Any, out: Any, stream: Any = None) -> None:
        source = qkv if type(qkv) is int else self._address(qkv, "qkv")
        target = out if type(out) is int else self._address(out, "out")
        if type(stream) is not int:
            stream = stream_handle(stream) if type(qkv) is int else stream_handle(stream, kind_of(qkv), qkv)
        if self._simple and (source | target) & 15 == 0:
            part, n = self._part, self._n
            self._simple(stream, (source, source + part, source + part + part, target, 0, n, n, self._scale))
        else:
            self.launch(source, target, 0, stream)

    def launch(self, qkv: int, out: int, l: int, stream: int, scratch: Scratch | None = None) -> None:
        """The same for addresses, and for the one that l is stored to if the plan saves it; scratch: as in Aligner."""
        if self._aligned is None:  # no element
            return
        part = self._part
        launcher = self._aligned if (qkv | out) & 15 == 0 else self._launcher(gcd(16, qkv, out))
        launcher(stream, qkv, qkv + part, qkv + 2 * part, out, l, self._scale, scratch)

    def _launcher(self, alignment: int) -> Launcher:
        if alignment < self.dtype.itemsize:
            raise ParameterError(f"an address is no multiple of the {self.dtype.itemsize} bytes of {self.dtype}")
        if alignment not in self._launchers:
            self._launchers[alignment] = Launcher(replace(self._problem, alignment=alignment))
        return self._launchers[alignment]

    def _address(self, array: Any, name: str) -> int:
        """Where a device array begins; what has passed the check once passes at the price of a look-up."""
        if hasattr(array, "data_ptr"):  # torch
            shape, dtype = self._seen[name]
            if not (array.dtype is dtype and array.shape == shape and array.is_contiguous() and array.is_cuda):
                self._check(name, array, array.is_contiguous())
                self._seen[name] = array.shape, array.dtype
            return array.data_ptr()
        if SIMULATED and hasattr(array, "shape"):
            key = (name, array.shape, array.dtype, True)
            pointer = getattr(array, "_ary", array).ctypes.data
        else:
            interface = getattr(array, "__cuda_array_interface__", None)
            if interface is None:
                raise DTypeError(f"{name} must be a CUDA array or its address, got {type(array).__name__}")
            key = (name, interface["shape"], interface["typestr"], interface.get("strides") is None)
            pointer = interface["data"][0]
        if key not in self._known:
            self._check(name, array, key[3])
            self._known.add(key)
        return pointer

    def _check(self, name: str, array: Any, contiguous: bool) -> None:
        if hasattr(array, "is_cuda") and not array.is_cuda:
            raise DTypeError(f"{name} must be a CUDA array or its address, got a torch tensor on {array.device}")
        expected, axes = (self.shape.qkv, QKV_AXES) if name == "qkv" else (self.shape.out, OUT_AXES)
        check_shape(name, tuple(array.shape), expected, axes)
        if dtype_of(array) != self.dtype:
            raise DTypeError(f"{name} has dtype {dtype_of(array)}, the plan is for {self.dtype}")
        if not contiguous:
            raise ParameterError(f"{name} is strided: a plan takes contiguous arrays (psa_attention copies)")


def device_scale(softmax_scale: float) -> float:
    """softmax_scale * log2(e), kept away from 0, where a mask would no longer mask."""
    return copysign(max(abs(softmax_scale), SMALLEST_SCALE), softmax_scale) * LOG2E


class Launcher:
    """One problem's kernel, grid and strides; the kernel is the choice table's unless another one is given."""

    def __init__(self, problem: Problem, choice: Choice | None = None):
        device = current_device()
        self.choice = choice or choose(problem, architecture(device), multiprocessors(device))
        self._kernel = kernel(self.choice.make, self.choice.config, SIGNATURE)
        self._n_queries, self._n_keys = problem.n_queries, problem.n_keys
        self._blocks = -(-problem.n_queries // self.choice.config.BM)
        item = problem.dtype.itemsize
        q, k, v = (
            n * width
            for n, width in (
                (problem.n_queries, problem.key_dim),
                (problem.n_keys, problem.key_dim),
                (problem.n_keys, problem.value_dim),
            )
        )
        slab = (q, k, v) if problem.tokens_first else (q + k + v,) * 3
        self._strides = *(item * x for x in slab), item * problem.n_queries * problem.value_dim, 4 * problem.n_queries
        self._align = Aligner(problem, device) if self.choice.config.packed else None
        self._runs = head_runs(problem.heads, self._align.heads if self._align else MAX_GRID_Y)
        self._launch = {count: self._kernel.bound((self._blocks, count, 1), early=True) for _, count in self._runs}
        self.simple = self._launch[problem.heads] if len(self._runs) == 1 and not self._align else None

    def __call__(
        self, stream: int, q: int, k: int, v: int, out: int, l: int, scale: float, scratch: Scratch | None = None
    ) -> None:
        sizes = self._n_queries, self._n_keys, scale
        if self.simple:
            self.simple(stream, (q, k, v, out, l, *sizes))
            return
        for first, count in self._runs:
            starts = zip((q, k, v, out, l), self._strides, strict=True)
            q_, k_, v_, *rest = (address + first * stride for address, stride in starts)
            with self._align(count, stream, k_, scratch) if self._align else nullcontext((k_, v_)) as (keys, values):
                self._launch[count](stream, (q_, keys, values, *rest, *sizes))


Scratch = Callable[[int], Any]
"""What lends so many bytes, as something with a `pointer`, until the call returns; or None: take them from elsewhere."""


class Aligner:
    """Keys and values brought to aligned rows for the kernel after it: `with aligner(heads, stream, k) as (k, v)`.

    The rows lie in memory that scratch lends, or else in memory that the stream allocates and frees.
    """

    MOST = 2**28
    """Bytes that it takes at a time; more heads than fit go in several launches."""

    def __init__(self, problem: Problem, device: int):
        self._config, self._device, self._n = AlignConfig(problem.key_dim), device, problem.n_keys
        self._kernel = kernel(make_align_rows, self._config, ALIGN_SIGNATURE)
        memory_pool(device)
        self.heads = max(1, min(MAX_GRID_Y, self.MOST // self._config.bytes(self._n)))

    @contextmanager
    def __call__(self, heads: int, stream: int, k: int, scratch: Scratch | None = None) -> Iterator[tuple[int, int]]:
        count = heads * self._config.bytes(self._n)
        lent = scratch(count) if scratch else None
        with nullcontext(lent.pointer) if lent else borrowed(count, stream, self._device) as memory:
            self._kernel((self._config.blocks(self._n), heads, 1), stream, k, memory, self._n, heads)
            yield memory, memory + 2 * self._config.key_dim * pitch_of(self._n)


@cache
def launcher(problem: Problem, device: int) -> Launcher:
    """The launcher of a problem on a device, made once."""
    return Launcher(problem)


@cache
def cached_plan(
    qkv: tuple[int, ...],
    num_heads: int,
    dtype: np.dtype,
    softmax_scale: float | None,
    precision: str | None,
    saves_l: bool,
    device: int,
) -> AttentionPlan:
    """What psa_attention runs: the plan for qkv of this shape on this device, checked and made once."""
    shape = PSAShape.from_qkv(qkv, num_heads)
    return AttentionPlan(shape, dtype, softmax_scale=softmax_scale, precision=precision, saves_l=saves_l)


def plan_psa_attention(
    shape: PSAShape, dtype: Any, *, softmax_scale: float | None = None, precision: str | None = None
) -> AttentionPlan:
    """A plan for psa_attention on qkv of this shape and dtype: compiled and loaded now, launched with little host work.

    shape: PSAShape. precision: None or, for float32, "tf32". Raises as psa_attention does.
    """
    return AttentionPlan(shape, dtype, softmax_scale=softmax_scale, precision=precision)
