"""Convolutions of the CPU path, one by one and chained, against NumPy: every size of kernel, tile and residual."""

import numpy as np
from hypothesis import example, given, settings
from hypothesis import strategies as st
from layer_cases import normal

from numba_psa.nn.conv import Conv
from numba_psa.nn.planned import Plan, images_at_a_time
from numba_psa.testing.layers import agrees, exact


class Chain:
    """x → conv → split → conv(concat(the parts, the other way round)) + a residual."""

    def __init__(self, c_in, c_mid, c_out, first, second, silu=True, seed=0):
        rng = np.random.default_rng(seed)

        def conv(c_to, c_from, k, silu):
            weight = rng.standard_normal((c_to, c_from, k, k)) / (c_from * k * k) ** 0.5
            return Conv(weight, rng.standard_normal(c_to), silu)

        self.c_in, self.left = c_in, c_mid // 3
        self.convs = conv(c_mid, c_in, first, silu), conv(c_out, c_mid, second, not silu)
        self.short = conv(c_out, c_mid, 1, False)

    def forward(self, run, x):
        y = run.conv(self.convs[0], x)
        if not self.left:
            return run.conv(self.convs[1], y, run.conv(self.short, y))
        a, b = run.split(y, self.left, self.convs[0].c_out - self.left)
        return run.conv(self.convs[1], (b, a), run.conv(self.short, (a, b)))


def planned(chain, x, plan=Plan, most_idle=1.0):
    y = np.full((len(x), chain.short.c_out, *x.shape[2:]), np.nan, x.dtype)
    recorded = plan(chain, images_at_a_time(x.shape, x.dtype), *x.shape[2:], x.dtype)
    recorded.most_idle = most_idle
    recorded(x, y)
    return y


def judge_chain(chain, x, plan=Plan):
    """Whole tiles in turn and step by step: right, and the same bits."""
    in_turn, by_step = (planned(chain, x, plan, most_idle) for most_idle in (1.0, -1.0))
    assert agrees(in_turn, exact(chain, x))
    np.testing.assert_array_equal(in_turn, by_step)


chains = st.builds(
    Chain,
    c_in=st.integers(1, 40),
    c_mid=st.integers(1, 80),
    c_out=st.integers(1, 70),
    first=st.sampled_from((1, 3, 5)),
    second=st.sampled_from((1, 3, 7)),
    silu=st.booleans(),
    seed=st.integers(0, 2**16),
)
inputs = st.tuples(st.integers(1, 3), st.integers(1, 9), st.integers(1, 35))


@given(chains, inputs, st.sampled_from((np.float32, np.float64)))
@example(Chain(3, 65, 65, 1, 3), (1, 1, 1), np.float32)  # one token; one channel more than a work item
@example(Chain(3, 5, 4, 3, 3), (2, 9, 2), np.float32)  # rows shorter than the kernel
@example(Chain(1, 2, 1, 5, 7), (3, 1, 33), np.float64)
@settings(max_examples=40)
def test_chained_convolutions(chain, sizes, dtype):
    judge_chain(chain, normal(sizes[0], chain.c_in, *sizes[1:], dtype=dtype))


def test_many_images_are_computed_in_parts():
    chain, x = Chain(3, 5, 4, 3, 1), normal(7, 3, 40, 40)
    assert images_at_a_time(x.shape, x.dtype) < 7
    judge_chain(chain, x)


def test_silu_of_any_number():
    """Where exp overflows, at the infinities and NaN."""
    with np.errstate(all="ignore"):
        chain = Chain(1, 1, 1, 1, 1)
        chain.convs = Conv(np.ones((1, 1, 1, 1)), np.zeros(1), True), chain.convs[1]
        chain.forward = lambda run, x: run.conv(chain.convs[0], x)
        x = np.array([-np.inf, -1e30, -104, -88, -1, -1e-30, 0, 1e-30, 1, 88, 1e30, np.inf, np.nan], np.float32)
        y = planned(chain, x.reshape(1, 1, 1, -1)).ravel()
        expected = exact(chain, x.reshape(1, 1, 1, -1)).ravel()
    np.testing.assert_allclose(y, expected, rtol=1e-6, atol=1e-37)
