"""What is fuzzed: a Python function, in this process or in one of its own, or any program."""

from __future__ import annotations

import contextlib
import os
import queue
import shlex
import signal
import subprocess
import sys
import tempfile
import threading
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from numba_psa.errors import ParameterError
from numba_psa.testing.case import Case
from numba_psa.testing.casefiles import VectorError, read_outputs, write_case
from numba_psa.testing.check import truth
from numba_psa.testing.worker import read_message, write_message

STARTUP_SECONDS = 120
"""How long a port may take to import."""
STDERR_KEPT = 4000
"""Characters of a program's last words that are reported."""


class TargetFailure(Exception):
    """The port gave no results that could be compared; `kind` is raises, hangs, crashes, modifies-inputs, wrong-…."""

    def __init__(self, kind: str, text: str):
        super().__init__(kind, text)
        self.kind, self.text = kind, text


class Target(Protocol):
    """Anything that can be fuzzed."""

    def run(self, case: Case) -> list[np.ndarray]:
        """Results in the order of the contract, or TargetFailure."""

    def close(self) -> None:
        """Ends what `run` started."""


class CallableTarget:
    """A function, called in this process: fast, but one that hangs or crashes takes this process with it."""

    def __init__(self, function: Callable[..., Any]):
        self.function = function

    def run(self, case: Case) -> list[np.ndarray]:
        try:
            returned, changed = case.call(self.function)
        except Exception as error:
            # Frames of the port only: ours would tell the reader nothing.
            where = error.__traceback__
            for _ in range(2):
                where = where.tb_next if where is not None else None
            text = "".join(traceback.format_exception(type(error), error, where))
            raise TargetFailure("raises", text.strip()) from None
        if changed:
            raise TargetFailure("modifies-inputs", f"changed {', '.join(changed)}, or the memory around it")
        for i, x in enumerate(returned):
            if not hasattr(x, "__array__") or np.asarray(x).dtype == object:
                raise TargetFailure("wrong-count", f"result {i} is a {type(x).__name__}, not an array")
        return [np.array(x) for x in returned]

    def close(self) -> None:
        pass


class WorkerTarget:
    """A function `package.module:function` in a process of its own, killed when a call takes more than `timeout` seconds.

    Raises ParameterError if there is no such function.
    """

    def __init__(self, spec: str, timeout: float):
        self.spec, self.timeout = spec, timeout
        self._process: subprocess.Popen | None = None
        self._start()

    def _start(self) -> None:
        self._stderr = tempfile.TemporaryFile()  # noqa: SIM115 - lives as long as the process
        path = os.pathsep.join(filter(None, (os.getcwd(), os.environ.get("PYTHONPATH"))))
        self._process = subprocess.Popen(
            [sys.executable, "-m", "numba_psa.testing.worker", self.spec],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._stderr,
            env={**os.environ, "PYTHONPATH": path},
            start_new_session=True,
        )
        self._inbox: queue.Queue = queue.Queue()
        threading.Thread(target=_read_all, args=(self._process.stdout, self._inbox), daemon=True).start()
        kind, content = self._receive(STARTUP_SECONDS)
        if kind != "ready":
            self.close()
            text = content if kind == "unusable" else f"{content[0]} while it is imported: {content[1]}"
            raise ParameterError(f"--target {self.spec}: {text}")

    def _receive(self, seconds: float) -> tuple[str, Any]:
        try:
            message = self._inbox.get(timeout=seconds)
        except queue.Empty:
            self.close()
            return "failure", ("hangs", f"no result after {seconds:g} s: killed")
        if message is not None:
            return message
        code = self._process.wait()
        text = _last_words(self._stderr)
        self.close()
        return "failure", ("crashes", f"{_exit_text(code)}\n{text}".strip())

    def run(self, case: Case) -> list[np.ndarray]:
        if self._process is None:
            self._start()
        with contextlib.suppress(BrokenPipeError):  # it died since: the reader will say so
            write_message(self._process.stdin, case)
        kind, content = self._receive(self.timeout)
        if kind == "failure":
            raise TargetFailure(*content)
        return content

    def close(self) -> None:
        if self._process is not None:
            kill_group(self._process)
            for stream in (self._process.stdin, self._stderr):
                with contextlib.suppress(BrokenPipeError):
                    stream.close()
            self._process = None


def _read_all(stream, inbox: queue.Queue) -> None:
    try:
        while True:
            inbox.put(read_message(stream))
    except Exception:  # end of file, or half a message from a process that was killed
        inbox.put(None)
    finally:
        stream.close()


class ExecTarget:
    """A program: `{in}` in its command becomes a folder with the case, `{out}` one in which it writes its outputs."""

    def __init__(self, command: str, timeout: float, storage: str = "bin"):
        try:
            self.words = shlex.split(command)
        except ValueError as error:
            raise ParameterError(f"--exec {command!r}: {error}") from None
        for place in ("{in}", "{out}"):
            if not any(place in word for word in self.words):
                raise ParameterError(
                    f"--exec {command!r}: {place} is missing, the folder of {'inputs' if 'in' in place else 'outputs'}"
                )
        self.timeout, self.storage = timeout, storage

    def run(self, case: Case) -> list[np.ndarray]:
        shapes = {name: x.shape for name, x in truth(case.operation, case).items()}
        with tempfile.TemporaryDirectory(prefix="numba-psa-") as folder:
            inputs, outputs = Path(folder, "in"), Path(folder, "out")
            outputs.mkdir()
            write_case(inputs, case, shapes, storage=self.storage)
            words = [word.replace("{in}", str(inputs)).replace("{out}", str(outputs)) for word in self.words]
            self._execute(words)
            try:
                found = read_outputs(outputs, case, shapes)
            except VectorError as error:
                raise TargetFailure("wrong-shape", str(error).replace(f"{outputs}{os.sep}", "")) from None
            if missing := [name for name in case.operation.outputs if name not in found]:
                wrote = ", ".join(sorted(path.name for path in outputs.iterdir())) or "nothing"
                raise TargetFailure("wrong-count", f"no output {', '.join(missing)}: the program wrote {wrote}")
            return list(found.values())

    def _execute(self, words: list[str]) -> None:
        with tempfile.TemporaryFile() as said:
            try:
                process = subprocess.Popen(words, stdout=said, stderr=said, stdin=subprocess.DEVNULL, start_new_session=True)
            except OSError as error:
                raise ParameterError(f"--exec: cannot run {words[0]}: {error.strerror}") from None
            try:
                code = process.wait(self.timeout)
            except subprocess.TimeoutExpired:
                raise TargetFailure(
                    "hangs", f"no end after {self.timeout:g} s: killed\n{_last_words(said)}".strip()
                ) from None
            finally:
                kill_group(process)
            if code:
                raise TargetFailure("crashes", f"{_exit_text(code)}\n{_last_words(said)}".strip())

    def close(self) -> None:
        pass


def kill_group(process: subprocess.Popen) -> None:
    """Ends a process and what it started; it was given a session of its own."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        if hasattr(os, "killpg"):
            os.killpg(process.pid, signal.SIGKILL)
        else:
            process.kill()
    process.wait()


def _last_words(file) -> str:
    file.seek(0)
    return file.read().decode(errors="replace")[-STDERR_KEPT:].strip()


def _exit_text(code: int) -> str:
    if code >= 0:
        return f"exit code {code}"
    try:
        return f"killed by {signal.Signals(-code).name}"
    except ValueError:
        return f"killed by signal {-code}"
