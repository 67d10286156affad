"""A layer's call on the GPU: arrays of any library in, the layer on the kernels of `mirror` or `cuda`, arrays out."""

from __future__ import annotations

from math import gcd
from types import ModuleType
from typing import Any

from numba_psa import mirror
from numba_psa._numba_cuda import require_device
from numba_psa.cuda.launching import current_device
from numba_psa.cuda.views import Call
from numba_psa.errors import ParameterError
from numba_psa.mirror.launch import Call as MirrorCall
from numba_psa.nn.mirrored import Mirrored
from numba_psa.nn.planned_cuda import CudaPlan, images_at_a_time
from numba_psa.shapes import OUT_AXES


def run(layer: Any, namespace: ModuleType, x: Any, out: Any, stream: Any) -> Any:
    """y = layer(x) by the kernels of a namespace, mirror or cuda; out, stream: as in `Layer.__call__`."""
    require_device("mirror" if namespace is mirror else "cuda")
    if namespace is mirror:
        if stream is not None:
            raise ParameterError("stream is for impl='cuda', and this is impl='mirror'")
        return _run_mirror(layer, x, out)
    return _run_cuda(layer, x, out, stream)


def _run_cuda(layer: Any, x: Any, out: Any, stream: Any) -> Any:
    call = Call(stream, x=x)
    source = call["x"]
    layer.check(source.shape)
    batch, _, height, width = source.shape
    target = call.target("out", out, (batch, layer.c_out, height, width), OUT_AXES)
    item, tokens = call.dtype.itemsize, height * width
    if batch * tokens:
        images, x_bytes, y_bytes = images_at_a_time(batch, tokens), layer.c_in * tokens * item, layer.c_out * tokens * item
        for first in range(0, batch, images):
            at, to = source.pointer + first * x_bytes, target.pointer + first * y_bytes
            whole = gcd(at, to) % (4 * item) == 0
            key = min(images, batch - first), height, width, call.dtype, whole, current_device()
            layer.kept_plan(CudaPlan, key)(at, to, call.stream)
    return call.finish(out, target)


def _run_mirror(layer: Any, x: Any, out: Any) -> Any:
    call = MirrorCall(x=x)
    layer.check(call.shape("x"))
    batch, _, height, width = call.shape("x")
    shape = batch, layer.c_out, height, width
    target = None if out is None else call.target("out", out, shape, OUT_AXES)
    (source,) = call.flat("x")
    if not batch * height * width:
        return call.result(call.empty(shape), shape) if out is None else out
    y = layer.forward(Mirrored(call.dtype), source.reshape(call.shape("x"))).reshape(source.size // layer.c_in * layer.c_out)
    if out is None:
        return call.result(y, shape)
    target.copy_to_device(y)
    return call.finish(out, target, shape)
