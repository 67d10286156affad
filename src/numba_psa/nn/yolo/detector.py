"""A trained detector: from a weight file to what its head says, every layer's tensor on the way."""

from __future__ import annotations

import ast
import re
import threading
import time
from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from os import PathLike
from typing import Any

import numpy as np

from numba_psa.arrays import as_floats, quiet
from numba_psa.errors import BackendUnavailableError, ParameterError, ShapeError, WeightsError
from numba_psa.implementations import default_implementation, implementation
from numba_psa.nn.exact import Exact
from numba_psa.nn.files import read_file
from numba_psa.nn.layers import C2PSA, PLANS, C3k2, below
from numba_psa.nn.weights import build
from numba_psa.nn.yolo import decode
from numba_psa.nn.yolo.architecture import BINS, FAMILIES, SCALES, STRIDES, Architecture, Row, widths
from numba_psa.nn.yolo.blocks import SPPF, Concat, Convolution, Detect, Upsample
from numba_psa.numerics import accumulator_dtype
from numba_psa.shapes import check_count, check_rank

SPPF_SILU = {"yolo11": True, "yolo26": False}
"""Whether the first convolution of SPPF has an activation, where the file does not say."""

BINS_NAME = "model.23.dfl.conv.weight"


class Detector:
    """YOLO11 or YOLO26 for detection, built by `load`.

    model(x): what the head says about float images x `[B, 3, H, W]` (RGB, 0…1; H and W multiples of 32);
    model(x, taps=["10", "22"]): that, and {layer: its tensor}.
    """

    stride = STRIDES[-1]

    def __init__(self, architecture: Architecture, layers: Sequence[Any], metadata: Mapping[str, str]):
        self.family, self.scale, self.nc = architecture.family, architecture.scale, architecture.nc
        self.end2end = architecture.end2end
        self.layers = list(layers)
        self.metadata = dict(metadata)
        self.names = _class_names(metadata.get("names"), self.nc)
        self._plans: OrderedDict[tuple, Any] = OrderedDict()
        self._planning = threading.Lock()

    @classmethod
    def from_state_dict(
        cls, state: Mapping[str, np.ndarray], *, metadata: Mapping[str, str] | None = None, sppf_silu: bool | None = None
    ) -> Detector:
        """The detector whose weights are in `state` with Ultralytics' names, batch norm folded or not.

        Family, scale and classes are what the weights say; `metadata` as in a file. sppf_silu: whether SPPF's first
        convolution is followed by SiLU, which weights do not show; None: what metadata["sppf_silu"] says, else SiLU for
        YOLO11 and nothing for YOLO26. Raises WeightsError with every name that is missing, unexpected or wrong.
        """
        metadata = dict(metadata or {})
        state = {name: np.asarray(array) for name, array in state.items() if re.match(r"model\.\d+\.", name)}
        architecture = recognise(state, metadata, sppf_silu)
        wanted, sizes = architecture.wanted()
        known = _without_training_only(state, architecture)
        convs = build(known, wanted, f"{architecture.family}{architecture.scale} with {architecture.nc} classes", sizes)
        layers = [
            _layer(row, below(convs, f"model.{index}") | _own(convs, index), architecture)
            for index, row in enumerate(FAMILIES[architecture.family])
        ]
        return cls(architecture, layers, metadata)

    def __repr__(self) -> str:
        return f"<{self.family}{self.scale} detector of {self.nc} classes>"

    def __str__(self) -> str:
        """One line a layer: its number, kind, the layers that it reads, and the channels that it gives."""
        lines = [repr(self)]
        for index, (row, c) in enumerate(zip(FAMILIES[self.family], widths(self.family, self.scale), strict=True)):
            sources = ", ".join(str(source if source >= 0 else index + source) for source in row.sources) if index else "x"
            lines.append(f"{index:4d}  {row.kind:9s} of {sources:12s}" + (f"{c:5d} channels" if c else ""))
        return "\n".join(lines)

    # ---- calling ----
    def __call__(self, x: Any, *, taps: Iterable[str] | None = None, impl: str | None = None, **options: Any) -> Any:
        """Of an array: what `predict` gives, with `taps` also {layer: array}. Of pictures: their boxes.

        A picture is a path or a PIL image, or a list of them; `options` are those of `numba_psa.nn.yolo_pictures.detect`.
        """
        is_array = hasattr(x, "__array_interface__") or hasattr(x, "__cuda_array_interface__")
        if not is_array or hasattr(x, "getbands"):  # which a PIL image has
            from numba_psa.nn.yolo_pictures import detect

            return detect(self, x, **options)
        if options:
            raise ParameterError(f"{', '.join(sorted(options))}: only for pictures; an array has taps and impl")
        if taps is None:
            return self.predict(x, impl)
        return self._run(x, impl, [taps] if isinstance(taps, str) else [str(tap) for tap in taps])

    def predict(self, x: np.ndarray, impl: str | None = None) -> np.ndarray:
        """What the head says about x `[B, 3, H, W]`, in pixels of x; float64 for float64 and impl="oracle", else float32.

        end2end: `[B, min(300, A), 6]`, x1, y1, x2, y2, score, class by falling score; A = HW/64 + HW/256 + HW/1024. Else
        `[B, 4 + nc, A]`: cx, cy, w, h and the classes' scores, which overlap: non-maximum suppression is what comes next.
        impl: "cpu" (default) computes in float32, or float64 for float64; "oracle" in float64 by the formulas in NumPy.
        Raises ShapeError, DTypeError, ParameterError, BackendUnavailableError.
        """
        return self._run(x, impl, [])[0]

    def _run(self, x: Any, impl: str | None, taps: Sequence[str]) -> tuple[np.ndarray, dict[str, np.ndarray]]:
        x, impl = self._checked(x, impl)
        indices = [self._tap(tap) for tap in taps]
        with quiet():
            raw, tapped = (self._exactly if impl == "oracle" else self._planned)(x, indices)
            output = self._decode(raw, *x.shape[2:])
        return output, dict(zip(taps, tapped, strict=True))

    def _decode(self, raw: np.ndarray, height: int, width: int) -> np.ndarray:
        return (decode.end2end if self.end2end else decode.dense)(raw, height, width)

    def _checked(self, x: Any, impl: str | None) -> tuple[np.ndarray, str]:
        impl = impl or default_implementation(x)
        if impl not in ("oracle", "cpu") or hasattr(x, "__cuda_array_interface__"):
            implementation(impl)  # a name that does not exist is another error
            raise BackendUnavailableError(
                f"a detector runs on impl='cpu' and impl='oracle', on NumPy arrays, and has no impl={impl!r} for "
                f"{type(x).__name__}: copy a device array to the host and choose one of them"
            )
        (x,), _ = as_floats(x=x)
        check_rank("x", x.shape, ("B", "3", "H", "W"))
        if x.shape[1] != 3:
            raise ShapeError(f"x has {x.shape[1]} channels on axis 1, but a detector takes 3 (red, green, blue)")
        for axis, size in zip("HW", x.shape[2:], strict=True):
            if size % self.stride or not size:
                below_, above = size // self.stride * self.stride, (size // self.stride + 1) * self.stride
                fits = f"{below_} or {above}" if below_ else str(above)
                raise ShapeError(f"{axis} = {size} must be a positive multiple of {self.stride}: {fits} would fit")
        return x, impl

    def _tap(self, tap: str) -> int:
        last = len(self.layers) - 2  # the head is the output
        if not tap.isdecimal() or int(tap) > last:
            raise ParameterError(f"no tap {tap!r}: layers are '0' to '{last}'")
        return int(tap)

    def _forward(self, run: Any, x: Any, done=lambda: None) -> list[Any]:
        """What every layer gives on a runner."""
        given: list[Any] = []
        for index, (row, layer) in enumerate(zip(FAMILIES[self.family], self.layers, strict=True)):
            sources = [given[source if source >= 0 else index + source] for source in row.sources] if index else [x]
            given.append(layer.forward(run, sources[0] if len(sources) == 1 else sources))
            done()
        return given

    def _exactly(self, x: np.ndarray, indices: Sequence[int]):
        *given, levels = self._forward(Exact(), x.astype(np.float64))
        flat = [[part.reshape(*part.shape[:2], -1) for part in level] for level in levels]
        distances, logits = (np.concatenate(parts, axis=2) for parts in zip(*flat, strict=True))
        tapped = [np.concatenate(y, axis=1) if isinstance(y := given[index], tuple) else y for index in indices]
        return np.concatenate((distances, 1 / (1 + np.exp(-logits))), axis=1), tapped

    def _planned(self, x: np.ndarray, indices: Sequence[int]):
        compute = accumulator_dtype(x.dtype)
        plan = self._plan(*x.shape[2:], compute)
        x = np.require(x, compute, ("C", "A"))
        raw = np.empty((len(x), *plan.raw_shape), compute)
        maps = [_pieces(plan.results[index]) for index in indices]
        shapes = [(len(x), *_shape(pieces)) for pieces in maps]
        tapped = [np.empty(shape, compute) for shape in shapes]
        for b, image in enumerate(x):

            def keep(layer: int, b: int = b) -> None:
                for index, pieces, y in zip(indices, maps, tapped, strict=True):
                    if index == layer:
                        np.concatenate([plan.look(piece) for piece in pieces], out=y[b])

            plan.run(image, raw[b], keep if indices else None)
        return raw, tapped

    def _plan(self, height: int, width: int, compute: np.dtype):
        from numba_psa.nn.yolo.plan import NetworkPlan  # compiled code, which the oracle does without

        key = height, width, compute
        with self._planning:
            if key not in self._plans:
                self._plans[key] = NetworkPlan(lambda plan, x: self._forward(plan, x, plan.layer_done), *key)
            self._plans.move_to_end(key)
            while len(self._plans) > PLANS:
                self._plans.popitem(last=False)
            return self._plans[key]

    # ---- looking ----
    def profile(self, x: np.ndarray, rounds: int = 5) -> list[Timing]:
        """Where the time of x's first image goes: each layer's, and that of decoding, medians of `rounds` runs."""
        x, _ = self._checked(x, "cpu")
        rounds = check_count("rounds", rounds, 1)
        if not len(x):
            raise ShapeError("B = 0: there is no image to look at")
        compute = accumulator_dtype(x.dtype)
        plan, x = self._plan(*x.shape[2:], compute), np.require(x[:1], compute, ("C", "A"))
        raw, rows = np.empty((1, *plan.raw_shape), compute), []
        for _ in range(rounds + 1):  # the first only warms up
            times = [time.perf_counter()]
            plan.run(x[0], raw[0], lambda _: times.append(time.perf_counter()))  # noqa: B023
            with quiet():
                self._decode(raw, *x.shape[2:])
            times.append(time.perf_counter())
            rows.append(np.diff(times))
        ms = np.median(rows[1:], axis=0) * 1e3
        kinds = [row.kind for row in FAMILIES[self.family]]
        shapes = [_shape(_pieces(given)) for given in plan.results[:-1]]
        names = [*map(str, range(len(kinds))), "decode"]
        columns = names, [*kinds, "boxes"], [*shapes, None, None], ms.tolist(), (ms / ms.sum()).tolist(), [*plan.gflop, 0.0]
        return [Timing(*values) for values in zip(*columns, strict=True)]


