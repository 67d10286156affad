"""Compile every kernel that the choice table can pick, for every architecture, on any machine: no GPU needed.

    python scripts/compile_all.py [--arch 80,90] [--all]

Prints registers and spills by ptxas, and fails on a spill, on float64 arithmetic and on serialised warpgroup products.
"""

from __future__ import annotations

import argparse
import re
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from numba_psa.cuda import convolution
from numba_psa.cuda.align import ALIGN_SIGNATURE, AlignConfig, make_align_rows
from numba_psa.cuda.backward import BACKWARD_SIGNATURE
from numba_psa.cuda.backward_sums import SUMS_SIGNATURE, make_backward_sums
from numba_psa.cuda.choice import Choice, Problem, choose
from numba_psa.cuda.choice_backward import choose_backward
from numba_psa.cuda.compiling import ARCHITECTURES, ptx_of, target
from numba_psa.cuda.convolution import make_convolution, make_depthwise
from numba_psa.cuda.convolution_tiles import DepthwiseConfig, choose_convolution
from numba_psa.cuda.forward import SIGNATURE
from numba_psa.cuda.layout import (
    MERGE_SIGNATURE,
    PACK_SIGNATURE,
    LayoutConfig,
    make_psa_extract_v_nchw,
    make_psa_merge_attn_nchw,
    make_psa_pack_qkv,
)
from numba_psa.cuda.layout_backward import (
    ADD_SIGNATURE,
    GradientLayoutConfig,
    make_add,
    make_psa_extract_v_backward,
    make_psa_merge_attn_backward,
    make_psa_pack_qkv_backward,
)
from numba_psa.cuda.tiles_backward import DKV, DQ, SumsConfig
from numba_psa.numerics import float_dtype


@dataclass(frozen=True)
class Report:
    """What ptxas and the PTX say of one kernel."""

    name: str
    arch: int
    registers: int
    spilled: int
    float64: int
    warnings: tuple[str, ...]

    @property
    def problem(self) -> str | None:
        if self.spilled:
            return f"{self.spilled} bytes are spilled"
        if self.float64:
            return f"{self.float64} float64 instructions"
        return self.warnings[0] if self.warnings else None


def find_ptxas() -> str | None:
    """ptxas of the toolkit wheels, or the one on PATH."""
    wheels = Path(sysconfig.get_paths()["purelib"]) / "nvidia"
    return next((str(path) for path in sorted(wheels.glob("*/bin/ptxas"))), shutil.which("ptxas"))


def assess(ptxas: str, make, config, signature, arch: int) -> Report:
    """Compile one kernel and read what ptxas says."""
    ptx = ptx_of(make, config, signature, arch)
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder, "kernel.ptx")
        source.write_text(ptx)
        command = [ptxas, "-v", f"-arch={target(arch)}", str(source), "-o", str(source.with_suffix(".cubin"))]
        answer = subprocess.run(command, capture_output=True, text=True)
    if answer.returncode:
        raise SystemExit(f"{config.name} for {target(arch)}: {answer.stderr}")
    registers = int(re.findall(r"Used (\d+) registers", answer.stderr)[-1])
    spilled = sum(int(n) for n in re.findall(r"(\d+) bytes spill", answer.stderr))
    warnings = tuple(line for line in answer.stderr.splitlines() if re.search(r"C75\d\d|warning", line))
    return Report(f"{make.__name__} {config.name}", arch, registers, spilled, ptx.count(".f64"), warnings)


def problems(everything: bool) -> Iterator[Problem]:
    """The shape classes of the choice table."""
    widths = (16, 32, 36, 64) if everything else (32,)
    for dtype in ("float16", "bfloat16", "float32") if everything else ("float16", "float32"):
        for width in widths:
            for heads, n in (
                (2, 400),
                (128, 400),
                (4, 1600),
                (32, 1600),
                (16, 6400),
                (2, 399),
                (128, 399),
                (4, 1599),
                (32, 1599),
            ):
                for saves_l in (False, True) if everything else (False,):
                    yield Problem(heads, n, n, width, 2 * width, float_dtype(dtype), saves_l=saves_l)
        for width in (64, 128) if everything else (128,):
            yield Problem(8, 1000, 999, width, width, float_dtype(dtype), tokens_first=True, saves_l=True)
        if everything:
            yield Problem(8, 1000, 999, 33, 17, float_dtype(dtype), tokens_first=True, saves_l=True)
            yield Problem(32, 1600, 1600, 32, 64, float_dtype(dtype), exact=dtype != "float32")


