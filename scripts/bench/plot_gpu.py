"""A table (Markdown, to stdout) and a plot of what scripts/bench/gpu.py measured; needs matplotlib, no GPU.

python scripts/bench/plot_gpu.py scripts/bench/results/gpu_h200.json scripts/bench/results/gpu_h200.png
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

OURS = "numba-psa"
SHAPES = [(1, 2, 400), (1, 2, 399), (32, 4, 400), (32, 4, 399), (1, 4, 1600), (8, 4, 1600), (8, 4, 1599), (4, 4, 6400)]


def by_shape(rows, dtype, precision):
    """{name: {shape: row}} of the rows of one dtype and precision."""
    found = {}
    for row in rows:
        if row["dtype"] == dtype and row["precision"] == precision and row["key_dim"] == 32 and "gpu_us" in row:
            found.setdefault(row["name"], {})[row["batch"], row["heads"], row["n"]] = row
    return found


def table(found):
    shapes = [shape for shape in SHAPES if any(shape in rows for rows in found.values())]
    yield "| GPU µs | " + " | ".join(f"B{b} h{h} N{n}" for b, h, n in shapes) + " |"
    yield "| --- |" + " --- |" * len(shapes)
    for name, rows in found.items():
        cells = [f"{rows[shape]['gpu_us']:.3g}" if shape in rows else "–" for shape in shapes]
        yield f"| {name} | " + " | ".join(cells) + " |"


def widths(rows, dtype):
    """The same at other KEY_DIM."""
    rows = [row for row in rows if row["dtype"] == dtype and row["key_dim"] != 32 and "gpu_us" in row]
    found = sorted({row["key_dim"] for row in rows})
    yield f"| GPU µs, {dtype}, B8 h4 N1600 | " + " | ".join(f"KEY_DIM {key_dim}" for key_dim in found) + " |"
    yield "| --- |" + " --- |" * len(found)
    for name in dict.fromkeys(row["name"] for row in rows):
        times = {row["key_dim"]: row["gpu_us"] for row in rows if row["name"] == name}
        yield f"| {name} | " + " | ".join(f"{times[key_dim]:.3g}" if key_dim in times else "–" for key_dim in found) + " |"


def draw(axis, found, title):
    """How many times as long as ours each peer takes; the original, hundreds of times as long, would flatten the rest."""
    shapes = [shape for shape in SHAPES if shape in found.get(OURS, {})]
    peers = [name for name in found if name != OURS and not name.startswith("original")]
    width = 0.8 / max(len(peers), 1)
    for i, name in enumerate(peers):
        at = [j + i * width for j, shape in enumerate(shapes) if shape in found[name]]
        ratio = [found[name][shape]["gpu_us"] / found[OURS][shape]["gpu_us"] for shape in shapes if shape in found[name]]
        axis.bar(at, ratio, width, label=name)
    axis.axhline(1, color="black", linewidth=1)
    axis.set_yscale("log")
    axis.set_xticks([j + 0.4 - width / 2 for j in range(len(shapes))], [f"B{b} h{h}\nN{n}" for b, h, n in shapes])
    axis.set_ylabel("time / time of numba-psa")
    axis.set_title(title)
    axis.legend(fontsize=7)


def main() -> None:
    source, target = map(Path, sys.argv[1:])
    report = json.loads(source.read_text())
    figure, axes = plt.subplots(2, 1, figsize=(10, 8), constrained_layout=True)
    for axis, dtype in zip(axes, ("float16", "float32"), strict=True):
        found = by_shape(report["rows"], dtype, dtype)
        print(f"\n{dtype}\n\n" + "\n".join(table(found)))
        draw(axis, found, f"PSA attention forward, {dtype}, KEY_DIM 32, {report['provenance']['gpu']}")
    found = by_shape(report["rows"], "float32", "tf32")
    print("\nfloat32 by one TF32 product\n\n" + "\n".join(table(found)))
    print("\nbfloat16\n\n" + "\n".join(table(by_shape(report["rows"], "bfloat16", "bfloat16"))))
    for dtype in ("float16", "float32"):
        print("\n" + "\n".join(widths(report["rows"], dtype)))
    for row in report["layout"]:
        print(row["dtype"], row["name"], row["gpu_us"], row["GB_s"])
    print(report["host_us"], report["ceilings"], report["mirror"], sep="\n")
    figure.savefig(target, dpi=120)


if __name__ == "__main__":
    main()
