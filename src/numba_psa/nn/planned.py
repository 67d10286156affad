"""The layers' operations on the CPU path: recorded once for an input size, then replayed on buffers that are kept.

Running a layer with a `Plan` in the place of `Exact` records its kernel launches instead of computing. All numbers that the
kernels are given stand in one array; a call only writes the addresses of its input and its output into it.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass, field

import numba
import numpy as np

from numba_psa.arrays import quiet
from numba_psa.cpu import convolution
from numba_psa.cpu.compiling import Kernel
from numba_psa.cpu.forward import forward
from numba_psa.cpu.operands import address, tiles
from numba_psa.cpu.vector import VECTOR_BYTES
from numba_psa.nn.conv import Conv
from numba_psa.nn.recording import Recorder, Tensor

TILES_AT_A_TIME = 24
"""Tiles of tokens for each thread in the images that are computed together: enough to share out evenly, few enough for
intermediate results to stay in the cache (8 images together take 5 % longer than one by one)."""
MOST_IDLE = 0.125
"""Share of the threads' time that may be lost when they are dealt whole tiles; else each step is dealt in finer items."""


def images_at_a_time(shape: Sequence[int], dtype: np.dtype) -> int:
    """How many images `[B, c_in, H, W]` are computed together; their intermediate results are what a plan keeps."""
    batch, _, height, width = shape
    most = -(-TILES_AT_A_TIME * numba.get_num_threads() // tiles(height * width, dtype))
    return -(-batch // -(-batch // most))


def prepared(conv: Conv, dtype: np.dtype) -> tuple[np.ndarray, np.ndarray]:
    """Weights, in the order in which the kernels read them, and bias."""
    if dtype not in conv.prepared:
        rows = conv.weight.reshape(conv.c_out, -1)
        weights = rows.ravel() if conv.groups > 1 else convolution.packed(rows)
        with quiet():
            conv.prepared[dtype] = weights.astype(dtype), conv.bias.astype(dtype)
    return conv.prepared[dtype]


@dataclass(eq=False)
class Buffer:
    """Memory of one result, `elements` long; `halo` elements before and after it are readable."""

    elements: int
    halo: int = 0
    uses: list[tuple[int, int]] = field(default_factory=list)
    """(index into the plan's numbers, bytes from the beginning): where an address in this buffer is to be written."""


@dataclass(frozen=True)
class Step:
    """A kernel launch. Its items are numbered `[image, row, tile of tokens, item of the tile]`."""

    kernel: Kernel
    numbers: slice
    scale: float
    rows: int
    items_of_tile: int


class Plan(Recorder):
    """One layer for up to `batch` images of one size at a time; float32 or float64, into which half inputs are widened."""

    def __init__(self, layer, batch: int, height: int, width: int, dtype: np.dtype):
        self.batch, self.height, self.width, self.dtype = batch, height, width, dtype
        self.tokens = height * width
        self.most_idle = MOST_IDLE
        self._lock = threading.Lock()
        self._numbers: list[int] = []
        self._chains: list[list[Step]] = []
        self._written: set[Buffer] = set()
        self._constants: list[np.ndarray] = []
        self._buffers: list[Buffer] = []
        self._x = self._new(layer.c_in).buffer
        self._y = layer.forward(self, Tensor(self._x, 0, layer.c_in * self.tokens, layer.c_in)).buffer
        self._settle()

    # ---- what a layer calls, as in `Exact` ----
    def conv(self, conv: Conv, x: Tensor | Sequence[Tensor], add: Tensor | None = None) -> Tensor:
        pieces, out = [x] if isinstance(x, Tensor) else list(x), self._new(conv.c_out)
        side = conv.kernel_size
        for piece in pieces:
            piece.buffer.halo = max(piece.buffer.halo, convolution.halo(side, self.width))
        weights, bias = self._weights(conv)
        numbers = [out, out.batch_stride, *((add, add.batch_stride) if add else (0, 0)), weights, bias, self._padding(side)]
        numbers += [self.tokens, self.width, side, conv.c_out, int(conv.silu), len(pieces)]
        for piece in pieces:
            numbers += [piece, piece.batch_stride, piece.channels]
        across = [piece.buffer for piece in pieces] if side > 1 else []
        self._launch(convolution.convolve, numbers, across, out, items_of_tile=convolution.groups(conv.c_out))
        return out

    def attend(self, qkv: Tensor, num_heads: int, key_dim: int, pe: Conv) -> Tensor:
        out, n = self._new(pe.c_out), self.tokens
        head, head_dim = qkv.channels // num_heads, pe.c_out // num_heads
        k, v = (Tensor(qkv.buffer, qkv.first + count * n, 0, 0) for count in (key_dim, 2 * key_dim))
        strides = head * n, n, 1
        numbers = [qkv, *strides, k, *strides, v, *strides, out, head_dim * n, n, 1, 0, n, n, key_dim, head_dim]
        self._launch(forward, numbers, [qkv.buffer], out, rows=num_heads, scale=key_dim**-0.5)

        qkv.buffer.halo = max(qkv.buffer.halo, convolution.halo(pe.kernel_size, self.width))
        numbers = [v, head * n, head_dim, out, out, *self._weights(pe), self._padding(pe.kernel_size)]
        numbers += [n, self.width, pe.kernel_size, pe.c_out]
        self._launch(convolution.depthwise, numbers, [qkv.buffer], out)
        return out

    # ---- recording ----
    def _new(self, channels: int) -> Tensor:
        self._buffers.append(Buffer(self.batch * channels * self.tokens))
        return Tensor(self._buffers[-1], 0, channels * self.tokens, channels)

    def _weights(self, conv: Conv) -> tuple[int, int]:
        """Addresses of the weights, in the order in which the kernel reads them, and of the bias."""
        arrays = prepared(conv, self.dtype)
        self._constants += arrays
        return tuple(address(array) for array in arrays)

    def _padding(self, side: int) -> int:
        """Address of the table of zero padding; 1×1 has none."""
        if side == 1:
            return 0
        self._constants.append(convolution.padding(side, self.height, self.width, self.dtype))
        return address(self._constants[-1])

    def _launch(self, kernel: Kernel, numbers, across: Sequence[Buffer], out: Tensor, *, rows=1, items_of_tile=1, scale=1.0):
        """Record a launch; `across` are the buffers of which it reads other tokens than those that it writes.

        It joins the chain of those before it, unless one of them writes such a buffer.
        """
        first = len(self._numbers)
        for index, number in enumerate(numbers, first):
            if isinstance(number, Tensor):
                number.buffer.uses.append((index, number.first * self.dtype.itemsize))
                number = 0
            self._numbers.append(number)
        if not self._chains or self._written.intersection(across) or kernel is forward:
            self._chains.append([])
            self._written = set()
        self._chains[-1].append(Step(kernel, slice(first, len(self._numbers)), scale, rows, items_of_tile))
        self._written.add(out.buffer)

    def _settle(self) -> None:
        """Give every buffer but those of a direct input and output its place in one piece of memory."""
        self._reads_input = not self._x.halo
        size, places = 0, {}
        for buffer in self._buffers:
            if buffer is not self._y and not (buffer is self._x and self._reads_input):
                places[buffer] = size + buffer.halo
                size += buffer.elements + 2 * buffer.halo
                size += -size % (VECTOR_BYTES // self.dtype.itemsize)
        work = np.empty(size + VECTOR_BYTES, self.dtype)
        self._work = work[-address(work) % VECTOR_BYTES // self.dtype.itemsize :]
        self._problem = np.array(self._numbers, np.int64)
        for buffer, place in places.items():
            self._point(buffer, address(self._work) + place * self.dtype.itemsize)
        if not self._reads_input:
            place = places[self._x]
            self._copy = self._work[place : place + self._x.elements]
        self._tiles = tiles(self.tokens, self.dtype)
        self._turns = [self._in_turn(chain) for chain in self._chains]

    def _in_turn(self, chain: Sequence[Step]) -> np.ndarray:
        """The problem of `in_turn` for a chain."""
        numbers, start = [self._tiles, len(chain)], address(self._problem)
        for step in chain:
            problem = start + step.numbers.start * self._problem.itemsize
            numbers += [step.kernel.address(self.dtype), problem, step.rows, step.items_of_tile]
        return np.array(numbers, np.int64)

    def _point(self, buffer: Buffer, start: int) -> None:
        for index, offset in buffer.uses:
            self._problem[index] = start + offset

    # ---- replaying ----
    @property
    def steps(self) -> list[Step]:
        """Every launch, in order."""
        return [step for chain in self._chains for step in chain]

    def launch(self, step: Step, images: int) -> None:
        """One step alone, on what is in the buffers."""
        items = images * self._tiles * step.rows * step.items_of_tile
        step.kernel.run(self.dtype, items, self._problem[step.numbers], step.scale)

    @property
    def nbytes(self) -> int:
        """Memory that the plan keeps, weights not counted."""
        return self._work.nbytes + self._problem.nbytes

    def __call__(self, x: np.ndarray, y: np.ndarray) -> None:
        """y = layer(x), both contiguous and of the plan's dtype, not overlapping; B may be any number."""
        with self._lock:
            for first in range(0, len(x), self.batch):
                images = slice(first, first + self.batch)
                self._run(x[images], y[images])

    def _run(self, x: np.ndarray, y: np.ndarray) -> None:
        if self._reads_input:
            self._point(self._x, address(x))
        else:
            self._copy[: x.size] = x.ravel()
        self._point(self._y, address(y))
        turns, threads = len(x) * self._tiles, numba.get_num_threads()
        even = turns >= (1 - self.most_idle) * threads * -(-turns // threads)
        for chain, problem in zip(self._chains, self._turns, strict=True):
            if even and len(chain) > 1:
                convolution.in_turn.run(self.dtype, turns, problem, chain[0].scale)  # only the first has one that counts
            else:
                for step in chain:
                    self.launch(step, len(x))
