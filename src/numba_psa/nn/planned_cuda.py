"""The layers' operations on the GPU: recorded once for an input size, then replayed as one CUDA graph.

Running a layer with a `CudaPlan` in the place of `Exact` records its kernel launches instead of computing. Intermediate
results are of the input's dtype and lie in memory that the plan keeps; a replay only needs the addresses of x and y.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from numba_psa._numba_cuda import MAX_GRID_Y, cuda, to_device
from numba_psa.cuda.choice import Problem
from numba_psa.cuda.convolution import DEPTHWISE_SIGNATURE, SIGNATURE, make_convolution, make_depthwise
from numba_psa.cuda.convolution_tiles import MOST_PIECES, DepthwiseConfig, choose_convolution, packed
from numba_psa.cuda.graphs import Graph, Launch
from numba_psa.cuda.launching import architecture, kernel
from numba_psa.cuda.plans import device_scale, launcher, multiprocessors
from numba_psa.cuda.tiles import padded
from numba_psa.cuda.views import address_of
from numba_psa.errors import ShapeError
from numba_psa.nn.conv import Conv
from numba_psa.nn.recording import Recorder, Tensor
from numba_psa.numerics import BFLOAT16

ALIGNMENT = 256
"""Of every buffer, in bytes."""
TOKENS_AT_A_TIME = 2**18
"""In the images that are computed together: the memory that a plan keeps grows with it."""
ADDRESSES = 16
"""Pairs of addresses of x and y that a plan remembers the arguments of: allocators give the same ones again and again."""
_captured: set[CudaPlan] = set()
"""Plans whose launches are part of a CUDA graph of someone else: their memory stays where it is."""


def images_at_a_time(batch: int, tokens: int) -> int:
    """How many images are computed together."""
    most = max(1, min(MAX_GRID_Y, TOKENS_AT_A_TIME // tokens))
    return -(-batch // -(-batch // most))


@dataclass(eq=False)
class Buffer:
    """Memory of one result, and the steps that touch it, in order; of x and y, the caller's."""

    elements: int
    steps: list[int] = field(default_factory=list)
    address: int = 0


