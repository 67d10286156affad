"""Attention layers of YOLO10, YOLO11 and YOLO26 for inference, built from trained weights.

Every layer is called as `layer(x, impl=None)`, x `[B, c_in, H, W]`, and written once: `forward` says what is computed on a
*runner*, which is `Exact` (impl "oracle"), `Plan` ("cpu"), `CudaPlan` ("cuda") or `Mirrored` ("mirror").
"""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping
from numbers import Integral
from os import PathLike
from typing import Any, ClassVar

import numpy as np

from numba_psa import oracle
from numba_psa.arrays import as_floats, check_target, quiet
from numba_psa.errors import DTypeError, ParameterError, ShapeError
from numba_psa.implementations import implementation
from numba_psa.nn.conv import Conv
from numba_psa.nn.exact import Exact, split_heads
from numba_psa.nn.files import read_state
from numba_psa.nn.weights import Wanted, build, count_units, select, under
from numba_psa.numerics import accumulator_dtype
from numba_psa.shapes import OUT_AXES, check_count, check_rank

PLANS = 8
"""Input sizes that a layer keeps buffers for; the one not used for longest goes first."""

_DLPACK_CUDA = 2


def _index(name: str, value: Any, count: int) -> int:
    if isinstance(value, bool) or not isinstance(value, Integral):
        raise DTypeError(f"{name} must be an int, got {type(value).__name__} {value!r}")
    if not 0 <= value < count:
        raise ParameterError(f"{name} must be 0 to {count - 1}, got {value}")
    return int(value)


def _on_device(array: Any) -> bool:
    """Whether `array` lies on a CUDA device; asked without loading what could compute there."""
    if isinstance(array, np.ndarray):
        return False
    if hasattr(array, "is_cuda"):  # torch
        return bool(array.is_cuda)
    try:
        if hasattr(array, "__cuda_array_interface__") or hasattr(array, "__cuda_ndarray__"):
            return True
        return hasattr(array, "__dlpack_device__") and int(array.__dlpack_device__()[0]) == _DLPACK_CUDA
    except Exception:  # torch refuses the interface to dtypes that NumPy does not know
        return True


def _check_on_host(array: Any, what: str) -> None:
    if _on_device(array):
        raise DTypeError(f"{what} takes NumPy arrays, and a {type(array).__name__} lies on the device: copy it to the host")


