"""A whole network on the CPU: its kernel launches recorded once for an image size, then replayed on buffers that are kept.

As `numba_psa.nn.planned` does it for a layer, but for maps of several sizes, which stand in frames of zeros
(`numba_psa.cpu.frames`), and for one image at a time: an image fills the threads and its maps the cache.
"""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numba
import numpy as np

from numba_psa.cpu import framed, framed_passes
from numba_psa.cpu.compiling import Kernel
from numba_psa.cpu.forward import forward
from numba_psa.cpu.frames import Frame
from numba_psa.cpu.in_order import run_in_order
from numba_psa.cpu.operands import address, tiles
from numba_psa.cpu.vector import ROWS
from numba_psa.errors import ShapeError
from numba_psa.nn.conv import Conv
from numba_psa.nn.planned import prepared
from numba_psa.nn.yolo.blocks import Level

TURNS = 16
"""Work items that a convolution should have for each thread."""


@dataclass(eq=False)
class Buffer:
    """Channels of maps of one size that are written, read and then free again."""

    frame: Frame
    channels: int
    born: int
    dies: int = 0
    place: int = 0
    """The first of its channels in the memory of all maps of this size."""


@dataclass(frozen=True)
class Map:
    """Some channels of a buffer."""

    buffer: Buffer
    first: int
    channels: int

    @property
    def frame(self) -> Frame:
        return self.buffer.frame

    @property
    def shape(self) -> tuple[int, int, int]:
        return self.channels, self.frame.height, self.frame.width


@dataclass(frozen=True)
class Enlarged:
    """Each token of a map as 2×2 of the same, which is not written down: see `NetworkPlan.conv`."""

    source: Map

    @property
    def shape(self) -> tuple[int, int, int]:
        return self.source.channels, 2 * self.source.frame.height, 2 * self.source.frame.width


@dataclass(frozen=True, eq=False)
class Outside:
    """An array of the caller: the image, or the head's `[4 + nc, A]`; `offset` elements from its beginning."""

    name: str
    offset: int = 0


@dataclass
class _Recorded:
    kernel: Kernel
    numbers: list
    items: int
    scale: float


