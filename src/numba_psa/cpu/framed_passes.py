"""What networks do between convolutions, on maps with a frame of zeros (`frames.py`), one image at a time.

move      into a frame, out of it, or from one pitch to another; sigmoid on the way
upsample  each token to 2×2
pool      5×5 maximum, three times in a row
expect    the expected bin of a distance's distribution (DFL)
"""

from __future__ import annotations

import math

from numba_psa.cpu.compiling import kernel
from numba_psa.cpu.tiles import aligned_pointer, called, inlined, new_scratch
from numba_psa.cpu.vector import (
    advance,
    exp2,
    keep,
    lanes,
    load,
    maximum,
    pointer,
    splat,
    store,
    where_greater,
)
from numba_psa.numerics import LOG2E


@kernel
def move(problem, like, scale, begin, end):
    """target[c, y, x] = source[c, y, x], or its sigmoid; an item is a row of a channel.

    problem: address, plane and pitch of source and of target; H, W, whether to take the sigmoid. (scale is not used.)
    """
    height, width, sigmoid = problem[6], problem[7], problem[8]
    step = lanes(like)
    whole = width // step * step
    for item in range(begin, end):
        c = item // height
        y = item - c * height
        source = advance(pointer(problem[0], like), c * problem[1] + y * problem[2])
        target = advance(pointer(problem[3], like), c * problem[4] + y * problem[5])
        if sigmoid:
            for x in range(0, whole, step):
                store(target, x, splat(like, 1.0) / (splat(like, 1.0) + exp2(load(source, x) * splat(like, -LOG2E))))
            for x in range(whole, width):
                target[x] = 1.0 / (1.0 + math.exp(-source[x]))
        else:
            for x in range(0, whole, step):
                store(target, x, load(source, x))
            for x in range(whole, width):
                target[x] = source[x]


@kernel
def upsample(problem, like, scale, begin, end):
    """target[c, y, x] = source[c, y//2, x//2]; an item is a source row of a channel.

    problem: address, plane and pitch of source and of target; H, W of the source. (scale is not used.)
    """
    height, width = problem[6], problem[7]
    for item in range(begin, end):
        c = item // height
        y = item - c * height
        source = advance(pointer(problem[0], like), c * problem[1] + y * problem[2])
        upper = advance(pointer(problem[3], like), c * problem[4] + 2 * y * problem[5])
        lower = advance(upper, problem[5])
        for x in range(width):
            value = source[x]
            upper[2 * x] = value
            upper[2 * x + 1] = value
            lower[2 * x] = value
            lower[2 * x + 1] = value


@inlined
def _or_lowest(like, present, x):
    """x in the image, -inf in the frame."""
    half, lowest = splat(like, 0.5), splat(like, -math.inf)
    return where_greater(present, half, x) + where_greater(half, present, lowest)


@called
def _pool_3x3(map_, rows, inside, pitch, tokens):
    """map_ = the largest of 3×3 around each of its tokens, -inf around the image; `rows` is work of the same size."""
    step = lanes(map_)
    for t in range(0, tokens, step):
        x = maximum(maximum(load(map_, t - 1), load(map_, t + 1)), load(map_, t))
        store(rows, t, _or_lowest(map_, load(inside, t), x))
    for t in range(0, tokens, step):
        x = maximum(maximum(load(rows, t - pitch), load(rows, t + pitch)), load(rows, t))
        store(map_, t, _or_lowest(map_, load(inside, t), x))


@kernel
def pool(problem, like, scale, begin, end):
    """out_1 = max over 5×5 of x (stride 1, -inf around the image), out_2 = the same of out_1, out_3 of out_2; an item is a
    channel. Twice the maximum over 3×3 is that over 5×5.

    problem: addresses of x, out_1, out_2, out_3, `inside`; plane, pitch, border, tiles. (scale is not used.)
    """
    inside, plane, pitch, border = pointer(problem[4], like), problem[5], problem[6], problem[7]
    step = lanes(like)
    tokens = problem[8] * step
    size = tokens + 2 * border
    scratch = new_scratch(2 * size // step)
    memory = aligned_pointer(scratch, like)
    for t in range(0, 2 * size, step):
        store(memory, t, splat(like, -math.inf))
    map_, rows = advance(memory, border), advance(memory, size + border)
    for c in range(begin, end):
        source = advance(pointer(problem[0], like), c * plane)
        for t in range(0, tokens, step):
            store(map_, t, _or_lowest(like, load(inside, t), load(source, t)))
        for turn in range(3):
            _pool_3x3(map_, rows, inside, pitch, tokens)
            _pool_3x3(map_, rows, inside, pitch, tokens)
            out = advance(pointer(problem[1 + turn], like), c * plane)
            for t in range(0, tokens, step):
                store(out, t, where_greater(load(inside, t), splat(like, 0.0), load(map_, t)))
    keep(scratch)


@kernel
def expect(problem, like, scale, begin, end):
    """out[side] = Σ_b b · softmax_b(x[side·bins + b]) for the 4 sides of a box; an item is LANES tokens.

    problem: addresses of x, out, `inside`; plane, bins. (scale is not used.)
    """
    plane, bins, step = problem[3], problem[4], lanes(like)
    for item in range(begin, end):
        token = item * step
        present = load(pointer(problem[2], like), token)
        for side in range(4):
            source = advance(pointer(problem[0], like), side * bins * plane + token)
            largest = load(source, 0)
            for b in range(1, bins):
                largest = maximum(load(source, b * plane), largest)
            total = weighted = splat(like, 0.0)
            for b in range(bins):
                weight = exp2((load(source, b * plane) - largest) * splat(like, LOG2E))
                total = total + weight
                weighted = weighted + weight * splat(like, b)
            out = advance(pointer(problem[1], like), side * plane + token)
            store(out, 0, where_greater(present, splat(like, 0.0), weighted / total))
