"""The two families as lists of layers, and what weights each scale of them has.

Widths, repetitions and connections are those in the description (`yaml`) that a trained model's file carries and in the
graphs of exported models; the numbers of parameters that follow for n, s, m, l and x are the published ones.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from numba_psa.nn.layers import C2PSA, C3k2
from numba_psa.nn.weights import Wanted, under

STRIDES = (8, 16, 32)
"""Pixels from token to token in the three maps that boxes are read from."""
BINS = 16
"""Of the distribution that YOLO11 gives for each side of a box."""


@dataclass(frozen=True)
class Scale:
    """How a family is made smaller: repetitions times `depth`, channels (first limited) times `width`."""

    depth: float
    width: float
    most_channels: int
    every_c3k: bool
    """Whether every C3k2 is made of C3k."""

    def channels(self, full: int) -> int:
        return -(-int(min(full, self.most_channels) * self.width) // 8) * 8

    def repeats(self, full: int) -> int:
        return max(round(full * self.depth), 1)


SCALES = {
    "n": Scale(0.5, 0.25, 1024, False),
    "s": Scale(0.5, 0.5, 1024, False),
    "m": Scale(0.5, 1.0, 512, True),
    "l": Scale(1.0, 1.0, 512, True),
    "x": Scale(1.0, 1.5, 512, True),
}


@dataclass(frozen=True)
class Row:
    """A layer: its kind, the layers it reads (-1: the one before), and its channels out and options at full size."""

    kind: str
    channels: int = 0
    sources: tuple[int, ...] = (-1,)
    repeats: int = 1
    c3k: bool = False
    half: float = 0.5
    """Channels of a C3k2's inside over those it gives."""
    attention: bool = False


def _rows(c3k_below: bool, last: Row) -> tuple[Row, ...]:
    def c3k2(channels: int, c3k: bool, half: float = 0.5) -> Row:
        return Row("C3k2", channels, repeats=2, c3k=c3k, half=half)

    return (
        Row("Conv", 64),  # 0, 1/2 of the image's height and width
        Row("Conv", 128),  # 1, 1/4
        c3k2(256, False, 0.25),
        Row("Conv", 256),  # 3, 1/8
        c3k2(512, False, 0.25),
        Row("Conv", 512),  # 5, 1/16
        c3k2(512, True),
        Row("Conv", 1024),  # 7, 1/32
        c3k2(1024, True),
        Row("SPPF", 1024),
        Row("C2PSA", 1024, repeats=2),  # 10
        Row("Upsample"),
        Row("Concat", sources=(-1, 6)),
        c3k2(512, c3k_below),
        Row("Upsample"),
        Row("Concat", sources=(-1, 4)),
        c3k2(256, c3k_below),  # 16, 1/8
        Row("Conv", 256),
        Row("Concat", sources=(-1, 13)),
        c3k2(512, c3k_below),  # 19, 1/16
        Row("Conv", 512),
        Row("Concat", sources=(-1, 10)),
        last,  # 22, 1/32
        Row("Detect", sources=(16, 19, 22)),
    )


FAMILIES = {
    "yolo11": _rows(False, Row("C3k2", 1024, repeats=2, c3k=True)),
    "yolo26": _rows(True, Row("C3k2", 1024, attention=True)),
}


def widths(family: str, scale: str) -> list[int]:
    """Channels that each layer gives; 0 for Detect."""
    given: list[int] = []
    for row in FAMILIES[family]:
        sources = [given[source] for source in row.sources if given]
        pass_on = {"Upsample": sum(sources), "Concat": sum(sources), "Detect": 0}
        given.append(pass_on[row.kind] if row.kind in pass_on else SCALES[scale].channels(row.channels))
    return given


