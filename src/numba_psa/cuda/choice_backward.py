"""Which kernel runs a backward, by architecture, dtype and shape class: the table of choice.py for gradients."""

from __future__ import annotations

from collections.abc import Iterator

from numba_psa.cuda.backward import make_backward
from numba_psa.cuda.backward_tf32 import make_backward_tf32
from numba_psa.cuda.backward_wgmma import make_backward_wgmma
from numba_psa.cuda.backward_wgmma_tf32 import make_backward_wgmma_tf32
from numba_psa.cuda.choice import Candidate, Choice, Problem
from numba_psa.cuda.tiles_backward import MmaBackwardConfig, Tf32BackwardConfig
from numba_psa.cuda.tiles_backward_wgmma import Tf32WarpgroupBackwardConfig, WarpgroupBackwardConfig
from numba_psa.errors import ParameterError, ShapeError
from numba_psa.numerics import BFLOAT16, FLOAT32


def choose_backward(problem: Problem, passes: int, arch: int, multiprocessors: int) -> Choice:
    """The first candidate of the table that can run; there always is one."""
    problem.check_widths()
    precision = {} if problem.dtype == FLOAT32 else {"bf16": problem.dtype == BFLOAT16}
    common = precision | {
        "key_dim": problem.key_dim,
        "value_dim": problem.value_dim,
        "tokens_first": problem.tokens_first,
        "copy": problem.copy,
        "passes": passes,
        "arch": arch,
    }
    for make, config, fields in candidates(problem, arch, multiprocessors):
        try:
            return Choice(make, config(**common, **fields))
        except ParameterError:
            continue
    raise ShapeError(f"no kernel of impl='cuda' takes {problem} on sm_{arch}: impl='mirror' and impl='cpu' do")


def candidates(problem: Problem, arch: int, multiprocessors: int) -> Iterator[Candidate]:
    """(factory, config class, tile sizes), best first: the fastest of one H200 (scripts/bench/results/backward_h200.json).

    Other architectures have not been timed: they get the mma.sync kernels with tiles that fit.
    """
    hopper = arch == 90 and not problem.tokens_first
    if problem.dtype == FLOAT32:
        if hopper and problem.heads * -(-problem.n_queries // 64) > 32:
            yield make_backward_wgmma_tf32, Tf32WarpgroupBackwardConfig, {"row_warps": 8}
        for row_warps in (4, 2, 1):
            yield make_backward_tf32, Tf32BackwardConfig, {"row_warps": row_warps}
        return
    if hopper and problem.n_queries > 64:
        yield make_backward_wgmma, WarpgroupBackwardConfig, {"blocks_per_sm": 3}
    wide = problem.key_dim + problem.value_dim > 128
    yield make_backward, MmaBackwardConfig, {"row_warps": 4, "BN": 16 if wide else 32, "blocks_per_sm": 1 if wide else 2}
    yield make_backward, MmaBackwardConfig, {"row_warps": 2, "BN": 16}
