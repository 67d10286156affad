"""A trained detector on the CPU against onnxruntime on the same file: milliseconds, ratio, peak memory, layers' shares.

    python scripts/bench/yolo.py .models/yolo26n.onnx [--size 640 640] [--threads N] [--rounds N] [--json FILE]

In each round each contender runs in a fresh process, one after the other, so that neither's waiting threads take the other's
cores. The ratio is the median over rounds of onnxruntime's median by ours; on a busy machine, where some processes are
disturbed for their whole life, that of the fastest processes of each says more. Results are compared before they are timed.
Peak memory is the most that a process ever held (`ru_maxrss`), and what it held with libraries imported, no model loaded.
Where other processes are busy, `chrt -r 1` before the command keeps them from the cores.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import time
from pathlib import Path

import numpy as np

OURS, PEER = "numba-psa", "onnxruntime"
WARM, CALLS = 5, 24


def image(height: int, width: int) -> np.ndarray:
    return np.random.default_rng(0).random((1, 3, height, width), np.float32)


def peak_mib() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / (2**20 if sys.platform == "darwin" else 2**10)


def contender(name: str, path: str, threads: int):
    """(call, MiB with libraries imported, the detector if it is ours)."""
    if name == OURS:
        import numba

        from numba_psa.nn import yolo
        from numba_psa.nn.yolo import plan  # noqa: F401  (loads the CPU path)

        numba.set_num_threads(threads)
        imported, model = peak_mib(), yolo.load(path)
        return model, imported, model
    import onnxruntime

    imported, options = peak_mib(), onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    options.log_severity_level = 3
    session = onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])
    return lambda x: session.run(None, {session.get_inputs()[0].name: x})[0], imported, None


def work(name: str, path: str, threads: int, height: int, width: int) -> None:
    """A contender's process: a line in asks for something, a line out answers."""
    call, imported, model = contender(name, path, threads)
    x = image(height, width)
    for line in sys.stdin:
        if line.strip() == "result":
            answer = call(x).tolist()
        elif line.strip() == "profile":
            answer = [vars(row) for row in model.profile(x, 20)]
        elif line.strip() == "memory":
            answer = {"imported_mib": imported, "peak_mib": peak_mib()}
        else:
            for _ in range(WARM):
                call(x)
            answer = []
            for _ in range(CALLS):
                start = time.perf_counter()
                call(x)
                answer.append(1e3 * (time.perf_counter() - start))
        print(json.dumps(answer), flush=True)


class Contender:
    def __init__(self, name: str, options: argparse.Namespace):
        arguments = [options.model, "--threads", options.threads, "--size", *options.size, "--worker", name]
        command = [sys.executable, __file__, *map(str, arguments)]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def ask(self, what: str):
        print(what, file=self.process.stdin, flush=True)
        return json.loads(self.process.stdout.readline())

    def __enter__(self) -> Contender:
        return self

    def __exit__(self, *_) -> None:
        self.process.communicate()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="an .onnx file of a YOLO11 or YOLO26 detector")
    parser.add_argument("--size", type=int, nargs=2, default=(640, 640))
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        work(options.worker, options.model, options.threads, *options.size)
        return

    from cpu import provenance

    times: dict[str, list] = {OURS: [], PEER: []}
    memory: dict[str, dict] = {}
    results, rows = {}, []
    for turn in range(options.rounds):
        for name in list(times)[:: 1 if turn % 2 else -1]:
            with Contender(name, options) as process:
                if turn == 0:
                    results[name] = np.array(process.ask("result"))
                times[name].append(process.ask("time"))
                memory[name] = process.ask("memory")
                if turn == options.rounds - 1 and name == OURS:
                    rows = process.ask("profile")
        if turn == 0:
            np.testing.assert_allclose(results[OURS][..., 4], results[PEER][..., 4], atol=1e-4, err_msg="scores differ")
    medians = {name: np.median(blocks, axis=1) for name, blocks in times.items()}
    ratios, fastest = medians[PEER] / medians[OURS], medians[PEER].min() / medians[OURS].min()
    table = {
        name: {"median_ms": float(np.median(each)), "processes_ms": each.tolist(), **memory[name]}
        for name, each in medians.items()
    }
    about = provenance(options.threads)
    print(f"{Path(options.model).name} {options.size[0]}×{options.size[1]}, {options.threads} threads")
    for name, row in table.items():
        print(
            f"  {name:12s} {row['median_ms']:7.2f} ms ({min(row['processes_ms']):.2f} to {max(row['processes_ms']):.2f})   "
            f"peak {row['peak_mib']:.0f} MiB, {row['imported_mib']:.0f} of it libraries"
        )
    low, high = ratios.min(), ratios.max()
    print(f"  {PEER} / {OURS}: {np.median(ratios):.3f} ({low:.3f} to {high:.3f}), of the fastest {fastest:.3f}")
    for row in rows:
        rate = f"{row['gflop'] / row['ms'] * 1e3:4.0f} GFLOP/s" if row["gflop"] else ""
        shape = "×".join(map(str, row["shape"])) if row["shape"] else ""
        print(f"  {row['layer']:>6s} {row['kind']:9s} {shape:12s} {row['ms']:7.3f} ms {100 * row['share']:5.1f} %  {rate}")
    print(json.dumps(about, indent=1))
    if options.json:
        found = {"provenance": about, "model": Path(options.model).name, "size": options.size, "contenders": table}
        found |= {"ratios": ratios.tolist(), "fastest": float(fastest), "layers": rows}
        options.json.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
