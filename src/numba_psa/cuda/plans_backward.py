"""From a backward problem to launches: one for l and delta, one for the gradients."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from math import copysign, gcd
from typing import Any

from numba_psa.cuda.backward import BACKWARD_SIGNATURE
from numba_psa.cuda.backward_sums import SUMS_SIGNATURE, make_backward_sums
from numba_psa.cuda.choice import Choice, Problem
from numba_psa.cuda.choice_backward import choose_backward
from numba_psa.cuda.launching import architecture, current_device, head_runs, kernel
from numba_psa.cuda.plan_arrays import ArrayCheck, check_alignment
from numba_psa.cuda.plans import SMALLEST_SCALE, device_scale, multiprocessors
from numba_psa.cuda.tiles import padded
from numba_psa.cuda.tiles_backward import DKV, DQ, SUMS_PAD, SumsConfig
from numba_psa.cuda.views import kind_of, stream_handle
from numba_psa.errors import DTypeError
from numba_psa.numerics import BFLOAT16, FLOAT32, FLOAT64, check_scale, float_dtype
from numba_psa.shapes import L_AXES, OUT_AXES, QKV_AXES, PSAShape


class BackwardLauncher:
    """One problem's kernels, grids and strides. `passes`: DQ, DKV or both."""

    def __init__(self, problem: Problem, passes: int = DQ | DKV, choice: Choice | None = None):
        device = current_device()
        self.choice = choice or choose_backward(problem, passes, architecture(device), multiprocessors(device))
        self._kernel = kernel(self.choice.make, self.choice.config, BACKWARD_SIGNATURE)
        item = problem.dtype.itemsize
        sums = SumsConfig(
            problem.key_dim,
            problem.value_dim,
            item,
            problem.dtype == BFLOAT16,
            problem.tokens_first,
            problem.copy,
            self.choice.config.arch,
        )
        self._sums = kernel(make_backward_sums, sums, SUMS_SIGNATURE)
        self._sizes = problem.n_queries, problem.n_keys
        self._passes = 2 if passes == DQ | DKV else 1
        longest = max(self._sizes)
        self._blocks, self._sums_blocks = -(-longest // self.choice.config.BM), -(-longest // SUMS_PAD)
        self._runs = head_runs(problem.heads)
        q, k, v = (
            n * width
            for n, width in (
                (problem.n_queries, problem.key_dim),
                (problem.n_keys, problem.key_dim),
                (problem.n_keys, problem.value_dim),
            )
        )
        slab = (q, k, v) if problem.tokens_first else (q + k + v,) * 3
        self._strides = tuple(item * x for x in (*slab, problem.n_queries * problem.value_dim))
        self._sums_stride, self._norms_stride = 8 * padded(problem.n_queries, SUMS_PAD), 16 * self._sums_blocks
        self._norms_offset = problem.heads * self._sums_stride
        self.workspace_bytes = problem.heads * (self._sums_stride + self._norms_stride)

    def __call__(
        self,
        stream: int,
        inputs: tuple[int, int, int, int, int, int],
        gradients: tuple[int, int, int],
        workspace: int,
        softmax_scale: float,
        scale: float,
    ) -> None:
        """Addresses of q, k, v, o, do, l and of dq, dk, dv; what a pass that does not run writes may be 0."""
        for first, count in self._runs:
            q, k, v, out = (first * stride for stride in self._strides)
            at = tuple(x + offset for x, offset in zip(inputs, (q, k, v, out, out, 4 * first * self._sizes[0]), strict=True))
            to = tuple(x + offset for x, offset in zip(gradients, (q, k, v), strict=True))
            sums = workspace + first * self._sums_stride
            norms = workspace + self._norms_offset + first * self._norms_stride
            self._sums((self._sums_blocks, count, 1), stream, *at[2:], sums, norms, *self._sizes)
            grid = self._blocks, count, self._passes
            self._kernel(grid, stream, *at[:3], at[4], *to, sums, norms, *self._sizes, softmax_scale, scale)


@cache
def backward_launcher(problem: Problem, passes: int, device: int) -> BackwardLauncher:
    """The launcher of a problem on a device, made once."""
    return BackwardLauncher(problem, passes)


def exponent_scale(softmax_scale: float, dtype: Any) -> float:
    """softmax_scale, kept away from 0, as the kernels' exponents want it: float32's are natural, halves' binary."""
    if dtype == FLOAT32:
        return copysign(max(abs(softmax_scale), SMALLEST_SCALE), softmax_scale)
    return device_scale(softmax_scale)


class AttentionBackwardPlan:
    """`plan(qkv, d_out, out, l, d_qkv, workspace, stream=None)` is psa_attention_backward for one shape and dtype.

    out and l are what psa_attention(…, save_for_backward=True) returned; d_qkv is written. workspace: a device array
    of `workspace_bytes`, overwritten. All contiguous device arrays, or their addresses as ints. Nothing is allocated and
    nothing waited for: it can be captured into a CUDA graph. Calls that run side by side need workspaces of their own.
    """

    def __init__(self, shape: PSAShape, dtype: Any, *, softmax_scale: float | None = None):
        if not isinstance(shape, PSAShape):
            given = type(shape).__name__
            raise DTypeError(f"shape must be a PSAShape, such as PSAShape.from_qkv(qkv.shape, num_heads), got {given}")
        self.shape, self.dtype = shape, float_dtype(dtype)
        if self.dtype == FLOAT64:
            raise DTypeError("impl='cuda' takes float16, bfloat16 and float32, not float64")
        self._softmax_scale = check_scale(softmax_scale, shape.softmax_scale)
        self._scale = exponent_scale(self._softmax_scale, self.dtype)
        self._problem = Problem(shape.bh, shape.n, shape.n, shape.key_dim, shape.head_dim, self.dtype)
        self._problem.check_widths()
        self._part = shape.key_dim * shape.n * self.dtype.itemsize
        self._launchers: dict[int, BackwardLauncher] = {}
        qkv, out = (shape.qkv, QKV_AXES, self.dtype), (shape.out, OUT_AXES, self.dtype)
        self._check = ArrayCheck(qkv=qkv, d_out=out, out=out, l=(shape.l, L_AXES, FLOAT32), d_qkv=qkv)
        self.workspace_bytes = self._launcher(16).workspace_bytes if shape.bh and shape.n else 0

    @property
    def choice(self) -> Choice:
        """The kernel and config that run where addresses are multiples of 16."""
        return self._launcher(16).choice

    def __call__(self, qkv: Any, d_out: Any, out: Any, l: Any, d_qkv: Any, workspace: Any, stream: Any = None) -> None:
        if type(stream) is not int:
            stream = stream_handle(stream) if type(qkv) is int else stream_handle(stream, kind_of(qkv), qkv)
        arrays = {"qkv": qkv, "d_out": d_out, "out": out, "l": l, "d_qkv": d_qkv}
        addresses = [self._check(name, array) for name, array in arrays.items()]
        self.launch(*addresses, self._check.room("workspace", workspace, self.workspace_bytes), stream)

    def launch(self, qkv: int, d_out: int, out: int, l: int, d_qkv: int, workspace: int, stream: int) -> None:
        """The same for addresses."""
        if not self.workspace_bytes:  # no element
            return
        launcher, part = self._launcher(gcd(16, qkv, d_out, out, d_qkv)), self._part
        inputs = qkv, qkv + part, qkv + 2 * part, out, d_out, l
        gradients = d_qkv, d_qkv + part, d_qkv + 2 * part
        launcher(stream, inputs, gradients, workspace, self._softmax_scale, self._scale)

    def _launcher(self, alignment: int) -> BackwardLauncher:
        check_alignment(alignment, self.dtype)
        if alignment not in self._launchers:
            self._launchers[alignment] = BackwardLauncher(replace(self._problem, alignment=alignment))
        return self._launchers[alignment]


@cache
def cached_backward_plan(
    qkv: tuple[int, ...], num_heads: int, dtype: Any, softmax_scale: float | None, device: int
) -> AttentionBackwardPlan:
    """What psa_attention_backward runs: the plan for qkv of this shape on this device, checked and made once."""
    return AttentionBackwardPlan(PSAShape.from_qkv(qkv, num_heads), dtype, softmax_scale=softmax_scale)


def plan_psa_attention_backward(shape: PSAShape, dtype: Any, *, softmax_scale: float | None = None) -> AttentionBackwardPlan:
    """A plan for psa_attention_backward on qkv of this shape and dtype: compiled now, launched with little host work.

    Raises as psa_attention_backward does.
    """
    return AttentionBackwardPlan(shape, dtype, softmax_scale=softmax_scale)
