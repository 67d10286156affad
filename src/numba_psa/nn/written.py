"""Files that are there whole or not at all."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from os import PathLike
from pathlib import Path
from typing import BinaryIO


@contextmanager
def written(path: str | PathLike[str]) -> Iterator[BinaryIO]:
    """A file to write, which becomes `path` once the block has ended; where the block raises, `path` is left as it was.

    OSError before the block runs where `path` cannot be written.
    What is no file on a disk, such as a pipe, is written at once.
    """
    path = Path(path)
    if path.exists() and not path.is_file():
        with path.open("wb") as file:  # or the error that says that it is a folder
            yield file
        return
    path = Path(os.path.realpath(path))  # the file that a link points to, not the link
    try:
        descriptor, name = tempfile.mkstemp(dir=path.parent, prefix=".numba-psa-")
    except OSError as error:
        raise type(error)(error.errno, error.strerror, str(path)) from error
    try:
        with os.fdopen(descriptor, "wb") as file:
            yield file
        umask = os.umask(0)
        os.umask(umask)
        os.chmod(name, 0o666 & ~umask)  # mkstemp lets only the owner read
        os.replace(name, path)
    except BaseException:
        os.unlink(name)
        raise