class Layer(ABC):
    """What all layers share: building from weights, calling, looking at attention."""

    PREFIX: ClassVar[str]
    """Where the layer stands in YOLO11 and YOLO26, the default prefix of `from_file`."""
    c_in: int
    c_out: int
    attentions: tuple[Attention, ...]
    """Every attention inside, in the order of computation."""

    def __init__(self) -> None:
        self._plans: OrderedDict[tuple, Any] = OrderedDict()
        self._planning = threading.Lock()

    @classmethod
    def from_state_dict(cls, state: Mapping[str, np.ndarray], prefix: str = "", **options: Any) -> Layer:
        """The layer whose weights stand in `state` below `prefix`, with Ultralytics' names.

        Arrays are float16, bfloat16, float32 or float64. Each convolution has `.conv.weight`, and either `.conv.bias` (batch
        norm folded) or `.bn.weight`, `.bn.bias`, `.bn.running_mean`, `.bn.running_var` (folded here, in float64, eps 1e-3).
        Widths and the number of blocks are what the shapes say. num_heads cannot be seen in them: default max(c // 64, 1).
        shortcut=False drops the residual additions. Both are keywords; Attention has no shortcut.
        Raises WeightsError with every name that is missing, unexpected or wrong; ShapeError where num_heads does not fit.
        """
        found = select(state, prefix)
        return cls._assemble(build(found, cls._wanted(found), cls.__name__), **options)

    @classmethod
    def from_file(cls, path: str | PathLike[str], prefix: str | None = None, **options: Any) -> Layer:
        """`from_state_dict` of a `.safetensors`, `.npz` or `.onnx` file (its initializers); default prefix: PREFIX.

        A `.pt` file is refused, and the message says how to convert it.
        """
        return cls.from_state_dict(read_state(path), cls.PREFIX if prefix is None else prefix, **options)

    @classmethod
    @abstractmethod
    def _wanted(cls, state: Mapping[str, np.ndarray]) -> tuple[Wanted, ...]:
        """The convolutions that the weights `state` are to be taken for."""

    @classmethod
    @abstractmethod
    def _assemble(cls, convs: Mapping[str, Conv], **options: Any) -> Layer:
        """The layer of these convolutions, by the names in `_wanted`."""

    @abstractmethod
    def forward(self, run, x):
        """The layer's result on a runner; `run.conv(conv, x, add)` is act(conv(x)) + add."""

    def __call__(self, x: Any, impl: str | None = None, *, out: Any = None, stream: Any = None) -> Any:
        """y `[B, c_out, H, W]` of x `[B, c_in, H, W]`, in the dtype of x: float16, bfloat16, float32 or float64.

        impl: "cpu" (the default for NumPy arrays) computes in float32, or float64 for float64, and rounds once at the end;
        "oracle" computes in float64. "cuda" (the default for device arrays: `__cuda_array_interface__`, DLPack; not float64)
        and "mirror" round every intermediate result to the dtype and sum in float32; they return device arrays for device
        arrays, and copy NumPy's over and back. `out`, shape, dtype and kind of y, is written and returned; it may overlap x
        on the CPU. stream: as in `numba_psa.cuda.psa_attention`, for "cuda" only; where it is being captured, the launches
        become part of that graph, which then must not run at the same time as another call of this size.
        Raises ShapeError, DTypeError, ParameterError, BackendUnavailableError; nothing is copied to the host unasked.
        """
        impl = impl or ("cuda" if _on_device(x) else "cpu")
        if impl in ("cuda", "mirror"):
            from numba_psa.nn import on_gpu

            return on_gpu.run(self, implementation(impl), x, out, stream)
        implementation(impl)  # a name that does not exist is another error
        _check_on_host(x, f"impl={impl!r}")
        if stream is not None:
            raise ParameterError(f"stream is for impl='cuda', and this is impl={impl!r}")
        (x,), dtype = as_floats(x=x)
        self.check(x.shape)
        shape = len(x), self.c_out, *x.shape[2:]
        if out is not None:
            check_target("out", out, shape, OUT_AXES, dtype)
        with quiet():
            if impl == "oracle":
                y = self.forward(Exact(), x.astype(np.float64))
            else:
                y = self._planned(x, self._direct(out, x, dtype))
            if out is None:
                return y.astype(dtype, copy=False)
            if y is not out:
                out[...] = y
        return out

    def attention_map(self, x: np.ndarray, query: tuple[int, int], head: int = 0, block: int = 0) -> np.ndarray:
        """P[b, y, x] = softmax(key_dim^-½ · qᵀ k): the weight of each token for the token at `query` = (y, x).

        `block` counts the attentions of the layer. Computed by the oracle: float64 `[B, H, W]`.
        Raises ShapeError, DTypeError, ParameterError.
        """
        _check_on_host(x, "attention_map")
        (x,), _ = as_floats(x=x)
        self.check(x.shape)
        height, width = x.shape[2:]
        block = _index("block", block, len(self.attentions))
        attention = self.attentions[block]
        head = _index("head", head, attention.num_heads)
        if np.shape(query) != (2,):
            raise ParameterError(f"query must be y,x, got {query!r}")
        row, column = (
            _index(f"query {axis}", at, size) for axis, at, size in zip("yx", query, (height, width), strict=True)
        )
        run = Exact()
        with quiet():
            self.forward(run, x.astype(np.float64))
        heads = split_heads(run.qkvs[block], attention.num_heads, attention.key_dim)
        q, k = (part[head :: attention.num_heads].swapaxes(1, 2) for part in heads[:2])
        # With the identity for values, the attention's output is its weights.
        every_token = np.broadcast_to(np.eye(height * width), (len(x), height * width, height * width))
        token = row * width + column
        weights, _ = oracle.flash_attention2_forward(q[:, token : token + 1], k, every_token)
        return weights.reshape(len(x), height, width)

    def check(self, shape: tuple[int, ...]) -> None:
        """ShapeError unless the layer takes an x of this shape."""
        check_rank("x", shape, ("B", "c_in", "H", "W"))
        if shape[1] != self.c_in:
            raise ShapeError(f"x has {shape[1]} channels on axis 1, but this {type(self).__name__} takes {self.c_in}")

    @staticmethod
    def _direct(out: np.ndarray | None, x: np.ndarray, dtype: np.dtype) -> np.ndarray | None:
        """out where the CPU path can write into it, else None."""
        if out is None or dtype != accumulator_dtype(dtype) or not out.flags.c_contiguous or not out.flags.aligned:
            return None
        return None if np.may_share_memory(out, x) else out

    def _planned(self, x: np.ndarray, y: np.ndarray | None) -> np.ndarray:
        compute = accumulator_dtype(x.dtype)
        y = np.empty((len(x), self.c_out, *x.shape[2:]), compute) if y is None else y
        if y.size:
            self._plan(x.shape, compute)(np.require(x, compute, ("C", "A")), y)
        return y

    def _plan(self, shape: tuple[int, ...], compute: np.dtype):
        from numba_psa.nn.planned import Plan, images_at_a_time  # compiled code, which the oracle does without

        key = (images_at_a_time(shape, compute), *shape[2:], compute)
        return self.kept_plan(Plan, key)

    def kept_plan(self, plan: Callable[..., Any], key: tuple) -> Any:
        """`plan(layer, *key)`, made once; the PLANS used last are kept."""
        with self._planning:
            if (plan, key) not in self._plans:
                self._plans[plan, key] = plan(self, *key)
            self._plans.move_to_end((plan, key))
            while len(self._plans) > PLANS:
                self._plans.popitem(last=False)
            return self._plans[plan, key]