@dataclass(frozen=True)
class Timing:
    """A layer's part in the time of one image."""

    layer: str
    kind: str
    shape: tuple[int, int, int] | None
    """Of its result, `[C, H, W]`; the head and decoding have none."""
    ms: float
    share: float
    gflop: float
    """Operations of its convolutions, two for a multiply-add."""


def load(path: str | PathLike[str], *, sppf_silu: bool | None = None) -> Detector:
    """The YOLO11 or YOLO26 detector in a `.onnx`, `.safetensors` or `.npz` file; see `Detector.from_state_dict`.

    Of an `.onnx` file the weights are read, and from its graph only whether SPPF's first convolution has an activation.
    """
    state, metadata = read_file(path)
    try:
        return Detector.from_state_dict(state, metadata=metadata, sppf_silu=sppf_silu)
    except WeightsError as error:
        raise WeightsError(f"{path}: {error}") from error


def recognise(state: Mapping[str, np.ndarray], metadata: Mapping[str, str], sppf_silu: bool | None = None) -> Architecture:
    """Family, scale and classes of the detector with these weights; WeightsError where they are none."""
    end2end = any(name.startswith("model.23.one2one_") for name in state)
    family = "yolo26" if end2end or any(name.startswith("model.22.m.0.1.attn.") for name in state) else "yolo11"
    branch = "model.23.one2one_cv3" if end2end else "model.23.cv3"
    heads = [np.shape(state.get(f"{branch}.{level}.2.weight", ())) for level in range(3)]
    classes = [shape[0] for shape in heads if len(shape) == 4 and shape[0]]
    first = np.shape(state.get("model.0.conv.weight", ()))
    if not classes or len(first) != 4:
        last = max((int(name.split(".")[1]) for name in state), default=None)
        found = "there is no array of a layer model.0, model.1, …" if last is None else f"the last layer is model.{last}"
        raise WeightsError(
            f"these are no weights of a YOLO11 or YOLO26 detector, whose last layer is model.23, a Detect: {found}"
        )
    repeats = 2 if any(name.startswith("model.2.m.1.") for name in state) else 1
    fits = {(scale.channels(64), scale.repeats(2)): name for name, scale in SCALES.items()}
    if (first[0], repeats) not in fits:
        there = ", ".join(f"{name}: {width} and {times}" for (width, times), name in fits.items())
        raise WeightsError(
            f"no scale of {family} gives {first[0]} channels in model.0 and repeats model.2.m {repeats} times ({there})"
        )
    if sppf_silu is None:
        says = {"true": True, "false": False, None: SPPF_SILU[family]}
        if metadata.get("sppf_silu") not in says:
            raise WeightsError(f"metadata sppf_silu must be 'true' or 'false', got {metadata['sppf_silu']!r}")
        sppf_silu = says[metadata.get("sppf_silu")]
    nc = max(set(classes), key=classes.count)
    return Architecture(family, fits[first[0], repeats], nc, end2end, sppf_silu)