class NetworkPlan:
    """`record(plan, image)` gives what every layer gives, the head's `Level`s last. float32 or float64."""

    def __init__(self, record: Callable, height: int, width: int, dtype: np.dtype):
        self.dtype = np.dtype(dtype)
        self._lock = threading.Lock()
        self._frames: dict[tuple[int, int], Frame] = {}
        self._recorded: list[_Recorded] = []
        self._buffers: list[Buffer] = []
        self._constants: list[np.ndarray] = []
        self.ends: list[int] = []
        """How many launches are done when each layer is."""
        self.gflop: list[float] = []
        """Operations of each layer's convolutions, two for a multiply-add."""
        self._operations = 0
        image = self._new(self._frame(height, width), 3)
        self._move(Outside("image"), height * width, width, image, image.frame.plane, image.frame.pitch, image)
        self.results = record(self, image)
        self._read_out(self.results[-1])
        self._settle()

    # ---- what layers call, as in `Exact` ----
    def layer_done(self) -> None:
        self.ends.append(len(self._recorded))
        self.gflop.append(self._operations / 1e9)
        self._operations = 0

    def conv(self, conv: Conv, x: Map | Sequence[Map | Enlarged], add: Map | None = None) -> Map:
        """act(conv(x)) + add; several maps are concatenated along channels.

        A 1×1 convolution of what has been enlarged is the enlarged convolution of what it was: a quarter of the work.
        """
        pieces = [x] if isinstance(x, (Map, Enlarged)) else list(x)
        if not any(isinstance(piece, Enlarged) for piece in pieces):
            return self._conv(conv, pieces, add)
        large, *others = pieces
        if conv.kernel_size > 1 or add or not others or any(isinstance(piece, Enlarged) for piece in others):
            raise ShapeError("an enlarged map is read only by a 1×1 convolution, without residual, with others after it")
        first, second = conv.parts(large.shape[0])
        return self._conv(second, others, self._enlarge(self._conv(first, [large.source])), early=True)

    def _conv(self, conv: Conv, pieces: Sequence[Map], add: Map | None = None, *, early: bool = False) -> Map:
        source, side, stride = pieces[0].frame, conv.kernel_size, conv.stride
        depthwise = conv.groups > 1
        if (side, stride) not in ((1, 1), (3, 1), (3, 2)) or (depthwise and (side, stride, len(pieces)) != (3, 1, 1)):
            raise ShapeError(f"no kernel for a convolution {side}×{side} of stride {stride} and {conv.groups} groups")
        frame = self._frame(-(-source.height // stride), -(-source.width // stride))
        out = self._new(frame, conv.c_out)
        self._operations += 2 * conv.weight.size * frame.height * frame.width
        if depthwise:
            return self._depthwise(conv, pieces[0], (conv.c_out, conv.c_out), out, add)
        weights, bias = self._weights(conv)
        most = self._rows_of_item(frame, conv.c_out)
        numbers = [out, add or 0, weights, bias, address(frame.inside), frame.plane, frame.pitch, conv.c_out, most]
        numbers += [int(conv.silu), side, stride, source.plane, source.pitch, conv.c_in]
        numbers += [int(early), frame.height, len(pieces)]
        for piece in pieces:
            numbers += [piece, piece.channels]
        self._launch(framed.convolve, numbers, frame.tiles * -(-conv.c_out // most))
        return out

    def split(self, x: Map, *channels: int) -> list[Map]:
        firsts = np.cumsum([0, *channels[:-1]]).tolist()
        return [Map(x.buffer, x.first + first, count) for first, count in zip(firsts, channels, strict=True)]

    def upsample(self, x: Map) -> Enlarged:
        return Enlarged(x)

    def _enlarge(self, x: Map) -> Map:
        frame = self._frame(2 * x.frame.height, 2 * x.frame.width)
        out = self._new(frame, x.channels)
        numbers = [x, x.frame.plane, x.frame.pitch, out, frame.plane, frame.pitch, x.frame.height, x.frame.width]
        self._launch(framed_passes.upsample, numbers, x.channels * x.frame.height)
        return out

    def pools(self, x: Map) -> list[Map]:
        frame, outs = x.frame, [self._new(x.frame, x.channels) for _ in range(3)]
        numbers = [x, *outs, address(frame.inside), frame.plane, frame.pitch, frame.border, frame.tiles]
        self._launch(framed_passes.pool, numbers, x.channels)
        return outs

    def expect(self, x: Map) -> Map:
        frame, out = x.frame, self._new(x.frame, 4)
        numbers = [x, out, address(frame.inside), frame.plane, x.channels // 4]
        self._launch(framed_passes.expect, numbers, frame.tiles)
        return out

    def attend(self, qkv: Map, num_heads: int, key_dim: int, pe: Conv) -> Map:
        frame, out = qkv.frame, self._new(qkv.frame, pe.c_out)
        width, n = frame.width, frame.height * frame.width
        head, head_dim = qkv.channels // num_heads, pe.c_out // num_heads
        # Keys in a frame would be attended to: attention reads and writes tokens that stand close together.
        flat, attended = (np.empty(channels * n, self.dtype) for channels in (qkv.channels, pe.c_out))
        self._constants += flat, attended
        self._move(qkv, frame.plane, frame.pitch, address(flat), n, width, qkv)
        q = address(flat)
        k, v = (q + count * n * self.dtype.itemsize for count in (key_dim, 2 * key_dim))
        strides = head * n, n, 1
        numbers = [q, *strides, k, *strides, v, *strides, address(attended), head_dim * n, n, 1, 0, n, n, key_dim, head_dim]
        self._launch(forward, numbers, tiles(n, self.dtype) * num_heads, key_dim**-0.5)
        self._move(address(attended), n, width, out, frame.plane, frame.pitch, out)
        values = Map(qkv.buffer, qkv.first + 2 * key_dim, pe.c_out)
        return self._depthwise(pe, values, (head, head_dim), out, out)

    # ---- recording ----
    def _depthwise(self, conv: Conv, x: Map, heads: tuple[int, int], out: Map, add: Map | None) -> Map:
        frame = x.frame
        numbers = [x, *heads, out, add or 0, *self._weights(conv), address(frame.inside)]
        numbers += [frame.plane, frame.pitch, frame.tiles, int(conv.silu)]
        self._launch(framed.depthwise, numbers, conv.c_out)
        return out

    def _move(self, source, plane, pitch, target, target_plane, target_pitch, tokens: Map, sigmoid: bool = False) -> None:
        height, width = tokens.frame.height, tokens.frame.width
        numbers = [source, plane, pitch, target, target_plane, target_pitch, height, width, int(sigmoid)]
        self._launch(framed_passes.move, numbers, tokens.channels * height)

    def _read_out(self, levels: Sequence[Level]) -> None:
        """Distances and scores of all maps into the head's `[4 + nc, A]`."""
        count = sum(level.logits.frame.height * level.logits.frame.width for level in levels)
        first = 0
        for level in levels:
            for map_, row in ((level.distances, 0), (level.logits, 4)):
                frame, target = map_.frame, Outside("raw", row * count + first)
                self._move(map_, frame.plane, frame.pitch, target, count, frame.width, map_, sigmoid=row > 0)
            first += frame.height * frame.width
        self.raw_shape = 4 + levels[0].logits.channels, count

    def _frame(self, height: int, width: int) -> Frame:
        return self._frames.setdefault((height, width), Frame(height, width, self.dtype))

    def _new(self, frame: Frame, channels: int) -> Map:
        self._buffers.append(Buffer(frame, channels, born=len(self._recorded)))
        return Map(self._buffers[-1], 0, channels)

    def _rows_of_item(self, frame: Frame, c_out: int) -> int:
        """As many output channels as leave each thread its turns: a multiple of ROWS."""
        most = framed.MOST_ROWS
        while most > ROWS and frame.tiles * -(-c_out // most) < TURNS * numba.get_num_threads():
            most -= ROWS
        return most

    def _weights(self, conv: Conv) -> tuple[int, int]:
        """Addresses of weights and bias."""
        arrays = prepared(conv, self.dtype)
        self._constants += arrays
        return tuple(address(array) for array in arrays)

    def _launch(self, kernel: Kernel, numbers: list, items: int, scale: float = 1.0) -> None:
        for number in numbers:
            if isinstance(number, Map):
                number.buffer.dies = len(self._recorded)
        self._recorded.append(_Recorded(kernel, numbers, items, scale))

    def _settle(self) -> None:
        """Place buffers, so that those alive at the same time do not overlap, and write down addresses."""
        self._memory: dict[Frame, np.ndarray] = {}
        by_frame = defaultdict(list)
        for buffer in self._buffers:
            by_frame[buffer.frame].append(buffer)
        for frame, buffers in by_frame.items():
            self._memory[frame] = _aligned_zeros(frame.elements(_place(buffers)), self.dtype)
        numbers, starts = [], []
        self._outside: dict[str, list[tuple[int, int]]] = {"image": [], "raw": []}
        for recorded in self._recorded:
            starts.append(len(numbers))
            for number in recorded.numbers:
                if isinstance(number, Outside):
                    self._outside[number.name].append((len(numbers), number.offset * self.dtype.itemsize))
                    number = 0
                numbers.append(self._address(number) if isinstance(number, Map) else number)
        self._problem = np.array(numbers, np.int64)
        problem = address(self._problem)
        steps = [
            (recorded.kernel.address(self.dtype), problem + 8 * start, recorded.items)
            for recorded, start in zip(self._recorded, starts, strict=True)
        ]
        self._steps = np.array(steps, np.int64)
        self._scales = np.array([recorded.scale for recorded in self._recorded])

    def _address(self, map_: Map) -> int:
        first = map_.frame.origin + (map_.buffer.place + map_.first) * map_.frame.plane
        return address(self._memory[map_.frame]) + first * self.dtype.itemsize

    # ---- replaying ----
    @property
    def nbytes(self) -> int:
        """Memory that the plan keeps, weights not counted."""
        return sum(memory.nbytes for memory in self._memory.values()) + self._problem.nbytes

    def look(self, map_: Map | Enlarged) -> np.ndarray:
        """The map's `[C, H, W]` in memory, until the next launch that writes there; of an enlarged one a copy."""
        if isinstance(map_, Enlarged):
            return self.look(map_.source).repeat(2, axis=1).repeat(2, axis=2)
        origin = map_.frame.origin + (map_.buffer.place + map_.first) * map_.frame.plane
        return map_.frame.view(self._memory[map_.frame], map_.channels, origin)

    def run(self, image: np.ndarray, raw: np.ndarray, after_layer: Callable[[int], None] | None = None) -> None:
        """raw `[4 + nc, A]` of the image `[3, H, W]`: both contiguous and of the plan's dtype.

        `after_layer(i)` is called when layer i is done and what it gave can be looked at: launches then stop there.
        """
        with self._lock:
            for name, array in (("image", image), ("raw", raw)):
                for index, offset in self._outside[name]:
                    self._problem[index] = address(array) + offset
            first = 0
            for layer, last in enumerate(self.ends if after_layer else ()):
                run_in_order(self._steps[first:last], self._scales[first:last])
                after_layer(layer)
                first = last
            run_in_order(self._steps[first:], self._scales[first:])


def _place(buffers: Sequence[Buffer]) -> int:
    """Give buffers of one size their places; how many channels of memory that takes.

    In order of birth, each at the first gap among those that are still alive.
    """
    alive: list[Buffer] = []
    most = 0
    for buffer in buffers:
        alive = sorted((other for other in alive if other.dies >= buffer.born), key=lambda other: other.place)
        for other in alive:
            if buffer.place + buffer.channels <= other.place:
                break
            buffer.place = other.place + other.channels
        alive.append(buffer)
        most = max(most, buffer.place + buffer.channels)
    return most


def _aligned_zeros(elements: int, dtype: np.dtype) -> np.ndarray:
    memory = np.zeros(elements + 64 // dtype.itemsize, dtype)
    return memory[-address(memory) % 64 // dtype.itemsize :][:elements]
