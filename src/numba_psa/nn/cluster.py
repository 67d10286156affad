"""Many pictures on many machines: `batch.outcomes` on a Ray cluster, with Ray Data."""

from __future__ import annotations

import contextlib
import logging
import os
import pickle
import re
import socket
import sys
import tempfile
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from numba_psa.errors import BackendUnavailableError, NumbaPSAError
from numba_psa.nn.batch import Outcome, Request, outcome, printable

MOST_BLOCKS = 2000
"""Blocks of pictures; a block is what is done again when its worker dies."""
RETRIES = 4
"""How often a block is done again: a picture that takes too much memory kills every worker."""
_MODELS: dict[str, Any] = {}
"""The network of this worker process, by the name of the object that its weights are."""


def _row(row: dict[str, Any], weights: list[Any], suffix: str, request: Request) -> dict[str, Any]:
    """What a task does with one picture; `weights` is a reference, so that a process fetches and loads them once.

    A task, not an actor: an actor that dies with its machine waits for a free core elsewhere, and its pictures with it.
    """
    image = os.fsdecode(row["image"])
    try:
        result = outcome(_model(*weights, suffix), image, request)
    except (NumbaPSAError, OSError) as error:  # of the weights: a package that this machine lacks, a full disk
        result = Outcome(image, error=printable(f"{image}: {error}"))
    return {"index": row["index"], "outcome": pickle.dumps(result)}  # a name of a file need not be text to Arrow


def _model(weights: Any, suffix: str) -> Any:
    import numba
    import ray

    from numba_psa.nn import yolo

    name = weights.hex()
    if name not in _MODELS:
        numba.set_num_threads(1)
        with tempfile.NamedTemporaryFile(suffix=suffix) as file:  # the machine need not have the weights
            file.write(ray.get(weights))
            file.flush()
            _MODELS.clear()
            _MODELS[name] = yolo.load(file.name)
    return _MODELS[name]


def outcomes(weights: Path, images: Sequence[str], request: Request, address: str) -> Iterator[tuple[int, Outcome]]:
    """(index, outcome) of every picture, in the order in which the cluster at `address` is done with them.

    Every machine needs this package, and reads the pictures by the names given here. The work of a worker that dies is done
    again by another one; a picture with which workers die time and again comes out as an error, and with it, where there
    are more than MOST_BLOCKS, the others of its block.
    Raises BackendUnavailableError where Ray or a cluster is missing.
    """
    try:
        import ray
        import ray.data
    except ImportError as error:
        raise BackendUnavailableError("--ray needs Ray Data: pip install 'numba-psa[cluster]'") from error
    with contextlib.redirect_stdout(sys.stderr):  # Ray tells of workers that died
        _connect(ray, address)
        try:
            yield from _outcomes(ray, weights, images, request)
        finally:
            ray.shutdown()


def _connect(ray: Any, address: str) -> None:
    try:
        if place := re.fullmatch(r"([^/]+):(\d+)", address):
            socket.create_connection((place[1], int(place[2])), timeout=10).close()  # Ray itself tries for minutes
        ray.init(address, logging_level=logging.ERROR, log_to_driver=False)
    except (OSError, OverflowError, ValueError, RuntimeError) as error:
        raise BackendUnavailableError(
            f"no Ray cluster can be reached at {address}: {printable(str(error))[:200]} (`ray start --head` starts one)"
        ) from error


def _outcomes(ray: Any, weights: Path, images: Sequence[str], request: Request) -> Iterator[tuple[int, Outcome]]:
    context = ray.data.DataContext.get_current()
    context.enable_progress_bars = False
    logging.getLogger("ray.data").setLevel(logging.ERROR)
    context.max_errored_blocks = -1
    rows = [{"index": index, "image": os.fsencode(os.path.abspath(image))} for index, image in enumerate(images)]
    content = ray.put(weights.read_bytes())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Ray Data 2.60 calls max_retries deprecated, and has no other name for it
        found = ray.data.from_items(rows, override_num_blocks=min(len(rows), MOST_BLOCKS)).map(
            _row,
            fn_kwargs={"weights": [content], "suffix": weights.suffix, "request": request},
            num_cpus=1,
            max_retries=RETRIES,
        )
    missing = set(range(len(rows)))
    try:
        for row in found.iter_rows():
            index, result = row["index"], pickle.loads(row["outcome"])
            missing.discard(index)
            # The name as it was given, not as the workers know it.
            absolute, name = (printable(path) for path in (result.image, images[index]))
            yield index, replace(result, image=images[index], error=result.error.replace(absolute, name))
    except ray.exceptions.RayError as error:
        raise BackendUnavailableError(f"the Ray cluster failed: {printable(str(error))[-500:]}") from error
    for index in sorted(missing):
        yield (
            index,
            Outcome(images[index], error=printable(f"{images[index]}: no worker of the cluster came to an end with it")),
        )
