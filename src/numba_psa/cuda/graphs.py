"""A chain of launches as one CUDA graph: captured once, replayed at the price of one launch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, NamedTuple

from numba_psa._numba_cuda import SIMULATED, cuda
from numba_psa.cuda.launching import checked


class Launch(NamedTuple):
    """A `launching.Kernel`, or what is called like one, with its grid and arguments."""

    kernel: Callable[..., None]
    grid: tuple[int, int, int]
    arguments: tuple


class Parameters(NamedTuple):
    """A launch, and what the driver wants to know of it."""

    launch: Launch
    node: Any


class Graph:
    """`graph.launch(stream)` runs the launches in order. Belongs to the device that was current when it was made.

    The simulator has no graphs: there the launches run one by one.
    """

    def __init__(self, launches: Sequence[Launch]):
        self._launches = list(launches)
        self._graph = self._executable = None
        if not SIMULATED:
            self._capture()

    def _capture(self) -> None:
        from cuda.bindings import driver

        self._driver = driver
        cuda.current_context()
        stream = checked(driver.cuStreamCreate(driver.CUstream_flags.CU_STREAM_NON_BLOCKING), "cuStreamCreate")
        mode = driver.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_THREAD_LOCAL
        checked(driver.cuStreamBeginCapture(stream, mode), "cuStreamBeginCapture")
        self._nodes = []
        try:
            for kernel, grid, arguments in self._launches:
                kernel(grid, int(stream), *arguments, early=True)
                status, _, _, _, newest, *_ = driver.cuStreamGetCaptureInfo(stream)
                checked((status,), "cuStreamGetCaptureInfo")
                self._nodes.append(newest[0])
        finally:
            self._graph = checked(driver.cuStreamEndCapture(stream), "cuStreamEndCapture")
            checked(driver.cuStreamDestroy(stream), "cuStreamDestroy")
        self._executable = checked(driver.cuGraphInstantiate(self._graph, 0), "cuGraphInstantiate")

    def parameters(self, index: int, arguments: tuple) -> Parameters:
        """What `replace` takes: other arguments for launch number `index`, which is of a Kernel."""
        kernel, grid, _ = self._launches[index]
        node = None if SIMULATED else kernel.node(grid, arguments)
        return Parameters(Launch(kernel, grid, arguments), node)

    def replace(self, index: int, parameters: Parameters) -> None:
        """Give launch number `index` these `parameters` from the next replay on."""
        self._launches[index] = parameters.launch
        if not SIMULATED:
            set_parameters = self._driver.cuGraphExecKernelNodeSetParams
            answer = set_parameters(self._executable, self._nodes[index], parameters.node)
            checked(answer, "cuGraphExecKernelNodeSetParams")

    def launch(self, stream: int) -> bool:
        """Replay on a stream, given as a handle; replays of one graph never run at the same time.

        A stream that is being captured refuses a graph like this one (error 900): it gets the launches one by one. Returns
        whether that was so: then someone else's graph holds the addresses of all memory here.
        """
        capturing = not SIMULATED and stream != 0 and self._is_capturing(stream)
        if SIMULATED or capturing:
            for kernel, grid, arguments in self._launches:
                kernel(grid, stream, *arguments)
        else:
            checked(self._driver.cuGraphLaunch(self._executable, stream), "cuGraphLaunch")
        return capturing

    def _is_capturing(self, stream: int) -> bool:
        status = checked(self._driver.cuStreamIsCapturing(stream), "cuStreamIsCapturing")
        return status != self._driver.CUstreamCaptureStatus.CU_STREAM_CAPTURE_STATUS_NONE

    def __del__(self):
        with suppress(Exception):  # at the end of the process the driver may be gone
            if self._executable is not None:
                self._driver.cuGraphExecDestroy(self._executable)
            if self._graph is not None:
                self._driver.cuGraphDestroy(self._graph)