@dataclass(frozen=True)
class Architecture:
    """A family at a scale, for `nc` classes; `end2end`: with the head that gives one box for one object."""

    family: str
    scale: str
    nc: int
    end2end: bool
    sppf_silu: bool

    @property
    def bins(self) -> int:
        return BINS if self.family == "yolo11" else 1

    def wanted(self) -> tuple[list[Wanted], dict[str, int]]:
        """Every convolution of the network under its full name, and all the sizes that they are measured in."""
        convs: list[Wanted] = []
        sizes: dict[str, int] = {}
        given = widths(self.family, self.scale)
        for index, row in enumerate(FAMILIES[self.family]):
            c_in = [given[source if source >= 0 else index + source] for source in row.sources] if index else [3]
            found = {
                "Conv": self._conv,
                "C3k2": self._c3k2,
                "SPPF": self._sppf,
                "C2PSA": self._c2psa,
                "Detect": self._detect,
            }.get(row.kind)
            if found is None:
                continue
            layer, layer_sizes = found(row, c_in, given[index])
            sizes |= {f"{index}.{symbol}": size for symbol, size in layer_sizes.items()}
            convs += (_measured_in(conv, f"{index}.") for conv in under(f"model.{index}", layer))
        return convs, sizes

    def _conv(self, row: Row, c_in: list[int], c_out: int):
        conv = Wanted("", (1, "c_out"), (1, "c_in"), 3, silu=True, stride=2)
        return [conv], {"c_in": c_in[0], "c_out": c_out}

    def _c3k2(self, row: Row, c_in: list[int], c_out: int):
        scale = SCALES[self.scale]
        n, c = scale.repeats(row.repeats), int(c_out * row.half)
        first = "0" if row.attention else "cv3" if row.c3k or scale.every_c3k else "cv1"  # by which a unit's kind is known
        return C3k2._wanted([f"m.{i}.{first}" for i in range(n)]), {
            "c_in": c_in[0],
            "c_out": c_out,
            "c": c,
            "e": c // 2,
            "qkv": 2 * c,
        }

    def _sppf(self, row: Row, c_in: list[int], c_out: int):
        cv1 = Wanted("cv1", (1, "c"), (1, "c_in"), silu=self.sppf_silu)
        cv2 = Wanted("cv2", (1, "c_out"), (4, "c"), silu=True)
        return [cv1, cv2], {"c_in": c_in[0], "c_out": c_out, "c": c_in[0] // 2}

    def _c2psa(self, row: Row, c_in: list[int], c_out: int):
        names = [f"m.{SCALES[self.scale].repeats(row.repeats) - 1}."]
        return C2PSA._wanted(names), {"c_in": c_in[0], "c": c_out // 2, "qkv": c_out}

    def _detect(self, row: Row, c_in: list[int], c_out: int):
        sizes = {"nc": self.nc, "sides": 4 * self.bins, "boxes": max(16, c_in[0] // 4, 4 * self.bins)}
        sizes["classes"] = max(c_in[0], min(self.nc, 100))
        convs = []
        for level, channels in enumerate(c_in):
            sizes[f"c{level}"] = channels
            convs += detect_level(level, self.end2end)
        return convs, sizes


def detect_level(level: int, end2end: bool) -> Iterator[Wanted]:
    """The convolutions of the head on one of the three maps: of boxes (cv2) and of classes (cv3)."""
    prefix, c = "one2one_" if end2end else "", (1, f"c{level}")
    boxes, classes = f"{prefix}cv2.{level}", f"{prefix}cv3.{level}"
    yield Wanted(f"{boxes}.0", (1, "boxes"), c, 3, silu=True)
    yield Wanted(f"{boxes}.1", (1, "boxes"), (1, "boxes"), 3, silu=True)
    yield Wanted(f"{boxes}.2", (1, "sides"), (1, "boxes"), plain=True)
    yield Wanted(f"{classes}.0.0", c, c, 3, silu=True, depthwise=True)
    yield Wanted(f"{classes}.0.1", (1, "classes"), c, silu=True)
    yield Wanted(f"{classes}.1.0", (1, "classes"), (1, "classes"), 3, silu=True, depthwise=True)
    yield Wanted(f"{classes}.1.1", (1, "classes"), (1, "classes"), silu=True)
    yield Wanted(f"{classes}.2", (1, "nc"), (1, "classes"), plain=True)


def _measured_in(conv: Wanted, prefix: str) -> Wanted:
    """The same convolution with its sizes named for the whole network."""
    (out, c_out), (into, c_in) = conv.c_out, conv.c_in
    return replace(conv, name=conv.name.rstrip("."), c_out=(out, prefix + c_out), c_in=(into, prefix + c_in))
