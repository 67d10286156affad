"""The child process that calls a Python port: so that a port may hang, crash or print without harm.

`python -m numba_psa.testing.worker PACKAGE.MODULE:FUNCTION`, cases in and outcomes out over stdin and stdout, pickled.
"""

from __future__ import annotations

import importlib
import os
import pickle
import sys
import traceback
from collections.abc import Callable
from typing import Any, BinaryIO

LENGTH = 8


def write_message(stream: BinaryIO, message: Any) -> None:
    data = pickle.dumps(message, protocol=pickle.HIGHEST_PROTOCOL)
    stream.write(len(data).to_bytes(LENGTH, "little") + data)
    stream.flush()


def read_message(stream: BinaryIO) -> Any:
    """The next message; EOFError when the other side is gone."""
    header = stream.read(LENGTH)
    if len(header) < LENGTH:
        raise EOFError
    return pickle.loads(stream.read(int.from_bytes(header, "little")))


def load(spec: str) -> Callable[..., Any]:
    """The function `package.module:function`; ValueError says what is wrong with it."""
    module_name, colon, path = spec.partition(":")
    if not (module_name and colon and path):
        raise ValueError(f"{spec!r} is not of the form package.module:function")
    try:
        found: Any = importlib.import_module(module_name)
    except ImportError as error:
        raise ValueError(f"cannot import {module_name}: {error}") from error
    for part in path.split("."):
        if not hasattr(found, part):
            raise ValueError(f"{module_name} has no {path}")
        found = getattr(found, part)
    if not callable(found):
        raise ValueError(f"{spec} is not callable")
    return found


def main(spec: str) -> None:
    inbox, outbox = sys.stdin.buffer, os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what the port prints must not end up between our messages
    sys.path.insert(0, os.getcwd())
    from numba_psa.testing.targets import CallableTarget, TargetFailure

    try:
        target = CallableTarget(load(spec))
    except ValueError as error:
        return write_message(outbox, ("unusable", str(error)))
    except Exception:
        return write_message(outbox, ("unusable", traceback.format_exc()))
    write_message(outbox, ("ready", None))
    while True:
        try:
            case = read_message(inbox)
        except EOFError:
            return None
        try:
            write_message(outbox, ("results", target.run(case)))
        except TargetFailure as failure:
            write_message(outbox, ("failure", (failure.kind, failure.text)))


if __name__ == "__main__":
    main(sys.argv[1])