def _without_training_only(state: Mapping[str, np.ndarray], architecture: Architecture) -> dict[str, np.ndarray]:
    """The arrays that inference needs: not the other head of an end-to-end model, nor the constant 0, 1, … of DFL."""
    other = r"model\.23\.cv[23]\..*" if architecture.end2end else "$"
    known = {name: array for name, array in state.items() if not re.fullmatch(other, name)}
    bins = known.pop(BINS_NAME, None)
    if bins is not None and not np.array_equal(np.ravel(bins), np.arange(BINS)):
        raise WeightsError(
            f"{BINS_NAME} must be 0 to {BINS - 1}, the bins of a distance, got {np.ravel(bins)[:20].tolist()}"
        )
    return known


def _own(convs: Mapping[str, Any], index: int) -> dict[str, Any]:
    """{"": the convolution} of a layer that is one."""
    return {"": convs[f"model.{index}"]} if f"model.{index}" in convs else {}


def _layer(row: Row, convs: Mapping[str, Any], architecture: Architecture) -> Any:
    if row.kind == "Conv":
        return Convolution(convs[""])
    if row.kind == "SPPF":
        return SPPF(convs["cv1"], convs["cv2"], shortcut=architecture.family == "yolo26")
    if row.kind == "Detect":
        return Detect.assemble(convs, architecture.bins, architecture.end2end)
    if row.kind in ("C3k2", "C2PSA"):
        return {"C3k2": C3k2, "C2PSA": C2PSA}[row.kind]._assemble(convs)
    return {"Upsample": Upsample, "Concat": Concat}[row.kind]()


def _pieces(given: Any) -> tuple:
    return given if isinstance(given, tuple) else (given,)


def _shape(pieces: tuple) -> tuple[int, int, int]:
    """`[C, H, W]` of maps concatenated along channels."""
    return sum(piece.shape[0] for piece in pieces), *pieces[0].shape[1:]


def _class_names(text: str | None, nc: int) -> dict[int, str]:
    """{class: name} of a file's metadata, a Python dict written down; numbers where there is none."""
    if text is None:
        return {index: str(index) for index in range(nc)}
    try:
        names = ast.literal_eval(text)
    except (ValueError, SyntaxError, MemoryError, RecursionError) as error:
        raise WeightsError(f"metadata names is no dict of names: {text[:80]!r}") from error
    names = dict(enumerate(names)) if isinstance(names, list) else names
    if not isinstance(names, dict) or set(names) != set(range(nc)):
        raise WeightsError(f"metadata names must name classes 0 to {nc - 1}, got {text[:80]!r}")
    return {index: str(names[index]) for index in range(nc)}
