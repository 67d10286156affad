"""Many pictures on many machines: `batch.outcomes` on a Ray cluster, with Ray Data."""

from __future__ import annotations

import logging
import os
import pickle
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from numba_psa.errors import BackendUnavailableError
from numba_psa.nn.batch import Outcome, Request, outcome, printable

MOST_BLOCKS = 2000
"""Blocks of pictures; a block is what is done again when its worker dies."""


class Worker:
    """An actor of Ray Data with the network in memory, on one core."""

    def __init__(self, weights: bytes, suffix: str, request: Request):
        import numba

        from numba_psa.nn import yolo

        numba.set_num_threads(1)
        with tempfile.NamedTemporaryFile(suffix=suffix) as file:  # the machine need not have the weights
            file.write(weights)
            file.flush()
            self.model, self.request = yolo.load(file.name), request

    def __call__(self, row: dict[str, Any]) -> dict[str, Any]:
        result = outcome(self.model, os.fsdecode(row["image"]), self.request)
        return {"index": row["index"], "outcome": pickle.dumps(result)}  # a name of a file need not be text to Arrow


def outcomes(weights: Path, images: Sequence[str], request: Request, address: str) -> Iterator[tuple[int, Outcome]]:
    """(index, outcome) of every picture, in the order in which the cluster at `address` is done with them.

    Every machine needs this package, and reads the pictures by the names given here. The work of a worker that dies is done
    again by another one; a picture with which workers die time and again comes out as an error.
    Raises BackendUnavailableError where Ray or a cluster is missing.
    """
    try:
        import ray
        import ray.data
    except ImportError as error:
        raise BackendUnavailableError("--ray needs Ray Data: pip install 'numba-psa[cluster]'") from error
    try:
        ray.init(address, logging_level=logging.ERROR, log_to_driver=False)
    except (ConnectionError, ValueError, RuntimeError) as error:
        raise BackendUnavailableError(
            f"there is no Ray cluster at {address}: {printable(str(error))[:200]} (`ray start --head` starts one)"
        ) from error
    try:
        yield from _outcomes(ray, weights, images, request)
    finally:
        ray.shutdown()


def _outcomes(ray: Any, weights: Path, images: Sequence[str], request: Request) -> Iterator[tuple[int, Outcome]]:
    context = ray.data.DataContext.get_current()
    context.enable_progress_bars = False
    context.max_errored_blocks = -1
    rows = [{"index": index, "image": os.fsencode(os.path.abspath(image))} for index, image in enumerate(images)]
    most = max(min(int(ray.cluster_resources().get("CPU", 1)), len(rows)), 1)
    found = ray.data.from_items(rows, override_num_blocks=min(len(rows), MOST_BLOCKS)).map(
        Worker,
        fn_constructor_args=(weights.read_bytes(), weights.suffix, request),
        compute=ray.data.ActorPoolStrategy(min_size=1, max_size=most),
        num_cpus=1,
    )
    missing = set(range(len(rows)))
    for row in found.iter_rows():
        missing.discard(row["index"])
        yield row["index"], pickle.loads(row["outcome"])
    for index in sorted(missing):
        yield index, Outcome(images[index], error=printable(f"{images[index]}: the workers that had it died"))