class CudaPlan(Recorder):
    """One layer for `batch` images of one size; `plan(x, y, stream)` is y = layer(x) for addresses of contiguous arrays.

    whole: whether the addresses of x and y are multiples of four elements; device: the current one. Raises ShapeError for
    widths that the attention kernels do not reach, BackendUnavailableError.
    """

    def __init__(self, layer: Any, batch: int, height: int, width: int, dtype: np.dtype, whole: bool, device: int):
        self.batch, self.height, self.width, self.dtype = batch, height, width, dtype
        self.tokens = height * width
        self._device = device
        self._whole = whole and self.tokens % 4 == 0
        self._format = {"item": dtype.itemsize, "bf16": dtype == BFLOAT16, "arch": architecture(device)}
        self._lock = threading.Lock()
        self._recorded: list[Launch] = []
        self._buffers: list[Buffer] = []
        self._kept: list[Any] = []
        self._x = self._new(layer.c_in)
        self._y = layer.forward(self, self._x)
        self._settle()

    # ---- what a layer calls, as in `Exact` ----
    def conv(self, conv: Conv, x: Tensor | Sequence[Tensor], add: Tensor | None = None) -> Tensor:
        pieces, out = joined([x] if isinstance(x, Tensor) else x, self.tokens), self._new(conv.c_out)
        if len(pieces) > MOST_PIECES:
            raise ShapeError(
                f"impl='cuda' reads up to {MOST_PIECES} tensors as one along channels, here there are {len(pieces)}: "
                "impl='mirror', 'cpu' and 'oracle' have no such limit"
            )
        if conv.stride != 1 or conv.groups != 1:
            raise ShapeError(
                f"impl='cuda' has convolutions of stride 1 in one group, not of stride {conv.stride} in {conv.groups}: "
                "impl='cpu' and 'oracle' have"
            )
        config = choose_convolution(
            conv.c_in,
            conv.c_out,
            self.batch,
            self.tokens,
            multiprocessors(self._device),
            taps=conv.kernel_size,
            pieces=len(pieces),
            whole=self._whole and (conv.kernel_size == 1 or self.width % 4 == 0),
            **self._format,
        )
        four = [*pieces, *pieces[:1] * (MOST_PIECES - len(pieces))]
        firsts = np.cumsum([0, *(piece.channels for piece in pieces[:-1])]).tolist() + [0] * MOST_PIECES
        arguments = [*four, *(self._bytes(piece.batch_stride) for piece in four), *firsts[1:MOST_PIECES]]
        arguments += self._weights(conv)
        arguments += [add, self._bytes(add.batch_stride)] if add else [0, 0]
        arguments += [out, self._bytes(out.batch_stride), conv.c_in, conv.c_out, self.height, self.width, int(conv.silu)]
        grid = -(-self.tokens // config.block_tokens), -(-conv.c_out // config.block_channels), self.batch
        self._record(kernel(make_convolution, config, SIGNATURE), grid, arguments)
        return out

    def attend(self, qkv: Tensor, num_heads: int, key_dim: int, pe: Conv) -> Tensor:
        out, n, head_dim = self._new(pe.c_out), self.tokens, pe.c_out // num_heads
        k, v = (Tensor(qkv.buffer, qkv.first + count * n, qkv.batch_stride, 0) for count in (key_dim, 2 * key_dim))
        problem = Problem(self.batch * num_heads, n, n, key_dim, head_dim, self.dtype)
        attention = launcher(problem, self._device)
        self._record(_without_grid(attention), (1, 1, 1), [qkv, k, v, out, 0, device_scale(key_dim**-0.5)])

        config = DepthwiseConfig(whole=self._whole and self.width % 4 == 0, **self._format)
        head = self._bytes((2 * key_dim + head_dim) * n)
        arguments = [
            v,
            head,
            self._bytes(qkv.batch_stride),
            head_dim,
            *self._weights(pe),
            out,
            self._bytes(out.batch_stride),
        ]
        arguments += [out, self._bytes(out.batch_stride), pe.c_out, self.height, self.width]
        grid = -(-pe.c_out * -(-n // 4) // config.threads), 1, self.batch
        self._record(kernel(make_depthwise, config, DEPTHWISE_SIGNATURE), grid, arguments)
        return out

    # ---- recording ----
    def _new(self, channels: int) -> Tensor:
        self._buffers.append(Buffer(self.batch * channels * self.tokens))
        return Tensor(self._buffers[-1], 0, channels * self.tokens, channels)

    def _bytes(self, elements: int) -> int:
        return elements * self.dtype.itemsize

    def _weights(self, conv: Conv) -> list[int]:
        """Addresses of the weights, as the kernel reads them, and of the bias on this device."""
        key = "cuda", self._device, self.dtype
        if key not in conv.prepared:
            if conv.groups > 1:
                weights = conv.weight.reshape(-1).astype(np.float32)
            else:
                weights = packed(conv.weight.astype(self.dtype), self.dtype.itemsize)
            conv.prepared[key] = to_device(weights), to_device(conv.bias.astype(np.float32))
        self._kept += conv.prepared[key]
        return [address_of(array) for array in conv.prepared[key]]

    def _record(self, run: Any, grid: tuple[int, int, int], arguments: Sequence[Any]) -> None:
        """Record a launch; a Tensor among the arguments stands for its address."""
        for argument in arguments:
            if isinstance(argument, Tensor):
                argument.buffer.steps.append(len(self._recorded))
        self._recorded.append(Launch(run, grid, tuple(arguments)))

    def _settle(self) -> None:
        """Give every buffer but those of x and y its place in one piece of memory."""
        own = [buffer for buffer in self._buffers if buffer not in (self._x.buffer, self._y.buffer)]
        found, size = places(own, self.dtype.itemsize)
        self._memory = cuda.device_array(size + ALIGNMENT, np.uint8)
        start = padded(address_of(self._memory), ALIGNMENT)
        for at, buffer in zip(found, own, strict=True):
            buffer.address = start + at
        self._theirs = [
            index
            for index, launch in enumerate(self._recorded)
            if any(isinstance(x, Tensor) and x.buffer in (self._x.buffer, self._y.buffer) for x in launch.arguments)
        ]
        self._graph: Graph | None = None
        self._pointed: tuple[int, int] | None = None
        self._known: dict[tuple[int, int], list[tuple[int, Any]]] = {}

    def _resolved(self, index: int) -> Launch:
        run, grid, arguments = self._recorded[index]
        addresses = (x.buffer.address + self._bytes(x.first) if isinstance(x, Tensor) else x for x in arguments)
        return Launch(run, grid, tuple(addresses))

    # ---- replaying ----
    @property
    def nbytes(self) -> int:
        """Memory on the device that the plan keeps, weights not counted."""
        return self._memory.nbytes

    def __call__(self, x: int, y: int, stream: int) -> None:
        with self._lock:
            if (x, y) != self._pointed:
                self._point(x, y)
            if self._graph.launch(stream):
                _captured.add(self)

    def _point(self, x: int, y: int) -> None:
        """Have the graph read x and write y; the first time, capture it."""
        self._pointed = None
        if (x, y) not in self._known:
            self._x.buffer.address, self._y.buffer.address = x, y
            if self._graph is None:
                self._graph = Graph([self._resolved(index) for index in range(len(self._recorded))])
            if len(self._known) == ADDRESSES:
                self._known.clear()
            self._known[x, y] = [
                (index, self._graph.parameters(index, self._resolved(index).arguments)) for index in self._theirs
            ]
        for index, parameters in self._known[x, y]:
            self._graph.replace(index, parameters)
        self._pointed = x, y


def places(buffers: Sequence[Buffer], item: int) -> tuple[list[int], int]:
    """(where each begins, bytes of all) in one piece of memory; those not in use at the same time may share a place."""
    found: list[tuple[int, Buffer]] = []
    for buffer in buffers:
        at = 0
        for start, other in sorted(found, key=lambda place: place[0]):
            together = buffer.steps[0] <= other.steps[-1] and other.steps[0] <= buffer.steps[-1]
            if together and start < at + item * buffer.elements:
                at = max(at, padded(start + item * other.elements, ALIGNMENT))
        found.append((at, buffer))
    return [at for at, _ in found], max((at + item * buffer.elements for at, buffer in found), default=0)


def joined(pieces: Sequence[Tensor], tokens: int) -> list[Tensor]:
    """The same channels in as few pieces as can be: neighbours in a buffer are one."""
    joined: list[Tensor] = []
    for piece in pieces:
        before = joined[-1] if joined else None
        if before and before.buffer is piece.buffer and before.first + before.channels * tokens == piece.first:
            piece = Tensor(piece.buffer, before.first, piece.batch_stride, before.channels + piece.channels)
            joined.pop()
        joined.append(piece)
    return joined


def _without_grid(run: Any) -> Any:
    """A launcher that knows its grid, called like a kernel."""
    return lambda grid, stream, *arguments, early=False: run(stream, *arguments)
