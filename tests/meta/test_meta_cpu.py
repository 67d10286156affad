"""Planted bugs in the CPU path, each of which a property of `tests/host/test_cpu_*` must catch."""

from __future__ import annotations

import inspect
import sys
from pathlib import Path

import numpy as np
import pytest

from numba_psa.cpu import attention, backward, compiling, flash_attn2, forward, layout, operands, psa, vector_twin
from numba_psa.shapes import PSAShape
from numba_psa.testing.values import make_case

sys.path.insert(0, str(Path(__file__).parents[1] / "host"))
import test_cpu_operations as operations
import test_cpu_vector as blocks

FLOAT32 = np.dtype(np.float32)


def mutant(module, old: str, new: str) -> dict:
    """The names of `module`, compiled from its source with `old` replaced: its kernels are the module's, but for the bug."""
    source = inspect.getsource(module)
    assert source.count(old) == 1, f"the planted bug replaces {old!r}, which is there {source.count(old)} times"
    names = {"__name__": "mutant", "__file__": module.__file__}
    exec(compile(source.replace(old, new), "<mutant>", "exec"), names)
    return names


def plant_kernel(monkeypatch, name, *bug):
    if name == "forward":
        monkeypatch.setattr(flash_attn2, "forward", mutant(forward, *bug)["forward"])
    else:
        monkeypatch.setattr(backward, name, mutant(backward, *bug)[name])


def border():
    operations.judge_borders(forward.KEYS + 1)


def masked():
    operations.judge_masked(FLOAT32)


def real_size():
    compiling.threading_layer()
    operations.judge_real_size(32, 16)


KERNEL_BUGS = {
    "chunks are not rescaled": (border, "forward", "if key:", "if False:"),
    "l_i is not rescaled": (border, "forward", "scale_tile(acc, value_dim + 1,", "scale_tile(acc, value_dim,"),
    "the maximum begins at -inf": (masked, "forward", "float(np.finfo(np.float32).min)", "-np.inf"),
    "masked rows are divided by 0": (
        masked,
        "forward",
        "where_greater(l_i, splat(acc, 0.0), load",
        "maximum(load(acc, c * width) / l_i, load",
    ),
    "the last lane is lost": (border, "forward", "min(width, n_ctx_q - first)", "min(width, n_ctx_q - first - 1)"),
    "masked rows get a gradient": (
        masked,
        "backward_dq",
        "where_greater(load(l_tile, 0), splat(like, -np.inf), load(dq_tile, c * width))",
        "load(dq_tile, c * width)",
    ),
    "the last query of a chunk is lost": (
        border,
        "backward_dkv",
        "min(ROWS_IN_CHUNK, counts[bh] - query)",
        "min(ROWS_IN_CHUNK - 1, counts[bh] - query)",
    ),
    "dq of a whole head is mixed up": (
        real_size,
        "backward_dkv",
        "advance(dq_tiles, query * key_dim), key_dim",
        "dq_tiles, key_dim",
    ),
    "delta is left out": (
        real_size,
        "backward_dq",
        "multiply_each(subtract_each(rows, bias), weight)",
        "multiply_each(rows, weight)",
    ),
}


@pytest.mark.parametrize("bug", KERNEL_BUGS)
def test_bugs_in_kernels_are_caught(bug, monkeypatch):
    judge, name, old, new = KERNEL_BUGS[bug]
    plant_kernel(monkeypatch, name, old, new)
    with pytest.raises(AssertionError):
        judge()


def test_the_mutants_themselves_are_sound(monkeypatch):
    """A kernel compiled by this very route, with a replacement that changes nothing, passes."""
    plant_kernel(monkeypatch, "forward", "if key:", "if key > 0:")
    border()
    masked()


def test_masked_queries_that_reach_keys_are_caught(monkeypatch):
    def keep_all(q, do, l, delta):
        return q, do, l, delta, np.full(len(l), l.shape[1], np.int64)

    monkeypatch.setattr(flash_attn2, "_without_masked_rows", keep_all)
    with pytest.raises(AssertionError):
        masked()


def test_results_that_depend_on_the_threads_are_caught(monkeypatch):
    def attend(operands, l, bh, sizes, dtype, scale):
        flash_attn2.attend(operands, l, bh, sizes, dtype, scale * (1 + 1e-6 * compiling.numba.get_num_threads()))

    monkeypatch.setattr(attention, "attend", attend)
    with pytest.raises(AssertionError, match="threads"):
        operations.judge_threads(monkeypatch)


def test_ignored_strides_are_caught(monkeypatch):
    def contiguous(x):
        return operands.address(x), x.shape[1] * x.shape[2], 1, x.shape[2]

    monkeypatch.setattr(flash_attn2, "operand", contiguous)
    with pytest.raises(AssertionError):
        operations.judge_strides()


def test_changed_inputs_are_caught():
    class Careless:
        @staticmethod
        def psa_attention(qkv, num_heads, **keywords):
            out = attention.psa_attention(qkv, num_heads, **keywords)
            qkv += 1
            return out

    with pytest.raises(AssertionError, match="qkv was changed"):
        operations.judge_case(make_case("psa_attention", PSAShape(1, 1, 4, 2, 3), FLOAT32), Careless)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("min(width, channels - c)", "min(width, channels - c - 1)"),
        ("put(target, r * row, rows[r])", "put(target, r * row, rows[0])"),
        ("first * problem[8]", "0 * problem[8]"),
    ],
)
def test_bugs_in_layout_kernels_are_caught(old, new, monkeypatch):
    monkeypatch.setattr(layout, "move", mutant(layout, old, new)["move"])
    with pytest.raises(AssertionError):
        operations.judge_case(make_case("psa_pack_qkv", PSAShape(2, 3, 36, 9, 9), FLOAT32, values="ramp"))


def test_a_layout_that_is_mixed_up_is_caught(monkeypatch):
    monkeypatch.setattr(psa, "_by_section", lambda heads: heads[:, ::-1].transpose(1, 0, 3, 2))
    with pytest.raises(AssertionError):
        operations.judge_case(make_case("psa_merge_attn_backward", PSAShape(2, 3, 5, 3, 2), FLOAT32, values="ramp"))


def test_an_inexact_exponential_is_caught(monkeypatch):
    polynomial, *rest = blocks.vector._EXP2[blocks.types.float32]
    nudged = (*polynomial[:3], polynomial[3] * (1 + 2e-5), *polynomial[4:])
    monkeypatch.setitem(blocks.vector._EXP2, blocks.types.float32, (nudged, *rest))
    with pytest.raises(AssertionError):
        blocks.check_exp2(blocks.compiled(blocks.power, blocks.vector), np.float32)


def test_an_exponential_without_bounds_is_caught(monkeypatch):
    monkeypatch.setattr(blocks.vector, "_maximum", lambda builder, vector, a, b: b)
    with pytest.raises(AssertionError):
        blocks.check_exp2(blocks.compiled(blocks.power, blocks.vector), np.float32)


@pytest.mark.parametrize("name", ["maximum", "where_greater", "fma"])
def test_a_block_unlike_its_twin_is_caught(name, monkeypatch):
    other = {"maximum": "fma", "where_greater": "fma", "fma": "where_greater"}[name]
    if name == "maximum":
        monkeypatch.setattr(vector_twin, name, blocks.njit(lambda a, b: np.minimum(a, b)))
    else:
        monkeypatch.setattr(vector_twin, name, getattr(vector_twin, other))
    with pytest.raises(AssertionError):
        blocks.check_twins(blocks.one_vector, np.float32)