def kernels(arch: int, everything: bool) -> Iterator[tuple]:
    """(make, config, signature) of every kernel, once."""
    choices: dict[Choice, None] = {choose(problem, arch, 132): None for problem in problems(everything)}
    for choice in choices:
        yield choice.make, choice.config, SIGNATURE
    if arch == 90:
        yield make_align_rows, AlignConfig(32), ALIGN_SIGNATURE
    for item in (2, 4):
        for copy in (16, item):
            config = LayoutConfig(32, item, copy, copy)
            yield make_psa_pack_qkv, config, PACK_SIGNATURE
            yield make_psa_merge_attn_nchw, config, MERGE_SIGNATURE
            yield make_psa_extract_v_nchw, config, PACK_SIGNATURE
    for make, config in convolutions(arch, everything):
        yield make, config, SIGNATURES[make]


SIGNATURES = {make_convolution: convolution.SIGNATURE, make_depthwise: convolution.DEPTHWISE_SIGNATURE}


def convolutions(arch: int, everything: bool) -> dict[tuple, None]:
    """(make, config) of the convolutions of layers: few tokens and many, rows at odd places, concatenated inputs."""
    found = {}
    for item, bf16 in ((4, False), (2, False), (2, True))[: 3 if everything else 2]:
        for whole in (True, False):
            for batch, taps, pieces in ((1, 1, 2), (1, 3, 1), (32, 1, 4), (32, 3, 1)):
                for channels in (256, 128) if everything else (256,):
                    fields = {"taps": taps, "pieces": pieces, "whole": whole, "bf16": bf16, "arch": arch}
                    config = choose_convolution(channels, channels, batch, 400, 132, item=item, **fields)
                    found[make_convolution, config] = None
            found[make_depthwise, DepthwiseConfig(item, bf16, whole, arch=arch)] = None
    return found


def backward_kernels(arch: int, everything: bool) -> Iterator[tuple]:
    """(make, config, signature) of every kernel of the gradients, once."""
    choices: dict[Choice, None] = {}
    for problem in problems(everything):
        for passes in (DQ, DKV, DQ | DKV) if problem.tokens_first else (DQ | DKV,):
            choices[choose_backward(problem, passes, arch, 132)] = None
    for choice in choices:
        yield choice.make, choice.config, BACKWARD_SIGNATURE
    for item, copy in ((2, 16), (2, 2), (4, 16)):
        yield make_backward_sums, SumsConfig(32, 64, item, copy=copy), SUMS_SIGNATURE
        layout = GradientLayoutConfig(32, item, copy, copy, adds=True)
        yield make_psa_pack_qkv_backward, layout, PACK_SIGNATURE
        yield make_psa_merge_attn_backward, layout, MERGE_SIGNATURE
        yield make_psa_extract_v_backward, layout, PACK_SIGNATURE
        yield make_add, layout, ADD_SIGNATURE


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--arch", default=",".join(map(str, ARCHITECTURES)))
    parser.add_argument("--all", action="store_true", help="every width, dtype and l, not a sample")
    options = parser.parse_args()
    ptxas = find_ptxas()
    if ptxas is None:
        sys.exit("ptxas is not there: pip install 'numba-psa[cu13]'")
    failures = count = 0
    for arch in map(int, options.arch.split(",")):
        for make, config, signature in (*kernels(arch, options.all), *backward_kernels(arch, options.all)):
            report = assess(ptxas, make, config, signature, arch)
            count, failures = count + 1, failures + bool(report.problem)
            print(f"{target(arch):7s} {report.registers:3d} registers  {report.problem or 'ok'}  {report.name}", flush=True)
    print(f"{count} kernels, {failures} with problems")
    sys.exit(bool(failures))


if __name__ == "__main__":
    main()