ATTENTION = (
    Wanted("qkv", (1, "qkv"), (1, "c")),
    Wanted("pe", (1, "c"), (1, "c"), kernel_size=3, depthwise=True),
    Wanted("proj", (1, "c"), (1, "c")),
)
FFN = Wanted("ffn.0", (2, "c"), (1, "c"), silu=True), Wanted("ffn.1", (1, "c"), (2, "c"))
PSABLOCK = (*under("attn", ATTENTION), *FFN)


def below(convs: Mapping[str, Conv], prefix: str) -> dict[str, Conv]:
    """The convolutions whose names begin with `prefix.`, without it."""
    return {name[len(prefix) + 1 :]: conv for name, conv in convs.items() if name.startswith(f"{prefix}.")}


class Attention(Layer):
    """y = proj(out + pe(v)), out = v · softmax_keys(key_dim^-½ · qᵀ k)ᵀ; q, k, v the split of qkv(x) in each head.

    qkv, proj 1×1, pe depthwise 3×3, none with an activation; c channels in and out. head_dim = c / num_heads; key_dim is
    what is left of the qkv channels, (c_qkv − c) / (2·num_heads). head_dim need not be 2·key_dim.
    """

    PREFIX = "model.10.m.0.attn"

    def __init__(self, qkv: Conv, pe: Conv, proj: Conv, num_heads: int | None = None):
        super().__init__()
        self.qkv, self.pe, self.proj = qkv, pe, proj
        self.c_in = self.c_out = c = proj.c_out
        self.num_heads = max(c // 64, 1) if num_heads is None else check_count("num_heads", num_heads, 1)
        twice, rest = divmod(qkv.c_out - c, self.num_heads)
        if c % self.num_heads or rest or twice % 2 or twice < 2:
            fits = [str(h) for h in range(1, c + 1) if c % h == 0 and qkv.c_out > c and (qkv.c_out - c) % (2 * h) == 0]
            raise ShapeError(
                f"num_heads = {self.num_heads} does not fit {c} channels and {qkv.c_out} of qkv: it must divide {c}, and "
                f"{qkv.c_out} - {c} must be a multiple of 2·num_heads; {', '.join(fits) or 'no number'} would fit"
            )
        self.key_dim, self.head_dim = twice // 2, c // self.num_heads
        self.attentions = (self,)

    @classmethod
    def _wanted(cls, state):
        return ATTENTION

    @classmethod
    def _assemble(cls, convs, *, num_heads: int | None = None):
        return cls(convs["qkv"], convs["pe"], convs["proj"], num_heads)

    def forward(self, run, x, add=None):
        return run.conv(self.proj, run.attend(run.conv(self.qkv, x), self.num_heads, self.key_dim, self.pe), add)


class PSABlock(Layer):
    """y = t + ffn(t), t = x + attn(x); ffn = 1×1 c → 2c SiLU, 1×1 2c → c. shortcut=False: y = ffn(attn(x))."""

    PREFIX = "model.10.m.0"

    def __init__(self, attn: Attention, expand: Conv, contract: Conv, shortcut: bool = True):
        super().__init__()
        self.attn, self.expand, self.contract, self.shortcut = attn, expand, contract, shortcut
        self.c_in = self.c_out = attn.c_in
        self.attentions = attn.attentions

    @classmethod
    def _wanted(cls, state):
        return PSABLOCK

    @classmethod
    def _assemble(cls, convs, *, num_heads: int | None = None, shortcut: bool = True):
        attn = Attention._assemble(below(convs, "attn"), num_heads=num_heads)
        return cls(attn, convs["ffn.0"], convs["ffn.1"], shortcut)

    def forward(self, run, x):
        t = self.attn.forward(run, x, x if self.shortcut else None)
        return run.conv(self.contract, run.conv(self.expand, t), t if self.shortcut else None)


class C2PSA(Layer):
    """y = cv2(concat(a, blocks(b))), a and b the halves of cv1(x): cv1 1×1 c_in → 2c SiLU, cv2 1×1 2c → c_in SiLU."""

    PREFIX = "model.10"

    def __init__(self, cv1: Conv, cv2: Conv, blocks: tuple[PSABlock, ...]):
        super().__init__()
        self.cv1, self.cv2, self.blocks = cv1, cv2, blocks
        self.c_in, self.c_out = cv1.c_in, cv2.c_out
        self.attentions = tuple(block.attn for block in blocks)

    @classmethod
    def _wanted(cls, state):
        blocks = (under(f"m.{i}", PSABLOCK) for i in range(count_units(state, r"m\.(\d+)\.")))
        return *cls._outer(), *(conv for block in blocks for conv in block)

    @staticmethod
    def _outer():
        return Wanted("cv1", (2, "c"), (1, "c_in"), silu=True), Wanted("cv2", (1, "c_in"), (2, "c"), silu=True)

    @classmethod
    def _assemble(cls, convs, **options):
        names = dict.fromkeys(".".join(name.split(".")[:2]) for name in convs if name.startswith("m."))
        return cls(convs["cv1"], convs["cv2"], tuple(PSABlock._assemble(below(convs, name), **options) for name in names))

    def forward(self, run, x):
        c = self.cv1.c_out // 2
        a, b = run.split(run.conv(self.cv1, x), c, c)
        for block in self.blocks:
            b = block.forward(run, b)
        return run.conv(self.cv2, (a, b))


class PSA(C2PSA):
    """YOLO10's: a C2PSA with one block, whose attention and ffn stand beside cv1 and cv2 (`attn.…`, `ffn.…`)."""

    @classmethod
    def _wanted(cls, state):
        return *cls._outer(), *PSABLOCK

    @classmethod
    def _assemble(cls, convs, **options):
        return cls(convs["cv1"], convs["cv2"], (PSABlock._assemble(convs, **options),))


class Bottleneck:
    """x + cv2(cv1(x)), both 3×3 with SiLU; shortcut=False: cv2(cv1(x))."""

    CONVS = Wanted("cv1", (1, "e"), (1, "c"), 3, silu=True), Wanted("cv2", (1, "c"), (1, "e"), 3, silu=True)

    def __init__(self, cv1: Conv, cv2: Conv, shortcut: bool = True):
        self.cv1, self.cv2, self.shortcut = cv1, cv2, shortcut

    def forward(self, run, x):
        return run.conv(self.cv2, run.conv(self.cv1, x), x if self.shortcut else None)


class C3k:
    """cv3(concat(m(cv1(x)), cv2(x))): m two Bottlenecks of e channels, inside too; all 1×1 but theirs, all with SiLU."""

    CONVS = (
        Wanted("cv1", (1, "e"), (1, "c"), silu=True),
        Wanted("cv2", (1, "e"), (1, "c"), silu=True),
        *(Wanted(f"m.{i}.{cv}", (1, "e"), (1, "e"), 3, silu=True) for i in range(2) for cv in ("cv1", "cv2")),
        Wanted("cv3", (1, "c"), (2, "e"), silu=True),
    )

    def __init__(self, convs: Mapping[str, Conv], shortcut: bool = True):
        self.cv1, self.cv2, self.cv3 = (convs[name] for name in ("cv1", "cv2", "cv3"))
        self.blocks = tuple(Bottleneck(convs[f"m.{i}.cv1"], convs[f"m.{i}.cv2"], shortcut) for i in range(2))

    def forward(self, run, x):
        y = run.conv(self.cv1, x)
        for block in self.blocks:
            y = block.forward(run, y)
        return run.conv(self.cv3, (y, run.conv(self.cv2, x)))


class C3k2(Layer):
    """y = cv2(concat(a, b, u_1, …, u_n)), a and b the halves of cv1(x).

    u_i = unit_i(u_{i-1}), u_0 = b. A unit is a Bottleneck, or a C3k, or (YOLO26's with attention, the default where names do
    not tell) a Bottleneck and then a PSABlock; cv1 1×1 c_in → 2c, cv2 1×1 (2+n)c → c_out, both with SiLU.
    """

    PREFIX = "model.22"

    def __init__(self, cv1: Conv, cv2: Conv, units: tuple[tuple[Any, ...], ...]):
        super().__init__()
        self.cv1, self.cv2, self.units = cv1, cv2, units
        self.c_in, self.c_out = cv1.c_in, cv2.c_out
        self.attentions = tuple(block.attn for unit in units for block in unit if isinstance(block, PSABlock))

    @classmethod
    def _wanted(cls, state):
        n = count_units(state, r"m\.(\d+)\.")
        outer = Wanted("cv1", (2, "c"), (1, "c_in"), silu=True), Wanted("cv2", (1, "c_out"), (2 + n, "c"), silu=True)
        return *outer, *(conv for i in range(n) for conv in under(f"m.{i}", cls._unit(state, f"m.{i}")))

    @staticmethod
    def _unit(names: Iterable[str], prefix: str) -> tuple[Wanted, ...]:
        """The convolutions of the kind of unit that the names below `prefix` belong to."""
        parts = {name[len(prefix) + 1 :].split(".")[0] for name in names if name.startswith(f"{prefix}.")}
        if "cv3" in parts:
            return C3k.CONVS
        return Bottleneck.CONVS if "cv1" in parts else (*under("0", Bottleneck.CONVS), *under("1", PSABLOCK))

    @classmethod
    def _assemble(cls, convs, *, num_heads: int | None = None, shortcut: bool = True):
        units = []
        while unit := below(convs, f"m.{len(units)}"):
            if "cv3" in unit:
                units.append((C3k(unit, shortcut),))
            elif "cv1" in unit:
                units.append((Bottleneck(unit["cv1"], unit["cv2"], shortcut),))
            else:
                first = Bottleneck(unit["0.cv1"], unit["0.cv2"], shortcut)
                units.append((first, PSABlock._assemble(below(unit, "1"), num_heads=num_heads, shortcut=shortcut)))
        return cls(convs["cv1"], convs["cv2"], tuple(units))

    def forward(self, run, x):
        c = self.cv1.c_out // 2
        parts = run.split(run.conv(self.cv1, x), c, c)
        for unit in self.units:
            y = parts[-1]
            for block in unit:
                y = block.forward(run, y)
            parts.append(y)
        return run.conv(self.cv2, parts)
